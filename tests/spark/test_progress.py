"""What is known of a pass from the stages that Spark reports, without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gazette.history.spark.progress import StageTasks, reporting, tasks_ended


@pytest.mark.parametrize(
    ("stages", "ended"),
    [
        ([], 0),
        ([StageTasks(1, 1, 1)], 0),
        ([StageTasks(1, 1, 1), StageTasks(2, 8, 3)], 3),
        # With speculation, both attempts of a task may end.
        ([StageTasks(2, 8, 9)], 8),
        # A part of the stage is made again: its results were on a host that is gone.
        ([StageTasks(2, 3, 1)], 0),
        # The whole stage, or another read, is made by a later one.
        ([StageTasks(7, 8, 2), StageTasks(2, 8, 8)], 2),
        # It gathers what was read.
        ([StageTasks(2, 8, 8), StageTasks(3, 200, 5)], 8),
    ],
)
def test_tasks_that_have_ended(stages: list[StageTasks], ended: int) -> None:
    assert tasks_ended(stages, 8) == ended


def test_a_single_task_is_not_known_from_one_that_distributes() -> None:
    assert tasks_ended([StageTasks(1, 1, 1)], 1) == 0


class Server:
    """A session of Spark Connect, as far as progress is concerned: it keeps handlers, and has no context."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []
        self.registerProgressHandler = self.handlers.append
        self.removeProgressHandler = self.handlers.remove

    def says(self, *ended: int) -> None:
        for handler in self.handlers:
            for count in ended:
                stage = SimpleNamespace(stage_id=3, num_tasks=3, num_completed_tasks=count)
                handler(stages=[stage], inflight_tasks=1, operation_id="x", done=False)


def test_bytes_are_reported_once_and_in_full() -> None:
    server, read = Server(), list[int]()
    with reporting(server, 3, 100, read.append):
        server.says(0, 1, 1, 2, 1)
        assert read == [33, 33]
    assert read == [33, 33, 34]
    assert server.handlers == []


def test_a_pass_that_fails_is_not_reported_as_done() -> None:
    server, read = Server(), list[int]()
    with pytest.raises(ValueError, match="failed"), reporting(server, 3, 100, read.append):
        server.says(1)
        raise ValueError("failed")
    assert read == [33]
    assert server.handlers == []
