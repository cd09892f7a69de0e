"""Recorders: one append per group, write heads of shared appends, and failures that are for good."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams, AppendResult
from gazette.errors import Broken, Bug, Corrupt, Fenced, Invalid, Unavailable
from gazette.protocol.fragment import Fragment
from gazette.protocol.hints import FSMHints
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.recorder import Recorder, clean_path, fence_check
from gazette.runtime.tasks import OpFuture
from gazette.testing.recovery import LOG, MemoryLog, replay
from tests.facts import raises


class BatchingLog:
    """Appends share one RPC until it is sent, and its result; any may fail."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.batch = bytearray()
        self.future: OpFuture[Any] = OpFuture()
        self.params: list[AppendParams] = []
        self.refuse: Exception | None = None
        self._header = MemoryLog().enqueue(b"").result().header

    def start_append(self, params: AppendParams, dependencies: Any = ()) -> BatchingLog:
        if self.refuse is not None:
            raise self.refuse
        self.params.append(params)
        return self

    def write(self, content: bytes) -> None:
        self.batch += content

    def release(self) -> OpFuture[Any]:
        return self.future

    def roll_back(self) -> None:
        self.batch.clear()

    def send(self, *, begin: int | None = None) -> None:
        begin = len(self.data) if begin is None else begin
        self.data += self.batch
        fragment = Fragment(LOG, begin, begin + len(self.batch))
        self.batch.clear()
        future, self.future = self.future, OpFuture()
        future.set_result(AppendResult(fragment, EMPTY_LABELS, self._header))

    def fail(self, error: Exception) -> None:
        future, self.future = self.future, OpFuture()
        future.set_exception(error)


def recorder_of(log: Any, directory: Path) -> Recorder:
    return Recorder(RecoveryFSM(FSMHints(log=LOG)), 1234, directory, log, LOG, 0)


def test_a_group_is_one_append(tmp_path: Path) -> None:
    """Fenced by the author's register; what it replaces is unlinked in the same append."""
    log = MemoryLog()
    recorder = recorder_of(log, tmp_path)
    with recorder.group() as group:
        group.write(group.create("/a"), 0, b"one")
        with raises(Bug):
            _ = group.future
    with recorder.group() as group:
        group.write(group.create("/b"), 0, b"two")
        group.rename("/b", "/a")
    assert len(log.ends) == 3
    replay(bytes(log.data), tmp_path / "played")
    assert (tmp_path / "played" / "a").read_bytes() == b"two"
    assert recorder.live_paths() == ["/a"]

    batching = BatchingLog()
    fenced = recorder_of(batching, tmp_path)
    fenced.barrier()
    assert batching.params[0].check_registers == fence_check(1234)


def test_a_body_that_fails_appends_nothing(tmp_path: Path) -> None:
    """The files differ from the log by then, so the recorder is of no use any more."""
    log = MemoryLog()
    recorder = recorder_of(log, tmp_path)
    with pytest.raises(ZeroDivisionError), recorder.group() as group:
        group.create("/a")
        raise ZeroDivisionError
    assert not log.data
    for call in (recorder.barrier, recorder.flush, recorder.build_hints):
        with pytest.raises(ZeroDivisionError):
            call()
    with pytest.raises(ZeroDivisionError), recorder.group():
        pass


def test_offsets_of_hints_are_lower_bounds(tmp_path: Path) -> None:
    """Appends that share an RPC have one result: nothing stands before it, wherever in it it is."""
    log = BatchingLog()
    recorder = recorder_of(log, tmp_path)
    rng = random.Random(2)
    at: dict[int, int] = {}
    for number in range(200):
        with recorder.group() as group:
            begin = len(log.data) + len(log.batch)
            fnode = group.create(f"/{number % 9}")
            group.write(fnode, 0, rng.randbytes(rng.randrange(100)))
        # An unlink of the former file may stand before the create.
        at[fnode] = begin
        if rng.random() < 0.2:
            log.send()
        for node, state in recorder.fsm.nodes.items():
            (segment,) = state.segments
            assert segment.first_offset <= at[node] + 64
            assert segment.last_offset == 0
    log.send()
    hints, future = recorder.snapshot_hints()
    assert not future.done()
    assert recorder.write_head == len(log.data)
    assert min(node.segments[0].first_offset for node in hints.live_nodes) > 0
    replay(bytes(log.data), tmp_path / "played", hints=hints)
    assert len(list((tmp_path / "played").iterdir())) == 9
    assert 0 < recorder.horizon_bytes < len(log.data)


def test_a_failed_append_is_for_good(tmp_path: Path) -> None:
    """A fenced recorder records nothing more, and says why each time."""
    log = BatchingLog()
    recorder = recorder_of(log, tmp_path)
    with recorder.group() as group:
        group.create("/a")
    log.fail(Fenced("the registers are another owner's"))
    for _ in range(2):
        with pytest.raises(Fenced), recorder.group():
            pass

    log.refuse = Fenced("no")
    recorder = recorder_of(log, tmp_path)
    with pytest.raises(Fenced), recorder.group() as group:
        group.create("/a")
    log.refuse = None
    with pytest.raises(Fenced):
        recorder.barrier()


def test_a_cancelled_append_is_a_failed_one(tmp_path: Path) -> None:
    """Metrics go on to show the horizon, and the recorder is broken: what is in the log is unknown."""
    log = BatchingLog()
    recorder = recorder_of(log, tmp_path)
    with recorder.group() as group:
        group.write(group.create("/a"), 0, b"data")
    log.send()
    with recorder.group() as group:
        group.write(group.create("/b"), 0, b"data")
    known = recorder.known_horizon_bytes
    assert known > 0
    assert log.future.cancel()
    assert recorder.known_horizon_bytes == known
    with pytest.raises(Broken, match="cancelled"):
        recorder.barrier()


def test_a_log_that_goes_back_is_refused(tmp_path: Path) -> None:
    """It was reset: what was recorded before may be gone."""
    log = BatchingLog()
    recorder = recorder_of(log, tmp_path)
    for path in ("/a", "/b"):
        with recorder.group() as group:
            group.create(path)
        log.send()
    with recorder.group() as group:
        group.create("/c")
    log.send(begin=5)
    with raises(Corrupt, log="recovery/test", begin=5, write_head=47):
        recorder.barrier()


def test_waits_have_deadlines(tmp_path: Path) -> None:
    log = BatchingLog()
    recorder = recorder_of(log, tmp_path)
    for call in (recorder.flush, recorder.build_hints):
        with raises(Unavailable, "log", deadline_s=0.01):
            call(deadline_s=0.01)


def test_operations_that_cannot_be(tmp_path: Path) -> None:
    """Are errors before anything is appended."""
    log = MemoryLog()

    def attempt(call: Any, error: type[Exception]) -> None:
        recorder = recorder_of(log, tmp_path)
        before = len(log.data)
        with pytest.raises(error), recorder.group() as group:
            call(group)
        assert len(log.data) == before

    attempt(lambda group: group.unlink("/missing"), Bug)
    attempt(lambda group: group.write(5, 0, b"x"), Bug)
    attempt(lambda group: group.write(group.create("/a"), -1, b"x"), Invalid)
    attempt(lambda group: group.link("/missing", "/b"), Bug)
    attempt(lambda group: group.rename("/missing", "/b"), Bug)
    attempt(lambda group: (group.create("/a"), group.link("/a", "/a")), Bug)
    attempt(lambda group: (group.property("/p", "x"), group.create("/p")), Bug)
    attempt(lambda group: group._recorder.barrier(), Bug)
    with pytest.raises(Invalid):
        Recorder(RecoveryFSM(FSMHints(log=LOG)), 1, Path("relative"), log, LOG, 0)


def test_a_file_that_is_moved_to_an_identity_becomes_a_property(tmp_path: Path) -> None:
    """As RocksDB makes its own."""
    log = MemoryLog()
    recorder = recorder_of(log, tmp_path)
    (tmp_path / "IDENTITY").write_text("a-b-c")
    with recorder.group() as group:
        group.write(group.create("/1.dbtmp"), 0, b"a-b-c")
        group.rename("/1.dbtmp", "/IDENTITY")
    assert recorder.fsm.properties == {"/IDENTITY": "a-b-c"}
    assert recorder.live_paths() == []


@pytest.mark.parametrize("path", ["", "/", "..", "/../a", "a/../.."])
def test_paths_outside_are_refused(path: str) -> None:
    with pytest.raises(Invalid):
        clean_path(path)


def test_paths_are_spelt_in_one_way() -> None:
    assert {clean_path(path) for path in ("a/b", "/a/b", "//a//b", "/a/./b", "/x/../a/b")} == {
        "/a/b"
    }
