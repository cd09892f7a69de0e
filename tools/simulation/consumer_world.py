"""Brokers and members of a simulated cluster, whose application folds its input."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import apsw

from gazette.consumer.application import Store
from gazette.errors import GazetteError
from gazette.runtime.failpoints import hooked
from gazette.stores.sqlite.redo_recording import RedoRecording
from gazette.testing.simulation import members
from gazette.testing.simulation.members import MemberCluster
from tools.fuzz_stores.base import defaults
from tools.simulation.cold_reads import SimFragments
from tools.simulation.consumer_app import FoldApp, Surroundings
from tools.simulation.consumer_queries import MemberQueries, Notes
from tools.simulation.consumer_timers import TimedFoldApp
from tools.simulation.other_version import OtherVersion
from tools.simulation.remote_store import RemoteDatabase
from tools.simulation.world import World

CONSUMERS: Final = "/gazette/consumers/fold"


class MemberProcess(members.SimMember):
    """One process of a member whose application folds."""

    origin = __file__
    """Tells versions apart in traces."""
    cluster: ConsumerWorld

    def __init__(self, cluster: ConsumerWorld, host: str, id: str, number: int) -> None:
        super().__init__(cluster, host, id, number)
        self._query_rng = random.Random(number)
        self._app: FoldApp | None = None
        self.queries = MemberQueries(
            self.name,
            self.node,
            cluster.consumer_options["query_timeout_s"],
            cluster.violated,
            lambda: self.stopping,
        )

    def application(self, rng: random.Random) -> FoldApp:
        cluster = self.cluster
        around = Surroundings(
            cluster.outputs,
            self.pause,
            self._dawdle,
            cluster.database,
            cluster.violated,
            cluster.notes,
            self.queries,
            cluster.sqlite,
        )
        self._app = (TimedFoldApp if cluster.timers else FoldApp)(around, rng)
        return self._app

    def fragments(self) -> SimFragments | None:
        if not self.cluster.has_cold_readers:
            return None
        return SimFragments(self.node, random.Random(self.name), self.cluster.bucket)

    def _dawdle(self) -> None:
        """Let a query take long, sometimes."""
        rng = self._query_rng
        if rng.random() < self.cluster.slow_queries:
            self.threads.wait(rng.random() * 3.0)

    def forget(self) -> None:
        super().forget()
        if self._app is not None:
            for one in (*self._app.stores, *self._app.views):
                with contextlib.suppress(GazetteError, apsw.Error, OSError):
                    one.destroy() if isinstance(one, Store) else one.close()


@contextlib.contextmanager
def instrumented(passed: Callable[[str, str], float], thresholds: dict[str, int]) -> Iterator[None]:
    """Let processes of this version report their failpoints, and use these thresholds of SQLite stores."""
    with hooked(passed), defaults(RedoRecording.__init__, **thresholds):
        yield


class ConsumerWorld(MemberCluster, World):
    """Brokers and etcd, and beside them the members of one application."""

    root = CONSUMERS

    def __init__(
        self, seed: int, *, trace: bool = False, other: OtherVersion | None = None
    ) -> None:
        super().__init__(seed, trace=trace, other=other)
        self.outputs: list[str] = []
        self.database = RemoteDatabase()
        self.notes = Notes(self.loop, self.violated)
        self.sqlite: set[str] = set()
        """Shards whose state is in SQLite."""
        self.timers = False
        """True if the application publishes by timers."""
        self.has_cold_readers = False
        """True if members take stored fragments of sources and logs from the stores themselves."""
        self.redo: dict[str, int] = {}
        """Thresholds of recorded SQLite databases, so small that a run reaches them."""
        self.slow_queries = 0.0
        """Share of the queries that take up to three seconds."""
        self.on_member_exited: Callable[[MemberProcess], None] = lambda process: None

    def _new_member(self, host: str, id: str, number: int) -> Any:
        return self.version(__name__).MemberProcess(self, host, id, number)

    def on_member_failure(self, process: MemberProcess, error: BaseException) -> None:
        process.queries.failed()
        super().on_member_failure(process, error)

    def on_member_exit(self, process: MemberProcess) -> None:
        super().on_member_exit(process)
        self.on_member_exited(process)

    @contextlib.contextmanager
    def _instrumented(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in self.versions(__name__):
                stack.enter_context(one.instrumented(self._passed, self.redo))
            yield
