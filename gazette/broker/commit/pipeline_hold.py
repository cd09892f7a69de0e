"""The hold of one append on the pipeline of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.broker.replication.pipeline import Pipeline, Turn
from gazette.errors import Broken, GazetteError
from gazette.runtime.tasks import TaskScope

if TYPE_CHECKING:
    from gazette.broker.replica import Replica


class PipelineHold:
    """The hold of one append on a replica, in one of three states.

    - Nothing: ``replica`` is None.
    - The pipeline, taken from its mutex. ``pipeline`` is None while a new one is built.
    - After ``hand_over``, a ``turn`` to gather answers. Other appends may hold the pipeline by then.
    """

    __slots__ = ("pipeline", "replica", "turn")

    def __init__(self) -> None:
        self.replica: Replica | None = None
        self.pipeline: Pipeline | None = None
        self.turn: Turn | None = None

    @property
    def held_replica(self) -> Replica:
        """The replica, which must be held."""
        assert self.replica is not None
        return self.replica

    @property
    def held_pipeline(self) -> Pipeline:
        """The pipeline, which must be held."""
        assert self.pipeline is not None
        return self.pipeline

    def take(self, replica: Replica, pipeline: Pipeline | None) -> None:
        """Hold a replica, and the pipeline that was taken from its mutex."""
        self.replica, self.pipeline = replica, pipeline

    async def tear_down_former(self) -> None:
        """Tear the pipeline down, if there is one, and keep the right to build another one."""
        former, self.pipeline = self.pipeline, None
        if former is not None:
            await self.held_replica.tear_down(former)

    def hand_over(self) -> None:
        """Take a turn for the answers to the proposals, and let other appends have the pipeline."""
        self.turn = self.held_pipeline.take_turn()
        self.give_back()

    def give_back(self) -> None:
        """Give the pipeline back to its mutex."""
        self.held_replica.pipeline.give(self.pipeline)
        self.pipeline = None
        if self.turn is None:
            self.replica = None

    async def tear_down(self) -> None:
        """Tear the pipeline down, and give None to its mutex. Do both even if cancelled."""
        replica, pipeline = self.held_replica, self.held_pipeline
        self.replica = self.pipeline = None
        try:
            await replica.tear_down(pipeline)
        finally:
            replica.pipeline.give(None)

    def break_pipeline(self, error: GazetteError, scope: TaskScope) -> None:
        """Break the pipeline that was handed over. A task of ``scope`` tears it down."""
        assert self.turn is not None
        self.turn.pipeline.fail(error)
        replica = self.held_replica
        scope.spawn(replica.reap(self.turn.pipeline), name=f"reap pipeline {replica.journal}")

    def drop(self) -> None:
        """Give up all that is held, after a cancellation. The next holder tears the broken pipeline down."""
        if self.replica is None:
            return
        cut_short = Broken("an append was cut short", journal=self.replica.journal)
        if self.turn is not None:
            self.turn.skip(cut_short)
            return
        if self.pipeline is not None:
            self.pipeline.fail(cut_short)
        self.give_back()
