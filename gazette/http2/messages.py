"""Messages of gRPC in the content of a stream: a byte that says if they are compressed, four of length, and
the message. Pure.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Final

from gazette.errors import Invalid, TooLarge

PREFIX_BYTES: Final = 5
MESSAGE_BYTES: Final = 128
"""Memory of a message beside its content."""
_LARGE: Final = 1 << 18
"""A message of more bytes is consumed as it arrives, if no other waits to be taken: it need not fit
into the window.
"""
_SMALL: Final = 1 << 10
"""A part of a message of fewer bytes is joined with others."""
_WINDOW_BITS: Final = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
ENCODINGS: Final = ("identity", *_WINDOW_BITS)


def prefixed(message: bytes) -> bytes:
    """Return the content for a message that is not compressed."""
    return len(message).to_bytes(PREFIX_BYTES, "big") + message


class MessageQueue:
    """The messages of one stream that have arrived and were not taken, and the beginning of the next.

    ``bytes_max`` bounds a message, also when it is decompressed: that happens as it is taken. ``encoding``
    is one of `ENCODINGS`: that of messages that say that they are compressed.
    """

    __slots__ = (
        "_compressed",
        "_encoding",
        "_head",
        "_max",
        "_messages",
        "_missing",
        "_need",
        "_parts",
        "_reported",
        "held",
        "inflated",
    )

    def __init__(self, bytes_max: int, encoding: str = "identity") -> None:
        self._max = bytes_max
        self._encoding = encoding
        self._messages: deque[tuple[bytes, int, bool]] = deque()
        """Each message, the number of bytes that are consumed once it is taken, and if it is compressed."""
        self._head = b""
        """A part of a prefix."""
        self._parts: list[bytes | bytearray] = []
        """The message under way, copied: each part arrives as a view of all that one reading has brought."""
        self._need = 0
        """Length of the message under way, with its prefix; 0 without one."""
        self._missing = 0
        """Bytes of it that have not arrived."""
        self._compressed = False
        self._reported = 0
        """Bytes of it that were reported as consumed."""
        self.inflated = 0
        """Length of the last message that was taken, if it was compressed."""
        self.held = 0
        """Memory of what waits, of the message that is announced, and of the last one that was inflated."""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_cut(self) -> bool:
        """Return True if a part of a message has arrived."""
        return self._need > 0 or bool(self._head)

    def feed(self, content: memoryview) -> int:
        """Take content. Return how many bytes are consumed by that.

        Raise ``TooLarge`` for a message that is not taken: the stream is of no use then.
        """
        if self._need:
            content = self._go_on(content)  # It is of no use if the message has not ended.
        elif self._head:
            content, self._head = memoryview(self._head + content), b""
        if not self._need:
            self._split(content)
        return self._consumed_early() if self._need > _LARGE else 0

    def take(self) -> tuple[bytes, int]:
        """Return the next message, and the bytes that are consumed by that. There must be one.

        Raise ``TooLarge`` or ``Invalid`` for one that cannot be decompressed: the stream is of no use then.
        """
        message, consumed, compressed = self._messages.popleft()
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
        """Drop all that was not taken. The stream is of no use then."""
        self._messages.clear()
        self._head, self._parts = b"", []
        self._need = self._missing = self._reported = self.inflated = self.held = 0

    def _consumed_early(self) -> int:
        """Return the bytes of a large message under way that its peer may replace by later ones.

        While other messages wait, there are none: what is not taken must not grow.
        """
        if self._messages:
            return 0
        have = self._need - self._missing
        consumed, self._reported = have - self._reported, have
        return consumed

    def _go_on(self, content: memoryview) -> memoryview:
        """Take what belongs to the message under way, and return the rest."""
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
        self._messages.append((message, self._need - self._reported, self._compressed))
        self.held += MESSAGE_BYTES - PREFIX_BYTES
        self._parts = []
        self._need = self._missing = self._reported = 0
        return content[missing:]

    def _keep(self, part: memoryview) -> None:
        """Copy a part of the message under way. Small ones are joined: each costs more than its bytes."""
        parts = self._parts
        if part.nbytes >= _SMALL:
            parts.append(bytes(part))
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += part
        else:
            parts.append(bytearray(part))

    def _split(self, data: memoryview) -> None:
        at, end = 0, data.nbytes
        while end - at >= PREFIX_BYTES:
            begin = at + PREFIX_BYTES
            length = int.from_bytes(data[at + 1 : begin], "big")
            if length > self._max:
                raise TooLarge(f"a message is larger than {self._max} bytes", bytes=length)
            stop = begin + length
            compressed = data[at] != 0
            if stop > end:
                self._need, self._missing = PREFIX_BYTES + length, stop - end
                self._compressed = compressed
                self.held += self._need
                self._keep(data[begin:])
                return
            self._messages.append((bytes(data[begin:stop]), stop - at, compressed))
            self.held += length + MESSAGE_BYTES
            at = stop
        if at < end:
            self._head = bytes(data[at:])

    def _decompressed(self, message: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise Invalid("a message is compressed in a way that its call does not name")
        decoder = zlib.decompressobj(bits)
        try:
            content = decoder.decompress(message, self._max + 1)
        except zlib.error as error:
            raise Invalid(f"a message cannot be decompressed: {error}") from error
        if len(content) > self._max:
            raise TooLarge(f"a message is larger than {self._max} bytes")
        if not decoder.eof:
            raise Invalid("a compressed message is cut short")
        return content
