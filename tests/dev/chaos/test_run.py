"""The parts of a chaos run that need no cluster: its flags, its store, its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from gazette.protocol.codecs.codec import new_compressor
from gazette.protocol.fragment import Codec, Fragment
from gazette.runtime.clock import SystemClock
from tools.chaos.checker import Figures, Verdict
from tools.chaos.history import Completed, Created, FaultEvent, History, Invoked, Phase
from tools.chaos.payload import digest
from tools.chaos.quiet import Violation
from tools.chaos.recorder import Recorder
from tools.chaos.report import outages, table, timeline
from tools.chaos.run import end_of_gap, run
from tools.chaos.store import BreakableStore, Stored, read_store, stored_spans


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--minutes=0"], "invalid minutes"),
        (["--replication=4"], 'invalid replication "4" (expected 1 to 3)'),
        (["--replication=3", "--restarts=1"], "must have room"),
        (["--replication=two"], 'invalid replication "two"'),
        (["--lease=1s"], "invalid lease"),
        (["--rate=0"], "invalid rate"),
        (["--brokers=0"], "invalid brokers"),
        (["--restarts=-1"], "invalid restarts"),
        (["--faults=kill, nothing"], 'unknown fault "nothing"'),
    ],
)
def test_mistakes(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    assert text in capsys.readouterr().err


def test_a_directory_with_something_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    assert run([f"--dir={tmp_path}"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_store_that_is_hidden_and_protected(tmp_path: Path) -> None:
    store = BreakableStore(tmp_path / "store")
    (store.directory / "a").mkdir(parents=True)
    (store.directory / "a" / "file").write_text("content")
    store.hide()
    assert not store.directory.exists()
    # Case: another process made an empty one meanwhile.
    store.directory.mkdir()
    store.mend()
    store.mend()
    assert (store.directory / "a" / "file").read_text() == "content"
    if store.can_protect():
        store.protect()
        with pytest.raises(OSError):
            (store.directory / "a" / "other").touch()
        store.mend()
    (store.directory / "a" / "other").touch()


def store_fragment(directory: Path, begin: int, content: bytes, codec: Codec = Codec.NONE) -> Path:
    fragment = Fragment(
        "a/journal", begin, begin + len(content), bytes.fromhex(digest(content)), codec
    )
    path = directory / fragment.content_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    compressor = new_compressor(codec)
    path.write_bytes(compressor.compress(content) + compressor.finish())
    return path


def test_a_store_is_read_by_names_and_codecs(tmp_path: Path) -> None:
    assert read_store(tmp_path, "a/journal") == Stored(b"")
    assert stored_spans(tmp_path, "a/journal") == []
    store_fragment(tmp_path, 0, b"0123", Codec.GZIP)
    store_fragment(tmp_path, 4, b"45" * 100_000, Codec.ZSTANDARD)
    whole = b"0123" + b"45" * 100_000 + b"67"
    store_fragment(tmp_path, 200_004, b"67", Codec.SNAPPY)
    # Case: one that covers parts of others, as brokers that were cut off upload.
    store_fragment(tmp_path, 2, b"2345")
    (tmp_path / "a/journal/.partial-x").touch()
    assert read_store(tmp_path, "a/journal") == Stored(whole)
    spans = [(0, 4), (2, 6), (4, 200_004), (200_004, 200_006)]
    assert stored_spans(tmp_path, "a/journal") == spans


def test_what_may_be_wrong_with_a_store(tmp_path: Path) -> None:
    store_fragment(tmp_path, 0, b"0123")
    # Case: other bytes of the same offsets.
    store_fragment(tmp_path, 2, b"xx45")
    assert "differs from the files before it" in read_store(tmp_path, "a/journal").wrong[0]
    # Case: a gap.
    store_fragment(tmp_path, 10, b"ab")
    assert read_store(tmp_path, "a/journal").holes == ((6, 10),)
    # Case: a file that is not what it is called.
    changed = store_fragment(tmp_path, 12, b"cd")
    changed.write_bytes(b"ce")
    assert "does not hold what its name says" in read_store(tmp_path, "a/journal").wrong[1]


def test_a_gap_ends_where_a_fragment_begins() -> None:
    # A head was confirmed at 900, and again before the first confirmation was known to have worked: 700.
    assert end_of_gap(100, 900, [0, 90, 700, 950]) == 700
    assert end_of_gap(700, 900, [0, 90, 700, 950]) == 900
    assert end_of_gap(100, 900, []) == 900


def fault(kind: str, time: float, phase: Phase) -> FaultEvent:
    return FaultEvent(time, kind, "", phase)


def test_outages_are_of_the_journal_that_waited_longest() -> None:
    acknowledged = {"a": [1.0, 2.0, 3.0, 9.0, 9.5, 30.0], "b": [float(n) for n in range(31)]}
    faults = [
        fault("kill", 2.5, "begun"),
        fault("kill", 10.0, "ended"),
        fault("kill", 10.0, "settled"),
        fault("cut", 20.0, "begun"),
        fault("cut", 21.0, "ended"),
        fault("kill", 29.0, "begun"),
    ]
    found = outages(faults, acknowledged)
    # Case: the gap that begins just before the end is of the fault, too; the last fault never ended.
    assert found["kill"].seconds == [20.5]
    assert found["cut"].seconds == [20.5]
    assert outages([fault("kill", 2.5, "begun"), fault("kill", 8.0, "ended")], acknowledged)[
        "kill"
    ].seconds == [6.0]
    assert outages(faults, {})["kill"].seconds == [0.0]
    assert timeline(faults).splitlines() == [
        "faults",
        "      2.5 to    10.0 s  kill ()",
        "     20.0 to    21.0 s  cut ()",
    ]


def test_what_a_recorder_keeps_of_a_journal(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "history", SystemClock())
    moved: list[tuple[str, int]] = []
    recorder.restarted.append(lambda journal, begin: moved.append((journal, begin)))
    recorder.create(Created(0.0, "a", 1, 10))
    recorder.record(Invoked(1.0, 1, 0, "c", "a", 100))
    recorder.record(Completed(2.0, 1, 0, "ok", end=100, members=("b1",), revision=11))
    assert (recorder.heads["a"], recorder.members["a"]) == (100, ("b1",))
    recorder.restart("a", 60, 80)
    assert recorder.heads["a"] == 80
    recorder.create(Created(3.0, "a", 1, 20, life=2))
    # Case: an answer of the earlier life.
    recorder.record(Invoked(1.5, 2, 0, "c", "a", 100))
    recorder.record(Completed(4.0, 2, 0, "ok", end=200, members=("b1",), revision=11))
    assert (recorder.heads["a"], recorder.members) == (0, {})
    assert moved == [("a", 0), ("a", 60), ("a", 0)]
    recorder.close()
    assert len(list(History(recorder.path))) == 7


def test_the_table_says_what_was_found() -> None:
    verdict = Verdict()
    verdict.appends.update(ok=12_345, unknown=3)
    verdict.journals["a/journal"] = Figures(12_345, 0, 3, 7, 1_000_000, 2)
    found = outages([fault("kill", 0, "begun"), fault("kill", 1, "ended")], {"a": [0.0, 5.0]})
    text = table(verdict, found, 60.0)
    assert "12,348: 12,345 acknowledged" in text
    assert "no violation" in text
    assert (
        "a/journal                      12,345       0       3                7 1,000,000     2"
        in text
    )
    assert "kill" in text
    verdict.violations.append(Violation("lost", "a/journal", "op 7"))
    assert "1 VIOLATIONS\n  lost: a/journal: op 7" in table(verdict, found, 60.0)
    verdict.violations += [Violation("lost", "a/journal", f"op {op}") for op in range(8, 108)]
    verdict.violations.append(Violation("stuck", "a/journal", "r"))
    text = table(verdict, found, 60.0)
    assert "  lost: a/journal: op 10\n  lost: a/journal: and 97 more\n  stuck: a/journal: r" in text
