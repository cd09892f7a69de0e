"""Readers of a primary's sources, which fill its inbox."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gazette.client.client import Client
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.errors import status_of
from gazette.client.waits import RepeatedCall
from gazette.consumer.inbox import Chunk, Inbox, Jump, SourceFailed
from gazette.consumer.shard.loop_shard_io import READ_BYTES
from gazette.consumer.shard.source_lives import another_life, in_words_of_shard
from gazette.consumer.shard.standby_lag import journal_head
from gazette.errors import Corrupt, GazetteError, NotAllowed, NotYet
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.status import Status
from gazette.recoverylog.log.broker_logs import write_head
from gazette.runtime import failpoints
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

SUSPENDED_POLL_S: Final = 2.0
"""Seconds between two checks whether a fully suspended source was resumed."""
_LIFE_LOOKS_S: Final = (0.0, 1.0, 4.0)
"""Pauses in seconds before checks whether a source was created again, which brokers may notice late."""
MISSING_LOOK_S: Final = 10.0
"""Seconds between two looks at the reader of a source. If the reader got no bytes in between, ask whether any
broker has the next bytes."""
SHORT_SOURCE_LOOKS: Final = 5
SHORT_SOURCE_PAUSE_S: Final = 2.0
SHORT_SOURCE_PAUSE_MAX_S: Final = 60.0


async def read_source(
    params: ReadParams,
    inbox: Inbox,
    client: Client,
    clock: Clock,
    shard_id: str,
    missing: dict[str, tuple[int, int]],
) -> None:
    """Read a source into the inbox until the source fails or the shard ends. Report a failure to the inbox.

    At the same time check the source: see `check_source`. If the source is created again during the read,
    report that as a failure. While no broker has the next bytes, put their range of offsets into ``missing``.
    """
    interrupted = asyncio.Event()
    journal, offset, life = params.journal, params.offset, params.life
    reader = RetryReader(client, params, clock=clock, on_interrupted=interrupted.set)

    async def check() -> None:
        """Check once that the journal still reaches ``offset``. After each interruption of the read, check
        the journal's life."""
        if offset:
            await check_source(journal, offset, inbox, client, clock)
        while True:
            await interrupted.wait()
            interrupted.clear()
            for pause_s in _LIFE_LOOKS_S:
                await clock.sleep(pause_s)
                present = await _life(client, journal)
                if life is not None and present is not None and present.is_other(life):
                    error = another_life(journal, life, present, shard_id, reader.offset)
                    inbox.put(SourceFailed(journal, error))
                    return

    async with TaskScope(f"read {journal}") as scope:
        scope.spawn(check(), name="check")
        scope.spawn(_watch_missing(reader, client, clock, shard_id, missing), name="missing")
        try:
            await _read(reader, inbox, clock, shard_id)
        except GazetteError as error:
            # Report every error, even that of a closed client: otherwise the shard would wait for ever. A
            # stopped inbox drops the report.
            failure = in_words_of_shard(error, journal, life, shard_id, reader.offset)
            inbox.put(SourceFailed(journal, failure))
        finally:
            reader.close()
            scope.cancel()


async def _watch_missing(
    reader: RetryReader,
    client: Client,
    clock: Clock,
    shard_id: str,
    missing: dict[str, tuple[int, int]],
) -> None:
    """Log a warning while a reader waits for bytes below the journal's head that no broker has.

    The reader does not jump to the head. A blob store that is not mounted would look the same, and its
    messages must not be skipped. The reader jumps once bytes after the gap are stored.
    """
    journal, start, question = reader.params.journal, reader.offset, RepeatedCall()
    # Offsets of the reader: at the last look; where no bytes were missing; where bytes may be missing.
    offset = asked_at = suspected_at = -1  # -1: no such offset yet.
    try:
        while True:
            await clock.sleep(MISSING_LOOK_S)
            last, offset = offset, reader.offset
            if offset != last:
                client.waits.end(question)  # The reader reads on.
            if offset == asked_at:
                continue
            head = None if offset != last else await _missing_to(client, journal, offset, question)
            if head is not None and head <= offset == start:
                # The reader has got no byte yet: all bytes of the journal may have been deleted.
                head = await _confirmed_head(client, journal, head)
            if head is None or head <= offset or reader.offset != offset:
                missing.pop(journal, None)
                # No bytes are known to be missing. At the head, ask again only after the reader has moved.
                asked_at = -1 if head is None else offset
                continue
            if suspected_at != offset:
                suspected_at = offset  # The bytes may just have been appended: look again.
                continue
            if journal not in missing:
                log.warning(
                    "source %(journal)s of shard %(shard)s: no broker has the bytes %(begin)d to"
                    " %(end)d. They were pruned, or their store is not mounted. The shard waits until"
                    " later bytes are stored. To go on at once, set min_offset of this source and"
                    " unassign the shard",
                    {"journal": journal, "shard": shard_id, "begin": offset, "end": head},
                )
            missing[journal] = offset, head
    finally:
        missing.pop(journal, None)


async def _missing_to(
    client: Client, journal: str, offset: int, question: RepeatedCall
) -> int | None:
    """Return the head of a journal if its broker has no bytes at ``offset``; otherwise None.

    If the broker cannot answer, note the reason under ``question``, since a waiting read does not learn it.
    """
    reader = client.reader(ReadParams(journal, offset, block=False, metadata_only=True))
    client.waits.end(question)
    try:
        await reader.read()
    except NotYet:
        return reader.write_head
    except GazetteError as error:
        # Only note the error: if it also ends the read, `_read` handles it.
        client.waits.note(question, journal, error)
        return None
    finally:
        reader.close()
    return None


async def _life(client: Client, journal: str) -> JournalLife | None:
    """Return the present life of a journal; None if it is unknown now.

    Our brokers report the life to readers. Brokers of the original report it only in a list.
    """
    try:
        return (await client.get_journal(journal)).life
    except GazetteError:
        return None


async def _read(reader: RetryReader, inbox: Inbox, clock: Clock, shard_id: str) -> None:
    """Put chunks and jumps into the inbox, until the reader raises. Wait while the source is suspended."""
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
            # No broker serves the suspended journal. The next append resumes the journal.
            await clock.sleep(SUSPENDED_POLL_S)
            continue
        if data:
            if failpoints.armed_points:
                await failpoints.reach("source.read", journal, clock)
            await inbox.put_chunk(Chunk(journal, begin, data))


async def _confirmed_head(client: Client, journal: str, head: int) -> int:
    """Return the head of a journal, as an empty append finds it. If the append fails, return ``head``, which
    is from an answer to a read.

    The head in an answer to a read may be too low if fragments were pruned: 0 if all were pruned.
    """
    try:
        return max(head, await write_head(client, split_journal_meta(journal)[0]))
    except GazetteError as error:
        # For example, this member may lack the right to append. Use the head of the read.
        log.info(
            "the head of source %(journal)s cannot be confirmed: %(error)s",
            {"journal": journal, "error": error},
        )
        return head


async def check_source(
    journal: str, offset: int, inbox: Inbox, client: Client, clock: Clock
) -> None:
    """Report a source as failed to the inbox if it ends before ``offset``, up to which the shard has read it.

    Without this check, the shard would wait in silence, and later read from the middle of other content.
    """
    head: int | None = None
    short = unknown = 0
    while short < SHORT_SOURCE_LOOKS:
        head = await journal_head(client, split_journal_meta(journal)[0])
        if head is None:
            # No broker says the head now, for example because brokers are starting: ask again.
            unknown += 1
            await clock.sleep(min(SHORT_SOURCE_PAUSE_MAX_S, SHORT_SOURCE_PAUSE_S * unknown))
            continue
        if head < offset:
            head = await _confirmed_head(client, journal, head)
        if head >= offset:
            return
        short += 1
        # Brokers that have just started may not know the whole journal yet: ask again.
        await clock.sleep(SHORT_SOURCE_PAUSE_S)
    error = Corrupt(
        "it ends before what the shard has read of it: data was lost, or it is another journal",
        hint="If its data was lost, restart the shard from nothing too: under another id, or with a new "
        "recovery log and new hints.",
        journal=journal,
        write_head=head,
        offset=offset,
    )
    inbox.put(SourceFailed(journal, error))
