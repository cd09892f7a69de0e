"""Runners of the two passes of a backfill: processes of this machine, or a Spark cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gazette.history.backfill.build import Attempt, OnRead, ShardTask
from gazette.history.backfill.definition import Backfill
from gazette.history.merge import FoldedSnapshot
from gazette.history.snapshot import Snapshot
from gazette.history.source import Access


class Runner(Protocol):
    """Runner of the two passes over the history. Methods block, and may be called by any thread.

    Any thread may call ``on_read``, with the bytes read since the call before, or with an estimate. If a task
    runs again, some runners count its bytes again.
    """

    @property
    def description(self) -> str:
        """The place where the passes run, as text for users."""
        ...

    def fold(
        self,
        access: Access,
        snapshot: Snapshot,
        on_read: OnRead,
        backfill: str | Backfill | None = None,
    ) -> FoldedSnapshot:
        """Make the first pass: find which messages have committed. Errors: those of `fold_by_threads`.

        ``backfill`` is as in `ShardTask`. If it is given, a runner may keep rows for the second pass.
        """
        ...

    def build(self, tasks: Sequence[ShardTask], on_read: OnRead) -> list[Attempt]:
        """Make the second pass: build the states of all shards, in the order of their tasks.

        Raise the errors of the application, and of `build_state`. States that were staged before an error
        stay for a resumed run.
        """
        ...

    def stop(self) -> None:
        """End the running pass: ``fold`` and ``build`` raise an error. May be repeated, by any thread."""
        ...
