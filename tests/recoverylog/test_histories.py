"""Histories of a log: whatever its owners did, every play-back of it gives the same files.

The oracle is a model of a directory. Owners follow each other, older ones go on writing as if nothing
had happened, appends arrive twice, hints are taken at any moment and used at any later one.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.recorder import Group, Recorder
from gazette.recoverylog.log.segment import fold_hinted_segments
from gazette.recoverylog.playback.playback import Playback
from gazette.recoverylog.playback.staged_files import StagedFiles
from gazette.testing.recovery import LOG, MemoryLog, Replayer, replay, take_over

PATHS = ("/main.db", "/journal", "/dir/next")
PROPERTIES = ("/IDENTITY", "/dir/next")


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="gazette-test-", dir=memory if memory.is_dir() else None
    ) as directory:
        yield Path(directory)


class RepeatingLog(MemoryLog):
    """A log whose appends may arrive twice, as those do whose answer was lost."""

    repeat_next = False

    def _commit(self, content: bytes, future: Any) -> None:
        if self.repeat_next and content:
            self.repeat_next = False
            self.data += content
            self.ends.append(len(self.data))
        super()._commit(content, future)


@dataclass
class Model:
    """What the files of a directory are."""

    links: dict[str, int] = field(default_factory=dict)
    contents: dict[int, bytearray] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def tree(self) -> dict[str, bytes]:
        files = {path: bytes(self.contents[node]) for path, node in self.links.items()}
        return files | {path: text.encode() for path, text in self.properties.items()}

    def create(self, path: str) -> int:
        self.count += 1
        self.links[path] = self.count
        self.contents[self.count] = bytearray()
        return self.count

    def write(self, node: int, offset: int, data: bytes) -> None:
        content = self.contents[node]
        if data:
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data


def tree(directory: Path) -> dict[str, bytes]:
    return {
        "/" + str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def act(model: Model, group: Group, kind: str, path: str, other: str, number: int) -> None:
    """Perform one file operation, if it is possible, in the model and in the log."""
    free = path not in model.properties
    exists = path in model.links
    if kind == "create" and free:
        group.create(path)
        model.create(path)
    elif kind == "write" and exists:
        data = bytes([number % 256]) * (number % 97)
        fnode = group.fnode_of(path)
        assert fnode is not None
        group.write(fnode, number % 50, data)
        model.write(model.links[path], number % 50, data)
    elif kind == "unlink" and exists:
        group.unlink(path)
        del model.links[path]
    elif kind == "link" and exists and other not in (model.links | model.properties):
        group.link(path, other)
        model.links[other] = model.links[path]
    elif (
        kind == "rename"
        and exists
        and other not in (model.properties | {path: ""})
        and other != "/IDENTITY"
    ):
        group.rename(path, other)
        model.links[other] = model.links.pop(path)
    elif kind == "property" and other in PROPERTIES and other not in model.links:
        group.property(other, f"property {number}")
        model.properties[other] = f"property {number}"


KINDS = ("create", "write", "unlink", "link", "rename", "property")
WEIGHTED = (
    *KINDS,
    "create",
    "write",
    "write",
    "hints",
    "take over",
    "take over",
    "zombie",
    "twice",
)
operation = st.tuples(
    st.sampled_from(WEIGHTED),
    st.sampled_from(PATHS),
    st.sampled_from((*PATHS, *PROPERTIES)),
    st.integers(0, 1000),
)


class History:
    """Owners at work on one log."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.log = RepeatingLog()
        self.model = Model()
        self.hints: list[FSMHints] = [FSMHints(log=LOG)]
        self.owner = take_over(self.log, directory, self.rng)
        self.zombies: list[Recorder] = []

    def step(self, kind: str, path: str, other: str, number: int) -> None:
        match kind:
            case "hints":
                self.hints.append(self.owner.build_hints())
            case "take over":
                self.zombies.append(self.owner)
                # What no member would do: an owner whose hints are as old as they may be.
                hints = self.hints[number % len(self.hints)]
                self.owner = take_over(self.log, self.directory, self.rng, hints=hints)
                assert tree(self.directory) == self.model.tree()
                # A player knows offsets exactly, and stores hints as well.
                self.hints.append(self.owner.fsm.build_hints(LOG))
            case "zombie" if self.zombies:
                # Its registers are gone, so the log takes what it sends. No player reads it.
                zombie = self.zombies[number % len(self.zombies)]
                with zombie.group() as group:
                    group.write(group.create("/zombie"), 0, b"of the past")
            case "twice":
                self.log.repeat_next = True
            case _:
                with self.owner.group() as group:
                    act(self.model, group, kind, path, other, number)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(operation, min_size=10, max_size=60), seed=st.integers(0, 1 << 32))
def test_every_hint_gives_the_same_files(
    scratch: Path, steps: list[tuple[str, str, str, int]], seed: int
) -> None:
    """From any hints that were ever taken, however the log's bytes arrive, and without the bytes
    that those hints do not need."""
    history = History(scratch / "owner", seed)
    for step in steps:
        history.step(*step)
    history.hints.append(history.owner.build_hints())
    data = bytes(history.log.data)
    expected = history.model.tree()
    rng = random.Random(seed)
    for hints in history.hints:
        replayer = Replayer(scratch / "replayed", hints=hints)
        replayer.advance(data, len(data), chunk_bytes=lambda: rng.randint(1, 100))
        fsm = replayer.finish()
        assert tree(scratch / "replayed") == expected
        assert fsm.next_seq_no == history.owner.fsm.next_seq_no
        assert fsm.next_checksum == history.owner.fsm.next_checksum
        assert fsm.links == history.owner.fsm.links

        pruned = without_what_is_not_needed(data, hints)
        replay(pruned, scratch / "replayed", hints=hints)
        assert tree(scratch / "replayed") == expected


def without_what_is_not_needed(data: bytes, hints: FSMHints) -> bytes:
    """Return the log with zeros in place of all bytes before and between the hinted segments."""
    segments = fold_hinted_segments((node.segments for node in hints.live_nodes), LOG)
    pruned = bytearray(data)
    end = 0
    for segment in segments:
        pruned[end : segment.first_offset] = bytes(segment.first_offset - end)
        end = segment.last_offset or len(data)
        if not segment.last_offset:
            break
    return bytes(pruned)


def test_a_deleted_file_is_not_brought_back(scratch: Path) -> None:
    """A journal that was created within a hinted segment, and unlinked behind it.

    The last hinted file has been created by then, so a player that asks for hinted *files* only would
    track the journal, jump over its unlink, and refuse all that the next journal's owner wrote.
    """
    log = MemoryLog()
    rng = random.Random(46)

    def cycle(owner: Recorder, text: bytes) -> None:
        with owner.group() as group:
            journal = group.create("/main.db-journal")
            group.write(journal, 0, b"journal")
        with owner.group() as group:
            fnode = group.fnode_of("/main.db")
            assert fnode is not None
            group.write(fnode, 0, text)
        with owner.group() as group:
            group.unlink("/main.db-journal")

    first = take_over(log, scratch / "a", rng)
    with first.group() as group:
        group.create("/main.db")
    cycle(first, b"one")
    second = take_over(log, scratch / "b", rng)
    cycle(second, b"two")
    hints = second.build_hints()
    cycle(second, b"six")

    (node,) = hints.live_nodes
    assert [segment.author for segment in node.segments] == [first.author, second.author]
    fsm = replay(bytes(log.data), scratch / "c", hints=hints)
    assert tree(scratch / "c") == {"/main.db": b"six"}
    assert fsm.next_seq_no == second.fsm.next_seq_no


def test_properties_of_hints_are_the_last_ones(scratch: Path) -> None:
    """Set within a hinted segment and again in a gap behind it: the gap counts."""
    log = MemoryLog()
    rng = random.Random(1)
    first = take_over(log, scratch / "a", rng)
    with first.group() as group:
        kept = group.create("/IDENTITY")  # A file at first, which moves away.
        group.link("/IDENTITY", "/kept")
        group.unlink("/IDENTITY")
        group.property("/IDENTITY", "older")
        group.write(kept, 0, b"x")
        group.property("/IDENTITY", "newer")
    second = take_over(log, scratch / "b", rng)
    with second.group() as group:
        group.create("/other")
    hints = second.build_hints()
    replay(bytes(log.data), scratch / "c", hints=hints)
    assert tree(scratch / "c") == {"/IDENTITY": b"newer", "/kept": b"x", "/other": b""}
    shutil.rmtree(scratch / "c")


def test_a_log_forks(scratch: Path) -> None:
    """A new log goes on where the old one was left, which is not changed; hints name both."""
    old = MemoryLog()
    rng = random.Random(3)
    first = take_over(old, scratch / "a", rng)
    with first.group() as group:
        group.write(group.create("/file"), 0, b"old")
    before = bytes(old.data)

    fsm = replay(before, scratch / "b")
    new = MemoryLog()
    fork = Recorder.open("recovery/fork", fsm, 77, scratch / "b", new)
    with fork.group() as group:
        fnode = group.fnode_of("/file")
        assert fnode is not None
        group.write(fnode, 0, b"n")
    hints = fork.build_hints()
    assert hints.log == "recovery/fork"
    assert [segment.log for segment in hints.live_nodes[0].segments] == [LOG, ""]
    assert bytes(old.data) == before

    logs = {LOG: before, "recovery/fork": bytes(new.data)}
    playback, files = Playback(hints), StagedFiles(scratch / "c")
    files.prepare()
    while True:
        if (wanted := playback.wanted()) is not None:
            playback.seek(*wanted)
        piece = logs[playback.log][playback.read_offset :][:7]
        if not piece:
            break
        files.perform(playback.feed(piece))
    assert not playback.fsm.has_hints
    files.make_live(playback.fsm)
    assert tree(scratch / "c") == {"/file": b"nld"}
