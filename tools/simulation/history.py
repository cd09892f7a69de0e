"""The events of a simulation that the judge needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Append:
    """One append of a client. ``revision`` of etcd says which life of the journal the answer is about."""

    number: int
    client: str
    journal: str
    payload: bytes
    begun: float
    ended: float | None = None
    begin: int | None = None
    """Offset of the append; None unless it was acknowledged."""
    revision: int = 0
    holders: tuple[tuple[str, ...], ...] = ()
    """For each replica of the append: the broker processes of which one was that replica."""
    primary: tuple[str, ...] = ()
    """The broker processes of which one was the primary of the append."""
    offset: int = 0
    """The explicit offset that the client asked for; 0 for none."""
    repeated: bool = False
    """True if it may be in the journal more than once: its client repeats attempts."""
    shared: bool = False
    """True if it was acknowledged within a commit with others, so that its own offset is not known."""
    session: int = 0
    """The session of the append; 0 for none. Appends of a session are in the order of their numbers."""
    batch: tuple[int, int] | None = None
    """Begin and end of the commit that contains this append and others of its session."""
    error: str = ""
    refused: bool = False
    """True if the answer was that nothing was appended."""
    tag: int | None = None
    """The value of the journal's register that this append has set."""
    expected_tag: int | None = None
    """The value that it required."""
    answered_tags: tuple[str, ...] | None = None
    """The values of the register in the answer to this append; None if the answer has no registers."""

    @property
    def acknowledged(self) -> bool:
        return self.begin is not None

    @property
    def end(self) -> int:
        assert self.begin is not None
        return self.begin + len(self.payload)


@dataclass(slots=True)
class Life:
    """A life of a journal: when it was created and deleted, as revisions of etcd."""

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
    """A time at which the bytes were already on their way to the reader, which may take them later."""
    journal: str
    revision: int
    offset: int
    content: bytes
    final: bool = False
    """True if it was read after all faults: these bytes stay in the journal."""

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
    """Earliest time at which a broker can have reported the jump: readers ask ahead."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something was wrong from ``begin`` to ``end``."""

    begin: float
    end: float
    what: str


@dataclass(slots=True)
class Stored:
    """A fragment that a bucket got, with its content before compression."""

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
    """True if an object stored aside marks this one: brokers must then ask etcd whether they may use it."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The processes that a journal is assigned to, from a revision of etcd on."""

    journal: str
    revision: int
    time: float
    processes: frozenset[str]
    synchronized: frozenset[str] = frozenset()
    """The processes with a route in etcd: they have been in step with their primary since the assignment."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """An operator confirms that a journal continues at ``head``, although all of its brokers ended.

    A broker that was taken from the journal before may still have bytes beyond ``head``.
    """

    life: Life
    time: float
    head: int


@dataclass(slots=True)
class History:
    """All that happened; each list is in the order of time."""

    appends: list[Append] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    jumps: list[Jump] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    unlisted: list[Fault] = field(default_factory=list)
    """Times in which a bucket was not mounted, so that brokers may have listed it as empty. ``what`` names
    the bucket."""
    confirmed: list[Confirmed] = field(default_factory=list)
    resets: list[Confirmed] = field(default_factory=list)
    """Each time that an operator confirmed a head, also while a broker of the journal lived."""
    closings: int = 0
    """Number of closings that primaries have put into stores."""
    assigned: list[Assigned] = field(default_factory=list)
    """The assignments of all journals, whenever they changed."""
    members: dict[str, tuple[int, float]] = field(default_factory=dict)
    """For each process: the revisions from which on, and until which, etcd has its member key."""
    evicted: dict[str, float] = field(default_factory=dict)
    """Processes whose member key was deleted from etcd, and when."""
    hurried: dict[str, float] = field(default_factory=dict)
    """Processes that left in good order, but did not wait until others had their journals."""
    stopped: bool = False
    """Whether all brokers were stopped in good order at the end."""
    lost_brokers: dict[str, float] = field(default_factory=dict)
    """Processes that ended without uploading what they had, or lost their lease, and when."""
    killed: dict[str, float] = field(default_factory=dict)
    """The processes of `lost_brokers` that were killed, and when."""
    violations: list[str] = field(default_factory=list)
    """Violations that were noticed during the run, and not by the judge afterwards."""

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
