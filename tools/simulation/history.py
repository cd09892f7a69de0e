"""What happened in a simulation, as far as its invariants are about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Append:
    """One append of a client. ``revision`` (of etcd) says in which life of the journal it was answered."""

    number: int
    client: str
    journal: str
    payload: bytes
    begun: float
    ended: float | None = None
    begin: int | None = None
    """Where it is; None unless it was acknowledged."""
    revision: int = 0
    holders: tuple[tuple[str, ...], ...] = ()
    """Its replicas: for each the broker processes, one of which it was."""
    primary: tuple[str, ...] = ()
    """The broker processes one of which was its primary."""
    offset: int = 0
    """The offset that was asked for; 0 for none."""
    repeated: bool = False
    """Whether it may be in the journal more than once."""
    shared: bool = False
    """Whether it was acknowledged as a part of something, at an offset that is not known."""
    session: int = 0
    """The session of which it is one: they are in the order of their numbers. 0 for none."""
    batch: tuple[int, int] | None = None
    """Begin and end of the commit that has it, and others of its session."""
    error: str = ""
    refused: bool = False
    """Whether it was answered that nothing was appended."""
    tag: int | None = None
    """The value of the journal's register that this append has set."""
    expected_tag: int | None = None
    """The value that it required."""
    answered_tags: tuple[str, ...] | None = None
    """The values of the register that its answer gave; None if it does not say."""

    @property
    def acknowledged(self) -> bool:
        return self.begin is not None

    @property
    def end(self) -> int:
        assert self.begin is not None
        return self.begin + len(self.payload)


@dataclass(slots=True)
class Life:
    """From the creation of a journal to its deletion, in revisions of etcd and in time."""

    journal: str
    created: int
    bucket: str
    deleted: int | None = None
    deleted_at: float | None = None

    def has(self, revision: int) -> bool:
        return self.created <= revision and (self.deleted is None or revision < self.deleted)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that a reader was given, in one RPC that began at ``revision``."""

    reader: str
    time: float
    """When they were on their way to the reader already. It may take them later."""
    journal: str
    revision: int
    offset: int
    content: bytes
    final: bool = False
    """Read after everything was healed: what the journal has for good."""

    @property
    def end(self) -> int:
        return self.offset + len(self.content)


@dataclass(frozen=True, slots=True)
class Jump:
    """A reader was sent from one offset to a greater one."""

    reader: str
    time: float
    journal: str
    revision: int
    begin: int
    end: int
    since: float
    """When a broker can have said so first: readers ask ahead."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something was wrong from ``begin`` to ``end``."""

    begin: float
    end: float
    what: str


@dataclass(slots=True)
class Stored:
    """A fragment that a bucket got, with its content as it was before compression."""

    time: float
    bucket: str
    journal: str
    begin: int
    end: int
    content: bytes
    path: str
    by: str = ""
    """The process that put it."""
    removed: float | None = None
    """When it was removed again."""
    marked: bool = False
    """An object aside says that brokers must ask etcd if they may use it."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The processes that a journal is assigned to, from a revision of etcd on."""

    journal: str
    revision: int
    time: float
    processes: frozenset[str]
    synchronized: frozenset[str] = frozenset()
    """Those of which etcd has a route: they agreed with their primary since they were assigned."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """An operator confirms that a journal continues at ``head``, although all of its brokers ended.

    A broker that was taken from the journal before may still have bytes behind ``head``.
    """

    life: Life
    time: float
    head: int


@dataclass(slots=True)
class History:
    """Everything, in the order in which it happened."""

    appends: list[Append] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    jumps: list[Jump] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    unlisted: list[Fault] = field(default_factory=list)
    """When brokers may not have listed what a bucket has, which ``what`` names: it was not mounted."""
    confirmed: list[Confirmed] = field(default_factory=list)
    resets: list[Confirmed] = field(default_factory=list)
    """Whenever an operator confirmed a head, also while one of its brokers lived."""
    closings: int = 0
    """Number of times that a primary said in a store where it ended."""
    assigned: list[Assigned] = field(default_factory=list)
    """The assignments of all journals, whenever they changed."""
    members: dict[str, tuple[int, float]] = field(default_factory=dict)
    """For each process, the revisions from which and until which etcd has its member key."""
    evicted: dict[str, float] = field(default_factory=dict)
    """Processes whose member key was deleted from etcd, and when."""
    hurried: dict[str, float] = field(default_factory=dict)
    """Processes that left in good order, but did not wait until others had their journals."""
    stopped: bool = False
    """Whether all brokers were stopped in good order at the end."""
    lost_brokers: dict[str, float] = field(default_factory=dict)
    """Processes that ended without uploading what they had, or lost their lease, and when."""
    killed: dict[str, float] = field(default_factory=dict)
    """Those of them that were killed, and when."""
    violations: list[str] = field(default_factory=list)
    """What was seen to be wrong as it happened."""

    def was_member(self, name: str, revision: int) -> bool:
        """Return True if the member key of a process was in etcd at ``revision``."""
        begin, end = self.members.get(name, (math.inf, 0))
        return begin <= revision < end

    def life_of(self, journal: str, revision: int) -> Life | None:
        for life in self.lives:
            if life.journal == journal and life.has(revision):
                return life
        return None

    def last_life(self, journal: str) -> Life | None:
        found = None
        for life in self.lives:
            if life.journal == journal:
                found = life
        return found
