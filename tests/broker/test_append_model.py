"""Appends of several brokers, against a model of everything around them: replicas, streams, etcd.

Hypothesis decides who moves next: which message arrives, what a client does, when a route changes,
which stream breaks, which broker dies. Whatever it decides, an acknowledged append is on all replicas,
contiguous, at offsets that were never given to another; and everybody comes to an end.

The state machine, the spools' decisions and the gathering rules are the real ones.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.broker import append_events as ev
from gazette.broker.append_events import AppendTerms, Ending, IndexView, PeerAnswer, SpoolView
from gazette.broker.append_fsm import AppendFSM, State
from gazette.errors import Broken, Invalid, Unavailable
from gazette.fragment.spool import Committed, Content, Mismatched, Proposal, SpoolState
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.route import EMPTY_ROUTE, Route
from gazette.protocol.status import Status

JOURNAL = "a/journal"
NOW = 1_700_000_000.0
LOST = Unavailable("the stream broke")


class Spool:
    """The real decisions, over bytes in memory. ``bytes`` has what is committed, by offset."""

    def __init__(self) -> None:
        self.state = SpoolState.new(JOURNAL)
        self.bytes: dict[int, int] = {}
        self.pending = b""
        self.holder: Any = None

    def view(self) -> SpoolView:
        state = self.state
        return SpoolView(state.fragment, state.registers, state.first_append_time)

    def sum(self) -> bytes:
        fragment = self.state.fragment
        committed = bytes(self.bytes[at] for at in range(fragment.begin, fragment.end))
        return hashlib.sha1(committed + self.pending).digest()

    def content(self, content: bytes, delta: int) -> None:
        self.state.check_content(Content(content, delta))
        self.state.extend(len(content))
        self.pending += content

    def propose(self, fragment: Fragment, registers: LabelSet) -> Status:
        end = self.state.fragment.end
        effects = self.state.propose(Proposal(fragment, registers), self.sum, NOW)
        self.state._check()
        if isinstance(effects[-1], Committed):
            self.bytes.update(enumerate(self.pending, end))
        if not isinstance(effects[-1], Mismatched) or len(effects) > 1:
            self.pending = b""
        return Status.PROPOSAL_MISMATCH if isinstance(effects[-1], Mismatched) else Status.OK

    def give_back(self) -> None:
        self.state.roll_back()
        self.pending, self.holder = b"", None


@dataclass(eq=False)
class Replica:
    spool: Spool = field(default_factory=Spool)
    pipeline: Pipeline | None = None
    taken_by: Any = None
    """The append that holds the pipeline."""
    gone: bool = False


@dataclass(eq=False)
class Stream:
    """Replicate, from a primary to one peer."""

    peer: Broker
    route: Route
    revision: int
    requests: deque[Any] = field(default_factory=deque)
    answers: deque[PeerAnswer] = field(default_factory=deque)
    spool: Spool | None = None
    ended: bool = False

    def end(self) -> None:
        self.ended = True
        self.requests.clear()
        if self.spool is not None:
            self.spool.give_back()
            self.spool = None


@dataclass(eq=False)
class Pipeline:
    route: Route
    spool: Spool
    streams: list[Stream]
    turns: deque[Any] = field(default_factory=deque)
    failed: bool = False

    @property
    def broken(self) -> bool:
        return self.failed or any(stream.ended for stream in self.streams)

    def send(self, *request: Any) -> None:
        for stream in self.streams:
            if not stream.ended:
                stream.requests.append(request)

    def fail(self) -> None:
        self.failed = True
        for stream in self.streams:
            stream.end()


@dataclass(frozen=True)
class Etcd:
    """The journal's keys at one revision."""

    revision: int
    members: tuple[ProcessId, ...]
    primary: ProcessId | None
    stored: tuple[tuple[ProcessId, Route], ...] = ()

    @property
    def route(self) -> Route:
        at = None if self.primary is None else self.members.index(self.primary)
        return Route(self.members, at)

    def stored_route(self, member: ProcessId) -> Route:
        return dict(self.stored).get(member, EMPTY_ROUTE)

    @property
    def consistent(self) -> bool:
        return all(self.stored_route(one).equivalent(self.route) for one in self.members)

    def next(self, members: tuple[ProcessId, ...], primary: ProcessId | None) -> Etcd:
        """An assignment whose slot changes is another key, but moves along with its value."""
        stored = tuple((one, route) for one, route in self.stored if one in members)
        return Etcd(self.revision + 1, members, primary, stored)


@dataclass(eq=False)
class Broker:
    id: ProcessId
    known: Etcd
    replica: Replica | None = None
    old: list[Replica] = field(default_factory=list)
    alive: bool = True

    def learn(self, etcd: Etcd) -> None:
        """One step of the key space, with its resolver."""
        was, self.known = self.known, etcd
        demoted = was.primary == self.id != etcd.primary
        if self.replica is not None and (demoted or self.id not in etcd.members):
            self.old.append(self.replica)
            self.replica = None
        if self.replica is None and self.id in etcd.members:
            self.replica = Replica()

    def retire(self) -> bool:
        """Shut down what was given up and came free."""
        for replica in self.old:
            if not replica.gone and replica.taken_by is None:
                if replica.pipeline is not None:
                    tear_down(replica)
                if replica.spool.holder is None:
                    replica.gone = True
                    return True
        return False


def tear_down(replica: Replica) -> None:
    """The spool comes free at once; streams end when their peers have read what was sent."""
    pipeline, replica.pipeline = replica.pipeline, None
    if pipeline is None:
        return
    pipeline.spool.give_back()
    if pipeline.failed:
        pipeline.fail()
    pipeline.send("end")


@dataclass(eq=False)
class Append:
    """An append at one broker, with a driver that never waits by itself."""

    world: World
    broker: Broker
    content: bytes
    fsm: AppendFSM = field(default_factory=lambda: AppendFSM(AppendTerms(JOURNAL)))
    effects: deque[ev.Effect] = field(default_factory=deque)
    replica: Replica | None = None
    answering: Pipeline | None = None
    sent: bytes = b""
    intended: bool = False
    torn: bool = False

    def __post_init__(self) -> None:
        self.effects.extend(self.fsm.start())

    @property
    def ended(self) -> bool:
        return not self.effects

    @property
    def pipeline(self) -> Pipeline:
        assert self.replica is not None
        assert self.replica.pipeline is not None
        return self.replica.pipeline

    def move(self) -> bool:
        """Perform the next effect if that is possible now."""
        effect = self.effects[0]
        perform: Callable[..., Any] = getattr(self, f"on_{type(effect).__name__}")
        done, event = perform(effect)
        if not done:
            return False
        self.effects.popleft()
        if event is not None:
            self.effects = deque(self.fsm.step(event))
            self.fsm._check()
        if self.ended:
            self.world.on_end(self)
        return True

    def superseded(self) -> bool:
        at = self.fsm.at
        assert at is not None
        return not at.route.equivalent(self.broker.known.route) or (
            self.replica is not None and self.replica is not self.broker.replica
        )

    def on_Resolve(self, effect: ev.Resolve) -> Any:
        known = self.broker.known
        if known.revision < effect.min_revision:
            return False, None
        primary = known.primary == self.broker.id
        status = Status.OK if known.primary else Status.NO_JOURNAL_PRIMARY_BROKER
        return True, ev.Resolved(
            status=status,
            route=known.route,
            revision=known.revision,
            is_primary=primary,
            same_replica=self.replica is None or self.replica is self.broker.replica,
            spec=self.world.spec,
            stored_routes=tuple(known.stored_route(one) for one in known.members),
            desired_replication=self.world.spec.replication,
        )

    def on_TakePipeline(self, _: ev.TakePipeline) -> Any:
        replica = self.broker.replica
        if self.superseded() or replica is None:
            return True, ev.Invalidated()
        if replica.taken_by is not None:
            return False, None
        replica.taken_by, self.replica = self, replica
        pipeline = replica.pipeline
        if pipeline is None or pipeline.broken:
            return True, ev.PipelineTaken(None, None)
        return True, ev.PipelineTaken(pipeline.route, replica.spool.view())

    def on_BuildPipeline(self, _: ev.BuildPipeline) -> Any:
        replica, at = self.replica, self.fsm.at
        assert replica is not None
        assert at is not None
        tear_down(replica)
        if self.superseded():
            return True, ev.Invalidated()
        if replica.spool.holder is not None:
            return False, None
        peers = [self.world.brokers[one] for one in at.route.members if one != self.broker.id]
        streams = [Stream(peer, at.route, at.revision, ended=not peer.alive) for peer in peers]
        self.world.streams += streams
        replica.spool.holder = replica.pipeline = Pipeline(at.route, replica.spool, streams)
        return True, ev.PipelineBuilt(replica.spool.view(), NOW)

    def on_GiveBackPipeline(self, _: ev.GiveBackPipeline) -> Any:
        assert self.replica is not None
        self.replica.taken_by = self.replica = None
        return True, None

    def on_TearDownPipeline(self, _: ev.TearDownPipeline) -> Any:
        assert self.replica is not None
        tear_down(self.replica)
        self.replica.taken_by = self.replica = None
        return True, None

    def on_BreakPipeline(self, _: ev.BreakPipeline) -> Any:
        assert self.answering is not None
        self.answering.fail()
        return True, None

    def propose(self, effect: Any, kind: str, *, acknowledge: bool) -> None:
        self.pipeline.send(kind, effect.proposal, effect.registers, acknowledge)
        status = self.pipeline.spool.propose(effect.proposal, effect.registers)
        assert status is Status.OK, "the primary's own spool disagrees"

    def on_SendSync(self, effect: ev.SendSync) -> Any:
        self.propose(effect, "open" if effect.opening else "propose", acknowledge=True)
        self.pipeline.turns.append(self)
        return True, ev.SyncSent(self.pipeline.spool.view())

    def gathered(self, pipeline: Pipeline) -> bool:
        return pipeline.turns[0] is self and all(
            stream.answers or stream.ended for stream in pipeline.streams
        )

    def on_GatherSync(self, _: ev.GatherSync) -> Any:
        pipeline = self.pipeline
        if not self.gathered(pipeline):
            return False, None
        pipeline.turns.popleft()
        answers = tuple(one.answers.popleft() for one in pipeline.streams if one.answers)
        error = None if len(answers) == len(pipeline.streams) else LOST
        return True, ev.SyncAnswered(answers, NOW, error)

    def on_PutAssignments(self, effect: ev.PutAssignments) -> Any:
        world, at = self.world, self.fsm.at
        assert at is not None
        etcd = world.etcd
        if etcd.revision != at.revision:
            return True, ev.EtcdWritten(at.revision + 1)
        stored = tuple((one, effect.route) for one in etcd.members)
        world.change(Etcd(etcd.revision + 1, etcd.members, etcd.primary, stored))
        return True, ev.EtcdWritten(world.etcd.revision)

    def on_CheckReadiness(self, _: ev.CheckReadiness) -> Any:
        committed = self.pipeline.spool.bytes
        index = IndexView(min(committed, default=0), max(committed, default=-1) + 1)
        return True, ev.ReadinessSeen(True, None, index, NOW)

    def on_SendRoll(self, effect: ev.SendRoll) -> Any:
        if self.pipeline.broken:
            return True, ev.SendFailed(LOST)
        self.propose(effect, "propose", acknowledge=False)
        return True, ev.RollSent(self.pipeline.spool.view())

    def on_ReadContent(self, _: ev.ReadContent) -> Any:
        if self.torn:
            return True, ev.StreamFailed(Broken("the client is gone"))
        if len(self.sent) < len(self.content):
            at = len(self.sent)
            chunk = self.content[at : at + 2]
            self.sent += chunk
            return True, ev.ContentRead(chunk)
        if not self.intended:
            self.intended = True
            return True, ev.ContentRead(b"")
        spool = self.pipeline.spool
        return True, ev.StreamEnded(spool.state.next(spool.sum), hashlib.sha1(self.sent).digest())

    def on_SendContent(self, effect: ev.SendContent) -> Any:
        if self.pipeline.broken:
            return True, ev.SendFailed(LOST)
        self.pipeline.send("content", effect.content, effect.delta)
        self.pipeline.spool.content(effect.content, effect.delta)
        return True, None

    def on_SendFinal(self, effect: ev.SendFinal) -> Any:
        if self.pipeline.broken:
            return True, ev.SendFailed(LOST)
        self.propose(effect, "propose", acknowledge=True)
        return True, None

    def on_HandOver(self, _: ev.HandOver) -> Any:
        assert self.replica is not None
        self.answering = self.pipeline
        self.answering.turns.append(self)
        self.replica.taken_by = self.replica = None
        return True, None

    def on_GatherAcks(self, _: ev.GatherAcks) -> Any:
        pipeline = self.answering
        assert pipeline is not None
        if pipeline.turns[0] is not self:
            return False, None
        if pipeline.failed:
            pipeline.turns.popleft()
            return True, ev.GatherFailed(LOST)
        if not self.gathered(pipeline):
            return False, None
        pipeline.turns.popleft()
        if any(not stream.answers for stream in pipeline.streams):
            pipeline.fail()
            return True, ev.GatherFailed(LOST)
        answers = tuple(stream.answers.popleft() for stream in pipeline.streams)
        if any(answer.status is not Status.OK for answer in answers):
            pipeline.fail()
        return True, ev.AcksGathered(answers)


class World:
    """Brokers, etcd, and what is promised of them."""

    def __init__(self, replication: int, length: int) -> None:
        ids = tuple(ProcessId("zone", f"broker-{name}") for name in "abcd")
        self.spec = JournalSpec(
            JOURNAL, replication, fragment=FragmentSpec(length=length, codec=Codec.GZIP)
        )
        self.etcd = Etcd(1, ids[:replication], ids[0])
        self.history = [self.etcd]
        self.brokers = {one: Broker(one, Etcd(0, (), None)) for one in ids}
        self.streams: list[Stream] = []
        self.appends: list[Append] = []
        self.acked: list[tuple[int, bytes]] = []
        for broker in self.brokers.values():
            broker.learn(self.etcd)

    def change(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.history.append(etcd)

    # What may happen.

    def deliver(self, stream: Stream) -> bool:
        """The peer takes the next request, if it is ready for it."""
        if stream.ended or not stream.requests:
            return False
        kind, *rest = stream.requests[0]
        peer = stream.peer
        if kind == "open":
            if peer.known.revision < stream.revision:
                return False
            refusal = self.refusal(stream)
            if refusal is not None:
                stream.requests.popleft()
                stream.answers.append(refusal)
                stream.end()
                return True
            assert peer.replica is not None
            spool = peer.replica.spool
            if spool.holder is not None:
                return False
            spool.holder, stream.spool = stream, spool
        stream.requests.popleft()
        if stream.spool is None:
            stream.end()  # Ended before it was opened.
        elif kind == "end":
            stream.end()
        elif kind == "content":
            try:
                stream.spool.content(*rest)
            except Invalid:
                stream.end()
        else:
            self.answer(stream, *rest)
        return True

    def refusal(self, stream: Stream) -> PeerAnswer | None:
        peer = stream.peer
        route, revision = peer.known.route, peer.known.revision
        if peer.id not in route.members:
            return PeerAnswer(peer.id, Status.NOT_JOURNAL_BROKER, route, revision)
        if not route.equivalent(stream.route):
            return PeerAnswer(peer.id, Status.WRONG_ROUTE, route, revision)
        return None

    def answer(
        self, stream: Stream, proposal: Fragment, registers: LabelSet, acknowledge: bool
    ) -> None:
        spool = stream.spool
        assert spool is not None
        status = spool.propose(proposal, registers)
        if acknowledge:
            state = spool.state
            stream.answers.append(
                PeerAnswer(
                    stream.peer.id, status, fragment=state.fragment, registers=state.registers
                )
            )
        elif status is not Status.OK:
            stream.end()

    def catch_up(self, broker: Broker) -> bool:
        """Learn of the next revision; or of several, as if they came in one batch."""
        later = [one for one in self.history if one.revision > broker.known.revision]
        if not broker.alive or not later:
            return False
        broker.learn(later[0])
        return True

    def reassign(self, members: list[int], primary: int) -> None:
        """As the allocator may: adds whom it likes, removes only if the journal is consistent, and never
        demotes a primary that stays: its replica, and what it appends meanwhile, would be given up."""
        ids = list(self.brokers)
        chosen = {ids[at] for at in members if self.brokers[ids[at]].alive}
        present = set(self.etcd.members)
        if not self.etcd.consistent:
            chosen |= present
        if len(chosen) < self.spec.replication or not chosen & present:
            return
        ordered = tuple(sorted(chosen))
        stays = self.etcd.primary in chosen
        leader = self.etcd.primary if stays else ordered[primary % len(ordered)]
        self.change(self.etcd.next(ordered, leader))

    def crash(self, broker: Broker) -> None:
        """Its lease runs out. Not if it is the last that has all of what was acknowledged."""
        others = [
            self.brokers[one]
            for one in self.etcd.members
            if one != broker.id and self.brokers[one].alive
        ]
        if (
            not any(self.has_everything(one) for one in others)
            or sum(one.alive for one in self.brokers.values()) <= self.spec.replication
        ):
            return
        broker.alive = False
        for append in self.appends:
            if append.broker is broker:
                append.effects.clear()
        for replica in [broker.replica, *broker.old]:
            if replica is not None and replica.pipeline is not None:
                replica.pipeline.fail()
        for stream in self.streams:
            if stream.peer is broker:
                stream.end()
        members = tuple(one for one in self.etcd.members if one != broker.id)
        if members != self.etcd.members:
            primary = self.etcd.primary if self.etcd.primary in members else members[0]
            self.change(self.etcd.next(members, primary))

    def has_everything(self, broker: Broker) -> bool:
        """It took part in every acknowledged append, and does not lose its replica yet."""
        if broker.replica is None or broker.known != self.etcd:
            return False
        end = max((begin + len(content) for begin, content in self.acked), default=0)
        return broker.replica.spool.state.fragment.end >= end

    # What is promised.

    def on_end(self, append: Append) -> None:
        outcome = append.fsm.outcome
        assert outcome is not None
        if outcome.ending is not Ending.COMMITTED:
            return
        commit, at = outcome.commit, append.fsm.at
        assert commit is not None
        assert at is not None
        assert commit.length == len(append.content)
        assert commit.begin >= max((begin + len(one) for begin, one in self.acked), default=0)
        for member in at.route.members:
            broker = self.brokers[member]
            if broker.alive:
                replicas = [one for one in [broker.replica, *broker.old] if one is not None]
                assert any(self.holds(one.spool, commit.begin, append.content) for one in replicas)
        self.acked.append((commit.begin, append.content))

    @staticmethod
    def holds(spool: Spool, begin: int, content: bytes) -> bool:
        return all(spool.bytes.get(begin + at) == byte for at, byte in enumerate(content))

    def check(self) -> None:
        """No replica has anything else where an acknowledged append is."""
        for broker in self.brokers.values():
            for replica in [broker.replica, *broker.old]:
                if replica is None:
                    continue
                for begin, content in self.acked:
                    for at, byte in enumerate(content, begin):
                        assert replica.spool.bytes.get(at, byte) == byte

    def settle(self) -> None:
        """Nothing goes wrong any more: everybody must come to an end."""
        ids = sorted(one.id for one in self.brokers.values() if one.alive)
        present = [one for one in ids if one in self.etcd.members]
        wanted = (present + [one for one in ids if one not in present])[: self.spec.replication]
        for _ in range(10_000):
            moved = [broker.retire() for broker in self.brokers.values() if broker.alive]
            moved += [self.catch_up(broker) for broker in self.brokers.values()]
            moved += [self.deliver(stream) for stream in self.streams]
            moved += [one.move() for one in self.appends if not one.ended]
            self.reap()
            if not any(moved):
                # The allocator comes to its desired state, as far as it may.
                if self.etcd.consistent and set(self.etcd.members) != set(wanted):
                    members = tuple(sorted(wanted))
                    keep = self.etcd.primary in members
                    self.change(self.etcd.next(members, self.etcd.primary if keep else members[0]))
                elif not self.etcd.consistent and not self.pulsing():
                    self.pulse()
                elif len(self.etcd.members) < self.spec.replication:
                    members = tuple(sorted({*self.etcd.members, *wanted}))
                    self.change(self.etcd.next(members, self.etcd.primary))
                else:
                    break
        for append in self.appends:
            assert append.ended, (append.fsm.state, append.effects)
        assert self.etcd.consistent

    def reap(self) -> None:
        """Broken pipelines that nobody holds are torn down; streams of an old route are cut off."""
        for broker in self.brokers.values():
            replica = broker.replica
            if replica is None or replica.taken_by is not None or replica.pipeline is None:
                continue
            if replica.pipeline.failed:
                tear_down(replica)
        for stream in self.streams:
            stale = stream.peer.alive and not stream.route.equivalent(stream.peer.known.route)
            if stale and stream.spool is not None and not stream.requests:
                stream.end()

    def pulsing(self) -> bool:
        """Whether an append waits at the primary, which is as good as a pulse."""
        return any(one.broker.id == self.etcd.primary and not one.ended for one in self.appends)

    def pulse(self) -> None:
        assert self.etcd.primary is not None
        self.appends.append(Append(self, self.brokers[self.etcd.primary], b""))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 3),
    st.sampled_from([3, 1 << 20]),
    st.lists(
        st.tuples(st.integers(0, 19), st.integers(0, 1 << 16), st.integers(0, 3)), max_size=300
    ),
)
def test_acknowledged_appends_are_kept(
    replication: int, length: int, moves: list[tuple[int, int, int]]
) -> None:
    world = World(replication, length)
    brokers = list(world.brokers.values())
    for kind, which, more in moves:
        broker = brokers[which % len(brokers)]
        going = [one for one in world.appends if not one.ended]
        if kind == 0 and broker.alive and len(going) < 6:
            content = bytes((len(world.appends) + at) % 251 for at in range(which % 6))
            world.appends.append(Append(world, broker, content))
        elif kind == 1:
            world.reassign([which % 4, (which >> 2) % 4, (which >> 4) % 4, more], which >> 6)
        elif kind == 2 and more == 0:
            world.crash(broker)
        elif kind == 3 and going:
            going[which % len(going)].torn = True
        elif kind == 4 and world.streams:
            world.streams[which % len(world.streams)].end()
        elif kind == 5:
            broker.retire()
            world.reap()
        elif kind <= 8:
            world.catch_up(broker)
        elif kind <= 13 and world.streams:
            live = [one for one in world.streams if one.requests]
            if live:
                world.deliver(live[which % len(live)])
        elif going:
            for _ in range(1 + more):
                going[which % len(going)].ended or going[which % len(going)].move()
        world.check()
    world.settle()
    world.check()


def test_model_commits() -> None:
    """Left alone, every append commits: the test above is not vacuous."""
    world = World(3, 1 << 20)
    brokers = list(world.brokers.values())
    for at in range(6):
        world.appends.append(Append(world, brokers[0], bytes([at] * (at + 1))))
    world.settle()
    assert [len(content) for _, content in world.acked] == [1, 2, 3, 4, 5, 6]
    assert {one.fsm.state for one in world.appends} == {State.FINISHED}
    world.check()
