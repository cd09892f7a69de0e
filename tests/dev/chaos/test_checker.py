"""The judge of chaos runs finds each kind of violation when it is planted, and no other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tools.chaos.checker import STORED, Verdict, check
from tools.chaos.history import (
    ClientFailed,
    Completed,
    Created,
    Deposed,
    Ended,
    Event,
    FaultEvent,
    Final,
    HeadReset,
    History,
    Invoked,
    Jumped,
    Labels,
    Logged,
    Lost,
    Opened,
    OtherLife,
    Quiet,
    Read,
    Replicas,
    Stopped,
    StoredOps,
    decode,
    encode,
)
from tools.chaos.payload import payload

JOURNAL = "a/journal"


@dataclass
class Story:
    """A history that is written down, and the bytes that it leaves. It ends well unless it says otherwise."""

    events: list[Event] = field(default_factory=lambda: [Created(0.0, JOURNAL, 2, 10)])
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

    def acknowledge(
        self, op: int, begin: int, end: int, registers: Labels = (), **fields: Any
    ) -> None:
        digest = hashlib.sha1(payload(op, self.length(op))).hexdigest()
        fields = {"members": ("b1", "b2"), "primary": "b1", "revision": 20, **fields}
        self.complete(op, "ok", begin=begin, end=end, sum=digest, registers=registers, **fields)

    def append(self, registers: Labels = (), **fields: Any) -> int:
        op = self.invoke(**fields)
        self.acknowledge(op, *self.land(op), registers)
        return op

    def held_by(self, *members: str, **fields: Any) -> int:
        """Record an append that these members acknowledged."""
        op = self.invoke()
        self.acknowledge(op, *self.land(op), members=members, primary=members[0], **fields)
        return op

    def say(self, event: type[Any], *fields: Any, **named: Any) -> None:
        self.events.append(event(self.tick(), *fields, **named))

    def close(self) -> None:
        """Add what a run that comes to its end has beside: a quiet time that was used, and final readings."""
        if not any(isinstance(one, Quiet) for one in self.events):
            used = [at for at, one in enumerate(self.events) if _is_acknowledged(one)]
            if not used:
                self.append()
                used = [len(self.events) - 1]
            self.events.insert(used[0], Quiet(0.5, "begun"))
            self.events.insert(used[0] + 2, Quiet(self.time + 0.5, "ended"))
        sources = {one.source for one in self.events if isinstance(one, Final)}
        if STORED not in sources:
            self.final(STORED, self.content)
        if not sources - {STORED}:
            self.final("b1", self.content)

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

    def verdict(self, *, closed: bool = True, **options: Any) -> Verdict:
        if closed:
            self.close()
        # By way of lines, as runs have them.
        events = list(decode(encode(one) for one in self.events))
        assert events == self.events
        return check(events, {JOURNAL: self.content}, **options)

    def kinds(self, **options: Any) -> set[str]:
        return {violation.kind for violation in self.verdict(**options).violations}


def _is_acknowledged(event: Event) -> bool:
    return isinstance(event, Completed) and event.outcome == "ok"


def good() -> Story:
    """Return a story with everything that may happen, and is right."""
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
    assert {one.kind for one in verdict.violations} == {"lost", "overwritten"}
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


def test_a_changed_byte_of_an_append_without_an_outcome() -> None:
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
    story.content += b"which test wrote this, and why so big"
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
    # Case: registers that were never set refuse no append.
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
    story.events.append(HeadReset(story.tick(), JOURNAL, len(story.content), len(story.content)))
    story.append(registers=(("mark", "b"),), check="lock = z", union=(("mark", "b"),))
    assert story.kinds() == set()
    story.refuse("REGISTER_MISMATCH", check="mark = b")
    assert story.kinds() == {"register"}
    # Case: but no bytes.
    story = Story()
    story.append()
    story.content = b""
    story.events.append(HeadReset(story.tick(), JOURNAL, 0, 0))
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


def test_a_reader_that_knows_of_a_gap() -> None:
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


def test_promises_of_a_rolling_restart() -> None:
    failed: Event = ClientFailed(1.0, "client-1", "Unavailable: gone")
    short: Event = Replicas(1.0, JOURNAL, 17, 1, 2, consistent=False)
    enough: Event = Replicas(1.0, JOURNAL, 18, 2, 2, consistent=True)
    for event, kind in ((failed, "client"), (short, "replication")):
        story = Story()
        story.append()
        story.events += [event, enough]
        assert story.kinds() == set()
        assert story.kinds(restarts_only=True) == {kind}


# Losses of all replicas: what was declared is excused, and nothing else.


def loss(story: Story, *brokers: str, stored: tuple[tuple[int, int], ...] = ()) -> None:
    story.say(Lost, JOURNAL, brokers, stored)


def test_a_declared_loss_excuses_what_was_not_stored() -> None:
    story = Story()
    story.held_by("b1", "b2")
    story.held_by("b1", "b2")
    loss(story, "b1", "b2", "b3", stored=((0, 100),))
    story.content = story.content[:100]
    story.say(HeadReset, JOURNAL, 100, 100)
    # Its offsets are given to other bytes.
    story.held_by("b1", "b3")
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.journals[JOURNAL].excused == 1


def test_a_declared_loss_does_not_excuse_what_was_stored() -> None:
    story = Story()
    story.held_by("b1", "b2")
    loss(story, "b1", "b2", stored=((0, 100),))
    story.content = b""
    assert story.kinds() == {"lost"}


def test_a_declared_loss_does_not_excuse_what_others_held() -> None:
    story = Story()
    story.held_by("b1", "b2")
    loss(story, "b1")
    story.content = b""
    assert story.kinds() == {"lost"}


def test_a_declared_loss_does_not_excuse_what_came_after_it() -> None:
    story = Story()
    loss(story, "b1", "b2")
    story.tick()
    story.tick()
    story.held_by("b1", "b2")
    story.content = b""
    assert story.kinds() == {"lost"}


def test_a_declared_loss_excuses_answers_that_a_cut_held_back() -> None:
    for target, kinds in (("b3 | client held", set()), ("b3 | client refused", {"lost"})):
        story = Story()
        op = story.invoke()
        story.say(FaultEvent, "cut from clients", target, "begun")
        loss(story, "b1", "b2")
        for _ in range(5):
            story.tick()
        story.say(FaultEvent, "cut from clients", target, "ended")
        story.acknowledge(op, 0, 100)
        story.content = b""
        assert story.kinds() == kinds


def test_a_hole_is_excused_only_where_all_replicas_were_lost() -> None:
    for declared, kinds in ((True, set()), (False, {"source", "lost", "jump"})):
        story = Story()
        for _ in range(3):
            story.held_by("b1", "b2")
        if declared:
            loss(story, "b1", "b2", stored=((0, 100), (200, 300)))
        story.content = story.content[:100] + bytes(100) + story.content[200:]
        story.open(0)
        story.read(0, 100)
        story.say(Jumped, "r", JOURNAL, 100, 200)
        story.read(200, 300)
        digest = hashlib.sha1(story.content).hexdigest()
        story.events.append(Final(STORED, JOURNAL, 300, digest, ((100, 200),)))
        assert story.kinds() == kinds


def test_bytes_that_were_read_before_they_were_lost() -> None:
    for late in (False, True):
        story = Story()
        story.held_by("b1", "b2")
        story.open(0)
        story.read(0, 50)
        loss(story, "b1", "b2")
        story.say(HeadReset, JOURNAL, 0, 0)
        before, story.content = story.content, b""
        if late:
            story.time += 60.0
        story.read(50, 100, before[50:])
        story.held_by("b1", "b2")
        # Case: so long afterwards these can only be bytes of a broker that kept what was lost.
        assert story.kinds() == ({"read"} if late else set())


def test_registers_of_appends_that_were_lost() -> None:
    for declared in (True, False):
        story = Story()
        story.append(registers=(("lock", "a"),), union=(("lock", "a"),))
        story.append(registers=(("lock", "b"),), union=(("lock", "b"),))
        story.refuse("REGISTER_MISMATCH", check="lock = a")
        story.content = story.content[:100]
        if declared:
            loss(story, "b1", "b2", stored=((0, 100),))
            story.say(HeadReset, JOURNAL, 100, 100)
        story.append()
        # Case: without a loss, that append is lost and the refusal is unexplained.
        kinds = story.kinds()
        assert kinds == set() if declared else {"lost", "register"} <= kinds


def test_two_histories() -> None:
    """What a broker acknowledged that had been replaced, and what its successor did."""
    story = Story()
    first = story.held_by("b1")
    story.content = b""
    second = story.held_by("b2")
    verdict = story.verdict()
    assert {one.kind for one in verdict.violations} == {"lost", "overwritten", "replication"}
    text = next(one.text for one in verdict.violations if one.kind == "overwritten")
    assert f"op {first} was acknowledged as [0, 100)" in text
    assert f"op {second} as [0, 100)" in text


def test_a_broker_that_was_removed_and_acknowledged() -> None:
    for revision, kinds in ((31, set()), (29, {"deposed"})):
        story = Story()
        story.held_by("b1", "b2", revision=20)
        story.say(Deposed, "b1", 30)
        # Case: the other broker, and the same one when it is back.
        story.held_by("b2", "b1", revision=25)
        story.held_by("b1", "b2", revision=revision)
        assert story.kinds() == kinds


def test_too_few_replicas() -> None:
    story = Story()
    story.held_by("b1", "b2", "b3")
    story.held_by("b2")
    verdict = story.verdict()
    assert [one.kind for one in verdict.violations] == ["replication"]
    assert "by b2 only" in verdict.violations[0].text


@pytest.mark.parametrize(("outcome", "kinds"), [("unknown", set()), ("fail", {"read"})])
def test_a_reader_at_a_broker_that_died_in_an_append(outcome: str, kinds: set[str]) -> None:
    """It may be given what no other replica got, unless the append was refused."""
    story = Story()
    story.append()
    op = story.invoke(length=60)
    story.open(0)
    story.read(0, 160, story.content + payload(op, 60))
    story.complete(op, outcome, **({"status": "SUSPENDED"} if outcome == "fail" else {}))
    story.append(length=100)
    story.read(160, 200)
    assert story.kinds() == kinds


@pytest.mark.parametrize("outcome", ["unknown", "fail"])
def test_readers_at_a_broker_that_died_with_several_appends(outcome: str) -> None:
    """They get them piece by piece, and from the middle on."""
    story = Story()
    story.append()
    ops = [story.invoke(length=length) for length in (60, 40, 30)]
    shown = story.content + b"".join(payload(op, story.length(op)) for op in ops)
    story.open(0)
    story.open(50, "other")
    for begin, end in ((0, 100), (100, 140), (140, 160), (160, 230)):
        story.read(begin, end, shown[begin:end])
    story.read(50, 120, shown[50:120], reader="other")
    story.read(120, 225, shown[120:225], reader="other")
    for op in ops:
        story.complete(op, outcome, **({"status": "SUSPENDED"} if outcome == "fail" else {}))
    story.append(length=200)
    assert story.kinds() == (set() if outcome == "unknown" else {"read"})
    # Case: such bytes long after the journal went on without them.
    story.say(HeadReset, JOURNAL, 100, 100)
    story.time += 60.0
    story.open(100, "late")
    story.read(100, 160, shown[100:160], reader="late")
    assert story.kinds() == {"read"}


# Journals that are deleted and created again.


def second_life(story: Story) -> None:
    story.time += 100.0
    story.content = b""
    story.say(Created, JOURNAL, 2, 50, life=2)


def test_a_second_life_begins_empty() -> None:
    story = Story()
    story.held_by("b1", "b2", revision=20)
    story.complete(story.invoke(), "unknown")
    story.open(0)
    story.read(0, 100)
    # Case: the first life's appends whose answers come late.
    late = story.invoke()
    second_life(story)
    story.acknowledge(late, 100, 200, revision=49)
    story.held_by("b1", "b2", revision=51)
    story.open(0)
    story.read(0, 100)
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.journals[JOURNAL].lives == 2


@pytest.mark.parametrize("outcome", ["ok", "unknown"])
def test_bytes_of_an_earlier_life(outcome: str) -> None:
    story = Story()
    op = story.invoke()
    if outcome == "ok":
        story.acknowledge(op, 0, 100, revision=20)
    else:
        story.complete(op, outcome)
    second_life(story)
    story.held_by("b1", "b2", revision=51)
    story.land(op)
    assert "reborn" in story.kinds()


def test_bytes_in_the_store_of_another_life_that_none_reads() -> None:
    """They are hidden, or that life is over, too."""
    for former_life, kinds in ((1, set()), (2, {"reborn"})):
        story = Story()
        former = story.held_by("b1", "b2", revision=20)
        second_life(story)
        present = story.held_by("b1", "b2", revision=51)
        story.events.append(StoredOps(JOURNAL, former_life, (former,)))
        story.events.append(StoredOps(JOURNAL, 2, (present,)))
        assert story.kinds() == kinds


def test_what_a_second_life_acknowledged_is_lost() -> None:
    story = Story()
    story.held_by("b1", "b2", revision=20)
    loss(story, "b1", "b2")
    second_life(story)
    story.held_by("b1", "b2", revision=51)
    story.content = b""
    # Case: a loss of the earlier life excuses nothing of this one.
    assert story.kinds() == {"lost"}


def test_a_reader_of_a_second_life_that_was_given_bytes_of_the_first() -> None:
    story = Story()
    story.append()
    former = story.content
    second_life(story)
    story.held_by("b1", "b2", revision=51)
    story.open(0)
    story.read(0, 100, former)
    assert story.kinds() == {"read"}


# Quiet times, in which every journal serves.


def follower(story: Story, offset: int) -> None:
    story.say(Opened, "tail", JOURNAL, offset, follows=True)


def test_a_reader_that_is_stuck() -> None:
    story = Story()
    follower(story, 0)
    story.append()
    story.read(0, 60, reader="tail")
    story.say(Quiet, "begun")
    story.append()
    story.say(Quiet, "ended")
    verdict = story.verdict()
    assert [one.kind for one in verdict.violations] == ["stuck"]
    assert "tail is at 60, and the head at 100" in verdict.violations[0].text


def test_a_reader_that_gets_to_the_head_in_time() -> None:
    story = Story()
    follower(story, 0)
    story.append()
    story.say(Quiet, "begun")
    story.append()
    story.read(0, 100, reader="tail")
    # Case: a reader that does not follow may be anywhere.
    story.open(0)
    story.say(Quiet, "ended")
    assert story.kinds() == set()


def test_a_reader_that_follows_a_head_which_went_back() -> None:
    story = Story()
    follower(story, 0)
    story.held_by("b1", "b2")
    loss(story, "b1", "b2")
    story.say(Quiet, "begun")
    story.content = b""
    story.say(HeadReset, JOURNAL, 0, 0)
    story.held_by("b1", "b2")
    story.say(Quiet, "ended")
    assert story.kinds() == set()


def test_a_reader_that_waits_where_a_declared_loss_left_nothing() -> None:
    for stored, kinds in ((((0, 100), (200, 300)), set()), (((0, 300),), {"stuck"})):
        story = Story()
        for _ in range(3):
            story.held_by("b1", "b2")
        loss(story, "b1", "b2", stored=stored)
        follower(story, 100)
        story.say(Quiet, "begun")
        story.held_by("b1", "b2")
        story.say(Quiet, "ended")
        if not kinds:
            story.content = story.content[:100] + bytes(100) + story.content[200:]
            digest = hashlib.sha1(story.content).hexdigest()
            story.events.append(Final(STORED, JOURNAL, 400, digest, ((100, 200),)))
        assert story.kinds() == kinds


def half_stored(*, declared: bool) -> Story:
    """Return a story in which 200 bytes were acknowledged, and a follower has read 100 of them.

    ``declared``: all replicas are lost after the first 100 bytes were stored.
    """
    story = Story()
    follower(story, 0)
    story.held_by("b1", "b2")
    story.held_by("b1", "b2")
    story.read(0, 100, reader="tail")
    if declared:
        loss(story, "b1", "b2", stored=((0, 100),))
    return story


def kinds_with_gap(story: Story, end: int) -> set[str]:
    """Return the violations once a last append was answered, and 100 to 200 are stored nowhere."""
    story.say(Quiet, "begun")
    story.held_by("b1", "b2")
    story.say(Quiet, "ended")
    digest = hashlib.sha1(story.content).hexdigest()
    story.events.append(Final(STORED, JOURNAL, end, digest, ((100, 200),)))
    return story.kinds()


def test_a_reader_that_waits_before_a_head_that_etcd_knows() -> None:
    """Less was stored than etcd knows of: the journal goes on there, and nothing is before it."""
    for declared, kinds in ((True, set()), (False, {"stuck", "source", "lost"})):
        story = half_stored(declared=declared)
        story.say(HeadReset, JOURNAL, 200, 100)
        story.content = story.content[:100] + bytes(100)
        assert kinds_with_gap(story, 300) == kinds


def test_a_reader_that_waits_before_an_offset_that_an_append_confirmed() -> None:
    """The journal has an earlier gap, and no head was confirmed: an append named it."""
    for declared, kinds in ((True, set()), (False, {"stuck", "source", "lost"})):
        story = half_stored(declared=declared)
        story.content = story.content[:100] + bytes(100)
        story.held_by("b1", "b2")
        story.say(HeadReset, JOURNAL, 50, 50)
        story.held_by("b1", "b2")
        assert kinds_with_gap(story, 500) == kinds


@pytest.mark.parametrize("reset", [True, False])
def test_a_reader_that_waits_where_a_journal_went_on_behind_what_was_stored(reset: bool) -> None:
    """The first append after the loss shows it, also if a second loss hides that the head was reset."""
    for declared, kinds in ((True, set()), (False, {"stuck", "source", "lost"})):
        story = half_stored(declared=declared)
        story.content = story.content[:100] + bytes(100)
        if reset or not declared:
            story.say(HeadReset, JOURNAL, 100, 100)
        story.held_by("b1", "b2")
        assert kinds_with_gap(story, 400) == kinds


def test_a_journal_that_refuses_everything() -> None:
    story = Story()
    story.append()
    story.say(Quiet, "begun")
    story.refuse("INDEX_HAS_GREATER_OFFSET")
    story.refuse("INDEX_HAS_GREATER_OFFSET")
    story.complete(story.invoke(), "unknown", error="no answer within 15 s")
    story.say(Quiet, "ended")
    verdict = story.verdict()
    assert [one.kind for one in verdict.violations] == ["refuses"]
    text = verdict.violations[0].text
    assert "2 times INDEX_HAS_GREATER_OFFSET; 1 times no answer within 15 s" in text


def test_a_run_in_which_nothing_was_acknowledged() -> None:
    story = Story()
    story.refuse("INSUFFICIENT_JOURNAL_BROKERS")
    story.say(Quiet, "begun")
    story.say(Quiet, "ended")
    verdict = story.verdict()
    assert [str(one) for one in verdict.violations] == [
        f"refuses: {JOURNAL}: nothing was acknowledged: no answer (quiet from 3.0 to 4.0 s)"
    ]


@pytest.mark.parametrize(("revision", "kinds"), [(20, set()), (40, {"stuck"})])
def test_a_late_answer_of_a_former_life_is_no_head_of_the_present_one(
    revision: int, kinds: set[str]
) -> None:
    story = Story()
    op = story.invoke()
    late = story.land(op)
    story.say(Created, JOURNAL, 2, 30, life=2)
    story.content = b""
    story.events.append(Opened(story.tick(), "tail", JOURNAL, 0, follows=True))
    story.acknowledge(op, *late, revision=revision)
    story.say(Quiet, "begun")
    other = story.invoke()
    story.acknowledge(other, *story.land(other), revision=40)
    story.events.append(Read(story.tick(), "tail", JOURNAL, 0, 99, ""))
    story.say(Quiet, "ended")
    assert {one.kind for one in story.verdict().violations} & {"stuck"} == kinds


# What readers, brokers and the run itself say.


def test_a_reader_that_was_answered_data_loss() -> None:
    story = Story()
    story.append()
    story.events.append(ClientFailed(3.0, "tail", "Read: sum differs", JOURNAL, damage=True))
    assert story.kinds() == {"damage"}


@pytest.mark.parametrize(
    ("before", "now", "kinds"),
    [(10, 20, set()), (20, 10, {"damage"}), (10, 10, {"damage"}), (10, 21, {"damage"})],
)
def test_a_reader_that_was_refused_for_another_life(before: int, now: int, kinds: set[str]) -> None:
    """It was right if the journal had both of these lives, one behind the other."""
    story = Story()
    story.events.append(OtherLife(3.0, "tail", JOURNAL, before, now))
    story.events.append(Created(3.1, JOURNAL, 2, 20, life=2))
    assert story.kinds() == kinds


def test_a_broker_that_logged_a_bug() -> None:
    story = Story()
    story.append()
    story.events.append(Logged("b1", "error gazette.broker: gazette.errors.Bug: oh", 3))
    verdict = story.verdict()
    assert [one.kind for one in verdict.violations] == ["bug"]
    assert "b1, 3 times: error gazette.broker" in verdict.violations[0].text


def ending(
    exit_code: int, *, asked: bool, error: str = "", fault: str = "", target: str = "b1 | etcd held"
) -> set[str]:
    story = Story()
    story.append()
    if fault:
        story.say(FaultEvent, fault, target, "begun")
        story.say(FaultEvent, fault, target, "ended")
    story.say(Ended, "b1", exit_code, asked, error)
    return story.kinds()


def test_a_broker_that_ended() -> None:
    lease = "fatal gazette serve: the lease was lost"
    assert ending(0, asked=True) == set()
    assert ending(0, asked=False) == {"ended"}
    assert ending(1, asked=True, error="not persisted in time") == {"ended"}
    assert ending(1, asked=False, error=lease) == {"ended"}
    # Case: a fault may have cost it its lease, and that is what it says.
    assert ending(1, asked=False, error=lease, fault="pause beyond the lease") == set()
    assert ending(1, asked=False, error=lease, fault="pause etcd", target="etcd") == set()
    # Case: another broker's lease, another reason to end, another fault.
    assert ending(1, asked=False, error=lease, fault="cut from etcd", target="b2 | etcd") == {
        "ended"
    }
    assert ending(1, asked=False, error="Bug", fault="pause beyond the lease") == {"ended"}
    assert ending(1, asked=False, error=lease, fault="store is missing") == {"ended"}
    # Case: a signal ended it, whatever it said before.
    assert ending(-11, asked=False, error=lease, fault="pause beyond the lease") == {"ended"}


def test_a_broker_whose_full_disk_keeps_it_from_saying_why_it_ended() -> None:
    def ended(full: str, *, mended: bool, shaken: bool = True, code: int = 1) -> set[str]:
        story = Story()
        story.append()
        if shaken:
            story.say(FaultEvent, "cut from etcd beyond the lease", "b1 | etcd refused", "begun")
        story.say(FaultEvent, "disk is full", full, "begun")
        if mended:
            story.say(FaultEvent, "disk is full", full, "ended")
        story.say(Ended, "b1", code, False, "warning: not uploaded yet")
        return story.kinds()

    assert ended("b1", mended=False) == set()
    # Case: another broker's disk, one that is mended, a broker that must not lose its lease.
    assert ended("b2", mended=False) == {"ended"}
    assert ended("b1", mended=True) == {"ended"}
    assert ended("b1", mended=False, shaken=False) == {"ended"}
    # Case: a signal ended it.
    assert ended("b1", mended=False, code=-25) == {"ended"}


def test_a_run_without_an_end() -> None:
    story = Story()
    story.append()
    story.say(Stopped, "no etcd")
    texts = [str(one) for one in story.verdict(closed=False).violations]
    assert texts == [
        "unfinished: : after 3.0 s: no etcd",
        f"unfinished: {JOURNAL}: there was no quiet time",
        f"unfinished: {JOURNAL}: its store was not read in the end",
        f"unfinished: {JOURNAL}: no broker was asked for it in the end",
    ]
    # Case: a comparison of the store only, of brokers only, and of no journal at all.
    for source in (STORED, "b1"):
        story = Story()
        story.append()
        story.final(source, story.content)
        assert story.kinds(closed=False) == {"unfinished"}
    assert {one.kind for one in check([], {}).violations} == {"unfinished"}


def test_a_history_is_read_from_its_file_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    story = good()
    story.close()
    path = tmp_path / "history.ndjson"
    path.write_bytes(b"".join(encode(event) for event in story.events))
    history = History(path)
    assert list(history) == list(history) == story.events
    assert check(history, {JOURNAL: story.content}).ok


def test_a_line_that_is_no_event() -> None:
    with pytest.raises(msgspec.DecodeError):
        list(decode([b'{"type": "nothing"}\n']))


def test_copies_within_a_session() -> None:
    """A session repeats an append until it has succeeded, and never behind a later one."""
    for late in (False, True):
        story = Story()
        first = story.invoke(session="s")
        story.land(first)
        story.complete(first, "unknown")
        if not late:
            story.invoke(op=first, session="s")
            story.acknowledge(first, *story.land(first))
        second = story.invoke(session="s")
        story.acknowledge(second, *story.land(second))
        if late:
            story.land(first)
        kinds = {one.kind for one in story.verdict().violations}
        assert kinds == ({"late"} if late else set())


def test_an_attempt_that_is_answered_for_an_earlier_one() -> None:
    """It began before what stands behind it."""
    story = Story()
    first = story.invoke(session="s")
    place = story.land(first)
    story.complete(first, "unknown")
    other = story.invoke()
    story.acknowledge(other, *story.land(other))
    story.invoke(op=first, session="s")
    story.acknowledge(first, *place)
    assert not story.verdict().violations
