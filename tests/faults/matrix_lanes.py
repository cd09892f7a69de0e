"""Runs the crash-point matrix: a lane for each kind of store, all on one backbone. Then there is a table.

In a lane, each repetition is a fleet of its own, with new names, another load and another order of the
rows: so each death falls on what the deaths before it left behind. Beside the shard that it is about, a
fleet has one on another kind of store, which dies wherever it is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gazette.runtime.tasks import TaskScope
from tests.faults import crash_matrix
from tests.faults.backbone import Backbone
from tests.faults.crash_matrix import Death, Manner, Row
from tests.faults.databases import prepare
from tests.faults.fold_app import SQL_URL_ENV
from tests.faults.fold_cluster import FoldCluster, report
from tests.faults.fold_input import Pace

LEASE_S: Final = 6.0
"""Leases that are waited for, in the first repetition: in the others they are revoked."""
LONG_LEASE_S: Final = 20.0
"""Long enough that no member of a loaded machine loses its lease."""


@dataclass
class Results:
    """What came of all cells so far."""

    deaths: dict[tuple[str, str], list[Death]] = field(default_factory=dict)
    violations: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    stores: tuple[str, ...] = ()

    def died(self, row: Row, kind: str, death: Death) -> None:
        self.deaths.setdefault((row.name, kind), []).append(death)

    def violated(self, row: str, kind: str, text: str) -> None:
        self.violations.setdefault((row, kind), []).append(text)

    @property
    def count(self) -> int:
        return sum(map(len, self.deaths.values()))

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return the table, in Markdown: how often each cell was run, and how often that was one too many."""
        titles = ["dies", *self.stores]
        lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for row in rows:
            cells = [self._cell(row.name, kind) for kind in self.stores]
            lines.append(f"| {row.name} | {' | '.join(cells)} |")
        wrong = sum(map(len, self.violations.values()))
        lines += ["", f"{self.count} deaths, {wrong} violations"]
        for what, expired in (("leases revoked", False), ("leases expired", True)):
            took = [d.replaced_s for ds in self.deaths.values() for d in ds if d.expired is expired]
            if took:
                took.sort()
                p50, p99 = took[len(took) // 2], took[min(len(took) - 1, len(took) * 99 // 100)]
                lines.append(
                    f"{what}: replaced after {p50:.1f} s (p50), {p99:.1f} s (p99),"
                    f" {took[-1]:.1f} s (most); {len(took)} deaths"
                )
        for (name, kind), texts in self.violations.items():
            lines += [f"VIOLATION in {name!r} with {kind}: {text}" for text in texts]
        return lines

    def _cell(self, name: str, kind: str) -> str:
        done = len(self.deaths.get((name, kind), ()))
        wrong = len(self.violations.get((name, kind), ()))
        return f"{done} and {wrong} VIOLATED" if wrong else str(done or "")


@dataclass(frozen=True)
class Matrix:
    """What is run. ``environ`` is that of the members, without the files of SQLite."""

    stores: Sequence[str]
    rows: Sequence[Row]
    repeats: int
    seed: int
    directory: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    async def run(self) -> Results:
        """Run all lanes to their end: a violation ends its repetition only."""
        results = Results(stores=tuple(self.stores))
        base = Backbone(self.directory, forge=True)
        try:
            await base.start()
            async with TaskScope("lanes") as scope:
                for kind in self.stores:
                    scope.spawn(self._lane(base, kind, results), name=kind)
        finally:
            await base.stop()
        return results

    async def _lane(self, base: Backbone, kind: str, results: Results) -> None:
        for repetition in range(1, self.repeats + 1):
            await self._repetition(base, kind, repetition, results)

    async def _repetition(
        self, base: Backbone, kind: str, repetition: int, results: Results
    ) -> None:
        rng = random.Random(f"{self.seed} {kind} {repetition}")
        rows = list(self.rows)
        rng.shuffle(rows)
        expire = repetition == 1
        name = f"{kind}-{repetition:02d}"
        kinds = self._kinds(kind, repetition)
        fleet = FoldCluster(
            base,
            kinds,
            fleet=name,
            environ=self._environ(name, kinds),
            lease_s=LEASE_S if expire else LONG_LEASE_S,
            max_txn_s=rng.choice((0.1, 0.5, 1.0)),
            pace=Pace(rng.choice((2, 8, 20)), rng.uniform(0.05, 0.2)),
            seed=rng.getrandbits(32),
        )
        at = "start"
        try:
            await fleet.start()
            async with TaskScope("load") as scope:
                load = scope.spawn(fleet.publish_forever(), name="publish")
                for row in rows:
                    at = row.name
                    began = base.clock.monotonic()
                    manner = Manner(cold=rng.random() < 1 / 3, expire=expire)
                    death = await crash_matrix.run(fleet, row, kind, manner)
                    if death is not None:
                        results.died(row, kind, death)
                        took = base.clock.monotonic() - began
                        report(f"{repetition} {row.name} | {kind}: {took:.1f} s")
                load.cancel()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted and reported
            text = f"repetition {repetition}, seed {self.seed}: {type(error).__name__} {error}"
            results.violated(at, kind, text)
            report(f"VIOLATION in {at!r} with {kind}: {text}")
        finally:
            await fleet.stop()

    def _kinds(self, kind: str, repetition: int) -> tuple[str, ...]:
        """Return the kind in question, and another one."""
        others = [one for one in self.stores if one != kind]
        return (kind, others[repetition % len(others)]) if others else (kind,)

    def _environ(self, fleet: str, kinds: Sequence[str]) -> dict[str, str]:
        environ = dict(self.environ)
        if "sqlfile" in kinds:
            url = f"sqlite:///{self.directory}/{fleet}.db"
            prepare(url)
            environ[SQL_URL_ENV.format("SQLFILE")] = url
        return environ
