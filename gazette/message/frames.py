"""What every framing has in common: `Framing`, the `Frames` it gives, and the errors it raises.

Stage 11 of the byte path. Pure. A `Framing` belongs to one reader or publisher, one content type
and one type of message.

A frame that is not what it should be never hides those around it: decoding gives what precedes it,
then raises a `MalformedMessage` that says where it ends, and goes on from there if told to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final, Generic, TypeVar

from gazette.errors import Corrupt, Invalid
from gazette.message.message_codec import MessageCodec
from gazette.protocol.ids import JournalName, Offset

M = TypeVar("M")

FRAME_BYTES_MAX: Final = 256 << 20
"""The longest frame that is published or read. The protocol has no bound, but a reader that trusts a
corrupt length would hold up to 4 GiB."""

_NEWLINE: Final = 0x0A


class MalformedMessage(Corrupt):
    """A frame of a journal is not a message of the expected type.

    ``raw`` holds its bytes, ``begin`` and ``end`` its place in ``journal``: enough to set it aside
    and go on behind it.
    """

    default_hint = (
        "Repair or stop its producer; to go on without it, let the shard's poison policy skip it."
    )

    def __init__(
        self, reason: str, *, begin: Offset, end: Offset, raw: bytes, journal: JournalName = ""
    ) -> None:
        super().__init__(reason, journal=journal, begin=begin, end=end)
        self.reason = reason
        self.journal = journal
        self.begin = begin
        self.end = end
        self.raw = raw

    def of(self, journal: JournalName) -> MalformedMessage:
        """The same, in a known journal."""
        error = MalformedMessage(
            self.reason, begin=self.begin, end=self.end, raw=self.raw, journal=journal
        )
        error.__cause__ = self.__cause__
        return error


class TruncatedFrame(Corrupt):
    """The bytes to be read ended inside of a frame."""

    default_hint = "Read to an offset at which a message ends, or block until more is written."

    def __init__(
        self, reason: str, *, begin: Offset, end: Offset, raw: bytes, journal: JournalName = ""
    ) -> None:
        super().__init__(reason, journal=journal, begin=begin, end=end)
        self.reason = reason
        self.journal = journal
        self.begin = begin
        self.end = end
        self.raw = raw


@dataclass(slots=True)
class Frames(Generic[M]):
    """Messages that were decoded from a buffer, in its order; ``begins`` and ``ends`` are offsets."""

    begins: list[Offset] = field(default_factory=list)
    ends: list[Offset] = field(default_factory=list)
    messages: list[M] = field(default_factory=list)
    uuids: bytes = b""
    """16 bytes for each message, or nothing if the type has no UUID."""
    consumed: int = 0
    """How much of the buffer they make up; what follows is still incomplete …"""
    stopped: bool = False
    """… unless this is set: then a malformed frame follows."""

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[tuple[Offset, Offset, M]]:
        return zip(self.begins, self.ends, self.messages, strict=True)


class Framing(ABC, Generic[M]):
    """How messages of one type lie in a journal of one content type."""

    content_type: ClassVar[str]

    def __init__(self, codec: MessageCodec[M], frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.codec = codec
        self.frame_bytes_max = frame_bytes_max

    @abstractmethod
    def decode(self, buffer: bytes, base_offset: Offset) -> Frames[M]:
        """The messages of all complete frames, up to the first malformed one.

        Raises `MalformedMessage` only if the very first frame is malformed; the caller may go on
        at its ``end``.
        """

    @abstractmethod
    def may_complete(self, pending: bytes, size: int, data: bytes) -> bool:
        """Whether ``data`` may complete a frame of which ``size`` bytes are pending, beginning with
        ``pending``: spares decoding a large frame again with every part of it."""

    @abstractmethod
    def encode_into(self, message: M, buffer: bytearray) -> None:
        """Append the frame of a message.

        Raises `Invalid` if it cannot be encoded; what the buffer then has beyond its former end is
        garbage that the caller removes.
        """

    @abstractmethod
    def frame(self, payload: bytes) -> bytes:
        """The frame of an encoded message."""

    def encode(self, message: M) -> bytes:
        """The frame of a message. Raises `Invalid`."""
        buffer = bytearray()
        self.encode_into(message, buffer)
        return bytes(buffer)

    def finish(self, rest: bytes, offset: Offset) -> None:
        """Check what is left, at ``offset``, when no more follows. Raises `TruncatedFrame`."""
        if rest:
            raise TruncatedFrame(
                "the bytes end inside of a message",
                begin=offset,
                end=offset + len(rest),
                raw=rest,
            )

    def resume(self, data: bytes) -> int | None:
        """Where in ``data`` a frame that was too long to be kept ends; None if it goes on."""
        at = data.find(_NEWLINE)
        return None if at < 0 else at + 1

    def _unencodable(self, error: BaseException) -> Invalid:
        name = getattr(self.codec.message_type, "__name__", self.codec.message_type)
        return Invalid(f"message of type {name} cannot be encoded: {error}")
