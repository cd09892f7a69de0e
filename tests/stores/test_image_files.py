"""Files of images: their number stays bounded however large a database is, and each state is recovered."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Corrupt
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import HINTS_BYTES_MAX, FSMHints, HintsForm, encode_hints
from gazette.recoverylog.sqlite import redo_format
from gazette.recoverylog.sqlite.redo import (
    RedoState,
    build,
    files_of,
    redo_files,
)
from gazette.recoverylog.sqlite.redo_format import KIND_IMAGE_WITHIN, decode_image
from gazette.stores.sqlite.databases import RedoDatabases
from gazette.stores.sqlite.hand_over import NOTE_PATH
from gazette.stores.sqlite.redo_recording import RedoRecording
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import MemoryLog, Replayer, pruned, replay, take_over
from tests.facts import raises
from tools.fuzz_stores.base import defaults
from tools.image_hints import ONE_IMAGE_EACH, ScaledState, steady_hints

SHARD: Any = None
SCHEMA = "CREATE TABLE IF NOT EXISTS {}t (k INTEGER PRIMARY KEY, v BLOB)"
PAGE = 512
IMAGE_FILES = 6


class Shard:
    """A shard with two databases, and plain ones that execute the same statements."""

    def __init__(self, directory: Path, seed: int, image_files: int = IMAGE_FILES) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.log = MemoryLog()
        self.plain = apsw.Connection(":memory:")
        self.plain.execute("ATTACH ':memory:' AS other")
        for prefix in ("main.", "other."):
            self.plain.execute(SCHEMA.format(prefix))
        self.owners = self.commits = 0
        self.hints: FSMHints | None = None
        self.standby: Replayer | None = None
        self.store: SQLiteStore
        self.own(image_files)

    def own(self, image_files: int = IMAGE_FILES, horizon_slack: int = 4000) -> None:
        self.owners += 1
        directory = self.directory / f"owner-{self.owners}"
        self.recorder = take_over(self.log, directory, self.rng, hints=self.hints)
        with (
            defaults(
                RedoRecording.__init__,
                group_pages=2,
                horizon_slack=horizon_slack,
                checkpoint_frames=40,
            ),
            defaults(RedoDatabases.__init__, image_files=image_files),
        ):
            schema = SCHEMA.format("") + ";" + SCHEMA.format("other.")
            self.store = SQLiteStore(self.recorder, schema, databases=["other"], page_size=PAGE)

    def execute(self, sql: str, *bindings: Any) -> None:
        self.store.execute(sql, bindings).fetchall()
        self.plain.execute(sql, bindings).fetchall()

    def commit(self) -> None:
        self.commits += 1
        checkpoint = Checkpoint({"source": SourceCheckpoint(self.commits)})
        self.store.start_commit(SHARD, checkpoint, ()).result()

    def table(self) -> str:
        return self.rng.choice(("main.t", "main.t", "other.t"))

    def grow(self) -> None:
        table = self.table()
        for _ in range(self.rng.randrange(1, 60)):
            value = self.rng.randbytes(self.rng.choice((50, 400, 900)))
            self.execute(f"INSERT INTO {table} (v) VALUES (?)", value)

    def change(self) -> None:
        for _ in range(6):
            key, value = self.rng.randrange(1, 400), self.rng.randbytes(300)
            self.execute(f"UPDATE {self.table()} SET v = ? WHERE k = ?", value, key)

    def shrink(self) -> None:
        table, part = self.table(), self.rng.randrange(2, 30)
        self.execute(f"DELETE FROM {table} WHERE k % 30 < ?", part)
        self.commit()
        self.store.vacuum(table.partition(".")[0])
        self.execute("UPDATE main.t SET k = k WHERE k = 0")

    def fail_over(self) -> None:
        self.store.destroy()
        self.own()

    def prune(self) -> None:
        self.hints = self.recorder.build_hints()
        self.log.data[:] = pruned(self.log.data, self.hints)

    def content(self, query: Any) -> list[Any]:
        return [query(f"SELECT k, v FROM {table} ORDER BY k") for table in ("main.t", "other.t")]

    def check(self) -> None:
        expected = self.content(lambda sql: self.plain.execute(sql).fetchall())
        directory = self.directory / "check"
        replay(bytes(self.log.data), directory, hints=self.hints)
        for database, rows in zip(("primary.db", "other.db"), expected, strict=True):
            paths = files_of(directory)
            state = build(paths, database, directory / "built")
            connection = apsw.Connection(str(directory / "built"))
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("SELECT k, v FROM t ORDER BY k").fetchall() == rows
            connection.close()
            self.check_files(database, state)
        assert self.content(self.store.query) == expected

    def check_files(self, database: str, state: RedoState) -> None:
        """Check that the log has exactly the files of images that a recovery reads, without overlaps."""
        needed = {"/" + image.file.name(database) for image in state.groups.values()}
        links = self.recorder.fsm.links
        assert {path for path in links if path.startswith(f"/{database}.image-")} == needed
        images = Counter((image.file, image.offset) for image in state.groups.values())
        assert all(count == 1 for count in images.values())

    def live_bytes(self) -> int:
        return self.store.live_bytes


STEPS = st.lists(
    st.sampled_from(["grow"] * 4 + ["change"] * 8 + ["shrink", "fail_over", "prune"]),
    min_size=5,
    max_size=40,
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 30), steps=STEPS)
def test_every_state_is_recovered_while_a_database_grows_and_shrinks(
    seed: int, steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    shard = Shard(tmp_path_factory.mktemp("shard"), seed)
    shard.grow()
    shard.commit()
    for number, step in enumerate(steps):
        getattr(shard, step)()
        shard.commit()
        if number % 5 == 0:
            shard.check()
    shard.check()
    shard.store.destroy()
    shard.plain.close()


def worked(directory: Path, seed: int, image_files: int = IMAGE_FILES) -> Shard:
    """Return a shard with a state of many groups, most of which were imaged several times."""
    shard = Shard(directory, seed, image_files)
    for _ in range(8):
        shard.grow()
        shard.commit()
    for _ in range(150):
        shard.change()
        shard.commit()
    return shard


def kinds(directory: Path) -> set[int]:
    return {
        kind
        for database in ("primary.db", "other.db")
        for file in redo_files(files_of(directory), database)
        for kind, _ in file.frames()
    }


def test_the_log_may_end_at_any_append(tmp_path: Path) -> None:
    """A kill between any two appends: the image of a group is one append with what it replaces."""
    shard = worked(tmp_path, 3)
    for _ in range(3):
        shard.shrink()
        shard.commit()
        shard.grow()
        shard.commit()
    directory = tmp_path / "cut"
    replayer = Replayer(directory / "staged")
    for end in shard.log.ends[1:]:
        replayer.advance(shard.log, end)
        if end < shard.log.ends[-1] * 3 // 4:
            continue
        replayer.copy_live(directory / "live")
        for database in ("primary.db", "other.db"):
            if redo_files(files_of(directory / "live"), database):
                built = directory / "built.db"
                build(files_of(directory / "live"), database, built)
                connection = apsw.Connection(str(built))
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                connection.close()
    replayer.abandon()
    shard.store.destroy()


def test_a_version_that_knows_one_image_for_a_file_refuses_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could otherwise take redo of another image for changes of its own."""
    shard = worked(tmp_path, 4)
    replay(bytes(shard.log.data), tmp_path / "files")
    assert KIND_IMAGE_WITHIN in kinds(tmp_path / "files")
    monkeypatch.setattr(redo_format, "_KINDS", (1, 2))
    with raises(Corrupt, "file", kind=3) as raised:
        build(files_of(tmp_path / "files"), "primary.db", tmp_path / "built")
    assert raised.value.facts["kind"] == KIND_IMAGE_WITHIN
    shard.store.destroy()


def test_a_small_database_stays_as_earlier_versions_read_it(tmp_path: Path) -> None:
    shard = worked(tmp_path, 5, image_files=1000)
    replay(bytes(shard.log.data), tmp_path / "files")
    assert kinds(tmp_path / "files") == {1, 2}
    shard.store.destroy()


def files(shard: Shard) -> int:
    return len(shard.recorder.fsm.links.keys() - {NOTE_PATH})


def test_the_log_of_an_earlier_version_gets_fewer_files(tmp_path: Path) -> None:
    """Also if nothing is written but small commits, and no horizon asks for images."""
    shard = worked(tmp_path, 6, image_files=ONE_IMAGE_EACH)
    shard.check()
    before = files(shard)
    assert before > 10 * IMAGE_FILES
    shard.store.destroy()
    shard.own(horizon_slack=1 << 30)
    for _ in range(8 * before):
        shard.commit()
    shard.check()
    assert files(shard) <= 2 * IMAGE_FILES
    shard.store.destroy()


def test_many_owners_that_write_nothing_leave_few_files(tmp_path: Path) -> None:
    """Each begins a redo file: a shard that fails and starts again for days must not outgrow its hints."""
    shard = Shard(tmp_path, 7)
    shard.grow()
    shard.commit()
    most = 0
    for _ in range(40):
        shard.fail_over()
        most = max(most, files(shard))
    shard.check()
    assert most <= 5 * IMAGE_FILES
    shard.store.destroy()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (
            lambda data, offset: data[:offset] + b"?" + data[offset + 1 :],
            "does not match its announcement",
        ),
        (lambda data, offset: data[: offset + 7], "does not match its announcement"),
        (lambda data, offset: b"", "does not match its announcement"),
    ],
)
def test_a_damaged_image_within_a_file_is_an_error(tmp_path: Path, damage: Any, match: str) -> None:
    shard = worked(tmp_path, 8)
    directory = tmp_path / "files"
    replay(bytes(shard.log.data), directory)
    state = build(files_of(directory), "primary.db", tmp_path / "built")
    image = max(state.groups.values(), key=lambda image: image.offset)
    assert image.offset > 0
    path = directory / image.file.name("primary.db")
    path.write_bytes(damage(path.read_bytes(), image.offset))
    with raises(Corrupt, "offset", "length", expected=1024) as raised:
        build(files_of(directory), "primary.db", tmp_path / "again")
    assert raised.value.facts["file"] == path.name
    assert not (tmp_path / "again").exists()
    shard.store.destroy()


def test_a_frame_of_an_image_with_a_wrong_length_is_an_error() -> None:
    with raises(Corrupt, length=28):
        decode_image(KIND_IMAGE_WITHIN, memoryview(struct.pack("<7I", *range(7))))


def test_a_file_has_one_image_of_each_group(tmp_path: Path) -> None:
    """Of a small database beside a large one, whose files are larger than it is: it would never end."""
    shard = worked(tmp_path, 10, image_files=1)
    replay(bytes(shard.log.data), tmp_path / "files")
    for path in sorted((tmp_path / "files").glob("*.image-*")):
        pages = max(
            image.first + image.count
            for database in ("primary.db", "other.db")
            if path.name.startswith(database)
            for image in build(files_of(path.parent), database, tmp_path / "built").groups.values()
        )
        assert path.stat().st_size < pages * PAGE
    bound = 2 * shard.live_bytes() + (64 << 10)
    assert shard.recorder.horizon_bytes < bound
    shard.store.destroy()


def test_groups_of_another_size_are_refused(tmp_path: Path) -> None:
    shard = worked(tmp_path, 9)
    shard.store.destroy()
    recorder = take_over(shard.log, tmp_path / "next", shard.rng)
    with (
        defaults(RedoRecording.__init__, group_pages=4),
        raises(Corrupt, group=1, count=2, group_pages=4),
    ):
        SQLiteStore(recorder, databases=["other"], page_size=PAGE)


def test_hints_of_10_gib_have_about_a_thousand_files(tmp_path: Path) -> None:
    hints = steady_hints(10, tmp_path)
    assert len(hints.live_nodes) < 1500
    assert encode_hints(hints)[0] is HintsForm.JSON


@pytest.mark.long
def test_hints_of_100_gib_fit_as_json(tmp_path: Path) -> None:
    """As they did not with one image for each file: 25,600 of them, of more than 4 MiB as JSON."""
    hints = steady_hints(100, tmp_path)
    assert len(hints.live_nodes) <= 2000
    form, value = encode_hints(hints)
    assert form is HintsForm.JSON
    assert len(value) <= 1 << 20 < HINTS_BYTES_MAX


@pytest.mark.long
def test_a_database_that_grows_all_the_time_has_few_files(tmp_path: Path) -> None:
    """Its first files were made when it was small."""
    state = ScaledState(tmp_path, 256, image_files=32)
    most = 0
    for _ in range(60):
        state.grow(128)
        for _ in range(60):
            state.change(4)
        most = max(most, len(state.recorder.fsm.links))
    assert most <= 32 * 5
    state.store.destroy()
