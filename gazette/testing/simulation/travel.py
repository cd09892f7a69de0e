"""Time travel in a simulation: a log must give, for a former moment, the state that its commit left."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from gazette.errors import GazetteError
from gazette.protocol.hints import FSMHints
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.time_travel import Moment, open_at
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.simulation.shard_history import Promotion, RecordedTransaction
from gazette.testing.simulation.states import (
    Rows,
    compared,
    state_of_files,
    without_checkpoint,
)

_OF: Final = 2
"""One in so many seeds goes back to former moments."""


def travels(seed: int) -> bool:
    """Return True if a seed opens former states in the end."""
    return seed % _OF == 0


@dataclass(slots=True)
class Logs:
    """The recovery logs of a run at its end, as a `LogSource`, and the hints of each shard."""

    content: dict[str, bytes] = field(default_factory=dict)
    hints: dict[str, list[FSMHints]] = field(default_factory=dict)
    """By shard, the newest first."""

    @property
    def knows_heads(self) -> bool:
        return True

    def bounds(self, log: str) -> tuple[int, int]:
        return 0, len(self.content[log])

    def read(self, log: str, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        yield begin, self.content[log][begin:end]


@dataclass(frozen=True, slots=True)
class WrongMoment:
    """A former moment for which the log gives another state than the shard had."""

    what: str
    details: str


class TimeTraveller:
    """Opens states of former moments, and compares them with the states that commits left."""

    def __init__(
        self,
        logs: Logs,
        directory: Path,
        ignore: Collection[str],
        seed: int,
        *,
        clocks_agree: bool,
    ) -> None:
        """Create a traveller. Without ``clocks_agree``, times of a log may go back, and no time is tried."""
        self._logs = logs
        self._clocks_agree = clocks_agree
        self._directory = directory
        self._ignore = ignore
        self._rng = random.Random(f"travel {seed}")
        self._opened = 0

    def wrong(
        self,
        spec: ShardSpec,
        promotion: Promotion,
        chains: Sequence[Sequence[RecordedTransaction]],
        rebuilt: Sequence[RecordedTransaction] | None,
    ) -> WrongMoment | None:
        """Go back to a commit of a shard: to its offsets of sources, to its end in the log, and to its time.

        ``chains`` are the sequences of transactions that may have led to the shard's last state. ``rebuilt``
        are the transactions since a backfill: go back to no earlier transaction. Return None if all is right.
        """
        store, hints = promotion.callbacks.store, self._logs.hints.get(spec.id, [])
        if not spec.recovery_log or not chains[0] or chains[0][-1].left is None:
            return None
        hints = [*hints, FSMHints(log=spec.recovery_log)]
        chosen = self._rng.choice(chains[0])
        if rebuilt is not None and not any(chosen is each for each in rebuilt):
            return None  # The backfill's state may have the same offsets.
        before = 0 if rebuilt is not None else self._rng.choice((0, 0, 1))
        for moment in self._moments(chosen, before):
            allowed = [rows for chain in chains for rows in _states_at(chain, moment)]
            if not allowed:
                continue  # The moment is before the first commit.
            try:
                rows, time = self._open(hints, store, moment)
            except GazetteError as error:
                return WrongMoment(f"{spec.id} cannot be opened as of {moment}: {error}", "")
            if rows not in allowed:
                return self._differs(spec, moment, rows, allowed[0])
            if time is not None and self._clocks_agree and moment.read_through is not None:
                # Other commits of the same millisecond may follow.
                of_time, again = self._open(hints, store, Moment(time=time))
                following = [left for chain in chains for left in _states_from(chain, rows)]
                if again != time or of_time not in following:
                    return self._differs(spec, Moment(time=time), of_time, rows)
        return None

    @staticmethod
    def _moments(chosen: RecordedTransaction, before: int) -> Iterator[Moment]:
        """Yield moments of a commit: its offsets of sources, and a place ``before`` bytes before its end."""
        assert chosen.checkpoint is not None
        sources = chosen.checkpoint.sources
        if sources:
            yield Moment(read_through={name: at.read_through for name, at in sources.items()})
        if chosen.log_end:
            yield Moment(offset=chosen.log_end - before)

    def _open(
        self, hints: Sequence[FSMHints], store: Any, moment: Moment
    ) -> tuple[Rows | None, datetime | None]:
        """Return the state as of a moment, and the time of its commit."""
        self._opened += 1
        prepare = store._readers._setup.call_prepare if isinstance(store, SQLiteStore) else None
        directory = self._directory / f"moment-{self._opened}"
        with open_at(self._logs, hints, directory, moment, prepare_connection=prepare) as state:
            return state_of_files(state, store, self._ignore), state.time

    @staticmethod
    def _differs(
        spec: ShardSpec, moment: Moment, rows: Rows | None, expected: Rows | None
    ) -> WrongMoment:
        return WrongMoment(
            f"the state of {spec.id} as of {moment} is not the one that its commit left",
            compared(
                f"as of {moment}",
                without_checkpoint(rows or {}),
                "at that commit",
                without_checkpoint(expected or {}),
            ),
        )


def _states_at(chain: Sequence[RecordedTransaction], moment: Moment) -> Iterator[Rows | None]:
    """Yield the states that a moment may have, if these transactions led there."""
    before: Mapping[str, int] = moment.read_through or {}
    last: RecordedTransaction | None = None
    unknown: list[RecordedTransaction] = []
    for each in chain:
        assert each.checkpoint is not None
        if moment.offset is not None:
            if not each.log_end:
                # The end is not known: it may be before or after the offset.
                unknown.append(each)
                continue
            is_before = each.log_end <= moment.offset
        else:
            sources = each.checkpoint.sources
            is_before = all(
                name not in sources or sources[name].read_through <= limit
                for name, limit in before.items()
            )
        if not is_before:
            break
        last, unknown = each, []
    if last is not None:
        yield last.left
        yield from (each.left for each in unknown)


def _states_from(chain: Sequence[RecordedTransaction], rows: Rows | None) -> list[Rows | None]:
    """Return the states of all commits from the first one that left these rows."""
    states = [each.left for each in chain]
    return states[states.index(rows) :] if rows in states else []
