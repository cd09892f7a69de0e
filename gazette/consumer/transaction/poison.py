"""What a shard does about messages that it cannot take: fail, or set them aside and go on.

A *poison message* is one that does not decode, or that ``consume_message`` raises an error for, however
often it is delivered. By default it fails its shard, with everything behind it waiting: nothing is lost,
and somebody has to look. With a `PoisonPolicy` it is skipped instead: its bytes and the error are
published to a dead-letter journal, in the transaction that passes over it. So a dead letter is committed
with the checkpoint that is behind the message, exactly once, like everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.errors import GazetteError, Invalid
from gazette.message.message import Message
from gazette.protocol.ids import JournalName, validate_journal_name
from gazette.protocol.label_set import LabelSet
from gazette.protocol.text.validation import within
from gazette.runtime.numbers import is_digits

POISON_LABEL: Final = "consumer.gazette.dev/poison"
"""Of a shard: ``fail``, ``skip``, or ``skip-malformed``."""
DEAD_LETTERS_LABEL: Final = "consumer.gazette.dev/dead-letters"
LIMIT_LABEL: Final = "consumer.gazette.dev/poison-limit"


@dataclass(frozen=True, slots=True)
class PoisonPolicy:
    """Skip poison messages, and publish them to ``dead_letters``.

    That journal must exist, and hold JSON lines. ``malformed_only``: messages that do not decode are
    skipped, errors of the application still fail the shard. ``limit`` bounds how many messages a shard
    skips within an hour, and ``raw_bytes_max`` how much of each is kept.

    ``errors`` are the types of exceptions of the application that make a message poison. Whatever they
    are, these never do: `GazetteError` (a lost database, a fenced shard), ``MemoryError``, ``OSError``, what
    is no ``Exception``, and what the store takes for errors of its own (`Store.classify_error`).
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
        if not is_digits(limit):
            raise Invalid(f"invalid limit ({limit[:50]!r})", path=LIMIT_LABEL)
        return cls(journal, malformed_only=value == "skip-malformed", limit=int(limit))

    def is_poison(self, error: BaseException) -> bool:
        """Return whether an exception of the application is one that the policy asks for."""
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
