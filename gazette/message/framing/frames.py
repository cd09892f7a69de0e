"""The base of every framing: `Framing`, the `Frames` that it decodes, and the errors that it raises.

Stage 11 of the byte path. Pure. Each reader or publisher has a `Framing` for one content and message type.

A malformed frame never hides the frames around it. Decoding first returns the messages before that frame.
Then it raises a `MalformedMessage` with the end of the frame, at which the caller may continue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from gazette.errors import Corrupt, Invalid, InvalidValue
from gazette.message.codec import MessageCodec
from gazette.message.uuid import UuidMint
from gazette.protocol.ids import JournalName, Offset

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)

FRAME_BYTES_MAX: Final = 256 << 20
"""Greatest length of a frame that is published or read, in bytes. The protocol has no bound, but a
reader that trusts a corrupt length would hold up to 4 GiB."""

_NEWLINE: Final = 0x0A


class MalformedMessage(Corrupt):
    """A frame of a journal that is not a message of the expected type.

    ``raw`` holds the bytes of the frame. ``journal``, ``begin`` and ``end`` locate the frame: a caller
    may continue at ``end``. ``is_whole`` is False if a frame is too long and its end is not known yet.
    """

    is_whole = True

    default_hint = (
        "Repair or stop its producer, or skip the message by the application's `poison_policy` "
        "(docs/transactions.md)."
    )

    def __init__(
        self,
        reason: str,
        *,
        begin: Offset,
        end: Offset,
        raw: bytes,
        journal: JournalName = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(reason, journal=journal, begin=begin, end=end, hint=hint)
        self.reason = reason
        self.journal = journal
        self.begin = begin
        self.end = end
        self.raw = raw

    def of(self, journal: JournalName) -> MalformedMessage:
        """Return the same error with the name of its journal."""
        error = MalformedMessage(
            self.reason,
            begin=self.begin,
            end=self.end,
            raw=self.raw,
            journal=journal,
            hint=self.hint,
        )
        error.__cause__ = self.__cause__
        return error


def hint_of(error: BaseException | None) -> str | None:
    """Return the hint of an error about the UUID of a message. Return None for any other error."""
    return error.hint if isinstance(error, Invalid) and error.path == "uuid" else None


class TruncatedFrame(Corrupt):
    """The bytes end inside of a frame."""

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
    """Messages that were decoded from a buffer, in order. ``begins`` and ``ends`` are journal offsets."""

    begins: list[Offset] = field(default_factory=list)
    ends: list[Offset] = field(default_factory=list)
    messages: list[M] = field(default_factory=list)
    uuids: bytes = b""
    """16 bytes for each message, or nothing if the type has no UUID."""
    consumed: int = 0
    """Bytes of the buffer that the messages occupy. An incomplete frame may follow."""
    stopped: bool = False
    """True if the frame after these messages is malformed."""

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[tuple[Offset, Offset, M]]:
        return zip(self.begins, self.ends, self.messages, strict=True)


class Stamper(Protocol[M_contra]):
    """Function that stamps a message and appends its frame: see `Framing.stamper`."""

    def __call__(self, message: M_contra, flags: int, buffer: bytearray, /) -> None: ...


class Framing(ABC, Generic[M]):
    """The encoding of messages of one type in a journal of one content type."""

    content_type: ClassVar[str]

    def __init__(self, codec: MessageCodec[M], frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.codec = codec
        self.frame_bytes_max = frame_bytes_max

    @abstractmethod
    def decode(self, buffer: bytes, base_offset: Offset) -> Frames[M]:
        """Decode all complete frames, up to the first malformed one.

        Raise `MalformedMessage` only if the first frame is malformed. The caller may continue at its ``end``.
        """

    @abstractmethod
    def may_complete(self, pending: bytes, size: int, data: bytes) -> bool:
        """Return True if ``data`` may complete the pending frame, or show that it is malformed.

        ``size`` bytes are pending, and begin with ``pending``. After False, the caller only waits for more
        bytes. So a large frame is not decoded again with each of its chunks.
        """

    @abstractmethod
    def encode_into(self, message: M, buffer: bytearray) -> None:
        """Append the frame of a message. Raise `Invalid` if it cannot be encoded: the caller then removes the
        appended bytes."""

    def stamper(self, mint: UuidMint) -> Stamper[M]:
        """Return a function that assigns a new UUID of ``mint`` to a message, and appends its frame.

        If a message cannot be encoded, the function raises `Invalid`. Its caller removes the appended bytes.
        """

        def stamp(message: M, flags: int, buffer: bytearray) -> None:
            self.encode_into(self.codec.stamp(message, mint, flags), buffer)

        return stamp

    @abstractmethod
    def frame(self, payload: bytes) -> bytes:
        """Return the frame of an encoded message."""

    def encode(self, message: M) -> bytes:
        """Return the frame of a message. Raise `Invalid` if it cannot be encoded."""
        buffer = bytearray()
        self.encode_into(message, buffer)
        return bytes(buffer)

    def finish(self, rest: bytes, offset: Offset) -> None:
        """Check the bytes left at ``offset`` at the end. Raise `TruncatedFrame` if they cut a message."""
        if rest:
            raise TruncatedFrame(
                "the bytes end inside of a message",
                begin=offset,
                end=offset + len(rest),
                raw=rest,
            )

    def resume(self, data: bytes) -> int | None:
        """Return the end in ``data`` of a frame that is too long. Return None if ``data`` has no such end."""
        newline = data.find(_NEWLINE)
        return None if newline < 0 else newline + 1

    def _unencodable(self, error: BaseException, message: Any) -> InvalidValue:
        """Return the error of a message that cannot be encoded, with the path of the faulty part if known."""
        if not isinstance(error, Invalid):
            error = self.codec.explained(message, error)
        name = getattr(self.codec.message_type, "__name__", self.codec.message_type)
        path, hint, text = "", None, str(error)
        if isinstance(error, Invalid):
            path, hint, text = error.path, error.hint, error.message
        return InvalidValue(
            f"message of type {name} cannot be encoded: {text}", path=path, hint=hint
        )
