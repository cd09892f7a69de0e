"""What an append is made of: its terms, the facts it is told, the work it asks for, its outcome.

The vocabulary between `broker/append/fsm`, which decides, and `broker/append/driver`, which performs. All
of it is
values; offsets are bytes of the journal, times Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

from gazette.broker.append.sessions import ADMITTED, Admission
from gazette.errors import GazetteError
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset, ProcessId, Revision
from gazette.protocol.journal import JournalSpec, SuspendLevel
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet
from gazette.protocol.route import Route
from gazette.protocol.status import Status


class SuspendControl(IntEnum):
    """What an append does about its journal's suspension."""

    RESUME = 0
    """Resume it if it is suspended."""
    NO_RESUME = 1
    """Leave it suspended, and say so."""
    IF_FLUSHED = 2
    """Suspend it if all its content has been in a blob store for a while."""
    NOW = 3
    """Suspend it, flushing what is not in a blob store yet."""
    KEEP = 4
    """Append as if there was no suspension."""


@dataclass(frozen=True, slots=True)
class AppendTerms:
    """What a caller asks of an append, before its content. ``offset`` is None where it may be any."""

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
    """A spool as its holder sees it: nothing pending, or what is pending does not matter."""

    fragment: Fragment
    registers: LabelSet
    first_append_time: float | None = None


@dataclass(frozen=True, slots=True)
class IndexView:
    """The known extent of a journal. ``newest_mod_time`` is of its last fragment, 0 while that is
    held by brokers only."""

    begin: Offset
    end: Offset
    newest_mod_time: int = 0

    @property
    def empty(self) -> bool:
        return self.begin == self.end


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What a peer said to a proposal. ``route`` and ``revision`` are of its header, if it sent one;
    ``end`` and the rest describe its spool, if it disagrees."""

    peer: ProcessId
    status: Status
    route: Route | None = None
    revision: Revision = 0
    fragment: Fragment | None = None
    registers: LabelSet = EMPTY_LABELS


# Facts. Those of a wait that ended otherwise come first: any of them may follow any effect that waits.


@dataclass(frozen=True, slots=True)
class Failed:
    """An effect other than a send or a gather failed, or its deadline passed."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The caller is gone, or the broker stops: nobody wants the outcome of what is being waited for."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class Invalidated:
    """The resolution that the wait is for has been superseded."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A proposal or content did not get to all replicas. The pipeline is of no use any more."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class GatherFailed:
    """An answer did not come, or not in time. The pipeline is of no use any more."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class Resolved:
    """``stored_routes`` are what etcd holds in each of the journal's assignments. ``same_replica``:
    the local replica is the one whose pipeline is held, if one is held. ``same_members``: no assignment
    was made again since that pipeline was built, behind which another replica may be."""

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
    """``route`` is that of the pipeline, None if there is none or it is broken."""

    route: Route | None
    spool: SpoolView | None


@dataclass(frozen=True, slots=True)
class PipelineBuilt:
    spool: SpoolView
    now: float


@dataclass(frozen=True, slots=True)
class SyncSent:
    """``spool`` is the local one, after the proposal."""

    spool: SpoolView


@dataclass(frozen=True, slots=True)
class SyncAnswered:
    """``error`` is that of the first peer which did not answer; ``answers`` are of the others."""

    answers: tuple[PeerAnswer, ...]
    now: float
    error: GazetteError | None = None


@dataclass(frozen=True, slots=True)
class EtcdWritten:
    """A transaction was decided, for or against us; its result shows at ``revision`` or before."""

    revision: Revision


@dataclass(frozen=True, slots=True)
class ReadinessSeen:
    """``store_error`` is None while the store is healthy. ``expired``: the wait has lasted long enough.
    ``known_head`` is what etcd says the journal reaches at least. ``admission`` is what the append's
    session has to say. ``closed`` are the journal's registers if the last primary left in good order: then
    nothing was acknowledged beyond the known head. Else None."""

    refreshed: bool
    store_error: str | None
    index: IndexView
    now: float
    expired: bool = False
    known_head: Offset = 0
    admission: Admission = ADMITTED
    closed: LabelSet | None = None


@dataclass(frozen=True, slots=True)
class RollSent:
    spool: SpoolView


@dataclass(frozen=True, slots=True)
class ContentRead:
    """A message of the caller's stream. Empty content says: commit if the stream ends here."""

    content: bytes


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The caller has closed its stream. ``next`` is what the spool would become, ``sum`` the SHA-1 of
    this append's content alone."""

    next: Fragment
    sum: bytes


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """The caller's stream broke, was abandoned, is malformed or too slow."""

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
    | PipelineBuilt
    | SyncSent
    | SyncAnswered
    | EtcdWritten
    | ReadinessSeen
    | RollSent
    | ContentRead
    | StreamEnded
    | StreamFailed
    | AcksGathered
)


# Work. An effect that reports an event on success is the last of its step; the others report only
# failure, which drops what follows them.


@dataclass(frozen=True, slots=True)
class Resolve:
    """Who serves the journal, as of ``min_revision`` or later. → Resolved."""

    min_revision: Revision


@dataclass(frozen=True, slots=True)
class TakePipeline:
    """Wait for the replica's pipeline. → PipelineTaken, Invalidated."""


@dataclass(frozen=True, slots=True)
class BuildPipeline:
    """Replace the held pipeline by one of the resolved route, with peers that have all of our spool.
    → PipelineBuilt, Invalidated; SyncAnswered if a peer cannot be brought up to it."""


@dataclass(frozen=True, slots=True)
class GiveBackPipeline:
    """Give the held pipeline, or the lack of one, to whoever waits."""


@dataclass(frozen=True, slots=True)
class TearDownPipeline:
    """Shut the held pipeline down on the side, and let whoever waits build another."""


@dataclass(frozen=True, slots=True)
class BreakPipeline:
    """The pipeline that was handed over is broken: its present holder and appends after this one
    must fail too."""

    error: GazetteError


@dataclass(frozen=True, slots=True)
class SendSync:
    """Propose to all replicas. ``opening``: first proposal of the pipeline. → SyncSent, SendFailed."""

    proposal: Fragment
    registers: LabelSet
    opening: bool


@dataclass(frozen=True, slots=True)
class GatherSync:
    """→ SyncAnswered; Invalidated if a peer failed, and is of another route meanwhile."""


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
    """Look at the index and the first store, or wait for a change of either. → ReadinessSeen."""

    wait: bool


@dataclass(frozen=True, slots=True)
class SendRoll:
    """Propose to all replicas, who need not answer. → RollSent, SendFailed."""

    proposal: Fragment
    registers: LabelSet


@dataclass(frozen=True, slots=True)
class ReadContent:
    """→ ContentRead, StreamEnded, StreamFailed."""


@dataclass(frozen=True, slots=True)
class SendContent:
    """→ SendFailed, or nothing."""

    content: bytes
    delta: int


@dataclass(frozen=True, slots=True)
class SendFinal:
    """Propose to commit or to roll back. → SendFailed, or nothing."""

    proposal: Fragment
    registers: LabelSet


@dataclass(frozen=True, slots=True)
class HandOver:
    """Queue for the pipeline's answers, and give its sending half to whoever waits."""


@dataclass(frozen=True, slots=True)
class GatherAcks:
    """→ AcksGathered, GatherFailed."""


Effect: TypeAlias = (
    Resolve
    | TakePipeline
    | BuildPipeline
    | GiveBackPipeline
    | TearDownPipeline
    | BreakPipeline
    | SendSync
    | GatherSync
    | PutAssignments
    | PutSuspend
    | CheckReadiness
    | SendRoll
    | ReadContent
    | SendContent
    | SendFinal
    | HandOver
    | GatherAcks
)


class Ending(Enum):
    """How an append ended. ``REFUSED`` has a status, ``FAILED`` an error."""

    COMMITTED = "committed"
    REFUSED = "refused"
    FAILED = "failed"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an append.

    ``commit`` is the span of this append alone. ``uncertain``: its content was proposed for commit
    and may be part of the journal although the append failed. ``context`` says where an error arose.
    ``repeated``: ``commit`` is that of an earlier attempt of the same append.
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
