"""Reports the progress of a pass that Spark makes: `reporting`.

The progress follows from Spark's information about stages: accumulators would count a repeated task twice.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from gazette.history.backfill.build import OnRead

LOGGER: Final = logging.getLogger(__name__)

_POLL_S: Final = 0.5
_GROUP: Final = "spark.jobGroup.id"
_DESCRIPTION: Final = "spark.job.description"
_CANCELS: Final = "spark.job.interruptOnCancel"


class StageTasks(NamedTuple):
    """A stage: its number, its number of tasks, and the number of successful attempts of tasks."""

    number: int
    tasks: int
    ended: int


@contextmanager
def reporting(spark: Any, tasks: int, length: int, on_read: OnRead) -> Iterator[None]:
    """Report the progress of the stage with ``tasks`` tasks that the block runs on this thread.

    Call ``on_read`` with an equal part of ``length`` bytes for each task that ends. Another thread may make
    these calls. At the end of the block, call ``on_read`` with the remaining bytes, unless the block raises.
    """
    counter = _Counted(tasks, length, on_read)
    context = getattr(spark, "sparkContext", None)  # A session of Spark Connect has no context.
    with _by_server(spark, counter.see) if context is None else _by_polling(context, counter.see):
        yield
    counter.finish()


class _Counted:
    """Bytes that were reported so far: no call of ``on_read`` reports a byte twice."""

    def __init__(self, tasks: int, length: int, on_read: OnRead) -> None:
        self._tasks = tasks
        self._length = length
        self._on_read = on_read
        self._done = 0

    def see(self, stages: Iterable[StageTasks]) -> None:
        """Report the progress of these stages, if more tasks have ended than before."""
        ended = tasks_ended(stages, self._tasks)
        self._reach(self._length * ended // max(1, self._tasks))

    def finish(self) -> None:
        self._reach(self._length)

    def _reach(self, done: int) -> None:
        if done > self._done:
            new_bytes, self._done = done - self._done, done
            self._on_read(new_bytes)


def tasks_ended(stages: Iterable[StageTasks], tasks: int) -> int:
    """Return how many of ``tasks`` tasks have ended, in the newest stage with exactly that many tasks.

    Other stages distribute or gather. If Spark repeats a part of a stage, the repetition has fewer tasks, and
    is ignored. With speculation, more attempts than tasks may end. If ``tasks`` is 1, return 0: a stage that
    distributes looks the same.
    """
    matching = [stage for stage in stages if stage.tasks == tasks > 1]
    return min(tasks, max(matching).ended) if matching else 0


@contextmanager
def _by_polling(context: Any, see: Callable[[Iterable[StageTasks]], None]) -> Iterator[None]:
    """Call ``see`` with the stages of the block's jobs each half second, on a thread that ends with the
    block."""
    group = f"gazette-{uuid.uuid4().hex}"
    ended = threading.Event()

    def poll() -> None:
        tracker = context.statusTracker()
        while not ended.wait(_POLL_S):
            try:
                see(_stages(tracker, group))
            except Exception as error:  # noqa: BLE001 - of any kind, as when Java or the session ends
                LOGGER.debug("progress of Spark is unknown", extra={"reason": str(error)})
                return

    # Give this thread's jobs a group, and restore the caller's group afterwards.
    former = {key: context.getLocalProperty(key) for key in (_GROUP, _DESCRIPTION, _CANCELS)}
    context.setLocalProperty(_GROUP, group)
    thread = threading.Thread(target=poll, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for key, value in former.items():
            context.setLocalProperty(key, value)


def _stages(tracker: Any, group: str) -> Iterator[StageTasks]:
    for number in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(number)
        for stage in () if job is None else job.stageIds:
            if (info := tracker.getStageInfo(stage)) is not None:
                yield StageTasks(stage, info.numTasks, info.numCompletedTasks)


@contextmanager
def _by_server(spark: Any, see: Callable[[Iterable[StageTasks]], None]) -> Iterator[None]:
    """Get the reports that a server of Spark Connect sends while it runs a query of this session."""

    def handle(stages: Iterable[Any] | None, **_: Any) -> None:
        see(StageTasks(s.stage_id, s.num_tasks, s.num_completed_tasks) for s in stages or ())

    spark.registerProgressHandler(handle)
    try:
        yield
    finally:
        spark.removeProgressHandler(handle)
