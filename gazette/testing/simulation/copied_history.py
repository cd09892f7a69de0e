"""Copies of journals in files. A backfill in a simulation reads them in place of brokers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gazette.client.journals import FragmentsParams, ListedJournal, StoredFragment
from gazette.client.read.reader import ReadParams
from gazette.client.waits import Waits
from gazette.errors import NotFound
from gazette.history.source import Access, OpenAccess
from gazette.protocol.fragment import Fragment
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.runtime.clock import Clock, SystemClock
from gazette.testing.stored import write_journal

_STORE: Final = "file:///fragments/"


@dataclass(frozen=True, slots=True)
class _Listing:
    journals: Sequence[ListedJournal]


class _Head:
    """The answer to a read of metadata."""

    lost = ()

    def __init__(self, write_head: int, life: JournalLife) -> None:
        self.write_head = write_head
        self.life = life

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        return None

    async def open(self) -> None:
        """Do nothing: the answer is there."""


class CopiedBrokers:
    """The methods of a `Client` that a backfill uses, over copies of journals below a directory."""

    def __init__(
        self, journals: Sequence[ListedJournal], content: Mapping[str, bytes], root: Path
    ) -> None:
        self.clock = SystemClock()
        self.waits = Waits()
        self._journals = {listed.spec.name: listed for listed in journals}
        self._fragments: dict[str, list[Fragment]] = {}
        self._ends = {name: len(data) for name, data in content.items()}
        for name, data in content.items():
            written = write_journal(root, _STORE, name, [data] if data else [])
            self._fragments[name] = [replace(fragment, mod_time=1) for fragment in written]

    async def get_journal(self, name: str) -> ListedJournal:
        if name not in self._journals:
            raise NotFound("the simulation has no copy of the journal", journal=name)
        return self._journals[name]

    async def list_journals(self, selector: LabelSelector = EVERYTHING) -> _Listing:
        listed = self._journals.values()
        return _Listing([each for each in listed if selector.matches(each.spec.labels_with_name())])

    async def list_fragments(self, params: FragmentsParams) -> list[StoredFragment]:
        return [StoredFragment(fragment, "") for fragment in self._fragments[params.journal]]

    def reader(self, params: ReadParams) -> _Head:
        return _Head(self._ends[params.journal], self._journals[params.journal].life)

    async def close(self) -> None:
        """Do nothing: there are no connections."""


class _Opened(OpenAccess):
    def __init__(self, settings: CopiedAccess, clock: Clock | None) -> None:
        super().__init__(settings, clock)
        self._copied: Any = settings.copied

    async def client(self) -> Any:
        return self._copied


@dataclass(frozen=True, slots=True)
class CopiedAccess(Access):
    """Access to copies of journals, for tasks of this process."""

    copied: CopiedBrokers | None = field(default=None, compare=False)

    def open(self, clock: Clock | None = None) -> OpenAccess:
        return _Opened(self, clock)
