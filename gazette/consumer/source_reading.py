"""Reads the sources of a primary into its inbox."""

from __future__ import annotations

import logging
from typing import Final

from gazette.client.client import Client
from gazette.client.reader import OffsetJump, ReadParams
from gazette.client.retry_reader import RetryReader
from gazette.client.rpc_errors import status_of
from gazette.clock import Clock
from gazette.consumer.inbox import Chunk, Inbox, Jump, SourceFailed
from gazette.consumer.outside import READ_BYTES
from gazette.consumer.standby_lag import journal_head
from gazette.errors import Corrupt, GazetteError, NotAllowed
from gazette.failpoints import reach
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.status import Status

log = logging.getLogger(__name__)

SUSPENDED_POLL_S: Final = 2.0
"""How often a reader looks whether a fully suspended source was resumed."""
SHORT_SOURCE_LOOKS: Final = 5
SHORT_SOURCE_PAUSE_S: Final = 2.0
SHORT_SOURCE_PAUSE_MAX_S: Final = 60.0


async def read_source(
    journal: str, offset: int, inbox: Inbox, client: Client, clock: Clock, shard_id: str
) -> None:
    """Read a source into the inbox until it fails, which the inbox is told, or the shard ends."""
    reader = RetryReader(client, ReadParams(journal, offset, block=True), clock=clock)
    try:
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
    except GazetteError as error:
        # `Closed`, for one, of an inbox that has stopped: then this is dropped. Of a client that somebody
        # closed, the shard would else wait for ever.
        inbox.put(SourceFailed(journal, error))
    finally:
        reader.close()


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
