"""The members of one seed of an application, and their cluster."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from gazette.config.schema import Schema
from gazette.consumer.application import Application
from gazette.consumer.member import ConsumerMember
from gazette.consumer.transaction.shard_timers import ShardTimers
from gazette.runtime.tasks import OpFuture
from gazette.testing.simulation.fold import ROOT
from gazette.testing.simulation.loop import NodeClock
from gazette.testing.simulation.members import MemberCluster, SimMember
from gazette.testing.simulation.queries import StatesRpc
from gazette.testing.simulation.setup import Setup
from gazette.testing.simulation.storage import SimPool, Threads, TurnThread


class AppMember(SimMember):
    """A member with the user's application."""

    cluster: AppCluster

    def __init__(self, cluster: AppCluster, host: str, id: str, number: int) -> None:
        super().__init__(cluster, host, id, number)
        self.commits = Threads(self.node, random.Random(f"commits {self.name} {cluster.seed}"))
        """The threads in which a SQLStore commits."""
        self.commits.troubled = lambda: True  # Each call may wait for a lock.

    def pause_thread(self, seconds: float) -> bool:
        """Block the caller's thread for that long. Return False if the caller is on the loop."""
        if self.pause(seconds):
            return True
        thread = TurnThread.current()
        if thread is not None:
            thread.wait(seconds)
        return thread is not None

    def passed(self, seconds: float) -> float:
        left = super().passed(seconds)
        return 0.0 if left and self.pause_thread(left) else left

    def new_commit_pool(self) -> SimPool:
        """Return the pool of a new store."""
        return self.commits.pool("sql commit", 1)

    def wait_for(self, future: OpFuture[Any]) -> None:
        """Wait for a future, if the caller is the thread of a shard."""
        worker = next((each for each in self.workers if each.is_current), None)
        if worker is not None:
            worker.wait(future, None)

    def application(self, rng: random.Random) -> Application[Any]:
        del rng
        return self.cluster.setup.new_application()

    def serve_beside(self, service: ConsumerMember) -> None:
        api = StatesRpc(service.service, self.cluster.setup.ignore)
        service.service.grpc_server.add_generic_rpc_handlers((api.handler(),))

    def config(self, application: Application[Any]) -> Mapping[str, Any]:
        return Schema("simulation", application.config_groups).load([], {}).groups


class AppCluster(MemberCluster):
    """One broker, and members of the user's application."""

    root = ROOT

    def __init__(self, setup: Setup, seed: int, *, trace: bool = False) -> None:
        self.setup, self.seed = setup, seed
        self.database: Any = None
        """The `SimDatabase` of a SQLStore; None without a SQLStore."""
        super().__init__(seed, trace=trace)
        self.on_member_exited: Callable[[Any], None] = lambda process: None
        self.timers_until = float("inf")
        """Time from which on the clock of timers stands still, so that timers come to rest."""
        self.clocks: list[NodeClock] = []
        """The clocks of members and publishers."""
        self._passed_s = 0.0

    def _new_member(self, host: str, id: str, number: int) -> AppMember:
        member = AppMember(self, host, id, number)
        member.clock.offset_s = self._passed_s
        self.clocks.append(member.clock)
        return member

    def pass_time(self, seconds: float) -> None:
        """Have the wall clocks of all members and publishers go on."""
        self._passed_s += seconds
        for clock in self.clocks:
            clock.offset_s += seconds

    def on_member_exit(self, process: Any) -> None:
        super().on_member_exit(process)
        self._end_sessions(process)
        self.on_member_exited(process)

    def _kill(self, process: Any, *, silent: bool) -> None:
        super()._kill(process, silent=silent)
        self._end_sessions(process)

    def _end_sessions(self, process: Any) -> None:
        if self.database is not None:
            self.database.end_process(process.node)

    def close(self) -> None:
        for process in self.all_members:
            process.commits.unwind()
        super().close()

    def timer_clock_us(self, call: Callable[[Any], int], timers: ShardTimers) -> int:
        """Return the wall clock as timers see it: it stands still from `timers_until` on."""
        return call(timers) - round(max(0.0, self.loop.now - self.timers_until) * 1e6)

    def idle_clock_s(self, call: Callable[[Any], float], timers: ShardTimers) -> float:
        """Return the monotonic clock by which sources become idle."""
        return call(timers) + self._passed_s
