"""The decisions of a spool, as tables. `test_spool_file` has the comparison with a model."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from gazette.errors import Bug, Invalid
from gazette.fragment.spool import (
    Committed,
    Completed,
    Content,
    Mismatched,
    Proposal,
    Restarted,
    RolledBack,
    SpoolState,
    proposal_of,
)
from gazette.protocol.fragment import ZERO_SUM, Codec, Fragment
from gazette.protocol.label_set import LabelSet
from tests.facts import raises

REGISTERS = LabelSet.of(("author", "one"))
OTHERS = LabelSet.of(("author", "two"))
NOW = 1_700_000_000.0
MINUTE_NS = 60 * 10**9


def sha(content: bytes) -> bytes:
    return hashlib.sha1(content).digest() if content else ZERO_SUM


def fragment(begin: int, content: bytes, codec: Codec = Codec.SNAPPY) -> Fragment:
    return Fragment("a/journal", begin, begin + len(content), sha(content), codec)


class Held:
    """A state and the bytes that its driver would hold."""

    def __init__(self, begin: int, committed: bytes, pending: bytes = b"") -> None:
        first = NOW - 100 if committed else None
        self.content = committed + pending
        self.state = SpoolState(fragment(begin, committed), REGISTERS, len(pending), first)
        self.state._check()

    def propose(self, proposed: Fragment, registers: LabelSet = REGISTERS) -> Any:
        effects = self.state.propose(Proposal(proposed, registers), lambda: sha(self.content), NOW)
        self.state._check()
        return effects


def test_a_new_spool_is_empty() -> None:
    """At offset zero, of no codec: the first proposal tells it more."""
    state = SpoolState.new("a/journal")
    state._check()
    assert state.fragment == Fragment("a/journal", 0, 0, ZERO_SUM, Codec.NONE)
    assert state.next(lambda: pytest.fail("nothing is pending")) == state.fragment


def test_content_must_follow_what_is_pending() -> None:
    """A gap or a repetition is the sender's error, and changes nothing."""
    held = Held(100, b"abc", b"de")
    assert held.state.check_content(Content(b"f", 2)) == 5
    for delta in (0, 1, 3):
        with raises(Invalid, path="ContentDelta", says="expected 2"):
            held.state.check_content(Content(b"f", delta))
    assert held.state.delta == 2
    held.state.extend(1)
    assert held.state.check_content(Content(b"g", 3)) == 6


def test_commit() -> None:
    """A proposal of exactly the pending bytes commits, and brings its registers."""
    held = Held(100, b"abc", b"de")
    proposed = held.state.next(lambda: sha(b"abcde"))
    assert proposed == fragment(100, b"abcde")
    assert held.propose(proposed, OTHERS) == (Committed(proposed, 2),)
    assert held.state.registers == OTHERS
    assert held.state.delta == 0
    assert held.state.first_append_time == NOW - 100

    # Case: the first commit of a fragment sets its time.
    held = Held(100, b"", b"de")
    assert held.propose(fragment(100, b"de")) == (Committed(fragment(100, b"de"), 2),)
    assert held.state.first_append_time == NOW


def test_roll_back() -> None:
    """A proposal of what is committed gives up what is pending; it is also how peers compare."""
    held = Held(100, b"abc", b"de")
    assert held.propose(fragment(100, b"abc")) == (RolledBack(2),)
    assert held.propose(fragment(100, b"abc")) == (RolledBack(0),)
    assert held.state.fragment == fragment(100, b"abc")


def test_a_fragment_differs_in_any_field() -> None:
    """Offsets, digest, codec, and what only blob stores know; nothing changes on a mismatch."""
    for change in (
        {"begin": 99},
        {"sum": sha(b"xyz")},
        {"codec": Codec.GZIP},
        {"backing_store": "s3://bucket/"},
        {"mod_time": 1},
        {"path_postfix": "a"},
        {"end": 102},
    ):
        held = Held(100, b"abc", b"de")
        assert held.propose(replace(fragment(100, b"abc"), **change)) == (Mismatched(),)
        assert held.state.delta == 2
        assert held.propose(replace(fragment(100, b"abcde"), **change)) == (Mismatched(),)
        assert held.state == Held(100, b"abc", b"de").state


def test_registers_are_compared() -> None:
    """An equal fragment with other registers is no roll-back, but a commit may change them."""
    held = Held(100, b"abc", b"de")
    assert held.propose(fragment(100, b"abc"), OTHERS) == (Mismatched(),)
    assert held.propose(fragment(100, b"abcde"), OTHERS) == (Committed(fragment(100, b"abcde"), 2),)


def test_roll_on_order() -> None:
    """An empty fragment at our end completes ours; registers at an equal end must agree."""
    empty = fragment(103, b"", Codec.ZSTANDARD)
    completed = Completed(fragment(100, b"abc"), REGISTERS, NOW - 100)
    held = Held(100, b"abc", b"de")
    assert held.propose(empty) == (completed, RolledBack(0))
    assert held.state.fragment == empty
    assert held.state.first_append_time is None

    # Case: other registers are not adopted, and so mismatch.
    held = Held(100, b"abc")
    assert held.propose(empty, OTHERS) == (completed, Mismatched())
    assert held.state.fragment == empty
    assert held.state.registers == REGISTERS

    # Case: nothing to complete; what is pending is given up.
    held = Held(103, b"", b"de")
    assert held.propose(empty) == (Restarted(), RolledBack(0))
    assert held.state.delta == 0


def test_roll_forward() -> None:
    """A proposal beyond all we hold means we missed commits: go on at its end."""
    held = Held(100, b"abc", b"de")
    completed = Completed(fragment(100, b"abc"), REGISTERS, NOW - 100)

    # Case: an empty one is taken up, with registers.
    assert held.propose(fragment(200, b""), OTHERS) == (completed, RolledBack(0))
    assert held.state.registers == OTHERS
    # Case: one with content cannot be ours; the peer learns that we are ready at its end.
    held = Held(100, b"abc", b"de")
    assert held.propose(fragment(190, b"0123456789"), OTHERS) == (completed, Mismatched())
    assert held.state.fragment == fragment(200, b"")
    # Case: equal to the end of what is pending is not beyond it.
    held = Held(100, b"abc", b"de")
    assert held.propose(fragment(105, b"")) == (Mismatched(),)
    assert held.state.delta == 2
    # Case: behind us.
    assert held.propose(fragment(50, b"")) == (Mismatched(),)


def test_another_journal_is_refused() -> None:
    """Before anything is rolled."""
    held = Held(100, b"abc", b"de")
    with raises(Invalid, path="Proposal.Journal", says="b/journal"):
        held.propose(Fragment("b/journal", 900, 900))
    assert held.state == Held(100, b"abc", b"de").state


def propose(length: int, **changes: Any) -> Fragment:
    arguments = {
        "roll_to": 0,
        "fragment_length": 1000,
        "codec": Codec.GZIP,
        "flush_interval_ns": 0,
        "now": NOW,
        "first_append_time": NOW - 10 if length else None,
    } | changes
    return proposal_of(fragment(100, b"x" * length), **arguments)


def test_a_primary_rolls() -> None:
    """An empty fragment, one that is longer than it should be, one elsewhere, one of yesterday."""
    rolled = fragment(0, b"", Codec.GZIP)
    # Case: neither; being just as long as it should is not longer.
    assert propose(1000) == fragment(100, b"x" * 1000)
    assert propose(1001) == replace(rolled, begin=1101, end=1101)
    # Case: empty, so that it takes the present codec.
    assert propose(0) == replace(rolled, begin=100, end=100)
    # Case: rolled to an offset, which may be the present end, but not one before.
    assert propose(10, roll_to=110) == replace(rolled, begin=110, end=110)
    assert propose(10, roll_to=5000) == replace(rolled, begin=5000, end=5000)
    assert propose(10, roll_to=100) == fragment(100, b"x" * 10)
    assert propose(0, roll_to=100) == replace(rolled, begin=100, end=100)
    with pytest.raises(Bug, match="backwards"):
        propose(10, roll_to=109)


@pytest.mark.parametrize(
    ("interval_ns", "first", "now", "rolls"),
    [
        (MINUTE_NS, 60.0, 119.9, False),
        (MINUTE_NS, 119.9, 120.0, True),
        (MINUTE_NS, 120.0, 119.9, True),
        (10 * MINUTE_NS, 599.0, 601.0, True),
        (10 * MINUTE_NS, 601.0, 1199.0, False),
        (0, 60.0, 1e9, False),
        (MINUTE_NS // 120, 60.0, 1e9, False),
    ],
)
def test_flush_intervals_are_buckets_of_the_epoch(
    interval_ns: int, first: float, now: float, rolls: bool
) -> None:
    """Not times since the first append: all journals flush at the same moments."""
    kept = propose(10, flush_interval_ns=interval_ns, first_append_time=first, now=now)
    assert (kept.length == 0) == rolls
