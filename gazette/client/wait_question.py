"""A question to brokers: why a journal cannot be written or read now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gazette.client.journals import get_journal, journal_problems
from gazette.client.waits import reason_of
from gazette.errors import GazetteError
from gazette.labels import META_NAME
from gazette.protocol.ids import JournalName, split_journal_meta
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.status import Status
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.client.access import BrokerAccess

_ASK_S: Final = 5.0


async def ask_reason(client: BrokerAccess, journal: JournalName) -> str:
    """Return why a journal cannot be written or read now, as its brokers say; empty if they give no reason.

    If the question fails, return its error as a text. Use this for calls that a broker keeps waiting, as it
    does while it cannot list a store.
    """
    name = split_journal_meta(journal)[0]
    try:
        async with timeout(_ASK_S):
            return await _ask(client, name)
    except TimeoutError:
        return f"no answer of a broker within {_ASK_S:g} s"
    except GazetteError as error:
        return reason_of(error)


async def _ask(client: BrokerAccess, name: JournalName) -> str:
    route = (await get_journal(client, name)).route
    if not route.members:
        return f"{Status.INSUFFICIENT_JOURNAL_BROKERS.name}: no broker is assigned to the journal"
    for endpoint in route.endpoints or (client.address,):
        problems = await journal_problems(client, endpoint, LabelSelector.of((META_NAME, name)))
        if problem := problems.get(name):
            return f"{Status.FRAGMENT_STORE_UNHEALTHY.name}: {problem}"
    return ""
