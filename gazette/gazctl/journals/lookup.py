"""Look-ups of journals by name, and of their heads."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.read.reader import WRITE_HEAD, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.errors import NotYet
from gazette.gazctl.context import Context
from gazette.protocol.label_set import LabelSelector

_NAMES_MAX: Final = 500


async def journals_by_name(
    context: Context, client: Client, names: Iterable[str]
) -> dict[str, ListedJournal]:
    """Return the existing journals of these names, by name."""
    unique_names = sorted(set(names))
    journals: dict[str, ListedJournal] = {}
    for begin in range(0, len(unique_names), _NAMES_MAX):
        pairs = [("name", name) for name in unique_names[begin : begin + _NAMES_MAX]]
        async with context.answering(client.address):
            listed = await client.list_journals(LabelSelector.of(*pairs))
        journals |= {journal.spec.name: journal for journal in listed.journals}
    return journals


async def write_head(context: Context, client: Client, journal: str) -> int:
    """Return the head of a journal, by a read: an append would resume a suspended journal. Raise ``NotFound``
    for a missing journal, ``NotAllowed`` also for a suspended one, ``Unavailable`` without an answer."""
    params = ReadParams(journal, offset=WRITE_HEAD, metadata_only=True)
    async with context.answering(client.address), RetryReader(client, params) as reader:
        with suppress(NotYet):
            await reader.read()
        return max(reader.offset, reader.write_head)
