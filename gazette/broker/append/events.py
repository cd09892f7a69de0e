"""The parts of an append: its terms, the events it receives, the effects it asks for, its outcome.

This is the vocabulary between `broker/append/fsm`, which decides, and `broker/append/driver`, which performs.
All parts are values. Offsets are bytes of the journal; times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TypeAlias

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
    """Leave the journal suspended, and refuse the append as `SUSPENDED`."""
    IF_FLUSHED = 2
    """Suspend the journal if all its content has been in a blob store for a while."""
    NOW = 3
    """Suspend the journal, and flush what is not in a blob store yet."""
    KEEP = 4
    """Append as if there was no suspension."""


@dataclass(frozen=True, slots=True)
class AppendTerms:
    """The terms of an append, known before its content. ``offset`` is None if any offset will do."""

    journal: JournalName
    offset: Offset | None = None
    check_registers: LabelSelector | None = None
    union_registers: LabelSet = EMPTY_LABELS
    subtract_registers: LabelSet = EMPTY_LABELS
    suspend: SuspendControl = SuspendControl.RESUME

    @property
    def changes_registers(self) -> bool:
        return bool(self.union_registers or self.subtract_registers)


@dataclass(frozen=True, slots=True)
class SpoolView:
    """A spool as its holder sees it: nothing is pending, or what is pending does not matter."""

    fragment: Fragment
    registers: LabelSet
    first_append_time: float | None = None


@dataclass(frozen=True, slots=True)
class IndexView:
    """The known extent of a journal. ``newest_mod_time`` is that of its last fragment. It is 0 while
    only brokers hold that fragment.
    """

    begin: Offset
    end: Offset
    newest_mod_time: int = 0

    @property
    def empty(self) -> bool:
        return self.begin == self.end


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The answer of a peer to a proposal.

    ``route`` and ``revision`` are those of its header, if it sent one. ``fragment`` and ``registers``
    describe its spool, if it disagrees.
    """

    peer: ProcessId
    status: Status
    route: Route | None = None
    revision: Revision = 0
    fragment: Fragment | None = None
    registers: LabelSet = EMPTY_LABELS


# Events. First come those for a wait that failed. Each of them may follow any effect that waits.


@dataclass(frozen=True, slots=True)
class Failed:
    """An effect other than a send or a gather failed, or its deadline passed."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The caller is gone, or the broker stops: the outcome of the wait is of no use."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class Invalidated:
    """The resolution that the wait is for has been superseded."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A proposal or content did not reach all replicas. The pipeline is broken."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class GatherFailed:
    """An answer did not arrive, or not in time. The pipeline is broken."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class Resolved:
    """A resolution of the journal.

    ``stored_routes`` are those that etcd holds in each of the journal's assignments. ``same_replica``: the
    local replica owns the pipeline that is held, if one is held. ``same_members``: no assignment was made
    again since that pipeline was built. A new assignment may stand for another replica.
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


@dataclass(frozen=True, slots=True)
class PipelineTaken:
    """The pipeline was taken. ``route`` is the pipeline's, or None if there is no usable pipeline.

    ``balance`` is that of the replica. Only the holder of its pipeline uses it.
    """

    route: Route | None
    spool: SpoolView | None
    balance: RateBalance = field(default_factory=RateBalance)


@dataclass(frozen=True, slots=True)
class TakenAlong:
    """Another append has committed this one along with its own content, or has failed with it."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class PipelineBuilt:
    """``caught_up`` is True if peers lacked bytes of the open fragment, and were sent them."""

    spool: SpoolView
    now: float
    caught_up: bool = False


@dataclass(frozen=True, slots=True)
class SyncSent:
    """A proposal was sent. ``spool`` is the local spool, to which the proposal was applied."""

    spool: SpoolView


@dataclass(frozen=True, slots=True)
class SyncAnswered:
    """Peers have answered. ``error`` is that of the first peer that did not answer. ``answers`` are
    those of the other peers.
    """

    answers: tuple[PeerAnswer, ...]
    now: float
    error: GazetteError | None = None


@dataclass(frozen=True, slots=True)
class EtcdWritten:
    """An etcd transaction was decided, for or against this append. Its result
    shows at ``revision`` or before.
    """

    revision: Revision


@dataclass(frozen=True, slots=True)
class HeadSeen:
    """The known head, as etcd has it. ``offset`` is what the journal has reached at least.

    ``closed`` holds the journal's registers if the last primary left in good order. Then nothing was
    acknowledged beyond ``offset``. Otherwise ``closed`` is None.
    """

    offset: Offset = 0
    closed: LabelSet | None = None


@dataclass(frozen=True, slots=True)
class ReadinessSeen:
    """The state of index, first store, known head and append session.

    ``unlisted`` says why the stores have not been listed yet; it is empty once they were.
    ``store_error`` is None while the store is healthy. ``head`` is None until it was read from etcd.
    ``must_begin``: stores may have, or get, bytes of former primaries behind the spool (`BeginTenure`).
    ``admission`` is the decision of the append's session ledger. ``monotonic`` is in seconds.
    """

    store_error: str | None
    index: IndexView
    now: float
    monotonic: float
    head: HeadSeen | None
    unlisted: str = ""
    must_begin: bool = False
    admission: Admission = ADMITTED


@dataclass(frozen=True, slots=True)
class AllAcknowledged:
    """All replicas have acknowledged what earlier appends proposed."""

    now: float


@dataclass(frozen=True, slots=True)
class RollSent:
    spool: SpoolView


@dataclass(frozen=True, slots=True)
class ContentRead:
    """A message of the caller's stream. Empty content means: commit if the stream ends here.

    ``waited`` and ``now`` are in ticks of a monotonic clock: the time that the read took, and its end.
    ``stalled``: the broker itself stood still meanwhile, so that the caller's speed is not known.
    """

    content: bytes
    waited: int = 0
    now: int = 0
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class ContentLate:
    """The caller has sent nothing for as long as it was given."""


@dataclass(frozen=True, slots=True)
class ContentHeld:
    """Content was held back until ``now``, in ticks. ``superseded``: the resolution no longer holds, so
    that other appends wait to change the pipeline.
    """

    now: int
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The caller has closed its stream. ``next`` is the fragment that the spool would become. ``sum`` is
    the SHA-1 of this append's content alone.
    """

    next: Fragment
    sum: bytes


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """The caller's stream broke, was abandoned, or is malformed."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class AcksGathered:
    answers: tuple[PeerAnswer, ...]


Event: TypeAlias = (
    Failed
    | Abandoned
    | Invalidated
    | SendFailed
    | GatherFailed
    | Resolved
    | PipelineTaken
    | TakenAlong
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


# Effects. Some report an event when they succeed: such an effect is the last one of its step. The
# others report only their failure. Then the effects behind them are dropped.


@dataclass(frozen=True, slots=True)
class Resolve:
    """Resolve the journal's route, as of ``min_revision`` or later. → Resolved."""

    min_revision: Revision


@dataclass(frozen=True, slots=True)
class TakePipeline:
    """Wait for the replica's pipeline. → PipelineTaken, TakenAlong, Invalidated."""


@dataclass(frozen=True, slots=True)
class BuildPipeline:
    """Replace the held pipeline by one of the resolved route, whose peers have the whole local spool. →
    PipelineBuilt, Invalidated; SyncAnswered if a peer cannot be brought up to date.
    """


@dataclass(frozen=True, slots=True)
class GiveBackPipeline:
    """Give the held pipeline, or the lack of one, to the next append that waits."""


@dataclass(frozen=True, slots=True)
class TearDownPipeline:
    """Shut the held pipeline down on the side, and let the next append build another."""


@dataclass(frozen=True, slots=True)
class BreakPipeline:
    """Break the pipeline that was handed over: its present holder and later appends must fail too."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class SendSync:
    """Propose to all replicas. ``opening``: the pipeline's first proposal. → SyncSent, SendFailed."""

    proposal: Fragment
    registers: LabelSet
    opening: bool


@dataclass(frozen=True, slots=True)
class GatherSync:
    """Gather the answers. → SyncAnswered; Invalidated if a peer failed and has since left the route."""


@dataclass(frozen=True, slots=True)
class PutAssignments:
    """Store the route in all assignments, if none of them has changed. → EtcdWritten."""

    route: Route


@dataclass(frozen=True, slots=True)
class PutSuspend:
    """Change the specification's suspension, if nothing of the journal has changed. → EtcdWritten."""

    level: SuspendLevel
    offset: Offset


@dataclass(frozen=True, slots=True)
class CheckReadiness:
    """Look at the index, the first store, the known head and the session. → ReadinessSeen."""


@dataclass(frozen=True, slots=True)
class LoadHead:
    """Read the known head from etcd, and look again. → ReadinessSeen."""


@dataclass(frozen=True, slots=True)
class AwaitReadiness:
    """Wait for a change of index or store, until a monotonic time at most, and look again. →
    ReadinessSeen, Invalidated.
    """

    until: float


@dataclass(frozen=True, slots=True)
class BeginTenure:
    """End uploads for former primaries at ``end``, list the stores, and look again. → ReadinessSeen."""

    end: Offset


@dataclass(frozen=True, slots=True)
class AwaitAcks:
    """Wait until earlier appends have gathered their answers. → AllAcknowledged, SendFailed, Abandoned."""


@dataclass(frozen=True, slots=True)
class SendRoll:
    """Propose to all replicas, which need not answer. → RollSent, SendFailed."""

    proposal: Fragment
    registers: LabelSet


@dataclass(frozen=True, slots=True)
class ReadContent:
    """Read the next message of the caller's stream, for at most ``ticks``; None: for ever.
    → ContentRead, ContentLate, StreamEnded, StreamFailed.
    """

    ticks: int | None = None


@dataclass(frozen=True, slots=True)
class HoldContent:
    """Hold the last content back for ``ticks``, or until the resolution is superseded.
    → ContentHeld, StreamFailed.
    """

    ticks: int


@dataclass(frozen=True, slots=True)
class SendContent:
    """Send content to all replicas. → SendFailed, or nothing."""

    content: bytes
    delta: int


@dataclass(frozen=True, slots=True)
class SendFinal:
    """Propose to commit or to roll back. → SendFailed, or nothing."""

    proposal: Fragment
    registers: LabelSet


@dataclass(frozen=True, slots=True)
class HandOver:
    """Queue for the pipeline's answers, and give its sending half to the next append that waits."""


@dataclass(frozen=True, slots=True)
class GatherAcks:
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an append.

    ``commit`` is the span of this append alone. ``uncertain``: the content was proposed for commit, and may
    be in the journal although the append failed. ``context`` says where an error arose. ``repeated``:
    ``commit`` is that of an earlier attempt of the same append.
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
