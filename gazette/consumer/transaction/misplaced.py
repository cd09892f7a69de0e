"""Stage 13 of the byte path: counts, moves, skips or refuses messages whose keys belong to other
partitions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from gazette.consumer import metrics
from gazette.consumer.application import MessageProducer
from gazette.consumer.contract.key_check import KeyCheck, KeyChecks, Misplaced
from gazette.consumer.transaction.poison_handler import PoisonSkipper
from gazette.consumer.transaction.shard_callbacks import ShardCallbacks
from gazette.errors import Invalid
from gazette.message.envelope import Envelope

log = logging.getLogger(__name__)


class MisplacedMessages:
    """The misplaced messages of one shard. Belongs to its thread."""

    def __init__(self, callbacks: ShardCallbacks, poison: PoisonSkipper | None) -> None:
        self._publisher = callbacks.publisher
        self._shard = callbacks.shard
        self._poison = poison
        self._checks = KeyChecks(callbacks.application.key_place)
        # Messages of a `MessageProducer` belong to no partition.
        self._is_needed = not isinstance(callbacks.application, MessageProducer)

    def checks(self, journal: str) -> bool:
        """Return True if messages of a source may be misplaced."""
        return self._is_needed and self._checks.of(journal) is not None

    def find(self, batch: Sequence[Envelope[Any]]) -> list[int]:
        """Return the positions of misplaced messages in a batch of one source."""
        check = self._checks.of(batch[0].journal) if self._is_needed else None
        return [] if check is None else check.misplaced(batch)

    def are_consumed(self, journal: str) -> bool:
        """Return True if misplaced messages of a source are consumed like other messages."""
        check = self._checks.of(journal)
        return check is None or check.place.policy == "count"

    def note(self, envelopes: Iterable[Envelope[Any]]) -> None:
        """Count misplaced messages that were consumed, and warn of the first."""
        error: Misplaced | None = None
        for envelope in envelopes:
            if error is None:
                error = self._error_of(envelope)
                self._warn("consumed a message of another partition", error)
            self._count(envelope, "count")

    def take_out(self, envelope: Envelope[Any]) -> None:
        """Move a misplaced message to its partition, or skip it as a dead letter, as the policies say.

        Raise `Misplaced` if the message can neither be moved nor skipped. Raise ``TooMuchPoison`` if the
        poison policy permits no further skip.
        """
        error = self._error_of(envelope)
        check = self._checks.of(envelope.journal)
        assert check is not None
        if check.place.policy == "republish" and self._republished(envelope, check, error):
            return
        if self._poison is None:
            raise error
        self._count(envelope, "fail")
        self._poison.skip_misplaced(envelope, error)

    def _republished(self, envelope: Envelope[Any], check: KeyCheck, error: Misplaced) -> bool:
        """Publish a message to its partition. Return False if the publisher refuses it, for example because
        of an invalid key."""
        try:
            self._publisher.publish_uncommitted(check.place.mapping, envelope.message)
        except Invalid as refusal:
            error.__cause__ = refusal
            return False
        self._warn("republished a message to its partition", error)
        self._count(envelope, "republish")
        return True

    def _error_of(self, envelope: Envelope[Any]) -> Misplaced:
        check = self._checks.of(envelope.journal)
        assert check is not None
        return check.error_of(envelope)

    def _count(self, envelope: Envelope[Any], policy: str) -> None:
        metrics.MISPLACED_MESSAGES.labels(self._shard.fqn, envelope.journal, policy).inc()

    def _warn(self, what: str, error: Misplaced) -> None:
        log.warning(
            "shard %(shard)s %(reason)s: %(error)s. %(hint)s",
            {"shard": self._shard.id, "reason": what, "error": error, "hint": error.hint},
            extra={"cause": f"misplaced {self._shard.id} {error.facts['journal']}"},
        )
