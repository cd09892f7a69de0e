"""What happened in a run, one event a line: the checker's only input beside the bytes of the journals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


class Completed(msgspec.Struct, frozen=True, tag="completed", omit_defaults=True):
    """An append ended. ``fail``: a broker refused it, so that nothing of it may be there; ``unknown``: it
    may. ``registers`` are those of the answer."""

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


class Opened(msgspec.Struct, frozen=True, tag="opened", omit_defaults=True):
    """A reader began, or began again, at an offset."""

    time: float
    reader: str
    journal: str
    offset: int


class Read(msgspec.Struct, frozen=True, tag="read", omit_defaults=True):
    """A reader was given bytes. ``sum`` is their SHA-1."""

    time: float
    reader: str
    journal: str
    begin: int
    end: int
    sum: str


class Jumped(msgspec.Struct, frozen=True, tag="jumped", omit_defaults=True):
    """A reader was told that there are no bytes before an offset."""

    time: float
    reader: str
    journal: str
    begin: int
    end: int


class FaultEvent(msgspec.Struct, frozen=True, tag="fault", omit_defaults=True):
    """Something was broken (``begun``), put right (``ended``), or is as it was before (``settled``)."""

    time: float
    kind: str
    target: str
    phase: Phase


class HeadReset(msgspec.Struct, frozen=True, tag="head_reset", omit_defaults=True):
    """All brokers of a journal had ended, and its head was confirmed as an operator does: what was stored
    goes on from there, and registers, which are not stored, are gone."""

    time: float
    journal: str
    offset: int


class Final(msgspec.Struct, frozen=True, tag="final", omit_defaults=True):
    """All that a source had in the end, from offset 0 on."""

    source: str
    journal: str
    length: int
    sum: str


class ClientFailed(msgspec.Struct, frozen=True, tag="client_failed", omit_defaults=True):
    """An operation that the client library retries failed for its caller nevertheless."""

    time: float
    client: str
    error: str


class Replicas(msgspec.Struct, frozen=True, tag="replicas", omit_defaults=True):
    """How many replicas a journal has in etcd as of a revision, and how many it should have."""

    time: float
    journal: str
    revision: int
    assigned: int
    wanted: int
    consistent: bool


Event: TypeAlias = (
    Invoked
    | Completed
    | Opened
    | Read
    | Jumped
    | FaultEvent
    | HeadReset
    | Final
    | ClientFailed
    | Replicas
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def encode(event: Event) -> bytes:
    """One line."""
    return _encoder.encode(event) + b"\n"


def decode(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of lines. Raises ``msgspec.DecodeError`` for a line that is none."""
    for line in lines:
        yield _decoder.decode(line)
