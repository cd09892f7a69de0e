"""Breaks a cluster as a plan says, several faults at a time, and does what an operator does.

``storm`` begins and ends faults. It waits for time to pass, and never looks into stores. ``quiet`` waits
until every journal serves. ``operate`` restarts brokers that ended, and confirms heads after a *declared*
loss of all replicas: the history then says which bytes may be gone.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from gazette.client.append.appender import AppendParams, append_once
from gazette.client.client import Client
from gazette.client.rpc.errors import status_of
from gazette.errors import Broken, GazetteError, Unavailable
from gazette.protocol.status import Status
from gazette.run.dev.heads import write_head
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope
from tools.chaos.cluster import LIVES, Broker, ChaosCluster
from tools.chaos.history import Deposed, Ended, FaultEvent, Lost, Phase, Quiet
from tools.chaos.lives import Lives
from tools.chaos.losses import contiguous, merged, processes_left
from tools.chaos.network import CLIENT, LinkState
from tools.chaos.recorder import Recorder
from tools.chaos.schedule import ETCD, Bounds, Effect, Kind, Planned
from tools.chaos.store import BreakableStore, empty_disk, fill_disk, stored_spans

SETTLE_S: Final = 240.0
"""Seconds within which a broker must leave, and a final reading must end."""
_TICK_S: Final = 0.2
_PROBE_S: Final = 10.0
_CUTS: Final = (LinkState.HELD, LinkState.REFUSED)
_JUMPS_S: Final = (-7200.0, -60.0, 60.0, 7200.0)
_LISTED_S: Final = 10.0
"""Seconds within which brokers have listed the stores again."""
_RECOVERY_S: Final = 5.0
"""Least seconds until survivors try a repaired store again."""


@dataclass(slots=True)
class Active:
    """A fault that has begun. ``end`` repairs the damage."""

    kind: Kind
    target: str
    resource: str
    end: Callable[[], Awaitable[None]]
    begun: float
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Confirmation:
    """A journal whose head may be confirmed once these processes have ended.

    Its bytes from ``begin`` on, and its registers, may then differ from before.
    """

    processes: set[tuple[str, int]]
    begin: int
    since: float
    lost: bool
    """A loss of bytes was declared."""
    head: int | None = None
    """The offset at which it was confirmed."""
    ended: float | None = None
    """Time at which all of the processes had ended."""


class Driver:
    """``operate`` is a daemon that must run during `storm` and `quiet`. Loop-bound; ``close`` it."""

    def __init__(
        self,
        cluster: ChaosCluster,
        recorder: Recorder,
        bounds: Bounds,
        replication: dict[str, int],
        lives: Lives,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.held_back: Counter[str] = Counter()
        """Planned faults that did not begin: their target was broken already, or the time was over."""
        self._cluster = cluster
        self._clock: Clock = cluster.clock
        self._recorder = recorder
        self._bounds = bounds
        self._replication = replication
        self._lives = lives
        self._say = say
        self._client: Client = cluster.client()
        self._active: dict[str, Active] = {}
        self._down: set[str] = set()
        """Brokers that must not be restarted yet."""
        self._asked: set[int] = set()
        """Processes that got SIGTERM."""
        self._killed: set[int] = set()
        self._seen: dict[str, int] = {}
        """The process that was last seen to run, by broker."""
        self._started: dict[int, float] = {}
        """Time at which each process was first seen."""
        self._reviving = TaskScope("reviving")
        self._confirmations: dict[str, _Confirmation] = {}
        self._impaired_until = 0.0

    # Storms.

    async def storm(self, planned: list[Planned], begin: float, seconds: float) -> None:
        """Begin and end faults for so many seconds, from the time ``begin`` of the plan on.

        Remove each from ``planned``, also if it could not begin. Faults that `Bounds` holds back stay there.
        """
        started = self._clock.monotonic()
        async with TaskScope("storm") as scope:
            while (passed := self._clock.monotonic() - started) < seconds:
                held_back: set[Effect] = set()
                for fault in list(planned):
                    if fault.begin > begin + passed:
                        break
                    if fault.kind.effect in held_back:
                        continue
                    if not self._may_begin(fault):
                        held_back.add(fault.kind.effect)
                        continue
                    planned.remove(fault)
                    await self._begin(fault, scope)
                await self._clock.sleep(_TICK_S)
            await self.heal()

    def _may_begin(self, planned: Planned) -> bool:
        return self._bounds.admits(planned.kind.effect, self._victim(planned).name)

    def _victim(self, planned: Planned) -> Broker:
        return self._cluster.brokers[planned.target % len(self._cluster.brokers)]

    async def _begin(self, planned: Planned, scope: TaskScope) -> None:
        """Begin a fault, unless its target has a fault already or does not run."""
        kind, broker = planned.kind, self._victim(planned)
        resource = kind.resource or broker.name
        free = resource not in self._active
        serves = broker.process.running and broker.name not in self._down
        needs_broker = not kind.resource and kind.effect is not Effect.ALL
        if not free or (needs_broker and not serves):
            self.held_back[kind.name] += 1
            return
        act = getattr(self, "_" + kind.name.replace("-", "_").replace(" ", "_"))
        self._bounds.begin(kind.effect, broker.name)
        target, end = await act(planned, broker)
        self._note(kind.name, target, "begun")
        active = Active(kind, target, resource, end, self._recorder.time)
        self._active[resource] = active
        scope.spawn(self._until_over(active, planned.seconds), name=kind.name)

    async def _until_over(self, active: Active, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await active.over.wait()
        except TimeoutError:
            await self._end(active)

    async def _end(self, active: Active) -> None:
        if self._active.get(active.resource) is not active:
            return
        del self._active[active.resource]
        active.over.set()
        await active.end()
        now = self._recorder.time
        if active.kind.effect is Effect.IMPAIRS:
            recovery = max(_RECOVERY_S, now - active.begun)
            self._impaired_until = max(self._impaired_until, now + recovery)
        self._note(active.kind.name, active.target, "ended")
        self._say(f"{active.kind.name} ({active.target}): over after {now - active.begun:.1f} s")

    def _note(self, kind: str, target: str, phase: Phase) -> None:
        self._recorder.record(FaultEvent(self._recorder.time, kind, target, phase))

    async def heal(self) -> None:
        """End every fault."""
        for active in list(self._active.values()):
            await self._end(active)

    async def quiet(self, timeout_s: float) -> None:
        """Break nothing until every journal serves, or until ``timeout_s`` seconds are over. The judge finds
        in the history what was missing then."""
        recorder = self._recorder
        recorder.record(Quiet(recorder.time, "begun"))
        begun = self._clock.monotonic()
        while (missing := self._missing()) and self._clock.monotonic() - begun < timeout_s:
            await self._clock.sleep(_TICK_S)
        waited = self._clock.monotonic() - begun
        recorder.record(Quiet(recorder.time, "ended"))
        self._say(f"quiet for {waited:.1f} s: {missing or 'every journal serves'}")

    def _missing(self) -> str:
        if self._lives.pending:
            return "journals are being created again"
        pids = set(self._cluster.pids().items())
        for journal, confirmation in self._confirmations.items():
            # A journal whose processes still live has lost nothing: they kept their leases.
            if not confirmation.processes & pids:
                return f"the head of {journal} is to be confirmed"
        return self._cluster.has_replicas() or self._recorder.quiet.missing()

    # What an operator does in production.

    async def operate(self) -> None:
        """Restart brokers that end, confirm heads after declared losses, and update the bounds: a daemon."""
        async with TaskScope("operator") as scope:
            scope.daemon(self._confirm_heads(), name="heads")
            while True:
                self._look_after_brokers()
                self._tick()
                await self._clock.sleep(_TICK_S)

    def _tick(self) -> None:
        """Update the bounds with what is broken now."""
        now = self._recorder.time
        impaired = now < self._impaired_until or any(
            active.kind.effect is Effect.IMPAIRS for active in self._active.values()
        )
        away = {
            active.resource for active in self._active.values() if active.kind.effect is Effect.GONE
        } | self._down
        if any(active.kind.effect is Effect.ALL for active in self._active.values()):
            away.add(ETCD)
        whole = not self._cluster.has_replicas()
        self._bounds.tick(now, impaired=impaired, whole=whole, away=away)

    def _look_after_brokers(self) -> None:
        for broker in self._cluster.brokers:
            process = broker.process
            if process.running:
                self._seen[broker.name] = process.pid
                self._started.setdefault(process.pid, self._recorder.time)
                continue
            if (pid := self._seen.pop(broker.name, 0)) and pid not in self._killed:
                self._on_ended(broker, pid)
            if broker.name not in self._down:
                self._down.add(broker.name)
                self._reviving.spawn(self._revive(broker), name=broker.name)

    def _on_ended(self, broker: Broker, pid: int) -> None:
        asked = pid in self._asked
        code = broker.process.exit_code
        error = "" if asked and code == 0 else broker.process.log_tail()[-1000:]
        time = self._recorder.time
        self._recorder.record(Ended(time, broker.name, code or 0, asked, error))
        if broker.name not in self._bounds.gone and not asked:
            # The broker has lost its lease, which was not planned. It has stored its bytes.
            self._bounds.begin(Effect.GONE, broker.name)
            if self._bounds.exceeded:
                self._say(f"{broker.name} ended unplanned: more are gone than replication covers")
                self._allow_confirmation(self._replication, None)

    async def _revive(self, broker: Broker) -> None:
        try:
            await self._cluster.revive(broker)
        except (Broken, Unavailable) as error:
            # The start is tried again. A broker that never starts makes the next quiet time fail.
            self._say(f"{broker.name} did not start: {str(error)[-300:]}")
        finally:
            self._down.discard(broker.name)

    # Losses of all replicas.

    def _allow_confirmation(
        self,
        journals: dict[str, int],
        stored: dict[str, tuple[tuple[int, int], ...]] | None,
    ) -> None:
        """Note that all replicas of some journals end. Once they have ended, each head may be confirmed.

        A broker that acknowledged nothing, or started after the last acknowledgement, holds nothing.
        """
        pids = self._cluster.pids()
        for journal in journals:
            acknowledged = self._recorder.acknowledged.get(journal)
            last = acknowledged[-1] if acknowledged else 0.0
            members = self._recorder.members.get(journal, ())
            processes = processes_left(members, pids, self._started, last)
            begin = self._recorder.heads[journal]
            if stored is not None:
                begin = min(begin, contiguous(stored[journal]))
            lost = stored is not None
            if (former := self._confirmations.get(journal)) is not None:
                # The former end of all replicas is still open, so its offset and its loss still count.
                # Without an acknowledgement since then, the same processes have the journal.
                begin, lost = min(former.begin, begin), lost or former.lost
                if last <= former.since:
                    processes = former.processes
            self._confirmations[journal] = _Confirmation(
                processes, begin, self._recorder.time, lost
            )

    async def _declare_loss(self, journals: dict[str, int], brokers: tuple[str, ...]) -> None:
        """Record the bytes of journals that may be gone: those that only these dead brokers had."""
        stored: dict[str, tuple[tuple[int, int], ...]] = {}
        for journal in journals:
            directory = self._cluster.file_root / self._lives.store_of(journal)
            hidden = self._cluster.file_root / f"{self._lives.store_of(journal)}.hidden"
            spans = await asyncio.to_thread(stored_spans, directory, journal)
            spans += await asyncio.to_thread(stored_spans, hidden, journal)
            stored[journal] = merged(spans)
        for journal, held in stored.items():
            self._recorder.record(Lost(self._recorder.time, journal, brokers, held))
        self._allow_confirmation(journals, stored)

    async def _confirm_heads(self) -> None:
        while True:
            await self._clock.sleep(1.0)
            for journal, confirmation in list(self._confirmations.items()):
                if confirmation.processes & set(self._cluster.pids().items()):
                    continue
                if confirmation.ended is None:
                    confirmation.ended = self._recorder.time
                if self._recorder.time < confirmation.ended + _LISTED_S:
                    continue  # Other brokers must first list what these processes have stored.
                if await self._went_on(journal, confirmation):
                    head = confirmation.head
                    if head is None and confirmation.lost:
                        head = confirmation.begin  # It went on unasked, behind what was stored.
                    elif head is None:
                        head = await self._head_of(journal)
                    if head is None or self._confirmations.get(journal) is not confirmation:
                        continue
                    del self._confirmations[journal]
                    self._recorder.restart(journal, min(confirmation.begin, head), head)
                    self._say(f"all replicas of {journal} had ended: it goes on from {head}")

    async def _went_on(self, journal: str, confirmation: _Confirmation) -> bool:
        """Return True if a journal takes appends. Confirm its head if it asks for that."""
        try:
            async with asyncio.timeout(_PROBE_S):
                await append_once(self._client, AppendParams(journal), b"")
        except GazetteError as error:
            if status_of(error) != Status.INDEX_HAS_GREATER_OFFSET.name:
                return False
        except TimeoutError:
            return False
        else:
            return True
        head = await self._head_of(journal)
        try:
            async with asyncio.timeout(_PROBE_S):
                if head is not None:
                    await append_once(self._client, AppendParams(journal, offset=head), b"")
                    confirmation.head = head
        except (GazetteError, TimeoutError) as error:
            self._say(f"the head of {journal} was not confirmed: {error}")
        return False

    async def _head_of(self, journal: str) -> int | None:
        try:
            async with asyncio.timeout(_PROBE_S):
                return await write_head(self._client, journal)
        except (GazetteError, TimeoutError):
            return None

    def _single(self, broker: Broker) -> dict[str, int]:
        """Return the journals whose only replica is at this broker."""
        return {
            journal: replication
            for journal, replication in self._replication.items()
            if replication == 1 and broker.name in (self._holders(journal) or {broker.name})
        }

    def _holders(self, journal: str) -> set[str]:
        """Return the brokers that acknowledged the journal's last append, or have the journal in etcd."""
        route, _ = self._cluster.route(journal)
        return {member.suffix for member in route.members} | set(
            self._recorder.members.get(journal, ())
        )

    # Faults. Each begins, and returns what it broke and a function that repairs it.

    async def _kill(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        self._down.add(broker.name)
        self._killed.add(broker.process.pid)
        await broker.process.kill()
        if single := self._single(broker):
            await self._declare_loss(single, (broker.name,))
        return broker.name, self._reviver(broker)

    async def _kill_all_brokers(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        brokers = [one for one in self._cluster.brokers if one.process.running]
        for one in brokers:
            self._down.add(one.name)
            self._killed.add(one.process.pid)
        await asyncio.gather(*(one.process.kill() for one in brokers))
        for one in brokers:
            one.paused = False
        names = tuple(one.name for one in self._cluster.brokers)
        await self._declare_loss(self._replication, names)

        async def end() -> None:
            for one in brokers:
                self._reviving.spawn(self._revive(one), name=one.name)

        return "all", end

    def _reviver(self, broker: Broker) -> _End:
        async def end() -> None:
            self._reviving.spawn(self._revive(broker), name=broker.name)

        return end

    async def _terminate(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        self._asked.add(broker.process.pid)
        self._allow_confirmation(self._single(broker), None)
        broker.process.signal(signal.SIGTERM)

        async def end() -> None:
            """Do nothing: `operate` starts the broker again once it has ended."""

        return broker.name, end

    async def _pause(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        process, pid = broker.process, broker.process.pid
        process.signal(signal.SIGSTOP)
        broker.paused = True

        async def end() -> None:
            broker.paused = False
            if process.running and process.pid == pid:
                if broker.name not in self._cluster.registered():
                    revision = self._cluster.key_space.header.revision
                    self._recorder.record(Deposed(self._recorder.time, broker.name, revision))
                process.signal(signal.SIGCONT)

        return broker.name, end

    async def _pause_beyond_the_lease(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        self._allow_confirmation(self._single(broker), None)
        return await self._pause(planned, broker)

    async def _kill_etcd(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        etcd = self._cluster.etcd
        await asyncio.to_thread(etcd.kill)

        async def end() -> None:
            await asyncio.to_thread(etcd.start)

        return ETCD, end

    async def _pause_etcd(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        etcd = self._cluster.etcd
        await asyncio.to_thread(etcd.pause)

        async def end() -> None:
            await asyncio.to_thread(etcd.resume)

        return ETCD, end

    async def _pause_etcd_beyond_the_lease(
        self, planned: Planned, broker: Broker
    ) -> tuple[str, _End]:
        """Pause etcd until all leases expire. All brokers end, and have stored what they hold."""
        self._allow_confirmation(self._replication, None)
        return await self._pause_etcd(planned, broker)

    async def _cut_from_etcd(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        return self._cut(planned, [(broker.name, ETCD)])

    async def _cut_from_etcd_beyond_the_lease(
        self, planned: Planned, broker: Broker
    ) -> tuple[str, _End]:
        self._allow_confirmation(self._single(broker), None)
        return self._cut(planned, [(broker.name, ETCD)])

    async def _cut_from_brokers(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        others = [one.name for one in self._cluster.brokers if one is not broker]
        return self._cut(planned, [(broker.name, name) for name in others])

    async def _cut_between_two_brokers(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        others = [one.name for one in self._cluster.brokers if one is not broker]
        pairs = [(broker.name, name) for name in others]
        return self._cut(planned, pairs[int(planned.dice * len(pairs)) :][:1])

    async def _cut_from_clients(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        return self._cut(planned, [(broker.name, CLIENT)])

    def _cut(self, planned: Planned, pairs: list[tuple[str, str]]) -> tuple[str, _End]:
        state = _CUTS[int(planned.dice * 1000) % len(_CUTS)]
        links = [self._cluster.network.link(one, other) for one, other in pairs]
        for link in links:
            link.set(state)

        async def end() -> None:
            for link in links:
                link.set(LinkState.OPEN)

        return ", ".join(f"{one} | {other}" for one, other in pairs) + f" {state.value}", end

    def _store(self, planned: Planned) -> BreakableStore:
        stores = self._cluster.stores
        return BreakableStore(
            self._cluster.file_root / stores[int(planned.dice * len(stores)) % len(stores)]
        )

    async def _store_is_missing(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        store = self._store(planned)
        store.hide()

        async def end() -> None:
            store.show()

        return store.directory.name, end

    async def _store_is_read_only(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        store = self._store(planned)
        await asyncio.to_thread(store.protect)

        async def end() -> None:
            await asyncio.to_thread(store.unprotect)

        return store.directory.name, end

    async def _store_hangs(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        stores = (*self._cluster.stores, LIVES)
        store = stores[int(planned.dice * len(stores)) % len(stores)]
        self._cluster.control.hang(store)

        async def end() -> None:
            self._cluster.control.release(store)

        return store, end

    async def _disk_is_full(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        pid = broker.process.pid
        fill_disk(pid)

        async def end() -> None:
            empty_disk(pid)

        return broker.name, end

    async def _clock_jumps(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        seconds = _JUMPS_S[int(planned.dice * len(_JUMPS_S)) % len(_JUMPS_S)]
        self._cluster.control.set_clock(broker.name, seconds)

        async def end() -> None:
            self._cluster.control.set_clock(broker.name, 0.0)

        return f"{broker.name} {seconds:+.0f} s", end

    async def _journal_is_created_again(self, planned: Planned, broker: Broker) -> tuple[str, _End]:
        return self._create_again(planned, store_fails=False)

    async def _journal_is_created_again_while_its_store_fails(
        self, planned: Planned, broker: Broker
    ) -> tuple[str, _End]:
        return self._create_again(planned, store_fails=True)

    def _create_again(self, planned: Planned, *, store_fails: bool) -> tuple[str, _End]:
        mortal = self._lives.mortal
        name = mortal[int(planned.dice * len(mortal)) % len(mortal)]
        if not self._lives.pending:
            self._confirmations.pop(name, None)
            again = self._lives.again(name, planned.seconds, store_fails=store_fails)
            self._reviving.spawn(again, name="lives")

        async def end() -> None:
            """Do nothing: `Lives.again` creates the journal as soon as etcd and brokers allow it."""

        return name, end

    async def close(self) -> None:
        """Stop. Brokers that are being restarted go on."""
        await self._reviving.stop()
        await self._client.close()


_End = Callable[[], Awaitable[None]]


async def rolling_restarts(
    cluster: ChaosCluster, recorder: Recorder, rounds: int, *, say: Callable[[str], None]
) -> None:
    """Stop each broker in turn by SIGTERM, and start it again when it has ended, ``rounds`` times over."""
    for number in range(1, rounds + 1):
        for broker in cluster.brokers:
            recorder.record(FaultEvent(recorder.time, "restart", broker.name, "begun"))
            begun = recorder.time
            if not await broker.process.stop(SETTLE_S):
                raise Unavailable(f"{broker.name} did not end within {SETTLE_S:.0f} s")
            if broker.process.exit_code != 0:
                raise broker.process.died()
            recorder.record(FaultEvent(recorder.time, "restart", broker.name, "ended"))
            ended = recorder.time
            await cluster.revive(broker)
            await cluster.until("settling", cluster.has_replicas, SETTLE_S)
            recorder.record(FaultEvent(recorder.time, "restart", broker.name, "settled"))
            say(
                f"round {number}: {broker.name} left in {ended - begun:.1f} s, and was back in"
                f" {recorder.time - ended:.1f} s"
            )
