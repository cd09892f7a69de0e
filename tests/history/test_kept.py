"""What a first pass keeps for the second, against reading twice; and what becomes of it when it fails."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gazette.errors import Broken, Corrupt, Invalid
from gazette.history import row_cache as kept
from gazette.history.batch_split import split_batch
from gazette.history.columns import MessageFormat
from gazette.history.combine import Combiner
from gazette.history.merge import FoldedSnapshot, fold_snapshot
from gazette.history.meta_columns import META
from gazette.history.read import fold_locally, resolver
from gazette.history.row_cache import KeptRows, read_kept_rows, summarise_and_keep
from gazette.history.row_format import RowFormat
from gazette.history.rows import read_rows
from gazette.history.scanned_batches import scanned_batches
from gazette.history.snapshot import Run
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.history.summary import RunSummary
from gazette.labels import CONTENT_CSV
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from gazette.protocol.fragment import Codec
from gazette.testing.stored import json_line, write_journal
from tests.facts import raises

STORE, JOURNAL = "file:///fragments/", "topic/one"
SCHEMA = pa.schema([("offset", META["offset"]), ("word", pa.string()), ("n", pa.int64())])
FORMAT = RowFormat("json", SCHEMA, (("offset", "offset"),))
COUNTED = RowFormat("json", pa.schema([("word", pa.string()), ("n", pa.int64())]))


def producer(number: int) -> bytes:
    return bytes([1, 0, 0, 0, 0, number])


def random_fragments(seed: int) -> list[bytes]:
    """Draw producers in turn: transactions over several fragments, rollbacks, repetitions, an open end."""
    rng = random.Random(seed)
    clocks = [0, 0, 0]
    acked = [0, 0, 0]
    fragments: list[bytes] = []
    for _ in range(rng.randint(2, 8)):
        lines: list[bytes] = []
        for _ in range(rng.randint(1, 12)):
            author = rng.randrange(3)
            clocks[author] += 1
            kind = rng.choice([OUTSIDE_TXN, CONTINUE_TXN, CONTINUE_TXN, ACK_TXN, ACK_TXN])
            clock = clocks[author]
            if kind == ACK_TXN and rng.random() < 0.2:
                clock = clocks[author] = max(1, acked[author])  # It rolls back.
            if kind != CONTINUE_TXN:
                acked[author] = clock
            words = {} if kind == ACK_TXN else {"word": rng.choice("abc"), "n": rng.randint(1, 9)}
            lines.append(json_line(words, build_uuid(producer(author), clock, kind)))
            if rng.random() < 0.1:
                lines += lines[-rng.randint(1, len(lines)) :]
        if fragments and rng.random() < 0.2:
            lines.insert(0, fragments[-1])
        fragments.append(b"".join(lines))
    return fragments


class Subject:
    """A journal in a store, and both ways to read it."""

    def __init__(
        self, root: Path, fragments: list[bytes], shape: MessageFormat = MessageFormat()
    ) -> None:
        self.directory = root / "kept"
        write_journal(root, STORE, JOURNAL, fragments, Codec.ZSTANDARD)
        self.access = Access.of(file_root=root, direct=True)
        self.selection = Selection(journals=(JOURNAL,), stores=(STORE,), shape=shape)
        with self.access.open() as opened:
            self.snapshot = take_snapshot(opened, self.selection)

    def first_pass(self, kept_rows: KeptRows) -> tuple[FoldedSnapshot, dict[int, str]]:
        paths: dict[int, str] = {}
        with self.access.open() as opened:

            def summaries(runs: Sequence[Run]) -> list[RunSummary]:
                found = [summarise_and_keep(opened, run, kept_rows, self.directory) for run in runs]
                paths.update((summary.number, path) for summary, path in found)
                return [summary for summary, _ in found]

            return fold_snapshot(self.snapshot, summaries, resolver(opened), 1), paths

    def second_pass(
        self, folded: FoldedSnapshot, kept_rows: KeptRows, paths: dict[int, str]
    ) -> list[dict[str, Any]]:
        with self.access.open() as opened:
            found = [
                batch
                for run in folded.runs
                for batch in read_kept_rows(opened, run, kept_rows, paths.get(run.run.number, ""))
            ]
        rows: list[dict[str, Any]] = pa.Table.from_batches(
            found, kept_rows.format.schema
        ).to_pylist()
        return rows

    def read_twice(self, format: RowFormat) -> list[dict[str, Any]]:
        folded = fold_locally(self.access, self.snapshot, run_bytes=1)
        with self.access.open() as opened:
            found = [batch for run in folded.runs for batch in read_rows(opened, run, format)]
        rows: list[dict[str, Any]] = pa.Table.from_batches(found, format.schema).to_pylist()
        return rows


def counted(rows: pa.Table) -> pa.Table:
    made = rows.group_by("word").aggregate([("n", "sum")])
    return made.rename_columns(rows.schema.names)


def sums(rows: list[dict[str, Any]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows:
        found[row["word"]] += row["n"]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_it_is_what_reading_twice_gives(tmp_path: Path, seed: int) -> None:
    subject = Subject(tmp_path, random_fragments(seed))
    want = subject.read_twice(FORMAT)
    folded, paths = subject.first_pass(KeptRows(FORMAT))
    assert all(paths.values())
    assert subject.second_pass(folded, KeptRows(FORMAT), paths) == want
    assert {path.suffix for path in subject.directory.iterdir()} == {".arrow"}
    combining = KeptRows(COUNTED, counted)
    folded, paths = subject.first_pass(combining)
    assert sums(subject.second_pass(folded, combining, paths)) == sums(want)
    # Without the files, too.
    assert sums(subject.second_pass(folded, combining, {})) == sums(want)


def test_the_random_histories_are_kept_and_are_not(tmp_path: Path) -> None:
    """Or the test above would show nothing: runs that are fresh, that are not, and what is decided late."""
    fresh = [0, 0]
    late = 0
    for seed in range(60):
        subject = Subject(tmp_path / str(seed), random_fragments(seed))
        folded, _ = subject.first_pass(KeptRows(FORMAT))
        for run in folded.runs:
            fresh[run.fresh] += 1
            late += bool(run.fates and run.fresh)
    assert min(*fresh, late) > 10


LINES = [
    json_line({"word": word, "n": n}, build_uuid(producer(1), clock, OUTSIDE_TXN))
    for clock, (word, n) in enumerate([("a", 1), ("b", 2), ("a", 4)], start=1)
]


def test_the_bytes_are_not_read_again(tmp_path: Path) -> None:
    """What was kept is enough, though the fragments are gone."""
    subject = Subject(tmp_path, LINES)
    folded, paths = subject.first_pass(KeptRows(FORMAT))
    want = subject.read_twice(FORMAT)
    for path in (tmp_path / "fragments").rglob("*.zst"):
        path.unlink()
    assert subject.second_pass(folded, KeptRows(FORMAT), paths) == want


@pytest.mark.parametrize("damage", ["gone", "empty", "directory", "of another schema", "no Arrow"])
def test_a_file_that_cannot_be_used_is_not_needed(tmp_path: Path, damage: str) -> None:
    subject = Subject(tmp_path, LINES)
    folded, paths = subject.first_pass(KeptRows(FORMAT))
    for path in map(Path, paths.values()):
        path.unlink()
        match damage:
            case "empty":
                path.write_bytes(b"")
            case "directory":
                path.mkdir()
            case "of another schema":
                with pa.ipc.new_stream(str(path), pa.schema([("x", pa.int64())])):
                    pass
            case "no Arrow":
                path.write_bytes(b"{}\n" * 100)
    assert subject.second_pass(folded, KeptRows(FORMAT), paths) == subject.read_twice(FORMAT)


def test_a_disk_without_room_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    subject = Subject(tmp_path, LINES)
    monkeypatch.setattr(kept, "_FREE_SHARE", 1.1)
    folded, paths = subject.first_pass(KeptRows(FORMAT))
    assert set(paths.values()) == {""}
    assert list(subject.directory.iterdir()) == []
    assert "the disk is nearly full" in str([vars(record)["reason"] for record in caplog.records])
    assert subject.second_pass(folded, KeptRows(FORMAT), paths) == subject.read_twice(FORMAT)


def test_a_file_that_is_damaged_within_fails_one_attempt(tmp_path: Path) -> None:
    """Rows of it were given already. The next attempt reads the fragments."""
    subject = Subject(tmp_path, [b"".join(LINES)])
    folded, paths = subject.first_pass(KeptRows(FORMAT))
    path = Path(paths[0])
    for cut_at in (path.stat().st_size - 1, path.stat().st_size // 2):
        path.write_bytes(path.read_bytes()[:cut_at])
        with raises(Broken, "file", journal="topic/one") as raised:
            subject.second_pass(folded, KeptRows(FORMAT), paths)
        assert str(path) in str(raised.value)
        assert not path.exists()
        assert subject.second_pass(folded, KeptRows(FORMAT), paths) == subject.read_twice(FORMAT)
        _, again = subject.first_pass(KeptRows(FORMAT))
        Path(again[0]).rename(path)


def test_the_oldest_files_go_where_there_is_no_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more of them than it takes; a file that is too large for all of it has none removed."""
    disk = shutil.disk_usage(tmp_path)._replace(total=1000, free=900)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    for at in range(4):
        path = tmp_path / f"{at}.arrow"
        path.write_bytes(bytes(50))
        os.utime(path, ns=(at, at))

    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    assert kept._make_room(tmp_path, 50)
    assert len(left()) == 4
    assert kept._make_room(tmp_path, 51)
    assert left() == ["1.arrow", "2.arrow", "3.arrow"]
    assert not kept._make_room(tmp_path, 251)
    assert len(left()) == 3
    # Of a disk that others have filled, too.
    disk = disk._replace(free=60)
    assert kept._make_room(tmp_path, 50)
    assert left() == ["3.arrow"]
    assert not kept._make_room(tmp_path, 50)
    assert left() == ["3.arrow"]


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    subject = Subject(tmp_path, LINES)
    subject.directory.write_text("not a directory")
    folded, paths = subject.first_pass(KeptRows(FORMAT))
    assert set(paths.values()) == {""}
    assert subject.second_pass(folded, KeptRows(FORMAT), paths) == subject.read_twice(FORMAT)


def test_a_disk_that_fills_up_keeps_nothing(tmp_path: Path) -> None:
    """In the middle of a file, and at its end: what was begun is removed."""
    subject = Subject(tmp_path, LINES)
    runs = subject.snapshot.runs(1)
    with (
        subject.access.open() as opened,
        Path("/dev/full").open("wb", 0) as full,
        kept._Writer(runs[0], KeptRows(FORMAT), subject.directory) as writer,
    ):
        (found,) = scanned_batches(opened, runs[0], FORMAT.scanned)
        writer._stream = pa.ipc.new_stream(pa.PythonFile(full), SCHEMA)
        writer.add(found, split_batch(found.columns, runs[0]))
        assert writer.finish() == ""
    assert list(subject.directory.iterdir()) == []


def test_messages_of_another_form_are_read_twice(tmp_path: Path) -> None:
    """A word that is a number: Arrow's parser has it, and the quick pass does not."""
    odd = json_line({"word": 5, "n": 1}, build_uuid(producer(1), 9, OUTSIDE_TXN))
    subject = Subject(tmp_path, [*LINES, odd])
    folded, paths = subject.first_pass(KeptRows(FORMAT))
    assert [bool(paths[number]) for number in range(4)] == [True, True, True, False]
    assert subject.second_pass(folded, KeptRows(FORMAT), paths) == subject.read_twice(FORMAT)
    assert subject.second_pass(folded, KeptRows(FORMAT), paths)[-1]["word"] == "5"


def test_csv_is_read_twice(tmp_path: Path) -> None:
    line = ",".join([str(json.loads(LINES[0])["uuid"]), "a", "3"]).encode() + b"\n"
    subject = Subject(tmp_path, [line], MessageFormat(CONTENT_CSV))
    kept_rows = KeptRows(replace(FORMAT, value="csv"))
    folded, paths = subject.first_pass(kept_rows)
    assert paths == {0: ""}
    assert subject.second_pass(folded, kept_rows, paths) == [{"offset": 0, "word": "a", "n": 3}]


def test_places_only(tmp_path: Path) -> None:
    format = RowFormat("json", pa.schema([("offset", META["offset"])]), (("offset", "offset"),))
    subject = Subject(tmp_path, LINES)
    folded, paths = subject.first_pass(KeptRows(format))
    assert all(paths.values())
    assert subject.second_pass(folded, KeptRows(format), paths) == subject.read_twice(format)


def test_a_damaged_fragment_leaves_no_file(tmp_path: Path) -> None:
    subject = Subject(tmp_path, LINES)
    (path, *_) = sorted((tmp_path / "fragments").rglob("*.zst"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(Corrupt):
        subject.first_pass(KeptRows(FORMAT))
    assert list(subject.directory.iterdir()) == []


# -- combining


def batches(*sizes: int) -> list[pa.RecordBatch]:
    count = itertools.count()
    return [
        pa.RecordBatch.from_pydict(
            {"word": [f"w{next(count) % 3}" for _ in range(size)], "n": [1] * size}, COUNTED.schema
        )
        for size in sizes
    ]


def combined(combiner: Combiner, given: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    found = [batch for one in given for batch in combiner.add(one)]
    return [*found, *combiner.finish()]


def test_rows_are_put_together() -> None:
    combiner = Combiner(counted, COUNTED.schema)
    found = combined(combiner, batches(100_000, 40_000, 0, 150_000, 7))
    assert sum(batch.num_rows for batch in found) == 3
    assert sum(sum(batch.column(1).to_pylist()) for batch in found) == 290_007
    assert combined(combiner, []) == []


def test_rows_that_stay_as_many_are_not_held() -> None:
    """A key of its own for each: what was put together in vain is passed on, and not gone through again."""
    calls: list[int] = []

    def combine(rows: pa.Table) -> pa.Table:
        calls.append(rows.num_rows)
        return rows

    found = combined(Combiner(combine, COUNTED.schema), batches(*[50_000] * 9))
    assert sum(batch.num_rows for batch in found) == 450_000
    assert calls == [150_000] * 3


@pytest.mark.parametrize(
    "combine",
    [lambda rows: None, lambda rows: rows.drop_columns("n"), lambda rows: rows.to_batches()[0]],
)
def test_a_combine_that_gives_something_else(combine: Callable[[pa.Table], Any]) -> None:
    with raises(Invalid, says="combine()") as raised:
        combined(Combiner(combine, COUNTED.schema), batches(3))
    assert "word: string" in str(raised.value.hint)
