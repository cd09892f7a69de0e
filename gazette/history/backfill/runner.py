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

    Some thread calls ``on_read`` with the bytes read since its last call. Repeated attempts count again.
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
        """Make the first pass: find which messages have committed. Raise what reading raises.

        ``backfill`` is the one of `ShardTask`. With it, a runner may keep rows for the second pass.
        """
        ...

    def build(self, tasks: Sequence[ShardTask], on_read: OnRead) -> list[Attempt]:
        """Make the second pass: build the states of all shards, in the order of their tasks.

        Raise what the application raises. States that were staged before stay for a resumed run.
        """
        ...

    def stop(self) -> None:
        """End the running pass, so that ``fold`` and ``build`` raise. May be repeated, by any thread."""
        ...
