"""Look up the journals that a shard needs, and check that they are of the right kind."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.waits import Grace, RepeatedCall
from gazette.consumer.broker_watch import RetryLog
from gazette.errors import Invalid, NotFound, Retryable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.shard import ShardSource
from gazette.runtime.clock import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S: Final = 0.2
"""Seconds to wait after an answer without the journal."""


async def retried(call: Callable[[], Awaitable[T]], what: str, shard_id: str, clock: Clock) -> T:
    """Repeat a call until it succeeds. If etcd stays away, the end of the member's lease ends the process.

    Raise an error that is not ``Retryable``. Log one line for each cause and minute.
    """
    attempt, retries = 0, RetryLog()
    while True:
        try:
            return await call()
        except Retryable as error:
            if (failures := retries.due(str(error), clock.monotonic())) is not None:
                log.warning(
                    "%(what)s, for shard %(shard)s, is tried again (%(failures)d attempts): "
                    "%(error)s",
                    {"what": what, "shard": shard_id, "failures": failures, "error": error},
                )
        attempt += 1
        await clock.sleep(min(5.0, 0.05 * 2 ** min(attempt, 10)))


class ShardJournals:
    """Look-ups of the journals of one shard."""

    def __init__(self, client: Client, clock: Clock, shard_id: str) -> None:
        self._client = client
        self._clock = clock
        self._shard_id = shard_id

    async def source(self, source: ShardSource) -> ListedJournal:
        """Return the journal of a source. Raise ``NotFound`` if it does not exist."""
        hint = "Create the journal, or remove it from the shard's sources."
        return await self._find(split_journal_meta(source.journal)[0], "source journal", hint)

    async def check_recovery_log(self, name: str) -> None:
        """Raise ``NotFound`` if the recovery log does not exist, ``Invalid`` if its label differs."""
        await self._check_content_type(name, "recovery log", CONTENT_RECOVERY_LOG)

    async def check_dead_letters(self, name: str) -> None:
        """Raise ``NotFound`` if the dead-letter journal does not exist, ``Invalid`` if its label differs."""
        await self._check_content_type(name, "dead-letter journal", CONTENT_JSON_LINES)

    async def _check_content_type(self, name: str, what: str, content_type: str) -> None:
        hint = f"Create the journal, with the label {CONTENT_TYPE}={content_type}."
        journal = await self._find(name, what, hint)
        actual = journal.spec.labels.value_of(CONTENT_TYPE)
        if actual != content_type:
            raise Invalid(
                f"expected label {CONTENT_TYPE} value {content_type} (got {actual})",
                journal=name,
                hint=f"A {what} has this label. Name another journal, or correct its label.",
            )

    async def _find(self, name: str, what: str, hint: str) -> ListedJournal:
        """Return a journal. Look again while brokers do not answer. Raise ``NotFound`` if brokers do not know
        the journal for some time: see `Grace`."""
        grace, call = Grace(self._clock), RepeatedCall()

        async def look_up() -> ListedJournal:
            waits = self._client.waits
            try:
                journal = await self._client.get_journal(name)
            except Retryable as error:
                grace.end()
                waits.note(call, name, error)
                raise
            waits.end(call)
            return journal

        while True:
            try:
                return await retried(
                    look_up,
                    f"looking up {name}",
                    self._shard_id,
                    self._clock,
                )
            except NotFound as error:
                if not grace.covers(error):
                    raise NotFound(
                        f"{what} {name} does not exist",
                        hint=f"{hint} Then: gazctl shards unassign --failed.",
                    ) from error
            await self._clock.sleep(_PAUSE_S)
