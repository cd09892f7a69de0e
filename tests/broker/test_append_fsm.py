"""The append state machine, state by state; then all of its interleavings that a model can find."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from gazette.broker.append import events as ev
from gazette.broker.append.events import (
    AppendTerms,
    Ending,
    IndexView,
    PeerAnswer,
    SpoolView,
    SuspendControl,
)
from gazette.broker.append.flow_control import RateBalance
from gazette.broker.append.fsm import SYNC_ROUNDS_MAX, AppendFSM, State
from gazette.broker.append.rules import REGISTERS_BYTES_MAX, judge_sync
from gazette.errors import Broken, Bug, Closed, TooLarge, Unavailable
from gazette.protocol.fragment import ZERO_SUM, Codec, Fragment
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import (
    FragmentSpec,
    JournalFlag,
    JournalSpec,
    Suspend,
    SuspendLevel,
)
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet
from gazette.protocol.route import EMPTY_ROUTE, Route
from gazette.protocol.status import Status
from tests.facts import raises

A, B, C = (ProcessId("zone", f"broker-{name}") for name in "abc")
JOURNAL = "a/journal"
NOW = 1_700_000_000.0
SUM = b"\x01" * 20
SPEC = JournalSpec(
    JOURNAL,
    replication=2,
    fragment=FragmentSpec(length=1 << 20, codec=Codec.GZIP, refresh_interval_ns=10**9),
)
AB = Route((A, B), 0)
ABC = Route((A, B, C), 0)


def fragment(begin: int, end: int, **fields: Any) -> Fragment:
    fields.setdefault("codec", Codec.GZIP)
    return Fragment(JOURNAL, begin, end, ZERO_SUM if begin == end else SUM, **fields)


def spool(begin: int, end: int, *registers: tuple[str, str]) -> SpoolView:
    return SpoolView(fragment(begin, end), LabelSet.of(*registers), NOW if begin != end else None)


def resolved(route: Route = AB, **fields: Any) -> ev.Resolved:
    fields.setdefault("status", Status.OK)
    fields.setdefault("revision", 10)
    fields.setdefault("is_primary", True)
    fields.setdefault("spec", SPEC)
    fields.setdefault("stored_routes", (route,) * len(route.members))
    fields.setdefault("desired_replication", 2)
    return ev.Resolved(route=route, **fields)


def ready(begin: int = 0, end: int = 0, **fields: Any) -> ev.ReadinessSeen:
    index = IndexView(begin, end, fields.pop("mod_time", 0))
    fields.setdefault("store_error", None)
    fields.setdefault("now", NOW)
    fields.setdefault("monotonic", 1.0)
    fields.setdefault("store_until", 61.0)
    head = ev.HeadSeen(fields.pop("known_head", 0), fields.pop("closed", None))
    fields.setdefault("head", head)
    return ev.ReadinessSeen(index=index, **fields)


def ok(*peers: ProcessId) -> tuple[PeerAnswer, ...]:
    return tuple(PeerAnswer(peer, Status.OK) for peer in peers or (B,))


def mismatch(peer: ProcessId, at: Fragment, *registers: tuple[str, str]) -> PeerAnswer:
    return PeerAnswer(
        peer, Status.PROPOSAL_MISMATCH, fragment=at, registers=LabelSet.of(*registers)
    )


class Story:
    """Tells a machine what happens, and remembers what it wanted last.

    It also tells, unless ``asks``, that replicas have acknowledged everything, if the machine waits for it,
    and that no store has a closing, if the machine looks for one.
    """

    asks = False

    def __init__(self, terms: AppendTerms | None = None, rate_min: int = 0) -> None:
        self.fsm = AppendFSM(terms or AppendTerms(JOURNAL), rate_min=rate_min)
        self.wants = self.fsm.start()

    def tell(self, *events: ev.Event) -> tuple[ev.Effect, ...]:
        for event in events:
            self.wants = self.fsm.step(event)
            self.fsm._check()
            if self.wants == (ev.AwaitAcks(),) and not self.asks:
                self.wants = self.fsm.step(ev.AllAcknowledged(NOW))
            if self.wants == (ev.SeekClosing(),) and not self.asks:
                self.wants = self.fsm.step(event)
        return self.wants

    def until_ready(self, held: SpoolView, at: ev.Resolved | None = None) -> Story:
        """Pass the common case: the pipeline is in step already."""
        at = at or resolved()
        self.tell(at, ev.PipelineTaken(at.route, held))
        assert self.wants == (ev.CheckReadiness(),)
        return self

    def until_stream(self, held: SpoolView, at: ev.Resolved | None = None) -> Story:
        """Pass the common case, in which no roll is due."""
        self.until_ready(held, at).tell(ready(begin=-1, end=held.fragment.end))
        assert self.wants == (ev.ReadContent(),)
        return self

    @property
    def outcome(self) -> ev.Outcome:
        assert self.fsm.outcome is not None
        assert self.fsm.state.terminal
        assert not self.fsm.holds
        return self.fsm.outcome


def test_common_case_is_one_round_trip() -> None:
    """Between resolution and acknowledgements nothing is asked of a peer."""
    story = Story()
    assert story.wants == (ev.Resolve(0),)
    assert story.tell(resolved()) == (ev.TakePipeline(),)
    held = spool(100, 200, ("k", "v"))
    assert story.tell(ev.PipelineTaken(AB, held)) == (ev.CheckReadiness(),)
    assert story.tell(ready(0, 200)) == (ev.ReadContent(),)
    assert story.tell(ev.ContentRead(b"abc")) == (ev.SendContent(b"abc", 0), ev.ReadContent())
    assert story.tell(ev.ContentRead(b"de")) == (ev.SendContent(b"de", 3), ev.ReadContent())
    assert story.tell(ev.ContentRead(b"")) == (ev.ReadContent(),)
    commit = replace(held.fragment, end=205, sum=b"\x02" * 20)
    assert story.tell(ev.StreamEnded(commit, b"\x03" * 20)) == (
        ev.SendFinal(commit, held.registers),
        ev.HandOver(),
        ev.GatherAcks(),
    )
    assert story.fsm.state is State.READ_ACKNOWLEDGEMENTS
    assert story.tell(ev.AcksGathered(ok())) == ()
    assert story.outcome == ev.Outcome(
        Ending.COMMITTED,
        commit=replace(commit, begin=200, sum=b"\x03" * 20),
        registers=held.registers,
    )


# Resolution.


@pytest.mark.parametrize(
    "status",
    [
        Status.JOURNAL_NOT_FOUND,
        Status.NO_JOURNAL_PRIMARY_BROKER,
        Status.NOT_JOURNAL_PRIMARY_BROKER,
        Status.INSUFFICIENT_JOURNAL_BROKERS,
    ],
)
def test_status_of_resolution_is_the_answer(status: Status) -> None:
    story = Story()
    assert story.tell(resolved(EMPTY_ROUTE, status=status, is_primary=False)) == ()
    assert story.outcome == ev.Outcome(Ending.REFUSED, status)


def test_resolution_that_fails_fails_the_append() -> None:
    story = Story()
    error = Closed("stopped")
    assert story.tell(ev.Failed(error)) == ()
    assert (story.outcome.error, story.outcome.context) == (error, "resolve")
    assert not story.outcome.uncertain


def test_other_primary_is_proxied_to() -> None:
    story = Story()
    assert story.tell(resolved(Route((A, B), 1), is_primary=False)) == ()
    assert story.outcome == ev.Outcome(Ending.PROXY)


@pytest.mark.parametrize("is_primary", [True, False])
def test_too_many_replicas_are_waited_out(is_primary: bool) -> None:
    """Nothing is sent to members that the allocator is about to remove, nor to their primary."""
    story = Story()
    story.tell(resolved(ABC, is_primary=is_primary))
    if is_primary:
        story.tell(ev.PipelineTaken(ABC, spool(0, 0)))
    assert story.wants == (ev.Resolve(11),)
    # Case: still too many, then right. The pipeline was held all along.
    story.tell(resolved(ABC, is_primary=is_primary, revision=14))
    assert story.wants == (ev.Resolve(15),)
    wants = story.tell(resolved(AB, is_primary=is_primary, revision=15))
    assert wants == ((ev.BuildPipeline(),) if is_primary else ())


@pytest.mark.parametrize("is_primary", [True, False])
def test_too_few_replicas_are_refused(is_primary: bool) -> None:
    story = Story()
    story.tell(resolved(AB, is_primary=is_primary, desired_replication=3))
    if is_primary:
        assert story.tell(ev.PipelineTaken(AB, spool(0, 0))) == (ev.GiveBackPipeline(),)
    assert story.outcome.status is Status.INSUFFICIENT_JOURNAL_BROKERS


def test_too_few_replicas_complete_what_they_hold_and_are_refused_then() -> None:
    story = Story()
    held = spool(100, 200, ("k", "v"))
    story.tell(resolved(AB, desired_replication=3), ev.PipelineTaken(AB, held))
    rolled = replace(held.fragment, begin=200, sum=ZERO_SUM)
    assert story.wants == (ev.SendSync(rolled, held.registers, opening=False),)
    assert story.tell(ev.SyncSent(spool(200, 200, ("k", "v")))) == (ev.GatherSync(),)
    assert story.tell(ev.SyncAnswered(ok(), NOW)) == (ev.GiveBackPipeline(),)
    assert story.outcome.status is Status.INSUFFICIENT_JOURNAL_BROKERS


def test_wait_for_the_pipeline_ends_with_its_resolution() -> None:
    story = Story()
    story.tell(resolved())
    assert story.tell(ev.Invalidated()) == (ev.Resolve(0),)
    assert not story.fsm.holds
    assert story.tell(resolved(Route((A, B), 1), is_primary=False)) == ()
    assert story.outcome.ending is Ending.PROXY


def test_pipeline_is_returned_before_the_append_moves_on() -> None:
    """It is given back when, while we held it, another became primary or the replica was replaced."""
    for moved in (
        resolved(Route((A, B), 1), is_primary=False, revision=11),
        resolved(ABC, same_replica=False, revision=11, desired_replication=3),
    ):
        story = Story()
        story.tell(resolved(ABC), ev.PipelineTaken(ABC, spool(0, 9)))
        effects = story.tell(moved)
        assert effects[0] == ev.GiveBackPipeline()
        assert not story.fsm.holds
        # A replaced replica's pipeline is queued for, like any other.
        assert effects[1:] == (() if not moved.is_primary else (ev.TakePipeline(),))


# Building and synchronizing a pipeline.


def begin_sync(story: Story, held: SpoolView, at: ev.Resolved | None = None) -> None:
    story.tell(at or resolved(), ev.PipelineTaken(None, None))
    assert story.wants == (ev.BuildPipeline(),)
    story.tell(ev.PipelineBuilt(held, NOW))


def test_new_pipeline_is_synchronized() -> None:
    """An empty spool is proposed with the codec of the specification; one in use as it is."""
    story = Story()
    begin_sync(story, SpoolView(fragment(0, 0, codec=Codec.NONE), EMPTY_LABELS))
    assert story.wants == (ev.SendSync(fragment(0, 0), EMPTY_LABELS, opening=True),)
    assert story.tell(ev.SyncSent(spool(0, 0))) == (ev.GatherSync(),)
    assert story.tell(ev.SyncAnswered(ok(), NOW)) == (ev.CheckReadiness(),)

    story = Story()
    begin_sync(story, spool(5, 9, ("k", "v")))
    assert story.wants == (ev.SendSync(fragment(5, 9), LabelSet.of(("k", "v")), opening=True),)


@pytest.mark.parametrize("route", [Route((A, B), 1), Route((A, C), 0), ABC])
def test_pipeline_of_another_route_is_replaced(route: Route) -> None:
    story = Story()
    assert story.tell(resolved(), ev.PipelineTaken(route, spool(0, 9))) == (ev.BuildPipeline(),)


def test_route_may_change_while_the_spool_is_waited_for() -> None:
    """The right to build the pipeline is kept meanwhile."""
    story = Story()
    story.tell(resolved(), ev.PipelineTaken(None, None), ev.Invalidated())
    assert story.wants == (ev.Resolve(0),)
    assert story.fsm.holds
    assert story.tell(resolved(revision=12)) == (ev.BuildPipeline(),)
    # Case: the wait fails.
    error = Unavailable("no endpoint")
    assert story.tell(ev.Failed(error)) == (ev.GiveBackPipeline(),)
    assert story.outcome.context == "waiting for spool"


def test_peer_that_joined_makes_us_roll() -> None:
    """A peer that cannot continue our fragment rolls to its end, and so do we."""
    story = Story()
    begin_sync(story, spool(5, 9, ("k", "v")))
    story.tell(ev.SyncSent(spool(5, 9, ("k", "v"))))
    story.tell(ev.SyncAnswered((mismatch(B, fragment(9, 9), ("k", "v")),), NOW))
    assert story.wants == (ev.SendSync(fragment(9, 9), LabelSet.of(("k", "v")), opening=False),)
    story.tell(ev.SyncSent(spool(9, 9, ("k", "v"))))
    assert story.tell(ev.SyncAnswered(ok(), NOW)) == (ev.CheckReadiness(),)


def test_peer_that_is_ahead_is_followed_with_its_registers() -> None:
    """No byte that any replica committed is lost; of several peers, the farthest counts."""
    at = resolved(ABC, desired_replication=3)
    story = Story()
    begin_sync(story, spool(0, 100), at)
    story.tell(ev.SyncSent(spool(0, 100)))
    answers = (
        mismatch(B, fragment(0, 120), ("author", "new")),
        mismatch(C, fragment(50, 110), ("author", "old")),
    )
    story.tell(ev.SyncAnswered(answers, NOW))
    registers = LabelSet.of(("author", "new"))
    assert story.wants == (ev.SendSync(fragment(120, 120), registers, opening=False),)
    # Case: our own spool took them over. B still holds [0, 120), which is complete now.
    story.tell(ev.SyncSent(SpoolView(fragment(120, 120), registers)))
    story.tell(ev.SyncAnswered((*ok(B), mismatch(C, fragment(120, 120), ("author", "new"))), NOW))
    assert story.wants == (ev.SendSync(fragment(120, 120), registers, opening=False),)


def test_newer_route_comes_before_a_roll() -> None:
    """Its peer has closed the stream, so that another round on this pipeline could not succeed."""
    at = resolved(ABC, desired_replication=3)
    for order in (1, -1):
        story = Story()
        begin_sync(story, spool(0, 100), at)
        story.tell(ev.SyncSent(spool(0, 100)))
        answers = (
            PeerAnswer(B, Status.WRONG_ROUTE, route=AB, revision=17),
            mismatch(C, fragment(0, 120)),
        )[::order]
        effects = story.tell(ev.SyncAnswered(answers, NOW, error=Broken("another peer is gone")))
        assert effects == (ev.TearDownPipeline(), ev.Resolve(17))
        assert not story.fsm.holds
        assert story.fsm.roll_to == 0


def test_peer_that_left_the_route_makes_us_resolve_again() -> None:
    """Whatever its status: what counts is that it knows a later revision, with another route."""
    for status in (Status.NOT_JOURNAL_BROKER, Status.JOURNAL_NOT_FOUND, Status.SUSPENDED):
        story = Story()
        begin_sync(story, spool(0, 100))
        story.tell(ev.SyncSent(spool(0, 100)))
        answer = PeerAnswer(B, status, route=Route((A,), 0), revision=12)
        story.tell(ev.SyncAnswered((answer,), NOW))
        assert story.wants == (ev.TearDownPipeline(), ev.Resolve(12))


@pytest.mark.parametrize(
    "answer",
    [
        PeerAnswer(B, Status.WRONG_ROUTE, route=AB, revision=99),  # the same route
        PeerAnswer(B, Status.WRONG_ROUTE, route=ABC, revision=10),  # no later than ours
        PeerAnswer(B, Status.WRONG_ROUTE),
        mismatch(B, fragment(50, 99)),  # behind, although it has seen our end
        mismatch(B, fragment(50, 100)),  # our end, but it holds something else
        PeerAnswer(B, Status.NOT_JOURNAL_BROKER),
    ],
)
def test_answer_that_makes_no_sense_breaks_the_pipeline(answer: PeerAnswer) -> None:
    story = Story()
    begin_sync(story, spool(0, 100))
    story.tell(ev.SyncSent(spool(0, 100)))
    assert story.tell(ev.SyncAnswered((answer,), NOW)) == (ev.TearDownPipeline(),)
    assert isinstance(story.outcome.error, Broken)
    assert f"unexpected {answer.status.name}" in str(story.outcome.error)
    assert not story.outcome.uncertain


def test_peer_that_does_not_answer_fails_the_append() -> None:
    story = Story()
    begin_sync(story, spool(0, 100), resolved(ABC, desired_replication=3))
    story.tell(ev.SyncSent(spool(0, 100)))
    error = Unavailable("peer does not answer")
    assert story.tell(ev.SyncAnswered(ok(B), NOW, error=error)) == (ev.TearDownPipeline(),)
    assert (story.outcome.error, story.outcome.context) == (error, "gatherSync")


def test_a_synchronization_that_a_change_of_the_route_cut_short_begins_again() -> None:
    """Also if the new route equals the old one: a peer may be the same, and have a new life."""
    story = Story()
    begin_sync(story, spool(0, 100))
    story.tell(ev.SyncSent(spool(0, 100)))
    assert story.tell(ev.Invalidated()) == (ev.TearDownPipeline(), ev.Resolve(0))
    assert not story.fsm.holds
    assert story.tell(resolved()) == (ev.TakePipeline(),)


def test_replicas_that_never_agree_are_given_up() -> None:
    """Two spools with the same end and different registers would answer each other for ever."""
    story = Story()
    begin_sync(story, spool(9, 9, ("k", "ours")))
    rounds = 0
    while not story.fsm.state.terminal:
        rounds += 1
        story.tell(ev.SyncSent(spool(9, 9, ("k", "ours"))))
        story.tell(ev.SyncAnswered((mismatch(B, fragment(9, 9), ("k", "theirs")),), NOW))
    assert rounds == SYNC_ROUNDS_MAX
    assert story.wants == (ev.TearDownPipeline(),)
    assert "cannot agree" in str(story.outcome.error)
    # Case: so would two at the very beginning of a journal.
    at = resolved()
    answers = (mismatch(B, fragment(0, 0), ("k", "theirs")),)
    assert judge_sync(answers, at, fragment(0, 0), None).roll_to == 0


def test_route_is_advertised_once_synchronized() -> None:
    stored = (AB, EMPTY_ROUTE)
    story = Story()
    begin_sync(
        story, spool(0, 9), resolved(replace(AB, endpoints=("x", "y")), stored_routes=stored)
    )
    story.tell(ev.SyncSent(spool(0, 9)), ev.SyncAnswered(ok(), NOW))
    assert story.wants == (ev.PutAssignments(AB),)
    assert story.tell(ev.EtcdWritten(15)) == (ev.Resolve(15),)
    # Case: the pipeline is in step now, and nothing is left to do but the append.
    assert story.tell(resolved(revision=15)) == (ev.CheckReadiness(),)


def test_failure_of_etcd_keeps_the_pipeline() -> None:
    story = Story()
    story.tell(resolved(stored_routes=(AB,)), ev.PipelineTaken(AB, spool(0, 9)))
    assert story.wants == (ev.PutAssignments(AB),)
    assert story.tell(ev.Failed(Unavailable("etcd"))) == (ev.GiveBackPipeline(),)
    assert story.outcome.context == "updateAssignments"


# Preconditions.


def test_a_closing_is_looked_for_once_if_the_head_is_open() -> None:
    stored = resolved(spec=replace(SPEC, fragment=replace(SPEC.fragment, stores=("s3://one/",))))
    story = Story().until_ready(spool(0, 0), stored)
    story.asks = True
    story.tell(ready(0, 9, known_head=5))
    assert story.wants == (ev.SeekClosing(),)
    # Case: it was adopted, so the head is closed.
    story.tell(ready(0, 9, known_head=9, closed=LabelSet.of(("k", "v"))))
    (sync,) = story.wants
    assert isinstance(sync, ev.SendSync)
    assert (sync.proposal.begin, sync.registers) == (9, LabelSet.of(("k", "v")))
    # Case: no store has one, as the answer says.
    story = Story().until_ready(spool(0, 0), stored)
    story.asks = True
    story.tell(ready(0, 9, known_head=12))
    story.tell(ready(0, 9, head=ev.HeadSeen(12, None, "no closing")))
    assert story.fsm.outcome is not None
    assert story.fsm.outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    assert story.fsm.outcome.store_error.endswith("; no closing")
    # Case: a closed head needs none.
    story = Story().until_ready(spool(0, 0), stored)
    story.asks = True
    story.tell(ready(0, 9, known_head=12, closed=LabelSet()))
    assert story.wants == (ev.GiveBackPipeline(),)


def test_the_known_head_is_read_first() -> None:
    story = Story().until_ready(spool(0, 9))
    assert story.tell(ready(-1, 9, head=None, unlisted="not yet")) == (ev.LoadHead(),)
    assert story.tell(ready(-1, 12)) == (ev.GiveBackPipeline(),)
    assert story.outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    # Case: etcd does not answer.
    story = Story().until_ready(spool(0, 9))
    story.tell(ready(-1, 9, head=None), ev.Failed(Unavailable("etcd")))
    assert story.wants == (ev.GiveBackPipeline(),)


def test_first_listing_and_healthy_store_are_waited_for() -> None:
    story = Story().until_ready(spool(0, 9))
    assert story.tell(ready(unlisted="not yet")) == (ev.AwaitReadiness(61.0),)
    later = ready(0, 9, store_error="is down", monotonic=2.0)
    assert story.tell(later) == (ev.AwaitReadiness(61.0),)
    assert story.tell(ready(-1, 9, monotonic=3.0)) == (ev.ReadContent(),)


def test_store_that_stays_unhealthy_refuses_appends() -> None:
    story = Story().until_ready(spool(0, 9))
    for _ in range(9):
        assert story.tell(ready(store_error="is down")) == (ev.AwaitReadiness(61.0),)
    late = ready(store_error="is down", monotonic=61.0)
    assert story.tell(late) == (ev.GiveBackPipeline(),)
    assert story.outcome.status is Status.FRAGMENT_STORE_UNHEALTHY
    assert story.outcome.store_error == "is down"
    # Case: the store is healthy, and yet cannot be listed.
    story = Story().until_ready(spool(0, 9))
    story.tell(ready(unlisted="not yet"))
    story.tell(ready(unlisted="no permission", monotonic=61.0))
    assert story.outcome.store_error == "no permission"


@pytest.mark.parametrize(("offset", "undecided_to"), [(None, 10), (9, 10), (9, 1 << 40)])
def test_offsets_of_unexplained_fragments_are_not_given_out(
    offset: int | None, undecided_to: int
) -> None:
    """Also to an append that names its offset, as `reset-head` does. Behind them, appends go on."""
    story = Story(AppendTerms(JOURNAL, offset=offset)).until_ready(spool(0, 9))
    story.tell(ready(-1, 9, undecided_to=undecided_to, undecided="whose?"))
    assert story.outcome.status is Status.FRAGMENT_STORE_UNHEALTHY
    assert story.outcome.store_error == "whose?"
    story = Story(AppendTerms(JOURNAL, offset=offset)).until_ready(spool(0, 9))
    assert story.tell(ready(-1, 9, undecided_to=9)) == (ev.ReadContent(),)


def test_a_tenure_begins_where_stores_may_have_bytes_of_former_primaries() -> None:
    story = Story().until_ready(spool(0, 9))
    assert story.tell(ready(-1, 9, must_begin=True)) == (ev.BeginTenure(9),)
    assert story.tell(ready(-1, 9)) == (ev.ReadContent(),)
    # Case: they have.
    story = Story().until_ready(spool(0, 9))
    story.tell(ready(-1, 9, must_begin=True), ready(-1, 12))
    assert story.outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    # Case: they could not be listed.
    story = Story().until_ready(spool(0, 9))
    story.tell(ready(-1, 9, must_begin=True), ev.Failed(Unavailable("not in time")))
    assert story.wants == (ev.GiveBackPipeline(),)
    # Case: a pulse has no content that could hide theirs.
    story = Story(AppendTerms(JOURNAL, suspend=SuspendControl.KEEP)).until_ready(spool(0, 9))
    assert story.tell(ready(-1, 9, must_begin=True)) == (ev.ReadContent(),)


def test_route_may_change_while_the_store_is_waited_for() -> None:
    story = Story().until_ready(spool(0, 9))
    story.tell(ready(unlisted="not yet"))
    assert story.tell(ev.Invalidated()) == (ev.Resolve(0),)
    assert story.fsm.holds


MATCHING = LabelSelector.of(k="v")
READ_ONLY = replace(SPEC, flags=JournalFlag.O_RDONLY)


@pytest.mark.parametrize(
    ("terms", "held", "index_end", "spec", "expected"),
    [
        # Registers: checked if the journal has any.
        ({"check_registers": MATCHING}, spool(0, 9, ("k", "v")), 9, SPEC, None),
        ({"check_registers": MATCHING}, spool(0, 9), 9, SPEC, None),
        ({"check_registers": MATCHING}, spool(0, 9, ("k", "w")), 9, SPEC, Status.REGISTER_MISMATCH),
        ({"check_registers": MATCHING}, spool(0, 9, ("x", "v")), 9, SPEC, Status.REGISTER_MISMATCH),
        # Their check comes before that of offsets.
        (
            {"check_registers": MATCHING, "offset": 3},
            spool(0, 9, ("k", "w")),
            20,
            SPEC,
            Status.REGISTER_MISMATCH,
        ),
        # Offsets: the head is the greater of spool and index.
        ({}, spool(0, 9), 5, SPEC, None),
        ({}, spool(0, 9), 10, SPEC, Status.INDEX_HAS_GREATER_OFFSET),
        ({}, spool(0, 9), 10, READ_ONLY, None),
        ({"offset": 9}, spool(0, 9), 9, SPEC, None),
        ({"offset": 8}, spool(0, 9), 9, SPEC, Status.WRONG_APPEND_OFFSET),
        ({"offset": 10}, spool(0, 9), 9, SPEC, Status.WRONG_APPEND_OFFSET),
        ({"offset": 9}, spool(0, 9), 10, SPEC, Status.WRONG_APPEND_OFFSET),
    ],
)
def test_preconditions(
    terms: Any, held: SpoolView, index_end: int, spec: JournalSpec, expected: Status | None
) -> None:
    story = Story(AppendTerms(JOURNAL, **terms)).until_ready(held, resolved(spec=spec))
    story.tell(ready(-1, index_end))
    if expected is None:
        assert story.wants == (ev.ReadContent(),)
    else:
        assert story.wants == (ev.GiveBackPipeline(),)
        assert story.outcome == ev.Outcome(Ending.REFUSED, expected, registers=held.registers)


def test_explicit_offset_resets_the_head_and_synchronizes_once() -> None:
    story = Story(AppendTerms(JOURNAL, offset=50)).until_ready(spool(0, 0, ("k", "v")))
    assert story.tell(ready(0, 50)) == (ev.ConfirmHead(50),), "what is missing is lost"
    assert story.tell(ready(0, 50)) == (
        ev.SendSync(fragment(50, 50), LabelSet.of(("k", "v")), opening=False),
    )
    story.tell(ev.SyncSent(spool(50, 50, ("k", "v"))), ev.SyncAnswered(ok(), NOW))
    assert story.wants == (ev.CheckReadiness(),)
    assert story.tell(ready(0, 50)) == (ev.ReadContent(),)


def test_suspended_offset_is_resumed_at() -> None:
    """A journal that was suspended goes on where it was, although its store may be empty."""
    spec = replace(SPEC, suspend=Suspend(SuspendLevel.NONE, 70))
    story = Story().until_ready(spool(0, 0), resolved(spec=spec))
    assert story.tell(ready(0, 0)) == (ev.SendSync(fragment(70, 70), EMPTY_LABELS, opening=False),)
    # Case: its head was closed there, so its registers are known.
    closed = LabelSet.of(("k", "v"))
    for known, index_end, registers in ((70, 70, closed), (70, 0, closed), (60, 60, EMPTY_LABELS)):
        story = Story().until_ready(spool(0, 0), resolved(spec=spec))
        wants = story.tell(ready(0, index_end, known_head=known, closed=closed))
        assert wants == (ev.SendSync(fragment(70, 70), registers, opening=False),)
    # Case: it is already beyond.
    story = Story().until_ready(spool(70, 71), resolved(spec=spec))
    assert story.tell(ready(0, 71)) == (ev.ReadContent(),)


def test_first_append_of_a_journal_becomes_a_fragment_of_its_own() -> None:
    """The roll is proposed before the content of the next append; no peer needs to answer it."""
    story = Story().until_ready(spool(0, 9, ("k", "v")))
    assert story.tell(ready(0, 9)) == (ev.SendRoll(fragment(9, 9), LabelSet.of(("k", "v"))),)
    assert story.tell(ev.RollSent(spool(9, 9, ("k", "v")))) == (ev.ReadContent(),)
    story.tell(ev.ContentRead(b"x"), ev.ContentRead(b""))
    story.tell(ev.StreamEnded(fragment(9, 10), SUM), ev.AcksGathered(ok()))
    assert story.outcome.commit == fragment(9, 10)
    # Case: an empty spool that has the right codec needs no roll.
    assert Story().until_ready(spool(9, 9)).tell(ready(9, 9)) == (ev.ReadContent(),)


@pytest.mark.parametrize("synchronizes", [False, True])
def test_no_fragment_is_completed_before_all_replicas_have_it(synchronizes: bool) -> None:
    """A later pipeline brings peers up to date with the open fragment, and not with completed ones."""
    held = spool(0, 9, ("k", "v"))
    story = Story()
    story.asks = True
    if synchronizes:
        story.tell(resolved(AB, desired_replication=3), ev.PipelineTaken(AB, held))
    else:
        story.until_ready(held).tell(ready(0, 9))
    assert story.wants == (ev.AwaitAcks(),)
    # Case: an earlier append was not acknowledged. Nothing was proposed.
    broken = Broken("recv")
    failed = copy.deepcopy(story)
    assert failed.tell(ev.SendFailed(broken)) == (ev.TearDownPipeline(),)
    assert failed.outcome.error is broken
    assert not failed.outcome.uncertain
    # Case: the caller leaves.
    left = copy.deepcopy(story)
    wanted = ev.GiveBackPipeline() if synchronizes else ev.SendFinal(held.fragment, held.registers)
    assert left.tell(ev.Abandoned(broken))[0] == wanted
    # Case: all have it.
    proposal = story.tell(ev.AllAcknowledged(NOW))[0]
    assert isinstance(proposal, ev.SendSync if synchronizes else ev.SendRoll)
    assert proposal.proposal == fragment(9, 9)


# Suspension: what is done, by level of the specification and control of the append.

FULL, PARTIAL, NONE = SuspendLevel.FULL, SuspendLevel.PARTIAL, SuspendLevel.NONE
DAY = 24 * 3600
EMPTY_INDEX = {"begin": 0, "end": 0}
CLEAN = {"begin": -1, "end": 9, "mod_time": int(NOW) - DAY - 1}
LOCAL = {"begin": -1, "end": 9, "mod_time": 0}
RECENT = {"begin": -1, "end": 9, "mod_time": int(NOW) - DAY + 1}


@pytest.mark.parametrize(
    ("level", "control", "index", "expected"),
    [
        (NONE, SuspendControl.RESUME, CLEAN, "append"),
        (NONE, SuspendControl.NO_RESUME, CLEAN, "append"),
        (NONE, SuspendControl.KEEP, CLEAN, "append"),
        (NONE, SuspendControl.IF_FLUSHED, EMPTY_INDEX, FULL),
        (NONE, SuspendControl.IF_FLUSHED, CLEAN, PARTIAL),
        (NONE, SuspendControl.IF_FLUSHED, LOCAL, "append"),
        (NONE, SuspendControl.IF_FLUSHED, RECENT, "append"),
        (NONE, SuspendControl.NOW, EMPTY_INDEX, FULL),
        (NONE, SuspendControl.NOW, CLEAN, PARTIAL),
        (NONE, SuspendControl.NOW, LOCAL, PARTIAL),
        (PARTIAL, SuspendControl.RESUME, CLEAN, NONE),
        (PARTIAL, SuspendControl.NO_RESUME, CLEAN, "suspended"),
        (PARTIAL, SuspendControl.KEEP, CLEAN, "append"),
        (PARTIAL, SuspendControl.IF_FLUSHED, EMPTY_INDEX, FULL),
        (PARTIAL, SuspendControl.IF_FLUSHED, LOCAL, "flush"),
        (PARTIAL, SuspendControl.NOW, EMPTY_INDEX, FULL),
        (PARTIAL, SuspendControl.NOW, CLEAN, "flush"),
    ],
)
def test_suspension(
    level: SuspendLevel, control: SuspendControl, index: Any, expected: Any
) -> None:
    end = index["end"]
    spec = replace(SPEC, suspend=Suspend(level, 0) if level is not NONE else None)
    held = spool(0, end)
    story = Story(AppendTerms(JOURNAL, suspend=control)).until_ready(held, resolved(spec=spec))
    story.tell(ready(**index))
    if isinstance(expected, SuspendLevel):
        assert story.wants == (ev.PutSuspend(expected, end),)
        assert story.tell(ev.EtcdWritten(33)) == (ev.Resolve(33),)
        assert story.fsm.holds
        # What SUSPEND_NOW leaves in the spool is flushed by the next proposal.
        assert story.fsm.roll_to == (end if control is SuspendControl.NOW else 0)
    elif expected == "suspended":
        assert story.wants == (ev.GiveBackPipeline(),)
        assert story.outcome.status is Status.SUSPENDED
    else:
        assert story.wants == (ev.ReadContent(),)
        story.tell(ev.ContentRead(b""), ev.StreamEnded(held.fragment, b""))
        story.tell(ev.AcksGathered(ok()))
        status = Status.SUSPENDED if expected == "flush" else Status.OK
        assert story.outcome.status is status


@pytest.mark.parametrize("control", list(SuspendControl))
def test_full_suspension_is_ended_by_resuming_appends_only(control: SuspendControl) -> None:
    spec = replace(SPEC, suspend=Suspend(FULL, 77))
    story = Story(AppendTerms(JOURNAL, suspend=control))
    story.tell(resolved(EMPTY_ROUTE, status=Status.SUSPENDED, is_primary=False, spec=spec))
    if control is SuspendControl.RESUME:
        assert story.wants == (ev.PutSuspend(NONE, 77),)
    else:
        assert story.wants == ()
        assert story.outcome.status is Status.SUSPENDED


def test_suspension_now_rolls_when_the_pipeline_is_rebuilt() -> None:
    story = Story(AppendTerms(JOURNAL, suspend=SuspendControl.NOW)).until_ready(spool(4, 9))
    story.tell(ready(0, 9, mod_time=0), ev.EtcdWritten(20))
    alone = Route((A,), 0)
    spec = replace(SPEC, suspend=Suspend(PARTIAL, 9))
    story.tell(resolved(alone, spec=spec, desired_replication=1, revision=21))
    assert story.wants == (ev.BuildPipeline(),)
    wants = story.tell(ev.PipelineBuilt(spool(4, 9), NOW))
    assert wants == (ev.SendSync(fragment(9, 9), EMPTY_LABELS, opening=True),)


def test_bytes_that_peers_had_to_be_sent_are_completed_at_once() -> None:
    """They have lost holders since they were acknowledged: the store gets them now."""
    story = Story()
    story.tell(resolved(), ev.PipelineTaken(None, None))
    story.tell(ev.PipelineBuilt(spool(4, 9), NOW, caught_up=True))
    assert story.wants == (ev.SendSync(fragment(9, 9), EMPTY_LABELS, opening=True),)


def test_roll_is_forgotten_with_the_pipeline() -> None:
    """Others append while we do not hold it; what we meant to complete is complete by then."""
    story = Story(AppendTerms(JOURNAL, suspend=SuspendControl.NOW)).until_ready(spool(4, 9))
    story.tell(ready(0, 9), ev.EtcdWritten(20))
    assert story.fsm.roll_to == 9
    effects = story.tell(resolved(same_replica=False, revision=20))
    assert effects == (ev.GiveBackPipeline(), ev.TakePipeline())
    story.tell(ev.PipelineTaken(None, None), ev.PipelineBuilt(spool(12, 30), NOW))
    assert story.wants == (ev.SendSync(fragment(12, 30), EMPTY_LABELS, opening=True),)


# Content.


def test_registers_are_subtracted_from_and_then_united() -> None:
    """The request's labels win over those which were there, name by name."""
    terms = AppendTerms(
        JOURNAL,
        union_registers=LabelSet.of(("author", "me"), ("new", "1")),
        subtract_registers=LabelSet.of(("drop", "x"), ("keep", "other"), ("author", "you")),
    )
    held = spool(4, 9, ("author", "them"), ("drop", "x"), ("keep", "this"))
    story = Story(terms).until_stream(held)
    story.tell(ev.ContentRead(b"x"), ev.ContentRead(b""))
    effects = story.tell(ev.StreamEnded(fragment(4, 10), SUM))
    expected = LabelSet.of(("author", "me"), ("keep", "this"), ("new", "1"))
    assert effects[0] == ev.SendFinal(fragment(4, 10), expected)
    story.tell(ev.AcksGathered(ok()))
    assert story.outcome.registers == expected


def sized(size: int, name: str = "rr") -> LabelSet:
    """Return registers whose encoded form has exactly ``size`` bytes."""
    labels = LabelSet()
    for index in range(size):
        label = (f"{name}-{index:06d}", "v" * 900)
        if labels.with_added(*label).encoded_bytes > size - 64:
            break
        labels = labels.with_added(*label)
    for length in range(1000):
        if (whole := labels.with_added(f"{name}-last", "v" * length)).encoded_bytes == size:
            return whole
    raise AssertionError("no such set")


OVER_LIMIT = sized(REGISTERS_BYTES_MAX + 1)


@pytest.mark.parametrize(
    ("terms", "field"),
    [
        ({"union_registers": OVER_LIMIT}, "UnionRegisters"),
        ({"subtract_registers": OVER_LIMIT}, "SubtractRegisters"),
        ({"check_registers": LabelSelector(OVER_LIMIT)}, "CheckRegisters"),
        (
            {"check_registers": LabelSelector(sized(40_000), sized(REGISTERS_BYTES_MAX - 39_999))},
            "CheckRegisters",
        ),
    ],
)
def test_an_append_that_names_too_many_registers_is_refused_before_anything(
    terms: dict[str, Any], field: str
) -> None:
    story = Story(AppendTerms(JOURNAL, **terms))
    assert story.wants == ()
    error = story.outcome.error
    assert isinstance(error, TooLarge)
    assert error.path == field
    assert error.facts["limit_bytes"] == 65_536
    assert error.facts["bytes"] > 65_536


def test_registers_do_not_grow_beyond_their_limit() -> None:
    """The refusal comes before content is read, and gives the pipeline back as it was."""
    held = SpoolView(fragment(4, 9), sized(40_000, "aa"), NOW)
    union = sized(30_000, "bb")
    story = Story(AppendTerms(JOURNAL, union_registers=union)).until_ready(held)
    assert story.tell(ready(-1, 9)) == (ev.GiveBackPipeline(),)
    error = story.outcome.error
    assert isinstance(error, TooLarge)
    assert error.facts == {"bytes": 70_000, "limit_bytes": 65_536}
    assert story.outcome.uncertain is False


def test_registers_may_be_as_large_as_their_limit() -> None:
    story = Story(AppendTerms(JOURNAL, union_registers=sized(REGISTERS_BYTES_MAX)))
    story.until_stream(spool(4, 9))


@pytest.mark.parametrize(
    ("terms", "accepted"),
    [
        ({}, True),
        ({"subtract_registers": LabelSet.of(("aa-000003", "v" * 900))}, True),
        ({"union_registers": LabelSet.of(("aa-000003", "w" * 900))}, True),
        ({"union_registers": LabelSet.of(("aa-000003", "w" * 901))}, False),
        ({"union_registers": LabelSet.of(("new", "one"))}, False),
    ],
)
def test_registers_beyond_the_limit_may_change_but_not_grow(
    terms: dict[str, Any], accepted: bool
) -> None:
    """A broker of an older version has let them become so large."""
    held = SpoolView(fragment(4, 9), sized(3 * REGISTERS_BYTES_MAX, "aa"), NOW)
    story = Story(AppendTerms(JOURNAL, **terms)).until_ready(held)
    wanted: tuple[ev.Effect, ...] = (ev.ReadContent(),) if accepted else (ev.GiveBackPipeline(),)
    assert story.tell(ready(-1, 9)) == wanted


def test_a_synchronization_adopts_registers_beyond_the_limit() -> None:
    """What a peer holds is not ours to refuse: the replicas would never be in step."""
    held, theirs = spool(4, 9), sized(3 * REGISTERS_BYTES_MAX)
    story = Story(AppendTerms(JOURNAL))
    story.tell(resolved(), ev.PipelineTaken(None, None), ev.PipelineBuilt(held, NOW))
    story.tell(ev.SyncSent(held))
    answer = PeerAnswer(B, Status.PROPOSAL_MISMATCH, fragment=fragment(4, 20), registers=theirs)
    story.tell(ev.SyncAnswered((answer,), NOW))
    assert story.wants == (ev.SendSync(fragment(20, 20), theirs, opening=False),)


def test_barrier_is_an_append_without_content() -> None:
    held = spool(4, 9, ("k", "v"))
    story = Story().until_stream(held)
    story.tell(ev.ContentRead(b""))
    assert story.tell(ev.StreamEnded(held.fragment, b"ignored"))[0] == ev.SendFinal(
        held.fragment, held.registers
    )
    story.tell(ev.AcksGathered(ok()))
    assert story.outcome.commit == fragment(9, 9)
    assert story.outcome.registers == held.registers


ROLLS_BACK: list[tuple[Any, list[ev.Event], str]] = [
    ({}, [ev.ContentRead(b"x"), ev.StreamEnded(fragment(4, 10), SUM)], "unexpected EOF"),
    ({}, [ev.StreamEnded(fragment(4, 9), SUM)], "unexpected EOF"),
    (
        {},
        [ev.ContentRead(b""), ev.ContentRead(b"x")],
        "expected EOF after empty Content chunk",
    ),
    ({}, [ev.ContentRead(b""), ev.ContentRead(b"")], "expected EOF after empty Content chunk"),
    ({}, [ev.ContentRead(b"x"), ev.StreamFailed(Broken("torn"))], "torn"),
    ({}, [ev.StreamFailed(Broken("torn"))], "torn"),
    ({}, [ev.ContentRead(b"x"), ev.Abandoned(Broken("gone"))], "gone"),
    (
        {"union_registers": LabelSet.of(("k", "v"))},
        [ev.ContentRead(b""), ev.StreamEnded(fragment(4, 9), SUM)],
        "register modification requires non-empty Append",
    ),
    (
        {"subtract_registers": LabelSet.of(("k", "v"))},
        [ev.ContentRead(b""), ev.StreamEnded(fragment(4, 9), SUM)],
        "register modification requires non-empty Append",
    ),
]


@pytest.mark.parametrize(("terms", "events", "text"), ROLLS_BACK)
def test_bad_stream_is_rolled_back(terms: Any, events: list[ev.Event], text: str) -> None:
    held = spool(4, 9, ("k", "v"))
    story = Story(AppendTerms(JOURNAL, **terms)).until_stream(held)
    story.tell(*events)
    rollback = (ev.SendFinal(held.fragment, held.registers), ev.HandOver(), ev.GatherAcks())
    assert story.wants == rollback
    assert story.tell(ev.AcksGathered(ok())) == ()
    assert story.outcome.ending is Ending.FAILED
    assert str(story.outcome.error) == text
    assert story.outcome.context == "append stream"
    assert not story.outcome.uncertain


@pytest.mark.parametrize(
    ("control", "spec"),
    [
        (SuspendControl.RESUME, READ_ONLY),
        (SuspendControl.KEEP, SPEC),
        (SuspendControl.IF_FLUSHED, SPEC),
        (SuspendControl.NOW, replace(SPEC, suspend=Suspend(PARTIAL, 0))),
    ],
)
def test_content_may_not_be_allowed(control: SuspendControl, spec: JournalSpec) -> None:
    """A barrier is, and so is the empty end of any append."""
    held = spool(4, 9)
    story = Story(AppendTerms(JOURNAL, suspend=control)).until_ready(held, resolved(spec=spec))
    story.tell(ready(-1, 9))
    story.tell(ev.ContentRead(b"x"))
    assert story.wants[0] == ev.SendFinal(held.fragment, held.registers)
    story.tell(ev.AcksGathered(ok()))
    assert story.outcome.status is Status.NOT_ALLOWED
    assert story.outcome.commit is None


@pytest.mark.parametrize("last", [ev.ContentRead(b"xy"), None])
def test_peer_lost_while_content_is_sent(last: ev.Event | None) -> None:
    """Nothing was proposed for commit, so nothing can have been appended."""
    story = Story().until_ready(spool(0, 9))
    story.tell(ready(0, 9))
    error = Unavailable("peer takes no content")
    if last is not None:
        story.tell(ev.RollSent(spool(9, 9)), last)
    assert story.tell(ev.SendFailed(error)) == (ev.TearDownPipeline(),)
    assert (story.outcome.error, story.outcome.uncertain) == (error, False)


def committed(story: Story) -> Story:
    story.tell(ev.ContentRead(b"x"), ev.ContentRead(b""))
    story.tell(ev.StreamEnded(fragment(4, 10), SUM))
    return story


def test_commit_that_is_not_acknowledged_is_uncertain() -> None:
    error = Unavailable("peer does not answer")
    # Case: an answer is missing. The pipeline has been handed over: its holder must find out.
    story = committed(Story().until_stream(spool(4, 9)))
    assert story.tell(ev.GatherFailed(error)) == (ev.BreakPipeline(error),)
    assert (story.outcome.error, story.outcome.uncertain) == (error, True)
    # Case: a peer says no.
    story = committed(Story().until_stream(spool(4, 9)))
    effects = story.tell(ev.AcksGathered((mismatch(B, fragment(4, 9)),)))
    assert isinstance(effects[0], ev.BreakPipeline)
    assert "unexpected PROPOSAL_MISMATCH" in str(story.outcome.error)
    assert story.outcome.uncertain
    # Case: it could not even be sent to all. The pipeline is still ours.
    story = committed(Story().until_stream(spool(4, 9)))
    assert story.tell(ev.SendFailed(error)) == (ev.TearDownPipeline(),)
    assert (story.outcome.error, story.outcome.uncertain) == (error, True)


def test_unacknowledged_roll_back_says_why_it_was_rolled_back() -> None:
    story = Story().until_stream(spool(4, 9))
    story.tell(ev.ContentRead(b"x"), ev.StreamFailed(Broken("torn")))
    effects = story.tell(ev.GatherFailed(Unavailable("peer is gone")))
    assert isinstance(effects[0], ev.BreakPipeline)
    assert str(story.outcome.error) == "torn"
    assert not story.outcome.uncertain


def test_failed_barrier_is_not_uncertain() -> None:
    story = Story().until_stream(spool(4, 9))
    story.tell(ev.ContentRead(b""), ev.StreamEnded(fragment(4, 9), SUM))
    story.tell(ev.GatherFailed(Unavailable("peer is gone")))
    assert story.outcome.ending is Ending.FAILED
    assert not story.outcome.uncertain


# Rates.

ROLLED_BACK = spool(4, 9).fragment, EMPTY_LABELS


def limited(rate_max: int, balance: RateBalance, rate_min: int = 0) -> Story:
    """Return a story whose content is read next, at tick 0 of a new balance."""
    story = Story(rate_min=rate_min)
    spec = replace(SPEC, max_append_rate=rate_max)
    held = spool(4, 9)
    story.tell(resolved(spec=spec), ev.PipelineTaken(AB, held, balance), ready(-1, 9))
    return story


def test_content_above_the_rate_is_held_back_and_then_sent() -> None:
    balance = RateBalance()
    story = limited(100, balance)
    # Case: a burst is let through, in debt.
    assert story.tell(ev.ContentRead(b"x" * 150, now=0))[0] == ev.SendContent(b"x" * 150, 0)
    assert story.tell(ev.ContentRead(b"y", now=0)) == (ev.HoldContent(501),)
    # Case: woken too early, it is held back for the rest.
    assert story.tell(ev.ContentHeld(500)) == (ev.HoldContent(1),)
    assert story.tell(ev.ContentHeld(501))[0] == ev.SendContent(b"y", 150)
    flow = story.fsm.flow
    assert flow is not None
    assert (flow.total_chunks, flow.delayed_chunks) == (2, 1)
    # Case: the next append of the journal has the same balance.
    later = limited(100, balance)
    assert later.tell(ev.ContentRead(b"z", now=501)) == (ev.HoldContent(10),)


def test_content_is_held_back_no_longer_when_the_route_changes() -> None:
    story = limited(100, RateBalance())
    story.tell(ev.ContentRead(b"x" * 1000, now=0))
    assert isinstance(story.tell(ev.ContentRead(b"y", now=0))[0], ev.HoldContent)
    assert story.tell(ev.ContentHeld(1, superseded=True))[0] == ev.SendContent(b"y", 1000)
    assert story.tell(ev.ContentRead(b"z", now=2))[0] == ev.SendContent(b"z", 1001)


def test_interrupted_while_content_is_held_back() -> None:
    story = limited(100, RateBalance())
    story.tell(ev.ContentRead(b"x" * 1000, now=0), ev.ContentRead(b"y", now=0))
    error = Broken("gone")
    assert story.tell(ev.StreamFailed(error))[0] == ev.SendFinal(*ROLLED_BACK)
    story.tell(ev.AcksGathered(ok()))
    assert story.outcome.error is error


def test_a_caller_that_sends_too_little_is_rolled_back() -> None:
    story = limited(0, RateBalance(), rate_min=1000)
    # Case: it is given a second first, and then what it earns.
    assert story.wants == (ev.ReadContent(1000),)
    assert story.tell(ev.ContentRead(b"x" * 100, waited=500))[-1] == ev.ReadContent(600)
    assert story.tell(ev.ContentLate())[0] == ev.SendFinal(*ROLLED_BACK)
    story.tell(ev.AcksGathered(ok()))
    assert (story.outcome.ending, story.outcome.uncertain) == (Ending.FAILED, False)
    assert story.outcome.error is not None
    assert story.outcome.error.facts["rate_min"] == 1000
    # Case: a read ended a little later than its timer. If the broker stood still, no caller is refused.
    for stalled in (False, True):
        story = limited(0, RateBalance(), rate_min=1000)
        story.tell(ev.ContentRead(b"x", waited=1001, stalled=stalled))
        assert isinstance(story.wants[0], ev.SendContent if stalled else ev.SendFinal)


# Leaving.


@pytest.mark.parametrize("steps", range(6))
def test_abandoned_append_lets_go_of_what_it_holds(steps: int) -> None:
    """Whichever wait it is in."""
    story = Story()
    events: list[ev.Event] = [
        resolved(),
        ev.PipelineTaken(None, None),
        ev.PipelineBuilt(spool(0, 9), NOW),
        ev.SyncSent(spool(0, 9)),
        ev.SyncAnswered(ok(), NOW),
    ]
    story.tell(*events[:steps])
    held = story.fsm.holds
    assert held == (steps >= 2)
    assert story.tell(ev.Abandoned(Closed("gone"))) == ((ev.GiveBackPipeline(),) if held else ())
    assert isinstance(story.outcome.error, Closed)


def test_event_that_cannot_be_is_a_bug() -> None:
    with raises(Bug, "event", state="RESOLVE"):
        Story().tell(ev.AcksGathered(ok()))
    with raises(Bug, "event", state="STREAM_CONTENT"):
        Story().until_stream(spool(0, 9)).tell(ev.AcksGathered(ok()))
    # Case: nothing is held back; a message is read while another one is.
    with raises(Bug, "event", state="STREAM_CONTENT"):
        Story().until_stream(spool(0, 9)).tell(ev.ContentHeld(0))
    with raises(Bug, "event", state="STREAM_CONTENT"):
        content = ev.ContentRead(b"x" * 1000, now=0)
        limited(100, RateBalance()).tell(content, content, content)
