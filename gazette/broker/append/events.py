"""The parts of an append: its terms, the events it receives, the effects it asks for, its outcome.

`broker/append/fsm` decides about events, and `broker/commit/driver` performs the effects. All parts are
values. One append creates about thirty values, so they are structs: to create a frozen dataclass takes nine
times as long. Offsets are in bytes of the journal; times are Unix seconds.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import cached_property
from typing import TypeAlias

import msgspec

from gazette.broker.append.flow_control import RateBalance
from gazette.broker.append.sessions import ADMITTED, Admission
from gazette.errors import GazetteError
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset, ProcessId, Revision
from gazette.protocol.journal import JournalSpec, SuspendLevel
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet
from gazette.protocol.route import Route
from gazette.protocol.status import Status


class SuspendControl(IntEnum):
    """The instruction of an append for its journal's suspension."""

    RESUME = 0
    """Resume the journal if it is suspended."""
    NO_RESUME = 1
    """If the journal is suspended, leave it so, and refuse the append as `SUSPENDED`. Otherwise append."""
    IF_FLUSHED = 2
    """Suspend the journal if it is empty, or if its newest content has been in a blob store for long
    enough (see `is_dirty`)."""
    NOW = 3
    """Suspend the journal, and flush the bytes that are not in a blob store yet."""
    KEEP = 4
    """Append no content. Leave a partial suspension; refuse the append as `SUSPENDED` for a full one."""


class AppendTerms(msgspec.Struct, frozen=True, dict=True):
    """The terms of an append, known before its content. ``offset`` and ``check_registers``: None for any."""

    journal: JournalName
    offset: Offset | None = None
    check_registers: LabelSelector | None = None
    union_registers: LabelSet = EMPTY_LABELS
    subtract_registers: LabelSet = EMPTY_LABELS
    suspend: SuspendControl = SuspendControl.RESUME

    @cached_property
    def changes_registers(self) -> bool:
        return bool(self.union_registers or self.subtract_registers)


class SpoolView(msgspec.Struct, frozen=True):
    """A spool as its holder sees it, without content that is pending."""

    fragment: Fragment
    registers: LabelSet
    first_append_time: float | None = None


class IndexView(msgspec.Struct, frozen=True):
    """The known extent of a journal. ``newest_mod_time`` is the time of its last fragment; 0 while only
    brokers hold that fragment, or if the journal has no fragment."""

    begin: Offset
    end: Offset
    newest_mod_time: int = 0

    @property
    def empty(self) -> bool:
        return self.begin == self.end


class PeerAnswer(msgspec.Struct, frozen=True):
    """The answer of a peer to a proposal.

    ``route`` and ``revision`` are from the header of the answer, if it has a header. If the peer disagrees,
    ``fragment`` and ``registers`` describe the peer's spool.
    """

    peer: ProcessId
    status: Status
    route: Route | None = None
    revision: Revision = 0
    fragment: Fragment | None = None
    registers: LabelSet = EMPTY_LABELS


# Events. The first five say that a wait failed: they may follow any effect that waits.


class Failed(msgspec.Struct, frozen=True):
    """An effect other than a send or a gather failed, or its deadline passed."""

    error: GazetteError


class Abandoned(msgspec.Struct, frozen=True):
    """The caller is gone, or the broker stops: the append does not need the result of its wait any more."""

    error: GazetteError


class Invalidated(msgspec.Struct, frozen=True):
    """A later resolution has superseded the one with which the wait began."""


class SendFailed(msgspec.Struct, frozen=True):
    """A proposal or content did not reach all replicas. The pipeline is broken."""

    error: GazetteError


class GatherFailed(msgspec.Struct, frozen=True):
    """An answer did not arrive in time, or not at all. The pipeline is broken."""

    error: GazetteError


class Resolved(msgspec.Struct, frozen=True):
    """A resolution of the journal.

    ``stored_routes`` are the routes that etcd holds, one for each of the journal's assignments.
    ``same_replica``: the held pipeline, if any, belongs to the local replica. ``same_members``: since that
    pipeline was built, no assignment was added or removed. A new assignment may stand for a new replica.
    """

    status: Status
    route: Route
    revision: Revision
    is_primary: bool = False
    same_replica: bool = True
    same_members: bool = True
    spec: JournalSpec | None = None
    stored_routes: tuple[Route, ...] = ()
    desired_replication: int = 0


class PipelineTaken(msgspec.Struct, frozen=True):
    """The pipeline was taken. ``route`` is the pipeline's, or None if there is no usable pipeline.

    ``balance`` is the replica's rate balance: only the holder of its pipeline uses the balance.
    """

    route: Route | None
    spool: SpoolView | None
    balance: RateBalance = msgspec.field(default_factory=RateBalance)


class PipelineBuilt(msgspec.Struct, frozen=True):
    """A pipeline was built. ``caught_up``: peers lacked bytes of the open fragment, and have got them."""

    spool: SpoolView
    now: float
    caught_up: bool = False


class SyncSent(msgspec.Struct, frozen=True):
    """A proposal was sent. ``spool`` is the local spool, to which the proposal was applied."""

    spool: SpoolView


class SyncAnswered(msgspec.Struct, frozen=True):
    """Peers have sent ``answers``. ``error`` is of the first peer that did not answer."""

    answers: tuple[PeerAnswer, ...]
    now: float
    error: GazetteError | None = None


class EtcdWritten(msgspec.Struct, frozen=True):
    """An etcd transaction for this append has succeeded or failed. Its result is visible at ``revision``."""

    revision: Revision


class HeadSeen(msgspec.Struct, frozen=True):
    """The known head, as etcd has it: the journal has reached ``offset`` at least.

    ``closed`` holds the journal's registers if the last primary left in good order. Then nothing was
    acknowledged beyond ``offset``. Otherwise ``closed`` is None. If a closing was looked for in a store,
    ``unclosed`` says why the head is still not closed.
    """

    offset: Offset = 0
    closed: LabelSet | None = None
    unclosed: str = ""


class ReadinessSeen(msgspec.Struct, frozen=True):
    """The facts that an append needs to begin: about index, first store, known head, and append session."""

    store_error: str | None
    """Why the first store is not healthy. None: it is."""
    index: IndexView
    now: float
    monotonic: float
    head: HeadSeen | None
    """The known head. None until it was read from etcd."""
    store_until: float = 0.0
    """The monotonic time until which the append waits for a store to be listed, or healthy."""
    unlisted: str = ""
    """Why the stores have not been listed yet. Empty once they were."""
    must_begin: bool = False
    """True if former primaries may have uploaded bytes beyond the spool, or still may. See `BeginTenure`."""
    admission: Admission = ADMITTED
    """The decision of the session ledger."""
    store_refuses: str = ""
    """Why the first store refuses the journal's fragments. Empty: it does not."""
    undecided_to: Offset = 0
    """The end of the last of the fragments that ``undecided`` names."""
    undecided: str = ""
    """Names stored fragments that may or may not be the journal's."""


class AllAcknowledged(msgspec.Struct, frozen=True):
    """All replicas have acknowledged the proposals of earlier appends."""

    now: float


class RollSent(msgspec.Struct, frozen=True):
    """A roll was sent. ``spool`` is the local spool after the roll."""

    spool: SpoolView


class ContentRead(msgspec.Struct, frozen=True):
    """A message of the caller's stream. Empty content means: commit if the stream ends here.

    ``waited`` is how long the read took, ``now`` when it ended, in ticks of a monotonic clock. ``stalled``:
    the broker itself stood still meanwhile, so the caller's speed is not known.
    """

    content: bytes
    waited: int = 0
    now: int = 0
    stalled: bool = False


class ContentLate(msgspec.Struct, frozen=True):
    """The caller has sent nothing until its deadline."""


class ContentHeld(msgspec.Struct, frozen=True):
    """Content was held back until ``now``, in ticks. ``superseded``: the resolution no longer holds, and
    other appends may wait to change the pipeline."""

    now: int
    superseded: bool = False


class StreamEnded(msgspec.Struct, frozen=True):
    """The caller has closed its stream. ``next`` is the fragment of the spool after a commit. ``sum`` is the
    SHA-1 of this append's content alone."""

    next: Fragment
    sum: bytes


class StreamFailed(msgspec.Struct, frozen=True):
    """The caller's stream broke, was abandoned, or is malformed."""

    error: GazetteError


class AcksGathered(msgspec.Struct, frozen=True):
    """Peers have sent ``answers`` to the final proposal, all of them or up to the first refusal."""

    answers: tuple[PeerAnswer, ...]


Event: TypeAlias = (
    Failed
    | Abandoned
    | Invalidated
    | SendFailed
    | GatherFailed
    | Resolved
    | PipelineTaken
    | PipelineBuilt
    | SyncSent
    | SyncAnswered
    | EtcdWritten
    | ReadinessSeen
    | AllAcknowledged
    | RollSent
    | ContentRead
    | ContentLate
    | ContentHeld
    | StreamEnded
    | StreamFailed
    | AcksGathered
)


# Effects. Some effects report an event when they succeed: such an effect is the last of its step. All other
# effects report only a failure. After a failure, the remaining effects of the step are dropped.


class Resolve(msgspec.Struct, frozen=True):
    """Resolve the journal's route, as of ``min_revision`` or later. → Resolved."""

    min_revision: Revision


class TakePipeline(msgspec.Struct, frozen=True):
    """Wait for the replica's pipeline. → PipelineTaken, Invalidated."""


class BuildPipeline(msgspec.Struct, frozen=True):
    """Replace the held pipeline by one of the resolved route, and bring its peers up to the local spool. →
    PipelineBuilt, Invalidated; SyncAnswered if a peer cannot be brought up to the spool."""


class GiveBackPipeline(msgspec.Struct, frozen=True):
    """Give the held pipeline, or the right to build a missing one, to the next append that waits."""


class TearDownPipeline(msgspec.Struct, frozen=True):
    """Shut the held pipeline down in the background, and let the next append build another."""


class BreakPipeline(msgspec.Struct, frozen=True):
    """Break the pipeline that was handed over: its present holder and later appends must fail too."""

    error: GazetteError


class SendSync(msgspec.Struct, frozen=True):
    """Propose to all replicas. ``opening``: as the first proposal of the pipeline. → SyncSent, SendFailed."""

    proposal: Fragment
    registers: LabelSet
    opening: bool


class GatherSync(msgspec.Struct, frozen=True):
    """Gather the answers. → SyncAnswered; Invalidated if a peer failed and the members have changed since."""


class PutAssignments(msgspec.Struct, frozen=True):
    """Store the route in all assignments, unless one of them has changed. → EtcdWritten."""

    route: Route


class PutSuspend(msgspec.Struct, frozen=True):
    """Change the specification's suspension, if nothing of the journal has changed. → EtcdWritten."""

    level: SuspendLevel
    offset: Offset


class CheckReadiness(msgspec.Struct, frozen=True):
    """Look at the index, the first store, the known head and the session. → ReadinessSeen."""


class LoadHead(msgspec.Struct, frozen=True):
    """Read the known head from etcd, and look again. → ReadinessSeen."""


class AwaitReadiness(msgspec.Struct, frozen=True):
    """Wait for the first listing or a change of the store's health, until a monotonic time at most. Then look
    again. → ReadinessSeen, Invalidated."""

    until: float


class SeekClosing(msgspec.Struct, frozen=True):
    """Close the known head if the last primary has left a closing in a store, and look again. →
    ReadinessSeen."""


class ConfirmHead(msgspec.Struct, frozen=True):
    """Record that the journal goes on at ``offset``, and that missing bytes before it are lost. Look again.
    → ReadinessSeen."""

    offset: Offset


class BeginTenure(msgspec.Struct, frozen=True):
    """End uploads for former primaries at ``end``, list the stores, and look again. → ReadinessSeen."""

    end: Offset


class AwaitAcks(msgspec.Struct, frozen=True):
    """Wait until earlier appends have gathered their answers. → AllAcknowledged, SendFailed, Abandoned."""


class SendRoll(msgspec.Struct, frozen=True):
    """Propose to all replicas, which need not answer. → RollSent, SendFailed."""

    proposal: Fragment
    registers: LabelSet


class ReadContent(msgspec.Struct, frozen=True):
    """Read the next message of the caller's stream, for at most ``ticks``; None: for ever. → ContentRead,
    ContentLate, StreamEnded, StreamFailed."""

    ticks: int | None = None


class HoldContent(msgspec.Struct, frozen=True):
    """Hold the last content back for ``ticks``, or until the resolution is superseded. → ContentHeld,
    StreamFailed."""

    ticks: int


class SendContent(msgspec.Struct, frozen=True):
    """Send content to all replicas, ``delta`` bytes into the append. → SendFailed, or nothing."""

    content: bytes
    delta: int


class SendFinal(msgspec.Struct, frozen=True):
    """Propose to commit or to roll back. → SendFailed, or nothing."""

    proposal: Fragment
    registers: LabelSet


class HandOver(msgspec.Struct, frozen=True):
    """Queue for the pipeline's answers, and give the right to send to the next append that waits."""


class GatherAcks(msgspec.Struct, frozen=True):
    """Gather the answers to the final proposal. → AcksGathered, GatherFailed."""


RareEffect: TypeAlias = (
    HoldContent
    | BuildPipeline
    | TearDownPipeline
    | BreakPipeline
    | SendSync
    | GatherSync
    | PutAssignments
    | PutSuspend
    | LoadHead
    | AwaitReadiness
    | SeekClosing
    | ConfirmHead
    | BeginTenure
    | AwaitAcks
)
"""Effects that only some appends ask for."""

Effect: TypeAlias = (
    ReadContent
    | SendContent
    | Resolve
    | TakePipeline
    | CheckReadiness
    | SendRoll
    | SendFinal
    | HandOver
    | GatherAcks
    | GiveBackPipeline
    | RareEffect
)


class Ending(Enum):
    """The way in which an append ended. ``REFUSED`` has a status, ``FAILED`` an error."""

    COMMITTED = "committed"
    REFUSED = "refused"
    FAILED = "failed"
    PROXY = "proxy"


class Outcome(msgspec.Struct, frozen=True):
    """The result of an append.

    ``commit`` is the span of this append alone. ``uncertain``: the content was proposed for commit, and may
    be in the journal although the append failed. ``context`` names the step in which ``error`` arose.
    ``repeated``: an earlier attempt of the same append made ``commit``.
    """

    ending: Ending
    status: Status = Status.OK
    commit: Fragment | None = None
    registers: LabelSet = EMPTY_LABELS
    store_error: str = ""
    error: GazetteError | None = None
    context: str = ""
    uncertain: bool = False
    repeated: bool = False
