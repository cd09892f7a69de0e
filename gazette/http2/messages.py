"""Messages of gRPC in the content of a stream. Before a message, one byte says whether it is compressed, and
four bytes give its length. Pure."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from typing import Final

from gazette.errors import Invalid, TooLarge

_PREFIX: Final = struct.Struct(">BL")
PREFIX_BYTES: Final = _PREFIX.size
MESSAGE_BYTES: Final = 128
"""Bytes of memory of a message in addition to its content."""
_LARGE: Final = 1 << 18
"""A message of more bytes counts as consumed while it arrives, if no other message waits to be taken. So a
message may be larger than the window of its stream."""
_SMALL: Final = 1 << 10
"""Parts of a message with fewer bytes are joined."""
_WINDOW_BITS: Final = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
ENCODINGS: Final = ("identity", *_WINDOW_BITS)


def prefixed(message: bytes) -> bytes:
    """Return the content for a message that is not compressed."""
    return len(message).to_bytes(PREFIX_BYTES, "big") + message


class MessageQueue:
    """The messages of one stream that have arrived and were not taken, and the begin of the next message.

    ``bytes_max`` bounds a message, also after decompression, which happens when it is taken. ``encoding`` is
    one of `ENCODINGS`: the compression of messages whose prefix says that they are compressed.
    """

    __slots__ = (
        "_bytes_max",
        "_compressed",
        "_encoding",
        "_head",
        "_missing",
        "_need",
        "_parts",
        "_reported",
        "held",
        "inflated",
        "messages",
    )

    def __init__(self, bytes_max: int, encoding: str = "identity") -> None:
        self._bytes_max = bytes_max
        self._encoding = encoding
        self.messages: deque[tuple[bytes, int, bool]] = deque()
        """Messages to `take`, each with the bytes that count as consumed then, and True if compressed."""
        self._head = b""
        """The beginning of an incomplete prefix."""
        self._parts: list[bytes | bytearray] = []
        """Copied parts of the incomplete message. Views would keep all bytes of a read alive."""
        self._need = 0
        """Length of the incomplete message, with its prefix; 0 unless a whole prefix has arrived."""
        self._missing = 0
        """Bytes of the incomplete message that have not arrived."""
        self._compressed = False  # Whether the incomplete message is compressed.
        self._reported = 0
        """Bytes of the incomplete message that were reported as consumed."""
        self.inflated = 0
        """Length of the last message that was taken, decompressed; 0 if that message was not compressed."""
        self.held = 0
        """Memory of waiting messages, of the announced message, and of the last message that was inflated."""

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def is_cut(self) -> bool:
        """True if only a part of the next message has arrived."""
        return self._need > 0 or bool(self._head)

    def feed(self, content: memoryview) -> int:
        """Take content. Return how many bytes count as consumed now. Raise ``TooLarge`` for a message that is
        refused: then the stream cannot be used any more."""
        if self._need:
            content = self._go_on(content)  # The rest, used only if the message is whole now.
        elif self._head:
            content, self._head = memoryview(self._head + content), b""
        if not self._need:
            self._split(content)
        return self._consumed_early() if self._need > _LARGE else 0

    def take(self) -> tuple[bytes, int]:
        """Return the next message, and how many bytes count as consumed now. There must be a message.

        Raise ``TooLarge`` or ``Invalid`` if the message cannot be decompressed: the stream is unusable then.
        """
        message, consumed, compressed = self.messages.popleft()
        self.held -= len(message) + MESSAGE_BYTES + self.inflated
        self.inflated = 0
        if compressed:
            message = self._decompressed(message)
            self.inflated = len(message)
            self.held += self.inflated
        if self._need > _LARGE:
            consumed += self._consumed_early()
        return message, consumed

    def clear(self) -> None:
        """Drop all messages that were not taken. The stream cannot be used any more."""
        self.messages.clear()
        self._head, self._parts = b"", []
        self._need = self._missing = self._reported = self.inflated = self.held = 0

    def _consumed_early(self) -> int:
        """Return how many received bytes of a large incomplete message count as consumed now.

        Return zero while other messages wait, so that the memory of waiting messages does not grow.
        """
        if self.messages:
            return 0
        received = self._need - self._missing
        consumed, self._reported = received - self._reported, received
        return consumed

    def _go_on(self, content: memoryview) -> memoryview:
        """Take the part that belongs to the incomplete message. If the message is whole, return the rest."""
        missing, length = self._missing, content.nbytes
        if length < missing:
            self._missing = missing - length
            if length >= _SMALL:
                self._parts.append(bytes(content))
            else:
                self._keep(content)
            return content
        self._keep(content[:missing])
        message = b"".join(self._parts)
        self.messages.append((message, self._need - self._reported, self._compressed))
        self.held += MESSAGE_BYTES - PREFIX_BYTES  # `_split` has counted prefix and content.
        self._parts = []
        self._need = self._missing = self._reported = 0
        return content[missing:]

    def _keep(self, part: memoryview) -> None:
        """Copy a part of the incomplete message. Join small parts: each object costs memory of its own."""
        parts = self._parts
        if part.nbytes >= _SMALL:
            parts.append(bytes(part))
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += part
        else:
            parts.append(bytearray(part))

    def _split(self, data: memoryview) -> None:
        """Cut whole messages out of content. Keep the beginning of the next message. Raise ``TooLarge`` for a
        message of more than ``_bytes_max`` bytes."""
        position, end = 0, data.nbytes
        while end - position >= PREFIX_BYTES:
            body = position + PREFIX_BYTES
            flag, length = _PREFIX.unpack_from(data, position)
            if length > self._bytes_max:
                raise TooLarge(f"a message is larger than {self._bytes_max} bytes", bytes=length)
            body_end = body + length
            compressed = flag != 0
            if body_end > end:
                self._need, self._missing = PREFIX_BYTES + length, body_end - end
                self._compressed = compressed
                self.held += self._need
                self._keep(data[body:])
                return
            self.messages.append((bytes(data[body:body_end]), body_end - position, compressed))
            self.held += length + MESSAGE_BYTES
            position = body_end
        if position < end:
            self._head = bytes(data[position:])

    def _decompressed(self, message: bytes) -> bytes:
        """Decompress a message by the call's encoding. Raise ``Invalid`` or ``TooLarge`` if that fails."""
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise Invalid("a message is compressed in a way that its call does not name")
        decoder = zlib.decompressobj(bits)
        try:
            content = decoder.decompress(message, self._bytes_max + 1)
        except zlib.error as error:
            raise Invalid(f"a message cannot be decompressed: {error}") from error
        if len(content) > self._bytes_max:
            raise TooLarge(f"a message is larger than {self._bytes_max} bytes")
        if not decoder.eof:
            raise Invalid("a compressed message is cut short")
        return content
