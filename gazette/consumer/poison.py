"""What a shard does about messages that it cannot take: fail, or set them aside and go on.

A *poison message* is one that does not decode, or that ``consume_message`` raises an error for, however
often it is delivered. By default it fails its shard, with everything behind it waiting: nothing is lost,
and somebody has to look. With a `PoisonPolicy` it is skipped instead: its bytes and the error are
published to a dead-letter journal, in the transaction that passes over it. So a dead letter is committed
with the checkpoint that is behind the message, exactly once, like everything else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gazette.clock import Clock
from gazette.consumer.replica_status import error_text
from gazette.errors import GazetteError, Invalid
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import Envelope
from gazette.message.frames import MalformedMessage
from gazette.message.mapping import fixed_mapping
from gazette.message.message import Message
from gazette.message.message_uuid import uuid_text
from gazette.message.publisher import Publisher
from gazette.protocol.ids import JournalName, Offset, validate_journal_name
from gazette.protocol.label_set import LabelSet
from gazette.protocol.validation import within

log = logging.getLogger(__name__)

POISON_LABEL: Final = "consumer.gazette.dev/poison"
"""Of a shard: ``fail``, ``skip``, or ``skip-malformed``."""
DEAD_LETTERS_LABEL: Final = "consumer.gazette.dev/dead-letters"
LIMIT_LABEL: Final = "consumer.gazette.dev/poison-limit"

ERROR_CHARS_MAX: Final = 4096
HOUR_S: Final = 3600.0

T = TypeVar("T")


class TooMuchPoison(GazetteError):
    """A shard skipped as many messages as its policy allows: it fails, because that is no accident."""

    default_hint = (
        "See the dead letters. Correct the application or the producer, then: gazctl shards unassign"
        " --failed. Or raise the policy's limit."
    )


@dataclass(frozen=True, slots=True)
class PoisonPolicy:
    """Skip poison messages, and publish them to ``dead_letters``.

    That journal must exist, and hold JSON lines. ``malformed_only``: messages that do not decode are
    skipped, errors of the application still fail the shard. ``limit`` bounds how many messages a shard
    skips within an hour, and ``raw_bytes_max`` how much of each is kept.

    ``errors`` are the types of exceptions of the application that make a message poison. Whatever they
    are, these never do: `GazetteError` (a lost database, a fenced shard), ``MemoryError``, and what is no
    ``Exception``.
    """

    dead_letters: JournalName
    malformed_only: bool = False
    limit: int = 100
    raw_bytes_max: int = 1 << 20
    errors: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        with within("dead_letters"):
            validate_journal_name(self.dead_letters)
        if self.limit < 1:
            raise Invalid(f"invalid limit ({self.limit}; expected >= 1)", path="limit")
        if self.raw_bytes_max < 0:
            raise Invalid(
                f"invalid raw_bytes_max ({self.raw_bytes_max}; expected >= 0)", path="raw_bytes_max"
            )

    @classmethod
    def of_labels(cls, labels: LabelSet) -> PoisonPolicy | None:
        """The policy that a shard's labels ask for; None: fail. Raises ``Invalid``."""
        value = labels.value_of(POISON_LABEL) or "fail"
        if value == "fail":
            return None
        if value not in ("skip", "skip-malformed"):
            raise Invalid(
                f"invalid value {value!r}", path=POISON_LABEL, hint="fail, skip or skip-malformed."
            )
        journal = labels.value_of(DEAD_LETTERS_LABEL)
        if not journal:
            raise Invalid(
                f"{POISON_LABEL}={value} needs the label {DEAD_LETTERS_LABEL}",
                hint="Name a journal of JSON lines there.",
            )
        limit = labels.value_of(LIMIT_LABEL) or "100"
        if not limit.isdecimal():
            raise Invalid(f"invalid limit ({limit!r})", path=LIMIT_LABEL)
        return cls(journal, malformed_only=value == "skip-malformed", limit=int(limit))

    def is_poison(self, error: BaseException) -> bool:
        """Whether an exception of the application says something about the message."""
        excluded = GazetteError | MemoryError
        return (
            not self.malformed_only
            and isinstance(error, self.errors)
            and not isinstance(error, excluded)
        )


class DeadLetter(Message):
    """A message that was skipped; what a dead-letter journal holds."""

    shard: str = ""
    journal: str = ""
    begin: int = 0
    end: int = 0
    message_uuid: str = ""
    """Empty if it did not decode."""
    reason: str = ""
    """``malformed`` or ``application``."""
    error: str = ""
    raw: bytes = b""
    """Its frame as it stands in the journal; in JSON as base64. Empty if that has been deleted."""
    cut: bool = False
    """Whether ``raw`` is only the beginning of it."""


class PoisonControl:
    """Skips messages for one shard, as its policy says. Belongs to the shard's thread.

    ``read_again`` gives bytes of a source, blocking; ``skipped`` is told (journal, reason) of each.
    """

    def __init__(
        self,
        policy: PoisonPolicy,
        shard_id: str,
        publisher: Publisher,
        clock: Clock,
        read_again: Callable[[JournalName, Offset, Offset], bytes],
        skipped: Callable[[JournalName, str], None],
    ) -> None:
        self.policy = policy
        self._shard_id = shard_id
        self._publisher = publisher
        self._clock = clock
        self._read_again = read_again
        self._skipped = skipped
        self._mapping = fixed_mapping(policy.dead_letters, CONTENT_JSON_LINES)
        self._times: deque[float] = deque(maxlen=policy.limit)

    def skip_malformed(self, error: MalformedMessage) -> None:
        """Publish what did not decode. Raises ``TooMuchPoison``, caused by ``error``."""
        letter = DeadLetter(begin=error.begin, end=error.end, raw=error.raw)
        self._publish(letter, error.journal, "malformed", error)

    def skip_message(self, envelope: Envelope[Any], error: BaseException) -> None:
        """Publish what the application raised ``error`` for. Blocks: its bytes are read again.

        Raises ``TooMuchPoison``, caused by ``error``.
        """
        end = min(envelope.end, envelope.begin + self.policy.raw_bytes_max)
        letter = DeadLetter(
            begin=envelope.begin,
            end=envelope.end,
            raw=self._read_again(envelope.journal, envelope.begin, end),
            message_uuid=uuid_text(envelope.uuid) if envelope.clock else "",
        )
        self._publish(letter, envelope.journal, "application", error)

    def _publish(
        self, letter: DeadLetter, journal: JournalName, reason: str, error: BaseException
    ) -> None:
        self._spend(error)
        letter.shard, letter.journal, letter.reason = self._shard_id, journal, reason
        text = error_text(error)
        named = text if isinstance(error, GazetteError) else f"{type(error).__name__}: {text}"
        letter.error = named[:ERROR_CHARS_MAX]
        letter.cut = len(letter.raw) > self.policy.raw_bytes_max or (
            reason == "application" and 0 < len(letter.raw) < letter.end - letter.begin
        )
        letter.raw = letter.raw[: self.policy.raw_bytes_max]
        log.warning(
            "shard %s skips a message of %s at [%d, %d), uuid %s: %s",
            self._shard_id,
            journal,
            letter.begin,
            letter.end,
            letter.message_uuid or "unknown",
            letter.error,
        )
        self._publisher.publish_uncommitted(self._mapping, letter)
        self._skipped(journal, reason)

    def _spend(self, error: BaseException) -> None:
        now, times = self._clock.monotonic(), self._times
        if len(times) == self.policy.limit and now - times[0] < HOUR_S:
            raise TooMuchPoison(
                f"more than {self.policy.limit} messages within an hour cannot be consumed; the last:"
                f" {error_text(error)}",
                shard=self._shard_id,
                dead_letters=self.policy.dead_letters,
            ) from error
        times.append(now)
