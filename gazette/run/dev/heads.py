"""Heads of journals, and the resumption of a cluster that was stopped as a whole."""

from __future__ import annotations

from gazette.client.append.appender import AppendParams, SuspendControl
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.client.rpc.errors import status_of
from gazette.errors import GazetteError, NotYet
from gazette.protocol.status import Status


async def write_head(client: Client, journal: str) -> int:
    """Return the end of a journal, as its brokers know it."""
    reader = client.retry_reader(ReadParams(journal, -1, metadata_only=True))
    try:
        await reader.read(1)
    except NotYet:
        pass
    finally:
        reader.close()
    return reader.write_head


async def resume_journals(client: Client) -> list[str]:
    """Let all journals continue after their stored fragments. Return the names of journals that were reset.

    Brokers refuse appends to a journal whose fragments reach beyond all spools: another broker, which is cut
    off, may hold more bytes. Call this only if *all* brokers were stopped, as when `gazette dev` starts.
    """
    resumed: list[str] = []
    for listed in (await client.list_journals()).journals:
        name = listed.spec.name
        try:
            await client.append(AppendParams(name, suspend=SuspendControl.KEEP))
        except GazetteError as error:
            if status_of(error) == Status.SUSPENDED.name:
                continue
            if status_of(error) != Status.INDEX_HAS_GREATER_OFFSET.name:
                raise
            head = await write_head(client, name)
            await client.append(AppendParams(name, offset=head, suspend=SuspendControl.KEEP))
            resumed.append(name)
    return resumed
