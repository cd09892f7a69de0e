"""A pulse: a zero-byte append to a journal, by its primary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.auth import Capability, Claims
from gazette.broker.append.events import AppendTerms, SuspendControl
from gazette.broker.commit.driver import AppendCall, AppendDriver

if TYPE_CHECKING:
    from gazette.broker.context import BrokerContext
    from gazette.protocol.ids import JournalName


class NoContent:
    """The content of a pulse: the intent to commit, and the end."""

    def __init__(self) -> None:
        self._intended = False

    async def next(self) -> bytes | None:
        if self._intended:
            return None
        self._intended = True
        return b""


def new_pulse(
    context: BrokerContext, journal: JournalName, control: SuspendControl
) -> AppendDriver | None:
    """Return the pulse of a replica of ``journal``; None if this broker does not lead the journal now."""
    if not context.resolver.is_primary(journal):
        return None
    call = AppendCall(
        terms=AppendTerms(journal, suspend=control),
        claims=Claims.of_journal(Capability.APPEND, journal),
        may_proxy=False,
        in_line=False,
    )
    return AppendDriver(context, call, NoContent())
