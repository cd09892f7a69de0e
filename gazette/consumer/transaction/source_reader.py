"""Readers of a primary's sources, which fill its inbox."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gazette.client.client import Client
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.errors import status_of
from gazette.consumer.query.standby_lag import journal_head
from gazette.consumer.transaction.inbox import Chunk, Inbox, Jump, SourceFailed
from gazette.consumer.transaction.loop_shard_io import READ_BYTES
from gazette.errors import Corrupt, GazetteError, NotAllowed
from gazette.protocol.ids import Revision, split_journal_meta
from gazette.protocol.status import Status
from gazette.runtime.clock import Clock
from gazette.runtime.failpoints import reach
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

SUSPENDED_POLL_S: Final = 2.0
"""Seconds between checks that a fully suspended source was resumed."""
_LIFE_LOOKS_S: Final = (0.0, 1.0, 4.0)
"""Pauses in seconds before checks that a source was created again: brokers learn of it late."""
SHORT_SOURCE_LOOKS: Final = 5
SHORT_SOURCE_PAUSE_S: Final = 2.0
SHORT_SOURCE_PAUSE_MAX_S: Final = 60.0


async def read_source(
    journal: str, offset: int, inbox: Inbox, client: Client, clock: Clock, shard_id: str
) -> None:
    """Read a source into the inbox until it fails or the shard ends. Report a failure to the inbox.

    Check the source first, and when it was created again during the read: see `check_source`.
    """
    interrupted = asyncio.Event()
    params = ReadParams(journal, offset, block=True)
    reader = RetryReader(client, params, clock=clock, on_interrupted=interrupted.set)

    async def check() -> None:
        if offset:
            await check_source(journal, offset, inbox, client, clock)
        created = await _created(client, journal)
        while True:
            await interrupted.wait()
            interrupted.clear()
            for pause_s in _LIFE_LOOKS_S:
                await clock.sleep(pause_s)
                now = await _created(client, journal)
                if now is not None and created is not None and now != created:
                    await check_source(journal, reader.offset, inbox, client, clock)
                created = created if now is None else now

    async with TaskScope(f"read {journal}") as scope:
        scope.spawn(check(), name="check")
        try:
            await _read(reader, inbox, clock, shard_id)
        except GazetteError as error:
            # The error may be the `Closed` of a stopped inbox, which drops it. If the client was
            # closed, the shard would otherwise wait for ever.
            inbox.put(SourceFailed(journal, error))
        finally:
            reader.close()
            scope.cancel()


async def _created(client: Client, journal: str) -> Revision | None:
    """Return the revision that a journal was created at; None if that is unknown now."""
    try:
        return (await client.get_journal(journal)).create_revision
    except GazetteError:
        return None


async def _read(reader: RetryReader, inbox: Inbox, clock: Clock, shard_id: str) -> None:
    journal = reader.params.journal
    while True:
        begin = reader.offset
        try:
            data = await reader.read(READ_BYTES)
        except OffsetJump as jump:
            log.warning(
                "source %(journal)s of shard %(shard)s: %(reason)s",
                {"journal": journal, "shard": shard_id, "reason": jump},
            )
            inbox.put(Jump(journal, jump.offset))
            continue
        except NotAllowed as error:
            if status_of(error) != Status.SUSPENDED.name:
                raise
            # No broker serves it. The next append resumes it.
            await clock.sleep(SUSPENDED_POLL_S)
            continue
        if data:
            await reach("source.read", journal, clock)
            await inbox.put_chunk(Chunk(journal, begin, data))


async def check_source(
    journal: str, offset: int, inbox: Inbox, client: Client, clock: Clock
) -> None:
    """Report a source to the inbox as failed if it ends before the offset that was read.

    Otherwise the shard would wait in silence, and later read from the middle of other content.
    """
    head: int | None = None
    short = unknown = 0
    while short < SHORT_SOURCE_LOOKS:
        head = await journal_head(client, split_journal_meta(journal)[0])
        if head is None:
            # Brokers that are away or starting give no answer: decide nothing.
            unknown += 1
            await clock.sleep(min(SHORT_SOURCE_PAUSE_MAX_S, SHORT_SOURCE_PAUSE_S * unknown))
            continue
        if head >= offset:
            return
        short += 1
        # Brokers that have just started may not know all of it yet.
        await clock.sleep(SHORT_SOURCE_PAUSE_S)
    error = Corrupt(
        "it ends before what the shard has read of it: it was deleted and created again, or "
        "data was lost",
        hint="If it was created again, restart the shard from nothing too: under another id, or "
        "with a new recovery log and new hints.",
        journal=journal,
        write_head=head,
        offset=offset,
    )
    inbox.put(SourceFailed(journal, error))
