"""The choice for messages that a shard cannot consume: fail, or skip them as dead letters.

A *poison message* does not decode, or ``consume_message`` raises an error at each delivery of it.
By default the shard fails, and later messages wait. No message is lost, and an operator has to act.
With a `PoisonPolicy` the shard skips the message. In the same transaction, the shard publishes the message's
bytes and the error to a dead-letter journal. So a dead letter commits exactly once, together with a
checkpoint after the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.consumer.contract.error_cause import passes_through
from gazette.errors import Invalid
from gazette.message.message import Message
from gazette.message.message_time import UnusableTime
from gazette.protocol.ids import JournalName, validate_journal_name
from gazette.protocol.label_set import LabelSet
from gazette.protocol.text.validation import within
from gazette.runtime.numbers import is_digits

POISON_LABEL: Final = "consumer.gazette.dev/poison"
"""Label of a shard: ``fail``, ``skip``, or ``skip-malformed``."""
DEAD_LETTERS_LABEL: Final = "consumer.gazette.dev/dead-letters"
LIMIT_LABEL: Final = "consumer.gazette.dev/poison-limit"


@dataclass(frozen=True, slots=True)
class PoisonPolicy:
    """Skip poison messages, and publish them to ``dead_letters``.

    That journal must exist, and hold JSON lines; `gazette run` and ``apply`` create it. With
    ``malformed_only``, skip only messages that do not decode, lack their time, or are misplaced; errors of
    the application fail the shard. A shard skips at most ``limit`` messages and timers within an hour. A dead
    letter keeps at most ``raw_bytes_max`` bytes of its message.

    ``errors`` are the types of the application's exceptions that make a message poison. `UnusableTime` is
    always among them: the application asked a message for a time that the message lacks. These exceptions
    never make a message poison: a `GazetteError` other than ``InvalidValue`` (a lost database, a fenced
    shard), ``MemoryError``, ``OSError``, exceptions outside ``Exception``, and errors whose cause is the
    store (`Store.classify_error`).
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
        """Return the policy that a shard's labels name; None if the shard is to fail. Raise ``Invalid`` for
        an unknown policy."""
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
        if not is_digits(limit):
            raise Invalid(f"invalid limit ({limit[:50]!r})", path=LIMIT_LABEL)
        return cls(journal, malformed_only=value == "skip-malformed", limit=int(limit))

    def is_poison(self, error: BaseException) -> bool:
        """Return True if the policy skips a message for this exception of the application."""
        if isinstance(error, UnusableTime):
            return not self.malformed_only
        excluded = passes_through(error) or isinstance(error, MemoryError)
        return not self.malformed_only and isinstance(error, self.errors) and not excluded


class DeadLetter(Message):
    """A skipped message, in a dead-letter journal."""

    shard: str = ""
    """Id of the shard that skipped the message."""
    journal: str = ""
    """Journal that holds the message, from ``begin`` to ``end``."""
    begin: int = 0
    """Offset of the message's first byte."""
    end: int = 0
    """Offset after the message's last byte."""
    message_uuid: str = ""
    """UUID of the message. Empty if the message did not decode, or has no UUID of a publisher."""
    reason: str = ""
    """``malformed``, ``time``, ``application``, ``misplaced`` or ``timer``."""
    error: str = ""
    """Text of the error."""
    raw: bytes = b""
    """The frame in the journal, with its header or newline; base64 in JSON. Empty if its bytes were deleted,
    or if a `MessageProducer` brought the message."""
    cut: bool = False
    """True if ``raw`` is only the beginning of the frame."""


class DeadTimer(DeadLetter):
    """A skipped timer, in a dead-letter journal. ``raw`` is the timer's payload."""

    timer: str = ""
    """Key of the timer."""
    at: str = ""
    """Time that the timer was scheduled for, in UTC."""
    domain: str = ""
    """``processing`` or ``event``."""
