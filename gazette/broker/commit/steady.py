"""Stage 4 of the byte path in the usual case: takes small appends from `broker/api/append`, gives them to
`pipeline` as one commit.

Most appends are small, and find their journal ready: its replicas are in step, its store is healthy, its
fragment has room. Such an append needs no state machine. ``commit_now`` checks these conditions, puts the
content into the spool, proposes it, and sends it. If any check fails, ``commit_now`` returns before it has
changed anything. Then a driver performs the append, and `broker/append/fsm` decides.

This module makes no decision of its own: the FSM would commit the same appends, without any other effect.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from gazette.broker.append.events import AppendTerms, Ending, Outcome, SuspendControl
from gazette.broker.append.line import GROUP_BYTES, Line, SmallAppend
from gazette.broker.append.rules import check_terms, registers_after
from gazette.broker.append.sessions import ADMITTED
from gazette.broker.replication.pipeline import Pipeline
from gazette.errors import Broken, Bug, GazetteError, TooLarge
from gazette.fragment.spool import proposal_of
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset
from gazette.protocol.label_set import LabelSet

if TYPE_CHECKING:
    from gazette.broker.context import BrokerContext
    from gazette.broker.replica import Replica
    from gazette.broker.replication.other_followers import Incarnation
    from gazette.broker.resolver import Resolution
    from gazette.fragment.spool_file import Spool
    from gazette.protocol.journal import JournalSpec

_NOT_SUSPENDING: Final = frozenset({SuspendControl.RESUME, SuspendControl.NO_RESUME})
"""Controls without effect on a journal that is not suspended."""
_NO_BROKERS: Final[frozenset[Incarnation]] = frozenset()


class AppendGroup:
    """Small appends of one journal that were proposed as one commit, the leader of their line first.

    Call ``start``, which settles each append when all peers have answered. No task waits for the answers. If
    the tasks of the broker are cancelled, all appends fail as uncertain.
    """

    __slots__ = (
        "_awaits",
        "_begin",
        "_commit",
        "_context",
        "_is_settled",
        "_line",
        "_pipeline",
        "_resolution",
        "small",
    )

    def __init__(
        self,
        context: BrokerContext,
        resolution: Resolution,
        pipeline: Pipeline,
        line: Line,
        small: tuple[SmallAppend, ...],
        begin: Offset,
        commit: Fragment,
    ) -> None:
        self._context = context
        self._resolution = resolution
        self._pipeline = pipeline
        self._line = line
        self.small = small
        self._begin = begin
        self._commit = commit
        self._is_settled = False
        self._awaits = False
        """True while answers are awaited. When the broker's tasks end, this wait is cut off."""
        pipeline.when_answered(self._settle)

    def start(self) -> None:
        """Settle now if no answer has to be awaited, otherwise once all answers have come."""
        self._pipeline.gather_now()
        if not self._is_settled:
            self._awaits = True
            self._context.scope.add_cut_off(self._cut_off)

    def _cut_off(self) -> None:
        """Break the pipeline, because the broker's tasks are cancelled. This fails the appends."""
        self._pipeline.fail(Broken("an append was cut short", journal=self._resolution.journal))

    def _settle(self, answered: LabelSet | GazetteError) -> None:
        """Settle all appends: commit them with the registers ``answered``, or fail them with the error.

        A bug ends the broker, too.
        """
        scope = self._context.scope
        self._is_settled = True
        if self._awaits:
            scope.drop_cut_off(self._cut_off)
        try:
            if isinstance(answered, GazetteError):
                self._fail(answered)
            else:
                self._committed(answered)
            if isinstance(answered, Bug):
                scope.fail(answered)
        except Exception as bug:  # noqa: BLE001 - it ends the broker, as that of a task does
            scope.fail(bug)

    def _committed(self, registers: LabelSet) -> None:
        """Settle each append with its own span of the commit, and let the next append of the line lead."""
        begin, sessions = self._begin, self._resolution.local_replica.sessions
        for append in self.small:
            end = begin + len(append.content)
            digest = hashlib.sha1(append.content, usedforsecurity=False).digest()
            commit = Fragment(self._commit.journal, begin, end, digest, self._commit.codec)
            if append.session is not None:
                sessions.ended(append.session, append, commit)
            append.settle(Outcome(Ending.COMMITTED, commit=commit, registers=registers))
            begin = end
        self._line.leave(self.small[0])

    def _fail(self, error: GazetteError) -> None:
        """Fail all appends as uncertain. The pipeline is broken."""
        scope, replica = self._context.scope, self._resolution.local_replica
        if not scope.is_stopping:
            scope.spawn(
                replica.reap(self._pipeline), name=f"reap pipeline {self._resolution.journal}"
            )
        for append in self.small:
            if append.session is not None:
                replica.sessions.ended(append.session, append, None)
            append.settle(Outcome(Ending.FAILED, error=error, context="recv", uncertain=True))
        self._line.leave(self.small[0])


def commit_now(
    context: BrokerContext,
    resolution: Resolution,
    pipeline: Pipeline | None,
    line: Line,
    leader: SmallAppend,
) -> AppendGroup | None:
    """Propose the commit of the append that leads a line, and of later appends that may join, and fit.

    Return None, without effect, if a check fails (see the module). ``resolution`` is of the present revision.
    ``pipeline`` is the pipeline of its replica, free or held by the caller; None: not available.
    """
    replica = resolution.replica
    if replica is None or pipeline is None:
        return None
    spool = pipeline.spool
    if not _is_steady(context, resolution, replica, pipeline, spool):
        return None
    begin, sessions = spool.fragment.end, replica.sessions
    registers = _registers_of(leader.terms, spool.registers, begin)

    def is_admitted(small: SmallAppend) -> bool:
        session = small.session
        return session is None or sessions.admit(session, resolution.tenure, small) == ADMITTED

    room = min(GROUP_BYTES, pipeline.local.room) - len(leader.content)
    # Admit the leader last. The ledger remembers an admission: no check may fail after it.
    if registers is None or room < 0 or not is_admitted(leader):
        return None
    joined = line.take_along(
        room, lambda small: may_join(small.terms, registers) and is_admitted(small)
    )
    content = leader.content
    if joined:
        content = b"".join((content, *(append.content for append in joined)))
    commit = pipeline.commit_now(content, registers)
    return AppendGroup(context, resolution, pipeline, line, (leader, *joined), begin, commit)


def may_join(terms: AppendTerms, registers: LabelSet) -> bool:
    """Return True if an append may join the commit of another append, which leaves ``registers``.

    An append that names an offset, changes registers or controls a suspension must lead a commit itself. So
    must an append whose check of registers fails here: the registers at its turn decide.
    """
    return terms.offset is None and not terms.changes_registers and _passes(terms, registers)


def _passes(terms: AppendTerms, registers: LabelSet) -> bool:
    """Return True if the append's control has no effect, and its check of registers does not fail.

    Empty registers pass any check.
    """
    check = terms.check_registers
    return terms.suspend in _NOT_SUSPENDING and (
        check is None or not registers.labels or check.matches(registers)
    )


def _registers_of(terms: AppendTerms, registers: LabelSet, end: Offset) -> LabelSet | None:
    """Return the registers after an append that leads. Return None if the FSM must decide about the append,
    for example to refuse it."""
    if terms.offset not in (None, end) or not _passes(terms, registers):
        return None
    if terms.check_registers is None and not terms.changes_registers:
        return registers
    try:
        check_terms(terms)
        return registers_after(registers, terms)
    except TooLarge:
        return None


def _is_steady(
    context: BrokerContext,
    resolution: Resolution,
    replica: Replica,
    pipeline: Pipeline,
    spool: Spool,
) -> bool:
    """Return True if the FSM would stream at once: see its ``_on_resolved`` to ``_begin_stream``."""
    if not resolution.takes_content or context.settings.max_append_rate or not context.lease.holds:
        return False
    if not pipeline.serves(resolution.header):
        return False
    spec, fragment = resolution.spec, spool.fragment
    assert spec is not None
    head, index, end = replica.head, replica.index, fragment.end
    return (
        pipeline.is_idle(context.clock.monotonic())
        and head.loaded
        and head.names(resolution.tenure)
        and replica.leads
        and replica.others.known == _NO_BROKERS
        and index.first_refresh.is_set
        and end >= max(index.end_offset, head.offset, index.unexplained_to, resolution.resume_at)
        and _is_healthy(context, resolution, replica)
        and not _rolls(context, spec, spool, end if fragment.begin == index.begin_offset else 0)
    )


def _is_healthy(context: BrokerContext, resolution: Resolution, replica: Replica) -> bool:
    """Return True if the journal's first store is healthy and takes its fragments, or there is no store."""
    assert resolution.spec is not None
    stores = resolution.spec.fragment.stores
    if not stores:
        return True
    store = context.blob_stores.get(stores[0])
    refused = store.refusals and (replica.journal, replica.life) in store.refusals
    return store.health.error is None and not refused


def _rolls(context: BrokerContext, spec: JournalSpec, spool: Spool, roll_to: Offset) -> bool:
    """Return True if the spool has to roll before it gets content, as ``proposal_of`` says."""
    fragment, fragment_spec = spool.fragment, spec.fragment
    proposal = proposal_of(
        fragment,
        spool.first_append_time,
        roll_to=roll_to,
        fragment_length=fragment_spec.length,
        codec=fragment_spec.codec,
        flush_interval_ns=fragment_spec.flush_interval_ns,
        now=context.clock.now(),
    )
    return proposal is not fragment and proposal != fragment
