"""Coverage of simulations: branches of state machines, and pairs of a fault and a stage.

A *branch* is a state of a machine, its input, and the state after it. The machines are those of appends,
sessions, recovery, sequencing and transactions. A *pair* is a kind of fault that was going on, and the state
that an append came to in the meantime. A third count says how appends went: in groups, as whole calls, and so
on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakSet

from gazette.broker.api.append import AppendApi
from gazette.broker.api.whole_append import SmallAppends
from gazette.broker.append.fsm import AppendFSM
from gazette.broker.append.sessions import Admission, SessionLedger
from gazette.broker.commit.driver import AppendDriver
from gazette.broker.commit.steady import AppendGroup
from gazette.client.read.reader import Reader
from gazette.client.read.retry_reader import RetryReader
from gazette.consumer.transaction.transaction import Transaction
from gazette.errors import Unavailable
from gazette.message.sequencer.sequencer import Sequencer
from gazette.net.grpc.handling import Handling
from gazette.recoverylog.log.fsm import RecoveryFSM
from tools.simulation.history import Fault, History

_NAMES: Final = re.compile(r"\[.*|\S*\d\S*")
"""The words of a fault's description that differ between seeds."""
WHOLE: Final = "whole calls"
GROUPED: Final = "in groups"
OF_SESSIONS: Final = "of sessions"
STEADY: Final = "in the steady state"
AT_ONCE: Final = "replicated as they arrived"
BY_TASKS: Final = "by tasks"
PROXIED: Final = "by way of another broker"
COMMITTED: Final = "committed"
AT_STORES: Final = "fragments read at their stores by clients"
AHEAD: Final = "opened ahead"


@dataclass(slots=True)
class Coverage:
    """The coverage of some seeds."""

    branches: set[str] = field(default_factory=set)
    pairs: set[str] = field(default_factory=set)
    ways: Counter[str] = field(default_factory=Counter)
    """Number of attempts of appends that went each way, at the brokers."""

    def add(self, other: Coverage) -> int:
        """Add another coverage. Return how many of its branches and pairs are new."""
        before = len(self.branches) + len(self.pairs)
        self.branches |= other.branches
        self.pairs |= other.pairs
        self.ways += other.ways
        return len(self.branches) + len(self.pairs) - before

    @property
    def attempts(self) -> int:
        """Attempts to append, at the broker that was called."""
        return self.ways[WHOLE] + self.ways[BY_TASKS]

    def describe(self) -> list[str]:
        """Return what to print, one line each."""
        attempts = self._shares(self.attempts, WHOLE, BY_TASKS, PROXIED)
        committed = self._shares(self.ways[COMMITTED], STEADY, GROUPED, OF_SESSIONS)
        return [
            f"{self.attempts} attempts to append: {attempts}",
            f"{self.ways[COMMITTED]} appends committed: {committed}",
            f"{self.ways[AT_ONCE]} messages {AT_ONCE}",
            f"{self.ways[AT_STORES]} {AT_STORES}: {self._shares(self.ways[AT_STORES], AHEAD)}",
            f"{len(self.branches)} branches of state machines, {len(self.pairs)} pairs of fault and stage",
        ]

    def _shares(self, total: int, *ways: str) -> str:
        return ", ".join(
            f"{self.ways[way]} {way} ({self.ways[way] / max(1, total):.0%})" for way in ways
        )


class _Probes:
    """Counts what the shipped code of this process does: its methods are patched."""

    def __init__(self) -> None:
        self.seen = Coverage()
        self._faults: list[Fault] = []
        self._now: Callable[[], float] = lambda: 0.0
        self._installed = False
        self._ahead: WeakSet[Reader] = WeakSet()
        """Readers that a look-ahead has begun to open."""
        self._at_stores: WeakSet[Reader] = WeakSet()
        """Readers that have given bytes of a store."""

    def begin(self, history: History, now: Callable[[], float]) -> None:
        """Count for another world from now on."""
        self._faults, self._now = history.faults, now
        if not self._installed:
            self._installed = True
            self._install()

    def take(self) -> Coverage:
        """Return what was counted, and count from zero."""
        seen, self.seen = self.seen, Coverage()
        return seen

    def _active(self) -> Iterable[str]:
        now = self._now()
        for fault in self._faults:
            if fault.begin <= now <= fault.end:
                yield _NAMES.sub("", fault.what).strip()

    def _install(self) -> None:
        self._around(AppendFSM, "step", self._stepped)
        self._around(SmallAppends, "take_whole", self._took)
        self._around(AppendApi, "append", lambda *_: self._count(BY_TASKS))
        self._around(AppendApi, "_proxy", lambda *_: self._count(PROXIED))
        self._around(AppendDriver, "_leave_session", self._ended)
        self._around(AppendGroup, "_committed", self._group_committed)
        self._around(AppendGroup, "_fail", self._group_failed)
        self._around(SessionLedger, "admit", self._admitted)
        self._around(SessionLedger, "refusal_of", self._refused)
        self._around(Handling, "arrived", lambda *_: self._count(AT_ONCE))
        self._around(Reader, "open_ahead", lambda reader, *_: self._ahead.add(reader))
        self._around(RetryReader, "_look_ahead", self._read_at_store)
        self._around(RecoveryFSM, "apply", self._applied)
        self._around(Sequencer, "queue", self._queued)
        self._around(Transaction, "decide", self._decided)

    def _around(
        self, owner: Any, name: str, note: Callable[[Any, tuple[Any, ...], Any], None]
    ) -> None:
        """Call ``note`` after each call of a method: with the object, its arguments and its result.
        The first argument is the state of an `AppendFSM` before the call; None for other classes."""
        before = vars(owner)[name]
        states = owner is AppendFSM

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            state = self.state if states else None
            result = before(self, *args, **kwargs)
            note(self, (state, *args), result)
            return result

        setattr(owner, name, method)

    def _count(self, way: str, number: int = 1) -> None:
        self.seen.ways[way] += number

    def _branch(self, *parts: object) -> None:
        self.seen.branches.add(" ".join(map(str, parts)))

    def _stepped(self, fsm: AppendFSM, args: tuple[Any, ...], effects: Any) -> None:
        before, event = args
        after, outcome = fsm.state.name, fsm.outcome
        ended = "" if outcome is None else f"{outcome.ending.name} {outcome.status.name}"
        wanted = "+".join(type(one).__name__ for one in effects)
        self._branch("append", before.name, type(event).__name__, after, wanted, ended)
        self.seen.pairs.update(f"{fault} x {after}" for fault in self._active())

    def _took(self, api: SmallAppends, args: tuple[Any, ...], rest: Any) -> None:
        del api
        self._count(WHOLE, len(args[1]) - len(rest))

    def _ended(self, driver: AppendDriver, args: tuple[Any, ...], _: Any) -> None:
        outcome = args[1]
        if outcome is None:
            self._branch("driver", "cut short")
            return
        certain = "uncertain" if outcome.uncertain else "certain"
        self._branch("driver", outcome.ending.name, certain)
        if outcome.commit is None or not outcome.commit.length or outcome.repeated:
            return
        self._count(COMMITTED)
        self._count(OF_SESSIONS, driver._call.session is not None)

    def _group_committed(self, group: AppendGroup, *_: object) -> None:
        self._group(group, "committed")
        self._count(COMMITTED, len(group.small))
        self._count(STEADY, len(group.small))
        self._count(GROUPED, len(group.small) if len(group.small) > 1 else 0)
        self._count(OF_SESSIONS, sum(one.session is not None for one in group.small))

    def _group_failed(self, group: AppendGroup, *_: object) -> None:
        self._group(group, "uncertain")

    def _group(self, group: AppendGroup, ending: str) -> None:
        self._branch("group", "of more" if len(group.small) > 1 else "of one", ending)
        self.seen.pairs.update(f"{fault} x group {ending}" for fault in self._active())

    def _refused(self, ledger: SessionLedger, args: tuple[Any, ...], refusal: Any) -> None:
        if refusal is not None:
            self._admitted(ledger, args, Admission(refusal))

    def _admitted(self, ledger: SessionLedger, args: tuple[Any, ...], admission: Any) -> None:
        del ledger
        refusal = admission.refusal
        kind = "goes on" if admission.commit is None else "has its commit"
        if refusal is not None:
            kind = "is unknown" if "ledger" in refusal.facts else "is late"
            if isinstance(refusal, Unavailable):
                kind = "is under way"
        self._branch("session", kind, "first" if args[1].sequence == 1 else "later")
        self.seen.pairs.update(f"{fault} x session {kind}" for fault in self._active())

    def _read_at_store(self, _: RetryReader, args: tuple[Any, ...], __: Any) -> None:
        reader: Reader = args[1]
        if reader not in self._at_stores:
            self._at_stores.add(reader)
            self._count(AT_STORES)
            self._count(AHEAD, reader in self._ahead)

    def _applied(self, fsm: RecoveryFSM, args: tuple[Any, ...], outcome: Any) -> None:
        action = type(args[1].action).__name__
        hinted = "hinted" if fsm.has_hints else "unhinted"
        self._branch("recovery", action, outcome.name, hinted)

    def _queued(self, sequencer: Any, args: tuple[Any, ...], outcome: Any) -> None:
        del sequencer, args
        self._branch("sequencer", outcome.name)

    def _decided(self, transaction: Transaction, args: tuple[Any, ...], decision: Any) -> None:
        del args
        empty, prior = transaction.is_empty, transaction.prior.name
        self._branch("transaction", decision.step.name, prior, empty, transaction.closed)
        self.seen.pairs.update(f"{fault} x {decision.step.name}" for fault in self._active())


PROBES: Final = _Probes()
"""The probes of this process."""
