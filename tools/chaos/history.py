"""The history of a run, one event a line. The checker has no other input but the bytes of the journals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values of registers, ascending."""
Outcome: TypeAlias = Literal["ok", "fail", "unknown"]
Phase: TypeAlias = Literal["begun", "ended", "settled"]


class Invoked(msgspec.Struct, frozen=True, tag="invoked", omit_defaults=True):
    """An append was begun. ``op`` names its payload, and is the same in every attempt to append it.
    ``time`` is monotonic, in seconds; ``offset`` 0 means anywhere."""

    time: float
    op: int
    attempt: int
    client: str
    journal: str
    length: int
    offset: int = 0
    check: str = ""
    union: Labels = ()
    subtract: Labels = ()
    session: str = ""
    """The session of the append; empty for none. It repeats the append while the outcome is unknown."""


class Completed(msgspec.Struct, frozen=True, tag="completed", omit_defaults=True):
    """An append ended. ``fail``: a broker refused it, and no byte of it may be in the journal. ``unknown``:
    its bytes may be there or not. ``registers`` are the answer's."""

    time: float
    op: int
    attempt: int
    outcome: Outcome
    begin: int = 0
    end: int = 0
    sum: str = ""
    registers: Labels = ()
    status: str = ""
    error: str = ""
    members: tuple[str, ...] = ()
    """Brokers of the answer's route: these held the bytes."""
    primary: str = ""
    revision: int = 0
    """Revision of the answer's route."""


class Opened(msgspec.Struct, frozen=True, tag="opened", omit_defaults=True):
    """A reader began, or began again, at an offset. If ``follows``, it follows the head."""

    time: float
    reader: str
    journal: str
    offset: int
    follows: bool = False


class Read(msgspec.Struct, frozen=True, tag="read", omit_defaults=True):
    """A reader was given bytes. ``sum`` is their SHA-1."""

    time: float
    reader: str
    journal: str
    begin: int
    end: int
    sum: str


class Jumped(msgspec.Struct, frozen=True, tag="jumped", omit_defaults=True):
    """A reader learned that there are no bytes before an offset."""

    time: float
    reader: str
    journal: str
    begin: int
    end: int


class FaultEvent(msgspec.Struct, frozen=True, tag="fault", omit_defaults=True):
    """A fault began or ended. The phase ``settled`` says that its effects are over, too."""

    time: float
    kind: str
    target: str
    phase: Phase


class Created(msgspec.Struct, frozen=True, tag="created", omit_defaults=True):
    """A journal was created as of ``revision``. ``life`` counts from 1: a name may be deleted and created
    again."""

    time: float
    journal: str
    replication: int
    revision: int
    life: int = 1


class Lost(msgspec.Struct, frozen=True, tag="lost", omit_defaults=True):
    """A declared loss of all replicas: ``brokers`` were killed together.

    Bytes of the journal that only these brokers held may be gone, except the spans in ``stored``.
    """

    time: float
    journal: str
    brokers: tuple[str, ...]
    stored: tuple[tuple[int, int], ...] = ()


class HeadReset(msgspec.Struct, frozen=True, tag="head_reset", omit_defaults=True):
    """The journal went on after a declared end of all of its replicas: its head was ``offset`` a moment ago.

    Registers, which are not stored, may be gone from some place of [``begin``, ``offset``] on.
    """

    time: float
    journal: str
    offset: int
    begin: int


class Deposed(msgspec.Struct, frozen=True, tag="deposed", omit_defaults=True):
    """A broker went on after a pause, and etcd had removed it as of ``revision``."""

    time: float
    broker: str
    revision: int


class Ended(msgspec.Struct, frozen=True, tag="ended", omit_defaults=True):
    """A broker's process ended. ``asked``: by SIGTERM. Killed brokers have no such event."""

    time: float
    broker: str
    exit_code: int
    asked: bool
    error: str = ""


class Logged(msgspec.Struct, frozen=True, tag="logged", omit_defaults=True):
    """A broker logged a defect (a ``Bug`` or a traceback), so many times."""

    broker: str
    text: str
    count: int = 1


class Quiet(msgspec.Struct, frozen=True, tag="quiet", omit_defaults=True):
    """A time without faults in which every journal must serve began or ended."""

    time: float
    phase: Phase


class Stopped(msgspec.Struct, frozen=True, tag="stopped", omit_defaults=True):
    """The run could not be brought to its end."""

    time: float
    error: str


class Final(msgspec.Struct, frozen=True, tag="final", omit_defaults=True):
    """All bytes that a source had in the end, from offset 0 on. It had no bytes in ``holes``."""

    source: str
    journal: str
    length: int
    sum: str
    holes: tuple[tuple[int, int], ...] = ()


class ClientFailed(msgspec.Struct, frozen=True, tag="client_failed", omit_defaults=True):
    """An operation that the client library retries failed for its caller nevertheless.

    ``damage``: the answer says that data is not what it should be (``DATA_LOSS``, ``Corrupt``).
    """

    time: float
    client: str
    error: str
    journal: str = ""
    damage: bool = False


class OtherLife(msgspec.Struct, frozen=True, tag="other-life", omit_defaults=True):
    """A reader was refused, as its journal was deleted and created again. Revisions are of both creations."""

    time: float
    reader: str
    journal: str
    before: int
    now: int


class Replicas(msgspec.Struct, frozen=True, tag="replicas", omit_defaults=True):
    """Number of replicas of a journal in etcd as of a revision, and the number that it should have."""

    time: float
    journal: str
    revision: int
    assigned: int
    wanted: int
    consistent: bool


class StoredOps(msgspec.Struct, frozen=True, tag="stored-ops", omit_defaults=True):
    """The operations that have bytes in the store of one life of a journal, in the end."""

    journal: str
    life: int
    ops: tuple[int, ...] = ()


Event: TypeAlias = (
    Invoked
    | Completed
    | Opened
    | Read
    | Jumped
    | FaultEvent
    | Created
    | Lost
    | HeadReset
    | Deposed
    | Ended
    | Logged
    | Quiet
    | Stopped
    | Final
    | StoredOps
    | ClientFailed
    | OtherLife
    | Replicas
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def encode(event: Event) -> bytes:
    """Encode an event as one line."""
    return _encoder.encode(event) + b"\n"


class History:
    """The events of a file. Each iteration reads the file from its beginning, so they need no memory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Event]:
        with self._path.open("rb") as lines:
            yield from decode(lines)


def decode(lines: Iterable[bytes]) -> Iterator[Event]:
    """Decode lines to their events. Raise ``msgspec.DecodeError`` for a line that is no event."""
    for line in lines:
        yield _decoder.decode(line)
