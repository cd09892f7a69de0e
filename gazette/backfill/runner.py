"""What runs the two passes of a backfill: processes of this machine, or a Spark cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gazette.backfill.build import Attempt, OnRead, ShardTask
from gazette.backfill.definition import Backfill
from gazette.history.merge import Folded
from gazette.history.snapshot import Snapshot
from gazette.history.source import Access


class Runner(Protocol):
    """Runs the two passes over the history, wherever that is. Blocking; any thread.

    ``on_read`` is called by any thread with how many bytes were read since; of attempts that are
    repeated, bytes count again.
    """

    @property
    def description(self) -> str:
        """Where it runs, as a person is told."""
        ...

    def fold(
        self,
        access: Access,
        snapshot: Snapshot,
        on_read: OnRead,
        backfill: str | Backfill | None = None,
    ) -> Folded:
        """The first pass: which messages have committed. Raises what reading them does.

        For ``backfill``, as of `ShardTask`, it may keep what the second pass is going to read.
        """
        ...

    def build(self, tasks: Sequence[ShardTask], on_read: OnRead) -> list[Attempt]:
        """The second: the states of all shards, in the order of their tasks.

        Raises what the application does; states that are staged by then are kept for a run that is resumed.
        """
        ...

    def stop(self) -> None:
        """End what runs, so that ``fold`` and ``build`` raise. Any thread; may be repeated."""
        ...
