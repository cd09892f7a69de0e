"""Decoding a log: pieces of any size, junk, gaps, and what must not be dropped in silence."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gazette.errors import Corrupt
from gazette.protocol.hints import FnodeSegments, FSMHints, Segment
from gazette.recoverylog.log.ops import (
    Action,
    Create,
    Link,
    RecordedOp,
    SetProperty,
    Unlink,
    Write,
    encode_op,
    next_checksum,
)
from gazette.recoverylog.playback.playback import (
    JUNK_MAX,
    DropNode,
    OpenNode,
    Playback,
    PrunedLog,
    WriteNode,
    local_path,
)
from tests.facts import raises

LOG = "a/log"


class Writer:
    """Writes frames as a recorder does; ``at`` are the offsets at which operations begin."""

    def __init__(self, author: int = 7) -> None:
        self.author = author
        self.data = bytearray()
        self.seq_no, self.checksum = 1, 0
        self.at: list[int] = []

    def op(self, action: Action, raw: bytes = b"", **fields: Any) -> bytes:
        op = RecordedOp(
            fields.get("seq_no", self.seq_no),
            fields.get("checksum", self.checksum),
            fields.get("author", self.author),
            action,
        )
        frame, payload = encode_op(op)
        self.at.append(len(self.data))
        self.data += frame + raw
        if not fields:
            self.seq_no += 1
            self.checksum = next_checksum(self.checksum, payload)
        return frame

    def write(self, fnode: int, offset: int, raw: bytes) -> None:
        self.op(Write(fnode, offset, len(raw)), raw)


def played(playback: Playback, data: bytes, rng: random.Random | None = None) -> list[Any]:
    """Return the actions, with neighbouring pieces of one write put together."""
    actions: list[Any] = []
    at = 0
    while at < len(data):
        size = len(data) if rng is None else rng.choice((1, 2, 7, 8, 30, 500))
        for action in playback.feed(data[at : at + size]):
            if (
                isinstance(action, WriteNode)
                and actions
                and isinstance(last := actions[-1], WriteNode)
                and (last.fnode, last.offset + len(last.data)) == (action.fnode, action.offset)
            ):
                actions[-1] = WriteNode(
                    last.fnode, last.offset, bytes(last.data) + bytes(action.data)
                )
            else:
                actions.append(action)
        at += size
        assert playback.read_offset == min(at, len(data))
    return actions


def test_pieces_of_any_size_say_the_same() -> None:
    """Among junk, with operations of strangers, repetitions, and writes to files that are gone."""
    writer = Writer()
    rng = random.Random(9)
    writer.op(Create("/a"))
    for number in range(40):
        writer.write(1, number * 10, rng.randbytes(rng.choice((1, 90, 3000))))
        match number % 6:
            case 0:
                writer.data += rng.randbytes(rng.randrange(1, 30))
            case 1:
                writer.op(Write(1, 0, 50), bytes(50), author=8, seq_no=3)
            case 2:
                writer.op(Write(1, 0, 50), bytes(50), seq_no=2)
            case 3:
                writer.data += b"\x66\x33\x93\x36\xff\xff\xff\xff"
            case 4:
                writer.op(Create(f"/{number}"))
                writer.op(Unlink(writer.seq_no - 1, f"/{number}"))
                writer.write(1, 0, b"x")
            case _:
                writer.op(Write(99, 0, 10), b"not ours..")
    whole = Playback(FSMHints(LOG))
    expected = played(whole, bytes(writer.data))
    assert whole.op_count == len(writer.at)
    assert sum(isinstance(action, DropNode) for action in expected) == 6
    assert whole.fsm.next_seq_no == writer.seq_no
    assert whole.junk_bytes
    for seed in range(5):
        playback = Playback(FSMHints(LOG))
        assert played(playback, bytes(writer.data), random.Random(seed)) == expected
        assert playback.fsm.build_hints(LOG) == whole.fsm.build_hints(LOG)
        assert playback.junk_bytes == whole.junk_bytes
        assert not playback.incomplete


def test_the_last_write_of_a_segment_is_read_to_its_end() -> None:
    """Although the next segment is further on, and the operation itself has been read already."""
    writer = Writer()
    writer.op(Create("/a"))
    writer.write(1, 0, b"0123456789")
    first_end = len(writer.data)
    for _ in range(3):
        writer.op(None)
    gap = (writer.seq_no, writer.checksum, len(writer.data))
    writer.author = 8
    writer.write(1, 10, b"abc")
    hints = FSMHints(
        LOG,
        (
            FnodeSegments(
                1,
                (
                    Segment(7, 1, 0, 0, 2, first_end),
                    Segment(8, gap[0], gap[2], gap[1], gap[0], len(writer.data)),
                ),
            ),
        ),
    )
    playback = Playback(hints)
    contents = bytearray(13)
    while playback.read_offset < len(writer.data):
        if (wanted := playback.wanted()) is not None:
            playback.seek(*wanted)
        piece = bytes(writer.data[playback.read_offset :][:3])
        for action in playback.feed(piece):
            if isinstance(action, WriteNode):
                contents[action.offset : action.offset + len(action.data)] = action.data
    assert contents == b"0123456789abc"


def test_many_small_writes_are_decoded_in_linear_time() -> None:
    """A piece of a megabyte holds thousands of them: what is behind each is not copied each time."""
    writer = Writer()
    writer.op(Create("/a"))
    for number in range(6_000):
        writer.write(1, number, b"0123456789")
    copied = 0

    class Counting(bytes):
        def __getitem__(self, key: Any) -> Any:
            nonlocal copied
            value = super().__getitem__(key)
            copied += len(value) if isinstance(value, bytes) else 0
            return value

    playback = Playback(FSMHints(LOG))
    assert len(playback.feed(Counting(bytes(writer.data)))) == 6_001
    assert copied <= len(writer.data)


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (Create("/a"), "LINK_EXISTS"),
        (Link(1, "/a"), "LINK_EXISTS"),
        (Unlink(1, "/b"), "NO_SUCH_LINK"),
        (Create("/IDENTITY"), "PROPERTY_EXISTS"),
        (SetProperty("/a", "x"), "LINK_EXISTS"),
    ],
)
@pytest.mark.parametrize("author", [7, 8])
def test_the_next_operation_must_apply(action: Action, outcome: str, author: int) -> None:
    """Number and checksum say that it belongs to this history, whichever owner wrote it."""
    writer = Writer()
    writer.op(Create("/a"))
    writer.op(SetProperty("/IDENTITY", "x"))
    writer.author = author
    writer.op(action)
    with raises(Corrupt, log=LOG, outcome=outcome):
        Playback(FSMHints(LOG)).feed(bytes(writer.data))


def test_strangers_and_repetitions_are_ignored() -> None:
    """Fenced owners go on writing, with any number; appends may come twice."""
    writer = Writer()
    repeated = writer.op(Create("/a"))
    writer.op(None)
    for seq_no in (1, 2, 3, 4, 50):
        writer.op(Create("/z"), author=9, seq_no=seq_no, checksum=5)
    writer.data += repeated
    writer.op(Create("/b"))
    playback = Playback(FSMHints(LOG))
    assert playback.feed(bytes(writer.data)) == [OpenNode(1), OpenNode(3)]


def test_a_gap_of_the_owner_is_an_error() -> None:
    """He wrote operations that are not here."""
    for fields in ({"seq_no": 4}, {"seq_no": 3, "checksum": 1}):
        writer = Writer()
        writer.op(Create("/a"))
        writer.op(None)
        chosen: dict[str, Any] = {"checksum": writer.checksum} | fields
        writer.op(None, **chosen)
        with raises(Corrupt, "seq_no", "expected_seq_no", log="a/log", offset=41):
            Playback(FSMHints(LOG)).feed(bytes(writer.data))


def test_a_log_without_its_beginning_needs_hints() -> None:
    """Else it would look like an empty one, and be taken over as that."""
    writer = Writer()
    writer.op(Create("/a"))
    writer.op(None)
    rest = bytes(writer.data[writer.at[1] :])
    with raises(PrunedLog, log="a/log", offset=0, jumped_to=21):
        Playback(FSMHints(LOG)).jump(writer.at[1])
    with raises(Corrupt, log="a/log", offset=0, seq_no=2, expected_seq_no=1):
        Playback(FSMHints(LOG)).feed(rest)


def test_a_jump_must_lose_nothing() -> None:
    """Bytes that were never written may be missing; operations may not, of whatever owner."""
    writer = Writer()
    writer.op(Create("/a"))
    end = len(writer.data)
    writer.op(Create("/b"))
    after = bytes(writer.data[end:])
    playback = Playback(FSMHints(LOG))
    playback.feed(bytes(writer.data[:end]))
    playback.jump(end + 1000)
    assert playback.feed(after) == [OpenNode(2)]

    writer.author = 8
    writer.op(None)
    playback = Playback(FSMHints(LOG))
    playback.feed(bytes(writer.data[:end]))
    playback.jump(writer.at[2])
    with raises(PrunedLog, log="a/log", offset=47, seq_no=3, expected_seq_no=2):
        playback.feed(bytes(writer.data[writer.at[2] :]))

    writer.write(1, 0, b"0123456789")
    playback = Playback(FSMHints(LOG))
    playback.feed(bytes(writer.data[:-5]))
    assert playback.incomplete
    with raises(PrunedLog, log="a/log", offset=98, jumped_to=103):
        playback.jump(len(writer.data))


def test_a_journal_of_something_else() -> None:
    """Is not searched to its end for a frame."""
    Playback(FSMHints(LOG)).feed(bytes(JUNK_MAX // 2))
    playback = Playback(FSMHints(LOG))
    with raises(Corrupt, log="a/log", offset=0):
        playback.feed(bytes(JUNK_MAX + 1000))


@pytest.mark.parametrize(
    "path",
    ["", "/", "/..", "/../x", "/a/../../x", "/a/..", "/./a", "/a//b", "/a/", "/.fnodes/1", "/a\0b"],
)
def test_paths_that_leave_the_directory(path: str) -> None:
    with pytest.raises(Corrupt, match="outside"):
        local_path(path)


@pytest.mark.parametrize("path", ["/a", "//a", "/a/b.c", "/..a", "/a/..b"])
def test_paths_within_the_directory(path: str) -> None:
    assert local_path(path) == path.lstrip("/")
