"""Look-ups of journals by name, of their heads, and of why they do not answer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.read.reader import WRITE_HEAD, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.wait_question import ask_reason
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
    for a missing journal, ``NotAllowed`` also for a suspended journal, ``Unavailable`` without an answer."""
    params = ReadParams(journal, offset=WRITE_HEAD, metadata_only=True)
    async with RetryReader(client, params) as reader:
        async with journal_answering(context, client, journal):
            with suppress(NotYet):
                await reader.read()
        return max(reader.offset, reader.write_head)


def journal_answering(
    context: Context, client: Client, journal: str
) -> AbstractAsyncContextManager[None]:
    """Bound calls about a journal in the block: see `Context.answering`. The error has the brokers' reason.
    Close readers after the block: the client forgets the reasons of closed readers."""

    async def reason() -> str:
        return await reason_of(client, journal)

    return context.answering(client.address, reason=reason)


async def reason_of(client: Client, journal: str) -> str:
    """Return a journal's name and why it cannot be read now; empty if its brokers give no reason."""
    reason = client.waits.reason(journal) or await ask_reason(client, journal)
    return f"{journal}: {reason}" if reason else ""
