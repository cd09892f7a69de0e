"""States of the past: every commit that a log still has can be had back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gazette.blobs.file import FileStore
from gazette.consumer.application import Store
from gazette.consumer.timers.timer import BEFORE_ALL, TimeDomain, TimerRow
from gazette.errors import Corrupt, Invalid, NotFound
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.hints import FnodeSegments, FSMHints
from gazette.protocol.journal_life import JournalLife
from gazette.recoverylog import Moment, ShardState, StoredLogs, open_at
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.log_source import CopiedLogs
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.playback.playback import BeyondTheEnd, PrunedLog
from gazette.recoverylog.shard_state import StateKind
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import LOG, FragmentLog, LogClock, MemoryLog, MemoryLogs, take_over
from gazette.testing.stored import write_fragment
from tests.facts import raises

SHARD: Any = None


class Named:
    """A shard, as far as tables of timers need it."""

    id = "shard-one"


SCHEMA = "CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY, n INTEGER)"


class SQLiteKind:
    kind = StateKind.SQLITE
    mode: Any = "redo"

    def open(self, recorder: Recorder) -> Store:
        return SQLiteStore(recorder, SCHEMA, mode=self.mode)

    def change(self, store: Any, word: str, n: int) -> None:
        store.execute(
            "INSERT INTO word VALUES (?, ?) ON CONFLICT DO UPDATE SET n = ?", (word, n, n)
        )

    def words(self, state: ShardState) -> dict[str, int]:
        if not state.query("SELECT 1 FROM sqlite_master WHERE name = 'word'"):
            return {}
        return dict(state.query("SELECT w, n FROM word"))


class VfsKind(SQLiteKind):
    mode = "vfs"


class RocksDBKind:
    kind = StateKind.ROCKSDB

    def open(self, recorder: Recorder) -> Store:
        pytest.importorskip("rocksdict")
        from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore

        small = RocksDBOptions(write_buffer_bytes=64 << 10)
        return RocksDBStore(recorder, column_families={"counts": small}, options=small)

    def change(self, store: Any, word: str, n: int) -> None:
        store.put(word.encode(), b"%d" % n)
        store.put(word.encode(), b"%d" % n, column_family="counts")
        if n % 7 == 0:  # More than a memtable: RocksDB makes tables meanwhile.
            for family in store.column_families:
                store.put(b"~", random.Random(n).randbytes(100_000), column_family=family)

    def words(self, state: ShardState) -> dict[str, int]:
        words = self._counts(state, "default")
        if words:
            assert words == self._counts(state, "counts")
            one = min(words)
            found = dict(state.iterate(one.encode()))
            assert found == {w.encode(): b"%d" % n for w, n in words.items() if w.startswith(one)}
        return words

    def _counts(self, state: ShardState, family: str) -> dict[str, int]:
        found = state.iterate(column_family=family)
        return {key.decode(): int(value) for key, value in found if key != b"~"}


class JSONKind:
    kind = StateKind.JSON

    def open(self, recorder: Recorder) -> Store:
        return JSONFileStore(recorder, dict[str, int], dict)

    def change(self, store: Any, word: str, n: int) -> None:
        store.state[word] = n

    def words(self, state: ShardState) -> dict[str, int]:
        return state.document() if state.kind is StateKind.JSON else {}


KINDS = [SQLiteKind(), VfsKind(), RocksDBKind(), JSONKind()]


class Recorded:
    """A log of several owners, and what was committed when: (end in the log, time, words)."""

    def __init__(self, kind: Any, directory: Path, log: MemoryLog) -> None:
        self.kind = kind
        self.log = log
        self.directory = directory
        self.rng = random.Random(type(kind).__name__)
        self.commits: list[tuple[int, datetime, dict[str, int]]] = []
        self.timed: list[int] = []
        """Numbers of the commits before which nothing else was appended once their time was taken."""
        self.words: dict[str, int] = {}
        self.hints: list[FSMHints] = []
        """The newest first."""
        self.new_life = 1 << 62
        """Number of the first commit after the source was created again."""

    def checkpoint(self, number: int) -> Checkpoint:
        """Return the checkpoint of a commit: with a new life of the source, its offsets begin again."""
        life, commit = (1, number) if number < self.new_life else (2, number - self.new_life + 1)
        return Checkpoint(
            {"a/source": SourceCheckpoint(commit * 100)},
            application="words",
            lives={"a/source": JournalLife(7, life)},
        )

    def owner(self, count: int) -> None:
        hints = self.hints[0] if self.hints else None
        target = self.directory / f"owner-{len(self.hints)}-{len(self.commits)}"
        recorder = take_over(self.log, target, self.rng, hints=hints)
        store = self.kind.open(recorder)
        for _ in range(count):
            number = len(self.commits) + 1
            word = f"word {self.rng.randrange(30)}"
            self.words[word] = number
            self.kind.change(store, word, number)
            checkpoint = self.checkpoint(number)
            time, before = LogClock(self.log).now(), self.log.end
            commit = store.start_commit(SHARD, checkpoint, ()).result().commit
            # RocksDB compacts in its own time, and appends that.
            if commit.begin == before:
                self.timed.append(number)
            self.commits.append((commit.end, datetime.fromtimestamp(time, UTC), dict(self.words)))
        self.hints.insert(0, recorder.build_hints())
        store.destroy()

    def check(
        self, directory: Path, moment: Moment, number: int, hints: Sequence[FSMHints] = ()
    ) -> None:
        """Check that the moment gives the state of commit ``number`` (from 1)."""
        source = MemoryLogs(self.log)
        with open_at(source, hints or self.hints, directory, moment) as state:
            assert self.kind.words(state) == (self.commits[number - 1][2] if number else {})
            expected = self.checkpoint(number) if number else Checkpoint()
            assert state.checkpoint.to_bytes() == expected.to_bytes()
            if number:
                assert state.kind is self.kind.kind
                assert state.offset >= self.commits[number - 1][0]


@pytest.fixture(params=KINDS, ids=lambda kind: type(kind).__name__)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Recorded:
    recorded = Recorded(request.param, tmp_path, MemoryLog())
    for count in (12, 1, 14):
        recorded.owner(count)
    return recorded


def test_any_commit_by_its_end(recorded: Recorded, tmp_path: Path) -> None:
    """From the byte at which it ends to the byte before the end of the next one."""
    for number in (1, *recorded.rng.sample(range(2, len(recorded.commits) + 1), 5)):
        end = recorded.commits[number - 1][0]
        recorded.check(tmp_path / f"at-{number}", Moment(offset=end), number)
        recorded.check(tmp_path / f"before-{number}", Moment(offset=end - 1), number - 1)
    recorded.check(tmp_path / "now", Moment(), len(recorded.commits))


def test_any_commit_by_its_time(recorded: Recorded, tmp_path: Path) -> None:
    for number in recorded.rng.sample(recorded.timed, 4):
        time = recorded.commits[number - 1][1]
        later, before = time + timedelta(milliseconds=1), time - timedelta(milliseconds=1)
        recorded.check(tmp_path / f"at-{number}", Moment(time=later), number)
        recorded.check(tmp_path / f"before-{number}", Moment(time=before), number - 1)


@pytest.mark.parametrize("asked", [0, 101, 1299, 5000])
def test_a_commit_by_its_checkpoint(recorded: Recorded, tmp_path: Path, asked: int) -> None:
    """The last one that had not read further. Sources that it does not know do not matter."""
    moment = Moment(read_through={"a/source": asked, "an/other": 7})
    recorded.check(tmp_path / "state", moment, min(asked // 100, len(recorded.commits)))


@pytest.mark.parametrize(("asked", "number"), [(0, 9), (99, 9), (100, 10), (450, 13), (5000, 14)])
def test_offsets_are_those_of_a_source_that_was_created_again(
    tmp_path: Path, asked: int, number: int
) -> None:
    """The state had read nothing of it while it read the former journal of that name."""
    recorded = Recorded(JSONKind(), tmp_path, MemoryLog())
    recorded.new_life = 10
    recorded.owner(14)
    recorded.check(tmp_path / "state", Moment(read_through={"a/source": asked}), number)


def test_hints_that_are_too_new_are_passed_over(recorded: Recorded, tmp_path: Path) -> None:
    """Each set leads to what came after it; where none does, the error says from where on."""
    newest, middle, first = recorded.hints
    end = recorded.commits[20][0]
    recorded.check(tmp_path / "a", Moment(offset=end), 21, [newest, middle, first])
    recorded.check(tmp_path / "b", Moment(offset=end), 21, [newest, middle])
    begin = min(node.segments[0].first_offset for node in newest.live_nodes)
    source = MemoryLogs(recorded.log, begin=begin)
    directory = tmp_path / "c"
    with raises(NotFound, "earliest_offset", "earliest_time", log="recovery/test") as caught:
        open_at(source, [newest], directory, Moment(offset=end))
    assert caught.value.facts["earliest_offset"] > end
    assert not directory.exists()


def test_a_log_without_times(tmp_path: Path) -> None:
    """As the original writes them: offsets and checkpoints work, and times are an error that says why."""
    log = MemoryLog()
    directory = tmp_path / "owner"
    directory.mkdir()
    recorder = Recorder(RecoveryFSM(FSMHints(log=LOG)), 1234, directory, log, LOG, 0)
    store = JSONFileStore(recorder, dict[str, int], dict)
    ends = []
    for number in range(1, 6):
        store.state["n"] = number
        checkpoint = Checkpoint({"a/source": SourceCheckpoint(number)})
        ends.append(store.start_commit(SHARD, checkpoint, ()).result().commit.end)
    hints, source = [FSMHints(log=LOG)], MemoryLogs(log)
    with raises(Invalid):
        open_at(source, hints, tmp_path / "time", Moment(time=datetime.now(UTC)))
    for number, end in enumerate(ends, 1):
        for moment in (Moment(offset=end), Moment(read_through={"a/source": number})):
            directory = tmp_path / f"{number}-{moment.offset}"
            with open_at(source, hints, directory, moment) as state:
                # Single operations were appended: the last one before the commit's rename counts.
                found = state.document()["n"] if state.kind is StateKind.JSON else 0
                assert found in (number, number - 1)


def test_fragments_that_nothing_explains_are_no_part_of_a_log(tmp_path: Path) -> None:
    """They are an error, until their template is given, or the journal that they belong to."""
    (tmp_path / "fragments").mkdir()
    url = "file:///fragments/"
    store = FileStore(tmp_path, FragmentStoreUrl.parse(url))
    write_fragment(tmp_path, url, LOG, 0, b"one", path_postfix="2025/06")
    write_fragment(tmp_path, url, LOG, 3, b"two")
    with StoredLogs([store]) as logs, raises(Invalid, "begin", log=LOG):
        logs.bounds(LOG)
    template = '{{ .Spool.FirstAppendTime.Format "2006/01" }}'
    with StoredLogs([store], path_postfix_template=template) as logs:
        assert logs.bounds(LOG) == (0, 6)
        assert b"".join(content for _, content in logs.read(LOG, 0, 6)) == b"onetwo"
    with StoredLogs([store], nested=[f"{LOG}/2025/06"]) as logs:
        assert logs.bounds(LOG) == (3, 6)


def test_from_a_fragment_store_alone(tmp_path: Path) -> None:
    """No broker is asked. What was pruned is an error; overlapping fragments are read once."""
    (tmp_path / "fragments").mkdir()
    store = FileStore(tmp_path, FragmentStoreUrl.parse("file:///fragments/"))
    log = FragmentLog(store, fragment_bytes=500)
    recorded = Recorded(SQLiteKind(), tmp_path, log)
    for count in (40, 40):
        recorded.owner(count)
    log.flush()
    assert len(log.fragments) > 10
    with StoredLogs([store, store]) as logs:
        assert logs.bounds(LOG) == (0, log.end)
        for number in (1, 33, 80):
            moment = Moment(offset=recorded.commits[number - 1][0])
            with open_at(logs, recorded.hints, tmp_path / f"s{number}", moment) as state:
                assert dict(state.query("SELECT w, n FROM word")) == recorded.commits[number - 1][2]
        pieces = logs.read(LOG, 0, log.end)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        with raises(NotFound, log="another/log"):
            logs.bounds("another/log")
        # A store lags behind its log, and then has less than the newest hints name.
        beyond = replace(recorded.hints[0].live_nodes[-1].segments[-1], last_offset=log.end + 1)
        lagging = FSMHints(LOG, (FnodeSegments(beyond.first_seq_no, (beyond,)),))
        with open_at(logs, [lagging, *recorded.hints], tmp_path / "lagging") as state:
            assert state.offset == log.end
        with raises(BeyondTheEnd, "segment", "write_head"):
            open_at(MemoryLogs(log), [lagging, *recorded.hints], tmp_path / "lost")
        store.remove(log.fragments[2].content_path())
        with pytest.raises(NotFound):  # It is gone between listing and reading.
            open_at(logs, [FSMHints(log=LOG)], tmp_path / "gone", Moment())
        logs.refresh()
        with pytest.raises(PrunedLog):
            open_at(logs, [FSMHints(log=LOG)], tmp_path / "pruned", Moment())
        damaged = tmp_path / "fragments" / log.fragments[5].content_path()
        damaged.write_bytes(b"x" * log.fragments[5].length)
        logs.refresh()
        with pytest.raises(Corrupt, match="SHA-1"):
            list(logs.read(LOG, 0, log.end))


def test_a_log_is_fetched_once(tmp_path: Path) -> None:
    """Whatever is asked of a copy, its source is asked for each byte at most once."""
    log = MemoryLog(random.Random(1).randbytes(50_000))
    asked: list[tuple[int, int]] = []

    class Counted(MemoryLogs):
        def read(self, name: str, begin: int, end: int) -> Any:
            for at, data in super().read(name, begin, end):
                asked.append((at, at + len(data)))
                yield at, data

    copied = CopiedLogs(Counted(log, piece_bytes=777), tmp_path)
    rng = random.Random(2)
    for _ in range(30):
        begin = rng.randrange(50_000)
        end = rng.randrange(begin, 50_001)
        found = b""
        for at, data in copied.read(LOG, begin, end):
            assert at == begin + len(found)
            found += data
            if rng.random() < 0.02:
                break
        else:
            assert found == log[begin:end]
    copied.close()
    asked.sort()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(asked))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("123", Moment(offset=123)),
        ("a/b=5", Moment(read_through={"a/b": 5})),
        ("a/b;x=y=5,c=6", Moment(read_through={"a/b;x=y": 5, "c": 6})),
        ("2026-01-31T12:00:00Z", Moment(time=datetime(2026, 1, 31, 12, tzinfo=UTC))),
    ],
)
def test_moments_as_text(text: str, moment: Moment) -> None:
    assert Moment.parse(text) == moment
    assert str(moment)


@pytest.mark.parametrize(
    "text", ["", "yesterday", "a=b", "=5", "2026-01-31T12:00:00", "-4", "a=1,"]
)
def test_texts_that_are_no_moments(text: str) -> None:
    with pytest.raises(Invalid):
        Moment.parse(text)


def no_moment(build: Callable[[], Moment]) -> None:
    with pytest.raises(Invalid):
        build()


def test_moments_that_are_none() -> None:
    no_moment(lambda: Moment(offset=1, time=datetime.now(UTC)))
    no_moment(lambda: Moment(offset=-1))
    no_moment(lambda: Moment(read_through={}))


def test_a_directory_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with raises(Invalid, says=str(tmp_path)):
        open_at(MemoryLogs(MemoryLog()), [FSMHints(log=LOG)], tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_state_says_what_it_is(recorded: Recorded, tmp_path: Path) -> None:
    """What belongs to another kind is refused, and nothing can be changed."""
    with open_at(MemoryLogs(recorded.log), recorded.hints, tmp_path / "state") as state:
        for kind, use in (
            (StateKind.SQLITE, lambda: state.query("SELECT 1")),
            (StateKind.ROCKSDB, lambda: state.get(b"x")),
            (StateKind.JSON, state.document),
        ):
            if state.kind is not kind:
                with pytest.raises(Invalid, match=f"kind {state.kind.value!r}"):
                    use()
        if state.kind is StateKind.SQLITE:
            with pytest.raises(Exception, match="readonly"):
                state.query("DELETE FROM word")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_timers_are_those_of_the_moment(kind: Any, tmp_path: Path) -> None:
    """Check that a state of the past has the timers of that commit, for the next owner of a copy."""
    log, rng = MemoryLog(), random.Random(7)
    recorder = take_over(log, tmp_path / "owner", rng)
    store = kind.open(recorder)
    shard: Any = Named()
    table = store.timer_table(shard)
    ends = []
    for number in range(6):
        table.put(TimeDomain.EVENT, TimerRow(number, f"timer {number}", b"payload"))
        if number % 2:
            table.take(TimeDomain.EVENT, BEFORE_ALL, number, 1)
        checkpoint = Checkpoint({"a/source": SourceCheckpoint(number)})
        ends.append(store.start_commit(shard, checkpoint, ()).result().commit.end)
    hints = recorder.build_hints()
    store.destroy()
    for number, end in enumerate(ends):
        directory = tmp_path / f"at-{number}"
        with open_at(MemoryLogs(log), [hints], directory, Moment(offset=end)) as state:
            assert state.checkpoint.sources["a/source"].read_through == number
        cut = MemoryLog(bytes(log.data[:end]))
        again = kind.open(take_over(cut, tmp_path / f"again-{number}", rng))
        taken = again.timer_table(shard).take(TimeDomain.EVENT, BEFORE_ALL, 99, 99)
        kept = range((number + 1) // 2, number + 1)
        assert [row.key for row in taken] == [f"timer {one}" for one in kept]
        again.destroy()
