"""Stage 4 of the byte path: takes an append from `broker/api/append` and decides each next step.
`broker/commit/driver` performs the steps; content goes on to `pipeline` and `fragment/spool`.

A pure state machine. All appends pass through it, except small appends in the usual case (`commit/steady`).
The zero-byte appends by which a primary keeps its replicas in step (`pulse`) pass through it, too. Usually,
an append goes from RESOLVE to STREAM_CONTENT without a wait. The commit is then its only round trip to
replicas.

An append that holds the pipeline, synchronized under a route, has the exclusive right to append to the
journal. The machine gives the pipeline up in exactly one of three ways. ``GiveBackPipeline`` and ``HandOver``
leave it intact; ``TearDownPipeline`` is for a pipeline that is broken, or of a superseded route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from gazette.broker.append import events as ev
from gazette.broker.append.events import (
    AppendTerms,
    Effect,
    Ending,
    Event,
    Outcome,
    PeerAnswer,
    SpoolView,
    SuspendControl,
)
from gazette.broker.append.flow_control import AppendFlow, RateBalance, effective_rate_max, too_slow
from gazette.broker.append.rules import (
    check_terms,
    is_dirty,
    judge_sync,
    registers_after,
    resume_offset,
    unexpected_answer,
)
from gazette.errors import Broken, Bug, Conflict, GazetteError, Invalid, TooLarge
from gazette.fragment.spool import proposal_of
from gazette.protocol.fragment import ZERO_SUM, Fragment
from gazette.protocol.ids import JournalName, Offset, Revision
from gazette.protocol.journal import JournalSpec, SuspendLevel
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.route import Route
from gazette.protocol.status import Status

SYNC_ROUNDS_MAX: Final = 6
"""Greatest number of proposals of one synchronization. Three are enough for replicas that can agree."""

_DONE: Final[tuple[Effect, ...]] = ()
_SUSPENDS: Final = frozenset({SuspendControl.IF_FLUSHED, SuspendControl.NOW})
_WITHOUT_CONTENT: Final = frozenset({*_SUSPENDS, SuspendControl.KEEP})


class State(Enum):
    RESOLVE = auto()
    ACQUIRE_PIPELINE = auto()
    START_PIPELINE = auto()
    SEND_PIPELINE_SYNC = auto()
    RECV_PIPELINE_SYNC = auto()
    UPDATE_ASSIGNMENTS = auto()
    AWAIT_DESIRED_REPLICAS = auto()
    VALIDATE_PRECONDITIONS = auto()
    UPDATE_SUSPEND = auto()
    STREAM_CONTENT = auto()
    READ_ACKNOWLEDGEMENTS = auto()
    ERROR = auto()
    PROXY = auto()
    FINISHED = auto()

    @property
    def terminal(self) -> bool:
        return self in (State.ERROR, State.PROXY, State.FINISHED)


_WAITING_FOR: Final = {
    State.RESOLVE: "resolve",
    State.ACQUIRE_PIPELINE: "waiting for pipeline",
    State.START_PIPELINE: "waiting for spool",
    State.SEND_PIPELINE_SYNC: "sendSync",
    State.RECV_PIPELINE_SYNC: "gatherSync",
    State.UPDATE_ASSIGNMENTS: "updateAssignments",
    State.VALIDATE_PRECONDITIONS: "waiting for fragment index",
    State.UPDATE_SUSPEND: "updateSuspend",
    State.STREAM_CONTENT: "append stream",
    State.READ_ACKNOWLEDGEMENTS: "recv",
}


@dataclass(slots=True)
class AppendFSM:
    """One append. Call ``start`` once, then ``step`` with the event of each effect, until ``outcome`` is set.
    Invariants: see ``_check``."""

    terms: AppendTerms
    state: State = State.RESOLVE
    holds: bool = False
    """True while this append holds the right to send on the pipeline, or to build a missing one."""
    outcome: Outcome | None = None
    resolution: ev.Resolved | None = None
    """The last resolution."""
    read_through: Revision = 0
    """Least revision of etcd for the next resolution."""
    rate_min: int = 0
    """Least rate of the caller's content, in bytes/s; 0: no limit."""
    rate_max: int = 0
    """Greatest rate of any journal, in bytes/s; 0: only the journal's own limit."""
    flow: AppendFlow | None = None
    """The flow of content; None until content is read."""
    roll_to: Offset = 0
    """Offset to which the next proposal must roll the spool; 0: the spool need not roll."""

    _balance: RateBalance = field(default_factory=RateBalance)
    _spool: SpoolView | None = None
    _pipeline_route: Route | None = None
    _opening: bool = False
    """True once a pipeline was built, until its first proposal was sent."""
    _rounds: int = 0
    """Proposals of the present synchronization."""
    _registers: LabelSet = EMPTY_LABELS
    """The registers of the next synchronization. While content arrives: the registers of the commit."""
    _sought: bool = False
    """True once a closing of the last primary was looked for."""
    _confirmed: Offset = 0
    """The head up to which missing bytes are recorded as lost; 0: nothing is recorded."""
    _final_status: Status = Status.OK
    """Status of the answer after the commit. `SUSPENDED`: the journal was suspended already."""
    _begin: Offset = 0
    """Offset of the append's first byte."""
    _length: int = 0
    """Bytes of content that were sent to the replicas."""
    _content: bytes | None = None
    """The last message, while the journal's rate holds it back."""
    _intent: bool = False
    """True once the caller has sent an empty chunk: its intent to commit."""
    _pending: Outcome | None = field(default=None)
    """The outcome of this append once its roll-back or commit is acknowledged."""

    def start(self) -> tuple[Effect, ...]:
        """Return the first effects, as ``step`` does. Too many registers in the terms end the append."""
        try:
            check_terms(self.terms)
        except TooLarge as error:
            return self._fail(error)
        return self._resolve()

    def step(self, event: Event) -> tuple[Effect, ...]:
        """Return the effects that ``event`` leads to; none once the append has ended (see ``outcome``).

        The step that ends an append may still return an effect that gives its pipeline up. Raise ``Bug`` for
        an event that the present state does not expect.
        """
        if self.state is State.STREAM_CONTENT:
            return self._on_stream(event)
        match event:
            case ev.Resolved() if self.state is State.RESOLVE:
                return self._on_resolved(event)
            case ev.PipelineTaken(route, spool, balance) if self.state is State.ACQUIRE_PIPELINE:
                self.holds, self._pipeline_route, self._spool = True, route, spool
                self._balance = balance
                return self._start_pipeline()
            case ev.ReadinessSeen() if self.state is State.VALIDATE_PRECONDITIONS:
                return self._on_readiness(event)
            case ev.AcksGathered(answers) if self.state is State.READ_ACKNOWLEDGEMENTS:
                return self._on_acks(answers)
            case ev.Failed(error) | ev.Abandoned(error):
                return self._fail(error)
            case ev.SendFailed(error) if self.state is State.READ_ACKNOWLEDGEMENTS:
                return self._on_final_unsent(error)
            case ev.SendFailed(error):
                return self._fail(error, broken=True)
            case ev.Invalidated() if self.state is State.RECV_PIPELINE_SYNC:
                # The peer for which this append waited may have left. Nothing was proposed for commit.
                self._let_go()
                return (ev.TearDownPipeline(), *self._resolve())
            case ev.Invalidated():
                return self._resolve()
        match self.state, event:
            case State.START_PIPELINE, ev.PipelineBuilt(spool, now, caught_up):
                self._pipeline_route, self._opening, self._rounds = self._resolution.route, True, 0
                self._spool, self._registers = spool, spool.registers
                if caught_up:
                    # Replicas that held these bytes are gone: close the fragment, so that it is uploaded now.
                    self.roll_to = spool.fragment.end
                return self._send_sync(now)
            case State.START_PIPELINE, ev.SyncAnswered():
                return self._on_catch_up_failed(event)
            case State.SEND_PIPELINE_SYNC, ev.AllAcknowledged(now):
                return (ev.SendSync(self._proposal_at(now), self._registers, self._opening),)
            case State.SEND_PIPELINE_SYNC, ev.SyncSent(spool):
                self._spool, self._opening = spool, False
                self.state = State.RECV_PIPELINE_SYNC
                return (ev.GatherSync(),)
            case State.RECV_PIPELINE_SYNC, ev.SyncAnswered():
                return self._on_sync_answered(event)
            case ((State.UPDATE_ASSIGNMENTS | State.UPDATE_SUSPEND), ev.EtcdWritten(revision)):
                self.read_through = max(self.read_through, revision)
                return self._resolve()
            case State.READ_ACKNOWLEDGEMENTS, ev.GatherFailed(error):
                return self._on_acks_missing(error)
        raise Bug("append FSM got an unexpected event", state=self.state.name, event=repr(event))

    # From resolution to a pipeline that is in step.

    def _resolve(self) -> tuple[Effect, ...]:
        self.state = State.RESOLVE
        return (ev.Resolve(self.read_through),)

    def _on_resolved(self, resolution: ev.Resolved) -> tuple[Effect, ...]:
        """Resume a suspended journal, refuse the append, pass it on to the primary, or go on to a pipeline.

        A pipeline that this append holds is kept only while the same replica is the primary.
        """
        self.resolution = resolution
        if (
            resolution.status is Status.SUSPENDED
            and self.terms.suspend is SuspendControl.RESUME
            and resolution.spec is not None
        ):
            return self._put_suspend(SuspendLevel.NONE, resume_offset(resolution.spec))
        if resolution.status is not Status.OK:
            return self._refuse(resolution.status)
        give_back: tuple[Effect, ...] = ()
        if self.holds and not (resolution.is_primary and resolution.same_replica):
            give_back = (ev.GiveBackPipeline(),)
            self._let_go()
        if not resolution.is_primary:
            return (*give_back, *self._await_desired_replicas())
        if self.holds:
            if not resolution.same_members:
                self._pipeline_route = (
                    None  # A member may have a new replica: build another pipeline.
                )
            return self._start_pipeline()
        self.state = State.ACQUIRE_PIPELINE
        return (*give_back, ev.TakePipeline())

    def _start_pipeline(self) -> tuple[Effect, ...]:
        """Use the held pipeline if it has the resolved route. Otherwise build another one."""
        route = self._pipeline_route
        if route is not None and route.equivalent(self._resolution.route):
            self._registers = self._spool_view.registers
            return self._update_assignments()
        self._pipeline_route = None
        self.state = State.START_PIPELINE
        return (ev.BuildPipeline(),)

    def _send_sync(self, now: float) -> tuple[Effect, ...]:
        self._rounds += 1
        self.state = State.SEND_PIPELINE_SYNC
        proposal = self._proposal_at(now)
        # The first proposal of a pipeline does not wait: all peers were brought up to date before.
        if not self._opening and self._completes(proposal):
            return (ev.AwaitAcks(),)
        return (ev.SendSync(proposal, self._registers, self._opening),)

    def _completes(self, proposal: Fragment) -> bool:
        """Return True if a proposal completes the spool's fragment.

        Such a proposal must wait until all replicas have acknowledged the fragment. A later pipeline sends
        only the open fragment, so its peers would never get the rest of the completed one. If this broker is
        then lost, the journal has a hole, and readers wait for the bytes.
        """
        spool_fragment = self._spool_view.fragment
        return spool_fragment.length > 0 and proposal.begin != spool_fragment.begin

    def _on_sync_answered(self, event: ev.SyncAnswered) -> tuple[Effect, ...]:
        """Go on if all peers agree. Otherwise propose again, as the answers demand, or resolve a later route.

        Fail after `SYNC_ROUNDS_MAX` proposals, if a peer has not answered, or for an answer that no correct
        replica gives.
        """
        try:
            verdict = judge_sync(
                event.answers, self._resolution, self._spool_view.fragment, event.error
            )
        except GazetteError as error:
            return self._fail(error, broken=True)
        if verdict.read_through:
            # Handle this before a roll: a peer that knows a later route has closed its stream.
            self.read_through = max(self.read_through, verdict.read_through)
            self._let_go()
            return (ev.TearDownPipeline(), *self._resolve())
        self.roll_to = verdict.roll_to or 0
        if verdict.roll_to is None:
            return self._update_assignments()
        if self._rounds >= SYNC_ROUNDS_MAX:
            return self._fail(_disagreement(self.terms.journal, verdict.roll_to), broken=True)
        if verdict.registers is not None:
            self._registers = verdict.registers
        return self._send_sync(event.now)

    def _on_catch_up_failed(self, event: ev.SyncAnswered) -> tuple[Effect, ...]:
        """Continue with the later route that a peer knows, or fail. The local spool is unchanged."""
        # These answers are about the route: the offsets of ``empty`` do not count.
        empty = Fragment(journal=self.terms.journal, begin=0, end=0)
        try:
            verdict = judge_sync(event.answers, self._resolution, empty, event.error)
        except GazetteError as error:
            return self._fail(error, broken=True)
        self.read_through = max(self.read_through, verdict.read_through)
        self._let_go()
        return (ev.TearDownPipeline(), *self._resolve())

    def _update_assignments(self) -> tuple[Effect, ...]:
        """Store the route in the assignments, unless each of them has it already."""
        resolution = self._resolution
        if len(resolution.stored_routes) == len(resolution.route.members) and all(
            stored_route.equivalent(resolution.route) for stored_route in resolution.stored_routes
        ):
            return self._await_desired_replicas()
        self.state = State.UPDATE_ASSIGNMENTS
        return (ev.PutAssignments(resolution.route.without_endpoints()),)

    def _await_desired_replicas(self) -> tuple[Effect, ...]:
        """Go on if the route has as many replicas as desired: to the primary's checks, or to the proxy.

        With more replicas, wait for a later route. With fewer, complete the open fragment of a pipeline that
        is held, and refuse the append.
        """
        resolution = self._resolution
        self.state = State.AWAIT_DESIRED_REPLICAS
        if len(resolution.route.members) > resolution.desired_replication:
            # The allocator is about to remove a replica, possibly the primary. Wait for that change.
            self.read_through = resolution.revision + 1
            return self._resolve()
        if len(resolution.route.members) < resolution.desired_replication:
            if self.holds and self._spool_view.fragment.length:
                # Too few brokers hold these bytes: complete the fragment, so that it is uploaded now. After
                # that, the spool is empty, and the append is refused.
                self.roll_to = self._spool_view.fragment.end
                return self._resync(now=0.0)  # `roll_to` is set: the time does not matter.
            return self._refuse(Status.INSUFFICIENT_JOURNAL_BROKERS)
        if not resolution.is_primary:
            self.state = State.PROXY
            self.outcome = Outcome(Ending.PROXY)
            return _DONE
        self.state = State.VALIDATE_PRECONDITIONS
        return (ev.CheckReadiness(),)

    # Preconditions.

    def _on_readiness(self, seen: ev.ReadinessSeen) -> tuple[Effect, ...]:
        """Check the preconditions, by rules. Their order matters: the first rule that fails decides.

        1. The append session: a late copy is refused, and a repeated append answered, before all else.
        2. Index and store: until the first listing, the offsets of the later checks are not known.
        3. Registers: a fenced writer learns that it is fenced, and not that its offset is wrong.
        4. Stored fragments that may be the journal's: their offsets are not given out again.
        5. An offset below which the journal must never go on: roll to that offset, and check again.
        6. Missing bytes: an append at the head confirms their loss. Without an offset, go on only if the
           head is closed and stores reach it, or if the journal has no store. Refuse any other offset.
        7. Bytes of former primaries: end their uploads, list the stores, and check again.
        8. Suspension, last: it changes the specification in etcd.
        """
        if seen.head is None:
            return (ev.LoadHead(),)
        if seen.admission.refusal is not None:  # Rule 1.
            return self._end(
                Outcome(Ending.FAILED, error=seen.admission.refusal, context="append session")
            )
        if seen.admission.commit is not None:
            return self._end_as_before(seen.admission.commit)
        if seen.store_refuses:  # Rule 2.
            return self._refuse(Status.FRAGMENT_STORE_UNHEALTHY, store_error=seen.store_refuses)
        if seen.unlisted or seen.store_error is not None:
            if seen.monotonic >= seen.store_until:
                error = seen.store_error or seen.unlisted
                return self._refuse(Status.FRAGMENT_STORE_UNHEALTHY, store_error=error)
            return (ev.AwaitReadiness(seen.store_until),)

        terms, spec, spool, index = self.terms, self._spec, self._spool_view, seen.index
        end = spool.fragment.end
        resume_at = resume_offset(spec)
        known_head = seen.head
        head = max(end, index.end, known_head.offset)
        if (
            terms.check_registers is not None  # Rule 3.
            and spool.registers
            and not terms.check_registers.matches(spool.registers)
        ):
            return self._refuse(Status.REGISTER_MISMATCH)
        if seen.undecided_to > max(head, resume_at):  # Rule 4.
            return self._refuse(Status.FRAGMENT_STORE_UNHEALTHY, store_error=seen.undecided)
        # The journal's end is known exactly if the head was closed there, or a later suspension names it.
        is_head_exact = known_head.closed is not None or known_head.offset < resume_at
        if end < resume_at and (is_head_exact or not spec.may_write):  # Rule 5.
            self.roll_to = resume_at
            # A head that was closed at this offset has the registers of the lost spools. If it is not closed,
            # these registers are not known: the append then goes on as if bytes were missing.
            return self._resync(
                seen.now, known_head.closed if known_head.offset == head == resume_at else None
            )
        if head > max(end, index.end) and not spec.fragment.stores:  # Rule 6.
            # No store could ever hold the missing bytes: these are lost. Do not give their offsets out again.
            return self._go_on_at(head, seen.now)
        if end != head and terms.offset is None and spec.may_write:
            if known_head.closed is not None and index.end >= known_head.offset:
                # The last primary left in good order, and stores have all that was acknowledged.
                self.roll_to = head
                return self._resync(seen.now, known_head.closed)
            if known_head.closed is None and not self._sought:
                self._sought = True
                return (ev.SeekClosing(),)
            return self._refuse(
                Status.INDEX_HAS_GREATER_OFFSET, store_error=_why_unconfirmed(seen, head, end)
            )
        if terms.offset is not None and terms.offset != head:
            return self._refuse(Status.WRONG_APPEND_OFFSET)
        if terms.offset is not None and end != head:
            return self._go_on_at(head, seen.now)
        if seen.must_begin and terms.suspend not in _WITHOUT_CONTENT:  # Rule 7.
            return (ev.BeginTenure(end),)
        return self._check_suspension(seen)  # Rule 8.

    def _go_on_at(self, head: Offset, now: float) -> tuple[Effect, ...]:
        """Go on at ``head``. First record that the bytes that are missing before ``head`` are lost."""
        if self._confirmed != head:
            self._confirmed = head
            return (ev.ConfirmHead(head),)
        self.roll_to = head
        return self._resync(now)

    def _resync(self, now: float, registers: LabelSet | None = None) -> tuple[Effect, ...]:
        """Synchronize again, with ``registers`` (default: the registers of the spool)."""
        self._rounds = 0
        self._registers = self._spool_view.registers if registers is None else registers
        return self._send_sync(now)

    def _check_suspension(self, seen: ev.ReadinessSeen) -> tuple[Effect, ...]:
        """Change the suspension as the caller asks, or refuse the append, or go on to the content."""
        control, spec, index = self.terms.suspend, self._spec, seen.index
        end = self._spool_view.fragment.end
        if spec.suspend_level is SuspendLevel.NONE:
            if control in _SUSPENDS and index.empty:
                return self._put_suspend(SuspendLevel.FULL, end)
            if control is SuspendControl.NOW:
                self.roll_to = end
                return self._put_suspend(SuspendLevel.PARTIAL, end)
            if control is SuspendControl.IF_FLUSHED and not is_dirty(index, spec, seen.now):
                return self._put_suspend(SuspendLevel.PARTIAL, end)
        elif control is SuspendControl.RESUME:
            return self._put_suspend(SuspendLevel.NONE, end)
        elif control is SuspendControl.NO_RESUME:
            return self._refuse(Status.SUSPENDED)
        elif control in _SUSPENDS:
            if index.empty:
                return self._put_suspend(SuspendLevel.FULL, end)
            self._final_status = Status.SUSPENDED  # Suspended already: end without content.
        # Go on: nothing is to be changed, or content is not in a blob store yet.
        if self._spool_view.fragment.begin == index.begin:
            # Roll before the second append, so that the first append is a fragment of its own. Without this
            # fragment, a journal that lost its fragments would look like one that never had any.
            self.roll_to = end
        return self._begin_stream(seen.now)

    def _put_suspend(self, level: SuspendLevel, offset: Offset) -> tuple[Effect, ...]:
        self.state = State.UPDATE_SUSPEND
        return (ev.PutSuspend(level, offset),)

    # Content.

    def _begin_stream(self, now: float) -> tuple[Effect, ...]:
        """Read content. First roll the spool, if its fragment is complete or must be completed."""
        spool = self._spool_view
        try:
            self._registers = registers_after(spool.registers, self.terms)
        except TooLarge as error:
            return self._fail(error)
        self.state = State.STREAM_CONTENT
        self._begin = spool.fragment.end
        rate_max = effective_rate_max(self._spec.max_append_rate, self.rate_max)
        self.flow = AppendFlow(self._balance, self.rate_min, rate_max)
        proposal = self._proposal_at(now)
        if proposal == spool.fragment:
            return self._read()
        if self._completes(proposal):
            return (ev.AwaitAcks(),)
        return (ev.SendRoll(proposal, spool.registers),)

    def _on_stream(self, event: Event) -> tuple[Effect, ...]:
        match event:
            case ev.ContentRead() if self._content is None:
                return self._on_read(event)
            case ev.ContentHeld(now, superseded) if self._content is not None:
                if superseded:
                    self._flow.unlimit()
                return self._pass_on(self._content, now)
            case ev.ContentLate():
                return self._roll_back(self._failure(too_slow(self.rate_min)))
            case ev.StreamEnded():
                return self._on_stream_end(event)
            case ev.AllAcknowledged(now):
                return (ev.SendRoll(self._proposal_at(now), self._spool_view.registers),)
            case ev.RollSent(spool):
                self._spool = spool
                return self._read()
            case ev.SendFailed(error):
                return self._fail(error, broken=True)
            case ev.StreamFailed(error) | ev.Failed(error) | ev.Abandoned(error):
                return self._roll_back(self._failure(error))
        raise Bug("append FSM got an unexpected event", state=self.state.name, event=repr(event))

    def _read(self) -> tuple[Effect, ...]:
        return (ev.ReadContent(self._flow.idle_ticks()),)

    def _on_read(self, read: ev.ContentRead) -> tuple[Effect, ...]:
        if not read.stalled and not self._flow.count_wait(read.waited):
            return self._roll_back(self._failure(too_slow(self.rate_min)))
        self._flow.received(len(read.content))
        return self._pass_on(read.content, read.now)

    def _pass_on(self, content: bytes, now: int) -> tuple[Effect, ...]:
        """Accept a message, or hold it back for as long as the journal's rate demands."""
        if ticks := self._flow.delay(now):
            self._content = content
            return (ev.HoldContent(ticks),)
        self._flow.take(len(content), delayed=self._content is not None)
        self._content = None
        return self._on_content(content)

    def _on_content(self, content: bytes) -> tuple[Effect, ...]:
        if self._intent:
            return self._roll_back(self._failure(Invalid("expected EOF after empty Content chunk")))
        if not content:
            self._intent = True
            return self._read()
        if not self._spec.may_write or self.terms.suspend in _WITHOUT_CONTENT:
            return self._roll_back(Outcome(Ending.REFUSED, Status.NOT_ALLOWED))
        delta = self._length
        self._length += len(content)
        return (ev.SendContent(content, delta), *self._read())

    def _on_stream_end(self, event: ev.StreamEnded) -> tuple[Effect, ...]:
        """Propose the commit. Roll back without the caller's intent, or if only registers would change."""
        if not self._intent:
            return self._roll_back(self._failure(Broken("unexpected EOF")))
        if not self._length and self.terms.changes_registers:
            return self._roll_back(
                self._failure(Invalid("register modification requires non-empty Append"))
            )
        registers = self._registers if self._length else self._spool_view.registers
        commit = Fragment(
            journal=event.next.journal,
            begin=self._begin,
            end=self._begin + self._length,
            sum=event.sum if self._length else ZERO_SUM,
            codec=event.next.codec,
        )
        ending = Ending.COMMITTED if self._final_status is Status.OK else Ending.REFUSED
        self._pending = Outcome(ending, self._final_status, commit, registers)
        return self._finish_stream(event.next, registers)

    def _roll_back(self, outcome: Outcome) -> tuple[Effect, ...]:
        self._pending = outcome
        return self._finish_stream(self._spool_view.fragment, self._spool_view.registers)

    def _finish_stream(self, proposal: Fragment, registers: LabelSet) -> tuple[Effect, ...]:
        self.state = State.READ_ACKNOWLEDGEMENTS
        self._let_go()  # `HandOver` gives the pipeline away before the next event, unless `SendFinal` fails.
        return (ev.SendFinal(proposal, registers), ev.HandOver(), ev.GatherAcks())

    # Acknowledgements, and endings.

    def _on_final_unsent(self, error: GazetteError) -> tuple[Effect, ...]:
        self._end_unacknowledged(error)
        return (ev.TearDownPipeline(),)

    def _on_acks(self, answers: tuple[PeerAnswer, ...]) -> tuple[Effect, ...]:
        for answer in answers:
            if answer.status is not Status.OK:
                return self._on_acks_missing(unexpected_answer(answer))
        self.outcome = self._pending
        # The acknowledgements may be those of a roll-back: the outcome of its append stays a failure.
        is_failed = self.outcome is not None and self.outcome.ending is Ending.FAILED
        self.state = State.ERROR if is_failed else State.FINISHED
        return _DONE

    def _on_acks_missing(self, error: GazetteError) -> tuple[Effect, ...]:
        self._end_unacknowledged(error)
        return (ev.BreakPipeline(error),)

    def _end_unacknowledged(self, error: GazetteError) -> None:
        """Fail, as uncertain if content was proposed for commit. Keep the outcome of an append that was
        rolled back."""
        pending = self._pending
        self.state = State.ERROR
        if pending is None or pending.commit is not None:
            pending = Outcome(
                Ending.FAILED,
                error=error,
                context=_WAITING_FOR[State.READ_ACKNOWLEDGEMENTS],
                uncertain=self._length > 0,
            )
        self.outcome = pending

    def _failure(self, error: GazetteError) -> Outcome:
        return Outcome(Ending.FAILED, error=error, context=_WAITING_FOR.get(self.state, ""))

    def _fail(self, error: GazetteError, *, broken: bool = False) -> tuple[Effect, ...]:
        return self._end(self._failure(error), broken=broken)

    def _refuse(self, status: Status, *, store_error: str = "") -> tuple[Effect, ...]:
        registers = EMPTY_LABELS if self._spool is None else self._spool.registers
        return self._end(
            Outcome(Ending.REFUSED, status, registers=registers, store_error=store_error)
        )

    def _end(
        self, outcome: Outcome, *, state: State = State.ERROR, broken: bool = False
    ) -> tuple[Effect, ...]:
        self.state = state
        self.outcome = outcome
        if not self.holds:
            return _DONE
        self.holds = False
        return (ev.TearDownPipeline() if broken else ev.GiveBackPipeline(),)

    def _end_as_before(self, commit: Fragment) -> tuple[Effect, ...]:
        """End with the commit of an earlier attempt of this append."""
        outcome = Outcome(
            Ending.COMMITTED, Status.OK, commit, self._spool_view.registers, repeated=True
        )
        return self._end(outcome, state=State.FINISHED)

    def _let_go(self) -> None:
        """Forget the pipeline and its spool, which another append may change at once."""
        self.holds, self._pipeline_route, self._spool, self.roll_to = False, None, None, 0

    # Accessors of values that are set in the states that use them.

    @property
    def _resolution(self) -> ev.Resolved:
        assert self.resolution is not None
        return self.resolution

    @property
    def _spec(self) -> JournalSpec:
        assert self.resolution is not None
        assert self.resolution.spec is not None
        return self.resolution.spec

    @property
    def _spool_view(self) -> SpoolView:
        assert self._spool is not None
        return self._spool

    @property
    def _flow(self) -> AppendFlow:
        assert self.flow is not None
        return self.flow

    def _proposal_at(self, now: float) -> Fragment:
        spool, spec = self._spool_view, self._spec.fragment
        return proposal_of(
            spool.fragment,
            spool.first_append_time,
            roll_to=self.roll_to,
            fragment_length=spec.length,
            codec=spec.codec,
            flush_interval_ns=spec.flush_interval_ns,
            now=now,
        )

    def _check(self) -> None:
        """Raise ``AssertionError`` if an invariant is broken."""
        assert self.state.terminal == (self.outcome is not None)
        assert not (self.state.terminal and self.holds)
        assert self.holds or self.state not in (
            State.START_PIPELINE,
            State.SEND_PIPELINE_SYNC,
            State.RECV_PIPELINE_SYNC,
            State.VALIDATE_PRECONDITIONS,
            State.STREAM_CONTENT,
        )
        assert self._length >= 0
        assert self.holds or self._pipeline_route is None or self.state.terminal


def _why_unconfirmed(seen: ev.ReadinessSeen, head: Offset, end: Offset) -> str:
    """Return why a journal whose spools end at ``end`` does not go on at ``head``."""
    assert seen.head is not None
    reasons = []
    if seen.head.offset > seen.index.end:
        reasons.append(f"known head {head}, stores end at {seen.index.end}, spools at {end}")
        reasons.append(seen.undecided)
    if seen.head.closed is None:
        reasons.append(seen.head.unclosed)
    return "; ".join(filter(None, reasons))


def _disagreement(journal: JournalName, offset: Offset) -> Conflict:
    return Conflict(
        "replicas cannot agree on a fragment and registers to append to",
        hint="Restart the broker of one replica, so that it adopts the registers of another.",
        journal=journal,
        offset=offset,
    )
