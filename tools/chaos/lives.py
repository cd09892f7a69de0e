"""Journals that are deleted and created again under load. Each life has a store of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gazette.client.journals import JournalChange
from gazette.errors import GazetteError
from gazette.protocol.journal import JournalSpec
from gazette.runtime.tasks import TaskScope
from tools.chaos.cluster import LIVES, ChaosCluster
from tools.chaos.history import Created
from tools.chaos.recorder import Recorder
from tools.chaos.store import BreakableStore

_ATTEMPT_S: Final = 10.0
_RETRY_S: Final = 0.1
_SHORT_BYTES: Final = 1024
"""Fragments of this length are completed by nearly every append."""
_FAILING_S: Final = 7.0
"""Seconds after which brokers have tried uploads three times, and pause before the next attempt."""

_HIDDEN_S: Final = 30.0


class Lives:
    """The journals of a run by their specifications. Some are deleted and created again."""

    def __init__(
        self, cluster: ChaosCluster, recorder: Recorder, specs: Sequence[JournalSpec]
    ) -> None:
        self.pending = False
        """True while a journal is being deleted and created again."""
        self._cluster = cluster
        self._recorder = recorder
        self._specs = {spec.name: spec for spec in specs}
        self._life: dict[str, int] = dict.fromkeys(self._specs, 1)

    @property
    def specs(self) -> list[JournalSpec]:
        return list(self._specs.values())

    @property
    def mortal(self) -> list[str]:
        """Journals that are deleted and created again."""
        return [spec.name for spec in self.specs if f"/{LIVES}/" in spec.fragment.stores[0]]

    def store_of(self, journal: str) -> str:
        """Return the directory of a journal's store, below the file root."""
        return self._specs[journal].fragment.stores[0].removeprefix("file:///").rstrip("/")

    def stores_of(self, journal: str) -> dict[int, str]:
        """Return the directories of the stores of all lives of a mortal journal, below the file root."""
        return {life: _directory(journal, life) for life in range(1, self._life[journal] + 1)}

    async def create_all(self) -> None:
        """Create every journal. Raise what ``apply_journals`` raises."""
        for journal in self.mortal:
            self._next_life(journal, 1)
        async with self._cluster.client() as client:
            await client.apply_journals([JournalChange(upsert=spec) for spec in self.specs])
        await self._cluster.until("creation", self._absent, 60.0)
        for spec in self.specs:
            self._record(spec)

    async def again(self, name: str, gap_s: float, *, store_fails: bool = False) -> None:
        """Delete a journal, and create it again ``gap_s`` seconds later, with an empty store.

        With ``store_fails``, first let the store of the present life fail for some seconds. Then brokers have
        spools that they could not upload, and try again during the next life. The store works again after
        `_HIDDEN_S` at the latest: brokers that end would wait for it for minutes, and no broker might be left
        to delete the journal.
        """
        self.pending = True
        store = BreakableStore(self._cluster.file_root / self.store_of(name))
        async with TaskScope("store") as scope:
            try:
                await self._again(name, gap_s, store, scope if store_fails else None)
            finally:
                store.show()
                scope.cancel()
        self.pending = False

    async def _again(
        self, name: str, gap_s: float, store: BreakableStore, hiding: TaskScope | None
    ) -> None:
        former = self._cluster.created(name)
        if hiding is not None:
            spec = self._specs[name]
            short = replace(spec, fragment=replace(spec.fragment, length=_SHORT_BYTES))
            # Expect its revision: after a cut, the change may arrive late, in the journal's next life.
            modified = self._cluster.modified(name)
            await self._apply(JournalChange(upsert=short, expect_mod_revision=modified))
            store.hide()
            hiding.spawn(self._show_later(store), name="show")
            await self._cluster.clock.sleep(_FAILING_S)
        while self._cluster.created(name) == former:
            modified = self._cluster.modified(name)
            await self._apply(JournalChange(delete=name, expect_mod_revision=modified))
        await self._cluster.clock.sleep(gap_s)
        self._next_life(name, self._life[name] + 1)
        while not self._cluster.created(name):
            await self._apply(JournalChange(upsert=self._specs[name]))
        self._record(self._specs[name])

    async def _show_later(self, store: BreakableStore) -> None:
        await self._cluster.clock.sleep(_HIDDEN_S)
        store.show()

    def _absent(self) -> str:
        return ", ".join(name for name in self._specs if not self._cluster.created(name))

    def _next_life(self, name: str, life: int) -> None:
        directory = _directory(name, life)
        (self._cluster.file_root / directory).mkdir(parents=True)
        spec = self._specs[name]
        fragment = replace(spec.fragment, stores=(f"file:///{directory}/",))
        self._specs[name] = replace(spec, fragment=fragment)
        self._life[name] = life

    def _record(self, spec: JournalSpec) -> None:
        name = spec.name
        created = Created(
            self._recorder.time,
            name,
            spec.replication,
            self._cluster.created(name),
            self._life[name],
        )
        self._recorder.create(created)

    async def _apply(self, change: JournalChange) -> None:
        """Attempt a change. Whether it took place is seen in etcd."""
        try:
            async with asyncio.timeout(_ATTEMPT_S), self._cluster.client() as client:
                await client.apply_journals([change])
        except (GazetteError, TimeoutError):
            pass
        await self._cluster.clock.sleep(_RETRY_S)


def _directory(journal: str, life: int) -> str:
    return f"{LIVES}/{journal.replace('/', '-')}-{life}"
