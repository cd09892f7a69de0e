"""The recovery FSM, operation by operation: what applies, what advances, what hints decide."""

from __future__ import annotations

import pytest

from gazette.errors import Invalid
from gazette.protocol.hints import FnodeSegments, FSMHints, Property, Segment
from gazette.recoverylog.log.fsm import Outcome, RecoveryFSM
from gazette.recoverylog.log.ops import (
    Action,
    Create,
    Link,
    RecordedOp,
    SetProperty,
    Unlink,
    Write,
    encode_op,
)

LOG = "a/log"


def apply(
    fsm: RecoveryFSM, action: Action, author: int = 7, log: str = LOG, **fields: int
) -> Outcome:
    """Sequence an operation as the log's owner would, or with other ``fields``."""
    op = RecordedOp(
        fields.get("seq_no", fsm.next_seq_no),
        fields.get("checksum", fsm.next_checksum),
        author,
        action,
        first_offset=fsm.next_seq_no * 10,
        last_offset=fsm.next_seq_no * 10 + 10,
        log=log,
    )
    return fsm.apply(op, encode_op(op)[1])


def test_outcomes() -> None:
    """Two advance; the others leave everything as it was."""
    fsm = RecoveryFSM(FSMHints(LOG))
    assert apply(fsm, Create("/a")) is Outcome.APPLIED
    assert apply(fsm, SetProperty("/p", "x")) is Outcome.APPLIED
    assert apply(fsm, Write(9, 0, 5)) is Outcome.NOT_TRACKED
    assert apply(fsm, Unlink(9, "/a")) is Outcome.NOT_TRACKED
    assert apply(fsm, Link(9, "/b")) is Outcome.NOT_TRACKED
    assert fsm.next_seq_no == 6
    before = (fsm.next_seq_no, fsm.next_checksum, fsm.build_hints(LOG))
    for outcome, action in (
        (Outcome.LINK_EXISTS, Create("/a")),
        (Outcome.LINK_EXISTS, Link(1, "/a")),
        (Outcome.LINK_EXISTS, SetProperty("/a", "y")),
        (Outcome.PROPERTY_EXISTS, Create("/p")),
        (Outcome.PROPERTY_EXISTS, Link(1, "/p")),
        (Outcome.NO_SUCH_LINK, Unlink(1, "/b")),
    ):
        assert apply(fsm, action) is outcome
    assert apply(fsm, None, seq_no=5) is Outcome.WRONG_SEQ_NO
    assert apply(fsm, None, seq_no=7) is Outcome.WRONG_SEQ_NO
    assert apply(fsm, None, checksum=1) is Outcome.CHECKSUM_MISMATCH
    assert (fsm.next_seq_no, fsm.next_checksum, fsm.build_hints(LOG)) == before
    assert [outcome for outcome in Outcome if outcome.advances] == [
        Outcome.APPLIED,
        Outcome.NOT_TRACKED,
    ]


def test_hints_are_runs_of_one_author() -> None:
    """From the first operation of a file to its last, with all that stands between."""
    fsm = RecoveryFSM(FSMHints(LOG))
    apply(fsm, Create("/a"))
    apply(fsm, None)
    apply(fsm, Write(1, 0, 5))
    apply(fsm, None, author=8)
    apply(fsm, Link(1, "/b"), author=8)
    apply(fsm, Unlink(1, "/a"), author=8)
    (node,) = fsm.build_hints(LOG).live_nodes
    assert [
        (s.author, s.first_seq_no, s.first_offset, s.last_seq_no, s.last_offset)
        for s in node.segments
    ] == [(7, 1, 10, 3, 40), (8, 5, 50, 6, 70)]
    assert {segment.log for segment in node.segments} == {""}
    assert {segment.log for segment in fsm.build_hints("b/log").live_nodes[0].segments} == {LOG}
    assert fsm.oldest_offset() == 10
    apply(fsm, Unlink(1, "/b"), author=8)
    assert fsm.oldest_offset() is None


def test_the_oldest_offset_is_of_the_newest_log() -> None:
    """After a fork, a recovery reads the new log from the first write to any file, also to an older file."""
    fsm = RecoveryFSM(FSMHints(LOG))
    apply(fsm, Create("/a"))
    apply(fsm, Create("/b"))
    apply(fsm, None, log="b/log")
    assert fsm.oldest_offset() is None
    apply(fsm, Write(2, 0, 3), log="b/log")
    apply(fsm, Create("/c"), log="b/log")
    apply(fsm, Write(1, 0, 3), log="b/log")
    assert fsm.oldest_offset() == 40
    apply(fsm, Unlink(2, "/b"), log="b/log")
    assert fsm.oldest_offset() == 50


def hints_of(*segments: Segment, fnode: int = 1) -> FSMHints:
    return FSMHints(LOG, (FnodeSegments(fnode, segments),))


def test_the_hinted_author_counts() -> None:
    """Two authors may have written the same next operation: the hints say whose branch it was."""
    fsm = RecoveryFSM(hints_of(Segment(8, 1, 0, 0, 2)))
    assert apply(fsm, Create("/a"), author=7) is Outcome.NOT_HINTED_AUTHOR
    assert apply(fsm, Create("/b"), author=8) is Outcome.APPLIED
    assert apply(fsm, Write(1, 0, 3), author=7) is Outcome.NOT_HINTED_AUTHOR
    assert apply(fsm, Write(1, 0, 3), author=8) is Outcome.APPLIED
    assert not fsm.has_hints
    assert apply(fsm, None, author=9) is Outcome.APPLIED
    assert fsm.links == {"/b": 1}


def test_a_hinted_file_must_be_created_there() -> None:
    """Hints start at number and checksum of their first segment, and jump over gaps."""
    hints = FSMHints(
        LOG,
        (
            FnodeSegments(5, (Segment(7, 5, 50, 99, 6),)),
            FnodeSegments(9, (Segment(7, 9, 90, 33, 9),)),
        ),
    )
    fsm = RecoveryFSM(hints)
    assert apply(fsm, Write(5, 0, 1)) is Outcome.EXPECTED_HINTED_FNODE
    assert apply(fsm, Create("/a")) is Outcome.APPLIED
    assert apply(fsm, Create("/gone by then")) is Outcome.NOT_TRACKED
    assert (fsm.next_seq_no, fsm.next_checksum) == (9, 33)
    assert apply(fsm, Create("/a")) is Outcome.LINK_EXISTS
    assert apply(fsm, Create("/b")) is Outcome.APPLIED
    assert fsm.links == {"/a": 5, "/b": 9}


@pytest.mark.parametrize(
    "hints",
    [
        hints_of(),
        hints_of(Segment(7, 2, 0, 0, 2)),
        FSMHints(LOG, (hints_of(Segment(7, 1, 0, 0, 2)).live_nodes[0],) * 2),
        hints_of(Segment(7, 1, 0, 0, 2, 50), Segment(7, 4, 60, 0, 5, 70, "b/log")),
        hints_of(Segment(0, 1, 0, 0, 2)),
        hints_of(Segment(7, 1, 0, 0, 2, 0, LOG)),
    ],
)
def test_hints_that_cannot_be(hints: FSMHints) -> None:
    with pytest.raises(Invalid):
        RecoveryFSM(hints)


def test_properties_of_hints_do_not_block_paths_of_before() -> None:
    """Behind the last segment, but before the hints were taken, the path may have been a file's."""
    hints = FSMHints(LOG, properties=(Property("/p", "last"),))
    fsm = RecoveryFSM(hints)
    assert apply(fsm, Create("/p")) is Outcome.APPLIED
    assert apply(fsm, Unlink(1, "/p")) is Outcome.APPLIED
    assert fsm.properties == {"/p": "last"}
    assert apply(fsm, SetProperty("/p", "older")) is Outcome.APPLIED
    assert apply(fsm, Create("/p")) is Outcome.PROPERTY_EXISTS
    assert apply(fsm, SetProperty("/p", "last")) is Outcome.APPLIED
