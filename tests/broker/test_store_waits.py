"""Appends that wait for their journal's store: all wait at the same time, each from its own arrival."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from gazette.auth import Capability, Claims
from gazette.broker.append.events import AppendTerms, Ending, Outcome
from gazette.broker.commit.driver import AppendCall, AppendDriver
from gazette.protocol.append_session import SessionAppend
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import journal_spec
from gazette.testing.clock import ManualClock
from tests.support.fixed_cluster import FixedBroker, FixedCluster

JOURNAL, STORE = "a/journal", "file:///missing/"
WAIT_S = 60.0
SIZES = [10, 1 << 17]
"""Bytes of a small append, and of a larger one."""


class Whole:
    """Content of an append, in one chunk, with its commit."""

    def __init__(self, size: int) -> None:
        self._chunks = [b"x" * size, b""]

    async def next(self) -> bytes | None:
        return self._chunks.pop(0) if self._chunks else None


class Callers:
    """Appends at any time. ``waited`` has the seconds until each was refused, ``ends`` has committed ones."""

    def __init__(
        self, broker: FixedBroker, clock: ManualClock, scope: TaskScope, *, sessions: bool
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._scope = scope
        self._sessions = sessions
        """True if each append is the first of a session. It is repeated with the ledger that it learns."""
        self.waited: list[float] = []
        self.ends: list[int] = []

    def append(self, *sizes: int) -> None:
        for size in sizes:
            self._scope.spawn(self._append(size), name=f"caller {size}")

    async def _append(self, size: int) -> None:
        begun = self._clock.monotonic()
        session = SessionAppend(secrets.token_hex(16), 1) if self._sessions else None
        outcome = await self._attempt(size, session)
        while session is not None and outcome.error and "ledger" in outcome.error.facts:
            known = str(outcome.error.facts["ledger"])
            outcome = await self._attempt(size, replace(session, ledger=known))
        if outcome.status is Status.FRAGMENT_STORE_UNHEALTHY:
            assert "missing" in outcome.store_error
            self.waited.append(self._clock.monotonic() - begun)
        else:
            assert (outcome.ending, outcome.commit is None) == (Ending.COMMITTED, False)
            assert outcome.commit is not None
            self.ends.append(outcome.commit.end)

    async def _attempt(self, size: int, session: SessionAppend | None) -> Outcome:
        claims = Claims.of_journal(Capability.APPEND, JOURNAL)
        call = AppendCall(AppendTerms(JOURNAL), claims, may_proxy=False, session=session)
        return await AppendDriver(self._broker.context, call, Whole(size)).run()

    async def pass_time(self, seconds: float) -> None:
        """Let time pass in steps, so slowly that threads keep up."""
        for _ in range(round(seconds * 2)):
            self._clock.advance(0.5)
            await SystemClock().sleep(0.002)

    async def refused(self, count: int) -> list[float]:
        """Return how long appends have waited, when that many were refused. Time does not pass."""
        while len(self.waited) < count:
            await SystemClock().sleep(0.001)
        waited, self.waited = self.waited, []
        return waited


@pytest.mark.parametrize("sessions", [False, True], ids=["", "sessions"])
@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES[1:], SIZES], ids=["small", "large", "both"])
async def test_each_append_waits_a_minute_for_the_store_from_its_arrival(
    tmp_path: Path, clock: ManualClock, sizes: list[int], sessions: bool
) -> None:
    many = sizes * (20 // len(sizes))
    async with (
        await FixedCluster.start(1, tmp_path, clock=clock) as cluster,
        TaskScope("callers") as scope,
    ):
        cluster.create(journal_spec(JOURNAL, stores=(STORE,)), "a")
        callers = Callers(cluster["a"], clock, scope, sessions=sessions)
        callers.append(*many)
        await callers.pass_time(40)
        callers.append(*sizes)
        await callers.pass_time(21)
        waited = await callers.refused(len(many))
        assert all(WAIT_S <= one <= WAIT_S + 1 for one in waited)
        # Those that came later have no answer yet: the store may be healthy within their minute.
        await callers.pass_time(38)
        assert not callers.waited
        await callers.pass_time(2)
        waited = await callers.refused(len(sizes))
        assert all(WAIT_S <= one <= WAIT_S + 1 for one in waited)

        # Case: it is.
        callers.append(*many)
        await callers.pass_time(5)
        (tmp_path / "root" / "missing").mkdir()
        await callers.pass_time(50)
        while len(callers.ends) < len(many):
            await callers.pass_time(1)
        assert max(callers.ends) == sum(many)


@pytest.mark.parametrize("size", SIZES, ids=["small", "large"])
async def test_an_append_does_not_wait_for_a_store_that_refuses_its_journal(
    tmp_path: Path, clock: ManualClock, size: int
) -> None:
    """The store ails for others, and refuses this journal for good: no time passes before the answer."""
    async with (
        await FixedCluster.start(1, tmp_path, clock=clock) as cluster,
        TaskScope("callers") as scope,
    ):
        cluster.create(journal_spec(JOURNAL, stores=(STORE,)), "a")
        callers = Callers(cluster["a"], clock, scope, sessions=False)
        callers.append(size)
        await callers.pass_time(WAIT_S + 1)
        await callers.refused(1)
        store = cluster["a"].context.blob_stores.get(STORE)
        store.refusals[JOURNAL, cluster.life(JOURNAL)] = "a file is in the way of missing/a"
        callers.append(size)
        assert await callers.refused(1) == [0]
        del store.refusals[JOURNAL, cluster.life(JOURNAL)]
        # Case: it does not refuse any more, and ails. An append waits for it.
        callers.append(size)
        await callers.pass_time(WAIT_S - 1)
        assert not callers.waited
        await callers.pass_time(2)
        await callers.refused(1)
