"""The size of the hints of a SQLite shard: ``python -m tools.image_hints 1 10 30 45 100`` (GiB of state).

The shipped recording writes a real database, scaled down: a group is one page of 512 bytes instead of 4 MiB.
It is changed until every group has an image of steady work. Offsets in its hints are then scaled up again.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gazette.errors import Invalid
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints, encode_hints
from gazette.recoverylog.log.recorder import Recorder
from gazette.stores.sqlite.databases import IMAGE_FILES, RedoDatabases
from gazette.stores.sqlite.redo_recording import HORIZON_SLACK, RedoRecording
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import LOG, MemoryLog, Replayer, take_over
from tools.fuzz_stores.base import defaults

PAGE: Final = 512
SCALE: Final = (4 << 20) // PAGE
ONE_IMAGE_EACH: Final = 1 << 40
"""So many files of images that each holds one: what versions before this form wrote."""
_SHARD: Final[Any] = None
_ROW_BYTES: Final = 400
"""About a row for each page."""


@contextlib.contextmanager
def scaled_down(image_files: int) -> Iterator[None]:
    """Have stores that are opened here record groups of one small page."""
    recording = {"group_pages": 1, "horizon_slack": HORIZON_SLACK // SCALE}
    with (
        defaults(RedoRecording.__init__, **recording),
        defaults(RedoDatabases.__init__, image_files=image_files),
    ):
        yield


class ScaledState:
    """A SQLite shard of ``groups`` groups of pages, whose log is in memory."""

    def __init__(self, directory: Path, groups: int, image_files: int = IMAGE_FILES) -> None:
        self.log = MemoryLog()
        self._directory = directory
        self._rng = random.Random(groups)
        self._groups = groups
        self._owners = 0
        self._commits = 0
        self.recorder: Recorder
        self.store: SQLiteStore
        self.own(image_files)
        self.grow(groups)

    def own(self, image_files: int, hints: FSMHints | None = None) -> None:
        """Take the log over, as the next owner does."""
        self._owners += 1
        directory = self._directory / f"owner-{self._owners}"
        self.recorder = take_over(self.log, directory, self._rng, hints=hints)
        with scaled_down(image_files):
            schema = "CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v BLOB)"
            self.store = SQLiteStore(self.recorder, schema, page_size=PAGE)

    def grow(self, groups: int) -> None:
        """Insert rows that take about ``groups`` pages."""
        begin = self._last_key()
        for first in range(begin, begin + groups, 500):
            keys = range(first, min(first + 500, begin + groups))
            rows = ((k + 1, self._rng.randbytes(_ROW_BYTES)) for k in keys)
            self.store.executemany("INSERT INTO t VALUES (?, ?)", rows)
            self.commit()

    def change(self, rows: int) -> None:
        """Change some rows, and commit."""
        last = self._last_key()
        changed = (
            (self._rng.randbytes(_ROW_BYTES), self._rng.randint(1, last)) for _ in range(rows)
        )
        self.store.executemany("UPDATE t SET v = ? WHERE k = ?", changed)
        self.commit()

    def _last_key(self) -> int:
        found: Any = self.store.execute("SELECT coalesce(max(k), 0) FROM t").fetchall()
        return int(found[0][0])

    def commit(self) -> None:
        """Commit, and wait for it."""
        self._commits += 1
        checkpoint = Checkpoint({"source": SourceCheckpoint(self._commits)})
        self.store.start_commit(_SHARD, checkpoint, ()).result()

    def settle(self) -> None:
        """Change rows until the log has four times the state: each group then has an image."""
        end = self.log.end + 4 * self._groups * PAGE
        while self.log.end < end:
            self.change(4)

    def hints(self) -> FSMHints:
        """Return the hints of the player of this log, with offsets of a state that is not scaled."""
        written = self.recorder.build_hints()
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            replayer = Replayer(Path(directory) / "files", hints=written)
            try:
                replayer.advance(self.log, self.log.end)
                return _scaled_up(replayer.fsm.build_hints(LOG))
            finally:
                replayer.abandon()


def _scaled_up(hints: FSMHints) -> FSMHints:
    return FSMHints(
        hints.log,
        tuple(
            replace(
                node,
                segments=tuple(
                    replace(
                        segment,
                        first_offset=segment.first_offset * SCALE,
                        last_offset=segment.last_offset * SCALE,
                    )
                    for segment in node.segments
                ),
            )
            for node in hints.live_nodes
        ),
        hints.properties,
    )


def steady_hints(gib: int, directory: Path, image_files: int = IMAGE_FILES) -> FSMHints:
    """Return the hints of a shard with a state of ``gib`` GiB after steady work."""
    state = ScaledState(directory, gib * 256, image_files)
    try:
        state.settle()
        return state.hints()
    finally:
        state.store.destroy()


def _describe(hints: FSMHints) -> str:
    json_bytes = len(hints.to_json())
    try:
        form, value = encode_hints(hints)
        stored = f"{len(value):,} as {form.value}"
    except Invalid:
        stored = "do not fit"
    return f"{len(hints.live_nodes):,} | {json_bytes:,} | {stored}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gib", type=int, nargs="+", help="sizes of the state, GiB")
    arguments = parser.parse_args()
    say = sys.stdout.write
    say("| state | files: one image each | as JSON, bytes | stored, bytes")
    say(" | files: as now | as JSON, bytes | stored, bytes |\n|---|---|---|---|---|---|---|\n")
    for gib in arguments.gib:
        cells = []
        for image_files in (ONE_IMAGE_EACH, IMAGE_FILES):
            with tempfile.TemporaryDirectory(prefix="gazette-hints-") as directory:
                cells.append(_describe(steady_hints(gib, Path(directory), image_files)))
        say(f"| {gib} GiB | {cells[0]} | {cells[1]} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
