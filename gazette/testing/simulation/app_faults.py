"""The faults of one seed of an application: kills, holds, cuts, hand-overs, delays, and time that passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from gazette.client.rpc.channel import Channels
from gazette.client.shards import ShardClient
from gazette.consumer.transaction.shard_timers import LOOK_S
from gazette.errors import GazetteError
from gazette.protocol.hints import FSMHints
from gazette.testing.simulation.cluster import ETCD
from gazette.testing.simulation.loop import NodeClock, SimNode, current_node
from gazette.testing.simulation.members import Trap
from gazette.testing.simulation.network import SimTransport
from gazette.testing.simulation.story import TO_TIMER, FaultForm, PlannedFault

LEASE_S: Final = 6.0
CALL_S: Final = 30.0


class AppFaults:
    """Strikes with the faults of a run, and starts members again that have ended."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._node = SimNode(run.cluster.loop, "faults")
        self._clock = NodeClock(run.cluster.loop)
        self.until = 0.0
        """Time at which the last fault is over."""

    async def strike_later(self, fault: PlannedFault) -> None:
        await self._clock.sleep(fault.at)
        self._run.cluster.say("fault", str(fault))
        # A clock jump takes no time. After time has passed, shards notice it at their next look at the clock.
        seconds = {FaultForm.CLOCK: 0.0, FaultForm.LATER: LOOK_S}.get(fault.form, fault.seconds)
        self.until = max(self.until, self._run.cluster.loop.now + seconds)
        await self._strike(fault)

    async def _strike(self, fault: PlannedFault) -> None:
        cluster, host, seconds = self._run.cluster, fault.host, fault.seconds
        if fault.form not in (
            FaultForm.FAIL,
            FaultForm.KILL_AT,
            FaultForm.HOLD_AT,
            FaultForm.REBUILD,
        ):  # They strike later.
            self._cover(fault.form, host)
        match fault.form:
            case FaultForm.KILL:
                self._kill(host, seconds)
            case FaultForm.KILL_AT | FaultForm.HOLD_AT:
                for name in self._run.story.members:
                    spring = self._spring(fault)
                    cluster.traps.append(Trap(name, fault.point, fault.number, spring))
            case FaultForm.HOLD:
                self._hold(cluster.members[host], seconds)
            case FaultForm.PARTITION:
                self._excuse(host, seconds)
                for link in ((host, ETCD), (ETCD, host)):
                    cluster.network.block(*link)
                await self._clock.sleep(seconds)
                for link in ((host, ETCD), (ETCD, host)):
                    cluster.network.unblock(*link)
            case FaultForm.HAND_OFF:
                await self._unassign(self._run.rng.choice(self._run.story.shards))
            case FaultForm.RESTART:
                cluster.members[host].terminate(hurried=False)
                self.until = max(self.until, cluster.loop.now + 5.0)
            case FaultForm.LATE:
                for spec in self._run.setup.journals:
                    cluster.late[spec.name] = (cluster.loop.now + 10.0, seconds)
            case FaultForm.SLOW:
                self._stall((0.1, seconds / 4))
                await self._clock.sleep(seconds)
                self._stall((0.0, 0.0))
            case FaultForm.CLOCK:
                cluster.members[host].clock.offset_s += seconds
            case FaultForm.LATER:
                self._pass_time(fault)
            case FaultForm.FAIL:
                self._run.user.fail_after = fault.number
            case FaultForm.REBUILD:
                await self._rebuild(fault)

    async def _rebuild(self, fault: PlannedFault) -> None:
        from gazette.testing.simulation.rebuild import rebuild

        shards = self._run.story.shards
        outcome = await rebuild(self._run, shards[fault.number % len(shards)], fault.number)
        if outcome:
            self._run.ended.coverage.add(f"{fault.form} × {outcome}")

    def _pass_time(self, fault: PlannedFault) -> None:
        """Have all clocks go on to the next timer, or for the seconds of the fault."""
        last = map(self._run.history.last, self._run.story.shards)
        waits = [
            each.timers.next_s() for each in last if each is not None and each.timers is not None
        ]
        ahead = [wait for wait in waits if wait is not None and wait > 0]
        to_timer = ahead and fault.number == TO_TIMER
        self._run.cluster.pass_time(min(ahead) + 0.1 if to_timer else fault.seconds)

    def on_failed_call(self) -> None:
        """Note that the fault that lets a call fail has struck in a callback."""
        node = current_node()
        if node is not None and node.name in self._run.cluster.members:
            self._cover(FaultForm.FAIL, node.name)

    def _stall(self, stalls: tuple[float, float]) -> None:
        self._run.cluster.stalls = stalls
        for process in self._run.cluster.members.values():
            for worker in process.workers:
                worker.stall_chance, worker.stall_s = stalls

    def _spring(self, fault: PlannedFault) -> Callable[[Any], None]:
        def strike(process: Any) -> None:
            self._cover(f"{fault.form} {fault.point}", process.host)
            traps = self._run.cluster.traps
            traps[:] = [
                trap for trap in traps if trap.spring is not strike
            ]  # Of the other members.
            if fault.form is FaultForm.HOLD_AT:
                self.until = max(self.until, self._run.cluster.loop.now + fault.seconds)
                self._hold(process, fault.seconds)
            else:
                self._kill(process.host, fault.seconds)

        return strike

    def _hold(self, process: Any, seconds: float) -> None:
        if not process.ended:
            self._excuse(process.host, seconds)
            process.node.hold(seconds)
            self._run.cluster.network.held(process.node)

    def _cover(self, fault: str, host: str) -> None:
        """Note which callback a fault has met: the running one, or the last one."""
        self._run.ended.coverage.add(f"{fault} × {self._running(host)}")

    def _running(self, host: str) -> str:
        for shard in self._run.cluster.members[host].shards.values():
            promotion = self._run.history.last(shard.id)
            if shard.is_primary and promotion is not None:
                running = promotion.callbacks.running_callback
                return running.callback if running.call is not None else f"after {running.callback}"
        return "no shard"

    def _excuse(self, host: str, seconds: float) -> None:
        until = self._run.cluster.loop.now + seconds + LEASE_S + 10.0
        excused = self._run.cluster.excused_until
        excused[host] = max(excused.get(host, 0.0), until)

    def _kill(self, host: str, restart_s: float) -> None:
        if not self._run.cluster.members[host].ended and not self._run.is_over:
            self._run.cluster.crash_member(host)
            self._restart_later(host, restart_s)

    def _restart_later(self, host: str, seconds: float) -> None:
        cluster = self._run.cluster

        def restart() -> None:
            if cluster.members[host].ended and not self._run.is_over:
                cluster.start_member(host, f"{host}-{len(cluster.all_members)}")

        cluster.loop.at(cluster.loop.now + seconds, restart)

    def on_member_exited(self, process: Any) -> None:
        if not self._run.is_over:
            self._restart_later(process.host, 0.5)

    async def _unassign(self, shard_id: str) -> None:
        """Have the allocator choose another member for a shard, or the same one again."""
        try:
            async with asyncio.timeout(CALL_S):
                await self.shard_client(self._node).unassign([shard_id])
        except (GazetteError, TimeoutError) as error:
            self._run.cluster.say("op", f"cannot: {type(error).__name__}", error)

    def shard_client(self, node: SimNode) -> ShardClient:
        """Return a client of the members, for a node."""
        channels = Channels(
            "", clock=self._clock, transport=SimTransport(self._run.cluster.network, node)
        )
        address = ",".join(f"http://{host}:8080" for host in self._run.story.members)
        return ShardClient(address, channels=channels, clock=self._clock)

    async def hints_of(self, shard_id: str) -> list[FSMHints | None]:
        """Return the hints of a shard, the newest first. Ask again while no member answers."""
        while True:
            try:
                stored = await self.shard_client(self._node).get_hints(shard_id)
            except GazetteError:
                await self._clock.sleep(1.0)
            else:
                return [stored.primary, *stored.backups]
