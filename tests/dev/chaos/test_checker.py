"""The judge of chaos runs finds each kind of violation when it is planted, and none where there is none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from gazette.dev.chaos.checker import Verdict, check
from gazette.dev.chaos.history import (
    ClientFailed,
    Completed,
    Event,
    Final,
    HeadReset,
    Invoked,
    Jumped,
    Labels,
    Opened,
    Read,
    Replicas,
    decode,
    encode,
)
from gazette.dev.chaos.payload import payload

JOURNAL = "a/journal"


@dataclass
class Story:
    """A history that is written down, and the bytes that it leaves."""

    events: list[Event] = field(default_factory=list)
    content: bytes = b""
    time: float = 0.0
    ops: int = 0

    def tick(self) -> float:
        self.time += 1.0
        return self.time

    def invoke(self, *, op: int = 0, length: int = 100, **fields: Any) -> int:
        if not op:
            self.ops += 1
            op = self.ops
        attempt = sum(isinstance(one, Invoked) and one.op == op for one in self.events)
        self.events.append(
            Invoked(self.tick(), op, attempt, f"client-{op}", JOURNAL, length, **fields)
        )
        return op

    def complete(self, op: int, outcome: str, **fields: Any) -> None:
        attempt = max(
            one.attempt for one in self.events if isinstance(one, Invoked) and one.op == op
        )
        self.events.append(Completed(self.tick(), op, attempt, outcome, **fields))  # type: ignore[arg-type]

    def length(self, op: int) -> int:
        return next(one.length for one in self.events if isinstance(one, Invoked) and one.op == op)

    def land(self, op: int) -> tuple[int, int]:
        begin = len(self.content)
        self.content += payload(op, self.length(op))
        return begin, len(self.content)

    def acknowledge(self, op: int, begin: int, end: int, registers: Labels = ()) -> None:
        digest = hashlib.sha1(payload(op, self.length(op))).hexdigest()
        self.complete(op, "ok", begin=begin, end=end, sum=digest, registers=registers)

    def append(self, registers: Labels = (), **fields: Any) -> int:
        op = self.invoke(**fields)
        self.acknowledge(op, *self.land(op), registers)
        return op

    def refuse(self, status: str, **fields: Any) -> int:
        op = self.invoke(**fields)
        self.complete(op, "fail", status=status)
        return op

    def read(self, begin: int, end: int, content: bytes | None = None, reader: str = "r") -> None:
        held = self.content[begin:end] if content is None else content
        digest = hashlib.sha1(held).hexdigest()
        self.events.append(Read(self.tick(), reader, JOURNAL, begin, end, digest))

    def open(self, offset: int, reader: str = "r") -> None:
        self.events.append(Opened(self.tick(), reader, JOURNAL, offset))

    def final(self, source: str, content: bytes) -> None:
        digest = hashlib.sha1(content).hexdigest()
        self.events.append(Final(source, JOURNAL, len(content), digest))

    def verdict(self, **options: Any) -> Verdict:
        # By way of lines, as runs have them.
        events = list(decode(encode(one) for one in self.events))
        assert events == self.events
        return check(events, {JOURNAL: self.content}, **options)

    def kinds(self, **options: Any) -> set[str]:
        return {violation.kind for violation in self.verdict(**options).violations}


def good() -> Story:
    """Everything that may happen, and is right."""
    story = Story()
    story.append(length=4000)
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    story.append(registers=(("lock", "b"),), check="lock = a", union=(("lock", "b"),))
    story.refuse("REGISTER_MISMATCH", check="lock = a")
    story.append(registers=(), check="lock = b", subtract=(("lock", "b"),))
    story.append(offset=len(story.content))
    story.refuse("WRONG_APPEND_OFFSET", offset=17)
    # Unknown, and there; unknown, and not there; never completed.
    story.land(here := story.invoke())
    story.complete(here, "unknown", error="gone")
    story.complete(story.invoke(), "unknown", error="gone")
    story.invoke()
    # At an explicit offset, with an unknown outcome, and tried again.
    head = len(story.content)
    retried = story.invoke(offset=head)
    story.complete(retried, "unknown")
    story.invoke(op=retried, offset=head)
    story.acknowledge(retried, *story.land(retried))
    # Two at once: either order is right.
    first, second = story.invoke(), story.invoke()
    of_second = story.land(second)
    story.acknowledge(first, *story.land(first))
    story.acknowledge(second, *of_second)
    story.open(0)
    story.read(0, 150)
    story.read(150, len(story.content))
    story.open(10)
    story.read(10, 20)
    story.final("broker-1", story.content)
    story.final("fragments", story.content)
    return story


def test_a_good_history_passes() -> None:
    story = good()
    verdict = story.verdict(restarts_only=True)
    assert verdict.violations == []
    assert verdict.appends == {"ok": 8, "fail": 2, "unknown": 4}
    assert verdict.refusals == {"REGISTER_MISMATCH": 1, "WRONG_APPEND_OFFSET": 1}
    assert verdict.unknown_there == 1
    assert (verdict.reads, verdict.content_bytes) == (3, len(story.content))


def test_lost_at_the_end() -> None:
    story = Story()
    story.append()
    story.append()
    story.content = story.content[:100]
    assert story.kinds() == {"lost"}


def test_lost_and_its_place_given_to_another() -> None:
    story = Story()
    lost = story.append()
    story.content = b""
    story.append()
    verdict = story.verdict()
    assert "lost" in {one.kind for one in verdict.violations}
    assert f"op {lost} of 100 bytes" in str(verdict.violations[0])


def test_duplicate() -> None:
    story = Story()
    op = story.append()
    story.land(op)
    assert story.kinds() == {"duplicate"}


def test_duplicate_of_an_unknown_one() -> None:
    story = Story()
    story.complete(op := story.invoke(), "unknown")
    story.land(op)
    story.append()
    story.land(op)
    assert "duplicate" in story.kinds()


def test_torn_at_the_end() -> None:
    for length in (99, 50, 20, 12, 1):
        story = Story()
        story.append()
        story.complete(story.invoke(), "unknown")
        story.content += payload(2, 100)[:length]
        assert story.kinds() == {"torn"}, length


def test_torn_in_the_middle() -> None:
    story = Story()
    story.complete(story.invoke(), "unknown")
    story.content += payload(1, 100)[:60]
    story.append()
    assert story.kinds() == {"torn"}


def test_interleaved() -> None:
    story = Story()
    first, second = story.invoke(), story.invoke()
    outer, inner = payload(first, 100), payload(second, 100)
    story.content = outer[:40] + inner + outer[40:]
    story.complete(first, "unknown")
    story.acknowledge(second, 40, 140)
    assert "interleaved" in story.kinds()


@pytest.mark.parametrize("at", [150, 199])
def test_a_changed_byte(at: int) -> None:
    story = Story()
    for _ in range(3):
        story.append()
    content = bytearray(story.content)
    content[at] ^= 1
    story.content = bytes(content)
    kinds = story.kinds()
    assert "changed" in kinds
    assert kinds <= {"changed", "lost"}


def test_a_changed_byte_of_an_append_that_nobody_knows_of() -> None:
    story = Story()
    story.complete(op := story.invoke(), "unknown")
    story.land(op)
    story.content = story.content[:70] + b"?" + story.content[71:]
    assert story.kinds() == {"changed"}


def test_an_acknowledgement_of_another_sum() -> None:
    story = Story()
    op = story.invoke()
    begin, end = story.land(op)
    story.complete(op, "ok", begin=begin, end=end, sum="0" * 40)
    assert story.kinds() == {"changed"}


def test_an_acknowledgement_of_another_length() -> None:
    story = Story()
    op = story.invoke()
    begin, end = story.land(op)
    story.acknowledge(op, begin, end - 1)
    assert "lost" in story.kinds()


def test_foreign_bytes() -> None:
    story = Story()
    story.append()
    story.content += b"who wrote this, and why is it so long"
    story.append()
    assert story.kinds() == {"foreign"}
    # Case: a payload of another journal, or of none.
    story = Story()
    story.content = payload(77, 100)
    assert story.kinds() == {"foreign"}


def test_refused_and_there() -> None:
    story = Story()
    op = story.refuse("INSUFFICIENT_JOURNAL_BROKERS")
    story.land(op)
    assert story.kinds() == {"refused"}


def test_an_explicit_offset_that_was_not_kept() -> None:
    story = Story()
    story.append()
    story.append(offset=50)
    assert story.kinds() == {"offset"}
    # Case: of an unknown outcome.
    story = Story()
    story.append()
    story.complete(op := story.invoke(offset=7), "unknown")
    story.land(op)
    assert story.kinds() == {"offset"}


def test_order() -> None:
    story = Story()
    early = story.invoke()
    story.acknowledge(early, 100, 200)
    late = story.invoke()
    story.acknowledge(late, 0, 100)
    story.content = payload(late, 100) + payload(early, 100)
    assert story.kinds() == {"order"}


def test_a_register_check_that_should_have_failed() -> None:
    story = Story()
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    story.append(registers=(("lock", "c"),), check="lock = b", union=(("lock", "c"),))
    assert story.kinds() == {"register"}


def test_a_register_check_that_should_have_passed() -> None:
    story = Story()
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    story.refuse("REGISTER_MISMATCH", check="lock = a")
    assert story.kinds() == {"register"}
    # Case: registers that were never set refuse nobody.
    story = Story()
    story.append()
    story.refuse("REGISTER_MISMATCH", check="lock = a")
    assert story.kinds() == {"register"}


def test_a_register_check_that_failed_beside_a_change() -> None:
    story = Story()
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    change = story.invoke(union=(("lock", "b"),))
    refused = story.invoke(check="lock = a")
    story.acknowledge(change, *story.land(change), (("lock", "b"),))
    story.complete(refused, "fail", status="REGISTER_MISMATCH")
    assert story.kinds() == set()
    # Case: not if the change began later.
    story = Story()
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    story.refuse("REGISTER_MISMATCH", check="lock = a")
    story.append(registers=(("lock", "b"),), union=(("lock", "b"),))
    assert story.kinds() == {"register"}


def test_a_stale_register_check_that_failed() -> None:
    """The state that would have explained it was over before the append began."""
    story = Story()
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    story.append(registers=(("lock", "b"),), union=(("lock", "b"),))
    story.refuse("REGISTER_MISMATCH", check="lock = b")
    assert story.kinds() == {"register"}


def test_registers_that_were_lost() -> None:
    story = Story()
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    story.append(registers=())
    assert story.kinds() == {"register"}


def test_registers_that_went_with_all_brokers() -> None:
    story = Story()
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    story.events.append(HeadReset(story.tick(), JOURNAL, len(story.content)))
    story.append(registers=(("mark", "b"),), check="lock = z", union=(("mark", "b"),))
    assert story.kinds() == set()
    story.refuse("REGISTER_MISMATCH", check="mark = b")
    assert story.kinds() == {"register"}
    # Case: but no bytes.
    story = Story()
    story.append()
    story.content = b""
    story.events.append(HeadReset(story.tick(), JOURNAL, 0))
    assert story.kinds() == {"lost"}


def test_registers_of_a_refused_append() -> None:
    story = Story()
    story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
    story.refuse("REGISTER_MISMATCH", check="lock = z", union=(("lock", "z"),))
    story.append(registers=(("lock", "z"),))
    assert story.kinds() == {"register"}


def test_a_reader_that_goes_back() -> None:
    story = Story()
    story.append()
    story.open(0)
    story.read(0, 60)
    story.read(40, 100)
    assert story.kinds() == {"back"}
    # Case: or leaves something out.
    story = Story()
    story.append()
    story.open(0)
    story.read(10, 60)
    assert story.kinds() == {"back"}


def test_a_reader_that_was_given_other_bytes() -> None:
    story = Story()
    story.append()
    story.open(0)
    story.read(0, 5, b"12345")
    assert story.kinds() == {"read"}
    # Case: bytes that are not there in the end.
    story = Story()
    story.append()
    story.open(0)
    story.read(0, 101, story.content + b"!")
    assert story.kinds() == {"read"}


def test_a_reader_that_was_told_of_a_gap() -> None:
    story = Story()
    story.append()
    story.open(0)
    story.events.append(Jumped(story.tick(), "r", JOURNAL, 0, 50))
    story.read(50, 100)
    assert story.kinds() == {"jump"}


def test_sources_that_differ() -> None:
    story = Story()
    story.append()
    story.final("broker-1", story.content)
    story.final("broker-2", story.content[:-1] + b"?")
    assert story.kinds() == {"source"}
    # Case: less of it.
    story = Story()
    story.append()
    story.final("fragments", story.content[:-1])
    assert story.kinds() == {"source"}


def test_a_journal_of_which_nothing_is_left() -> None:
    story = Story()
    story.append()
    assert {one.kind for one in check(story.events, {}).violations} == {"lost"}


def test_promises_of_a_rolling_restart() -> None:
    failed: Event = ClientFailed(1.0, "client-1", "Unavailable: gone")
    short: Event = Replicas(1.0, JOURNAL, 17, 1, 2, consistent=False)
    enough: Event = Replicas(1.0, JOURNAL, 18, 2, 2, consistent=True)
    for event, kind in ((failed, "client"), (short, "replication")):
        story = Story([event, enough])
        assert story.kinds() == set()
        assert story.kinds(restarts_only=True) == {kind}


def test_a_line_that_is_no_event() -> None:
    with pytest.raises(msgspec.DecodeError):
        list(decode([b'{"type": "nothing"}\n']))
