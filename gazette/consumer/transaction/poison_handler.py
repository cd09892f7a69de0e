"""Skips poison messages of one shard by its `PoisonPolicy`: limits and counts skips, writes dead letters."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from gazette.consumer.application import Store
from gazette.consumer.contract.callbacks import require_instance
from gazette.consumer.contract.error_cause import error_text
from gazette.consumer.contract.poison import POISON_LABEL, DeadLetter, DeadTimer, PoisonPolicy
from gazette.consumer.timers.timer import Timer
from gazette.errors import GazetteError, Invalid
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.frames import MalformedMessage
from gazette.message.mapping import fixed_mapping
from gazette.message.message_time import UnusableTime
from gazette.message.publisher import Publisher
from gazette.message.uuid import uuid_text
from gazette.protocol.ids import JournalName, Offset
from gazette.runtime.clock import Clock

log = logging.getLogger(__name__)

HOUR_S: Final = 3600.0
_READ_AGAIN: Final = ("application", "misplaced", "time")
"""Reasons of skips for which the message's bytes are read again, up to the policy's ``raw_bytes_max``."""


class TooMuchPoison(GazetteError):
    """A shard fails because it would skip more messages than its policy permits."""

    default_hint = (
        "See the dead letters. Correct the application or the producer, then: gazctl shards "
        "unassign --failed. Or raise the policy's limit."
    )


class PoisonSkipper:
    """Skips messages of one shard by its policy. Belongs to the shard's thread.

    ``read_again`` blocks, and returns bytes of a source; ``b""`` if there are none. ``skipped`` is called
    with (journal, reason) for each skipped message or timer. A timer has the journal ``""``.
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
        """Times of the last skips, by the monotonic clock."""

    def skip_malformed(self, error: MalformedMessage) -> None:
        """Publish a frame that did not decode, as a dead letter. Raise ``TooMuchPoison`` if the policy
        permits no further skip."""
        letter = DeadLetter(begin=error.begin, end=error.end, raw=error.raw)
        self._publish(letter, error.journal, "malformed", error)

    def skip_message(self, envelope: Envelope[Any], error: BaseException) -> None:
        """Publish the message for which the application raised ``error``, as a dead letter. Block to read the
        message's bytes again.

        Raise ``TooMuchPoison``, caused by ``error``, if the policy permits no further skip.
        """
        self._skip(envelope, error, "time" if isinstance(error, UnusableTime) else "application")

    def skip_untimed(self, envelope: Envelope[Any], error: UnusableTime) -> None:
        """Publish a message without its time, as a dead letter. Block, and raise, as `skip_message` does."""
        self._skip(envelope, error, "time")

    def skip_misplaced(self, envelope: Envelope[Any], error: BaseException) -> None:
        """Publish a message whose key belongs to another partition, as a dead letter. Block, and raise, as
        `skip_message` does."""
        self._skip(envelope, error, "misplaced")

    def _skip(self, envelope: Envelope[Any], error: BaseException, reason: str) -> None:
        begin, end = envelope.begin, envelope.end
        read_end = min(end, begin + self.policy.raw_bytes_max)
        # A read that ends at offset 0 would have no end.
        raw = self._read_again(envelope.journal, begin, read_end) if begin < read_end else b""
        letter = DeadLetter(
            begin=begin,
            end=end,
            raw=raw,
            message_uuid=uuid_text(envelope.uuid) if envelope.clock else "",
        )
        self._publish(letter, envelope.journal, reason, error)

    def skip_timer(self, timer: Timer, error: BaseException) -> None:
        """Publish the timer for which the application raised ``error``, as a dead letter.

        Raise ``TooMuchPoison``, caused by ``error``, if the policy permits no further skip.
        """
        letter = DeadTimer(
            raw=timer.payload,
            timer=timer.key,
            at=timer.at.isoformat(),
            domain=timer.domain.name.lower(),
        )
        self._publish(letter, "", "timer", error)

    def _publish(
        self, letter: DeadLetter, journal: JournalName, reason: str, error: BaseException
    ) -> None:
        """Complete a dead letter, and publish it. Raise the error of `_count_skip`."""
        self._count_skip(error)
        letter.shard, letter.journal, letter.reason = self._shard_id, journal, reason
        text = error_text(error)
        shown = text if isinstance(error, GazetteError) else f"{type(error).__name__}: {text}"
        letter.error = shown
        # Bytes that were read again end at `raw_bytes_max`: those of a longer message are cut.
        raw, raw_bytes_max = letter.raw, self.policy.raw_bytes_max
        letter.cut = len(raw) > raw_bytes_max or (
            reason in _READ_AGAIN
            and (raw != b"" or raw_bytes_max == 0)
            and len(raw) < letter.end - letter.begin
        )
        letter.raw = raw[:raw_bytes_max]
        self._log(letter)
        self._publisher.publish_uncommitted(self._mapping, letter)
        self._skipped(journal, reason)

    def _log(self, letter: DeadLetter) -> None:
        if isinstance(letter, DeadTimer):
            log.warning(
                "shard %(shard)s skips the timer %(timer)r of %(at)s: %(error)s",
                {
                    "shard": self._shard_id,
                    "timer": letter.timer,
                    "at": letter.at,
                    "error": letter.error,
                },
            )
            return
        log.warning(
            "shard %(shard)s skips a message of %(journal)s at [%(begin)d, %(end)d), uuid %(uuid)s: "
            "%(error)s",
            {
                "shard": self._shard_id,
                "journal": letter.journal,
                "begin": letter.begin,
                "end": letter.end,
                "uuid": letter.message_uuid or "unknown",
                "error": letter.error,
            },
        )

    def _count_skip(self, error: BaseException) -> None:
        """Count a skip. Raise ``TooMuchPoison`` if the policy permits no further skip within the hour."""
        now, times = self._clock.monotonic(), self._times
        if len(times) == self.policy.limit and now - times[0] < HOUR_S:
            raise TooMuchPoison(
                f"more than {self.policy.limit} messages within an hour cannot be consumed; "
                f"the last: {error_text(error)}",
                shard=self._shard_id,
                dead_letters=self.policy.dead_letters,
            ) from error
        times.append(now)


def checked_policy(policy: Any, store: Store) -> PoisonPolicy | None:
    """Return ``policy``, which may be None. Raise ``Invalid`` if the store lacks a method that the policy
    needs, and ``ApplicationFailed`` for an object that is no policy."""
    if policy is None:
        return None
    require_instance("poison_policy", policy, PoisonPolicy)
    assert isinstance(policy, PoisonPolicy)
    if not policy.malformed_only and not store.has_savepoints:
        raise Invalid(
            f"a {type(store).__name__} cannot undo the effects of a single message, which "
            "skipping it needs",
            hint=f"Skip malformed messages only ({POISON_LABEL}=skip-malformed, or "
            "malformed_only), or use a store with savepoints.",
        )
    if not policy.malformed_only and not store.classifies_errors:
        raise Invalid(
            f"a {type(store).__name__} does not say which errors a message caused, which "
            "skipping it needs",
            hint=f"Implement classify_error(), or skip malformed messages only"
            f" ({POISON_LABEL}=skip-malformed).",
        )
    return policy


def decoded(
    decoder: EnvelopeDecoder[Any], policy: PoisonPolicy | None
) -> Iterator[list[Envelope[Any]]]:
    """Yield the messages of a decoder in batches, for bytes that are read a second time.

    Without a policy, raise ``MalformedMessage`` at the first malformed message. With a policy, skip malformed
    messages, whose dead letters were published after the first read.
    """
    while True:
        try:
            if not (batch := decoder.decode()):
                return
        except MalformedMessage as error:
            if policy is None:
                raise
            decoder.skip(error)
        else:
            yield batch
