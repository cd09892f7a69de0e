"""Reads the sources of a primary into its inbox."""

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
"""How often a reader looks whether a fully suspended source was resumed."""
_LIFE_LOOKS_S: Final = (0.0, 1.0, 4.0)
"""Pauses before looks at whether a source was created again: brokers hear of that a moment later."""
SHORT_SOURCE_LOOKS: Final = 5
SHORT_SOURCE_PAUSE_S: Final = 2.0
SHORT_SOURCE_PAUSE_MAX_S: Final = 60.0


async def read_source(
    journal: str, offset: int, inbox: Inbox, client: Client, clock: Clock, shard_id: str
) -> None:
    """Read a source into the inbox until it fails, which the inbox is told, or the shard ends.

    The source is checked at first, and when it was created again while it was read: see `check_source`.
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
            # `Closed`, for one, of an inbox that has stopped: then this is dropped. Of a client that was
            # closed, the shard would else wait for ever.
            inbox.put(SourceFailed(journal, error))
        finally:
            reader.close()
            scope.cancel()


async def _created(client: Client, journal: str) -> Revision | None:
    """Return the revision that a journal was created at; None if that cannot be told now."""
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
            # No broker serves it; whoever appends to it resumes it.
            await clock.sleep(SUSPENDED_POLL_S)
            continue
        if data:
            await reach("source.read", journal, clock)
            await inbox.put_chunk(Chunk(journal, begin, data))


async def check_source(
    journal: str, offset: int, inbox: Inbox, client: Client, clock: Clock
) -> None:
    """Fail, by the inbox, if a source ends before what was read of it: it would be waited for without a
    word, and read on from the middle of something else."""
    head: int | None = None
    short = unknown = 0
    while short < SHORT_SOURCE_LOOKS:
        head = await journal_head(client, split_journal_meta(journal)[0])
        if head is None:
            # Not told now, by brokers that are away or start: that is no answer.
            unknown += 1
            await clock.sleep(min(SHORT_SOURCE_PAUSE_MAX_S, SHORT_SOURCE_PAUSE_S * unknown))
            continue
        if head >= offset:
            return
        short += 1
        # Brokers that have just started may not know all of it yet.
        await clock.sleep(SHORT_SOURCE_PAUSE_S)
    error = Corrupt(
        "it ends before what the shard has read of it: it was created anew, or data was lost",
        hint="If it was created anew, begin the shard anew as well, under another id, or with"
        " recovery log and hints of its own.",
        journal=journal,
        write_head=head,
        offset=offset,
    )
    inbox.put(SourceFailed(journal, error))
