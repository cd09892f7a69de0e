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
        "_encoding",
        "_inflated",
        "_max",
        "_messages",
        "_need",
        "_part",
        "_reported",
        "held",
    )

    def __init__(self, bytes_max: int, encoding: str = "identity") -> None:
        self._max = bytes_max
        self._encoding = encoding
        self._messages: deque[tuple[bytes, int, bool]] = deque()
        """Each message, the number of bytes that are consumed once it is taken, and if it is compressed."""
        self._part = bytearray()
        """The message under way. Parts are copied: each is a view of all that one reading has brought."""
        self._need = PREFIX_BYTES
        """Bytes of it, with its prefix; only the prefix until that has arrived."""
        self._reported = 0
        """Bytes of it that were reported as consumed."""
        self._inflated = 0
        """Length of the last message that was taken, if it was compressed."""
        self.held = 0
        """Memory of what waits, of the message that is announced, and of the last one that was inflated."""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def inflates(self) -> bool:
        """Return True if messages may be compressed."""
        return self._encoding != "identity"

    @property
    def is_cut(self) -> bool:
        """Return True if a part of a message has arrived."""
        return bool(self._part)

    def feed(self, content: memoryview) -> int:
        """Take content. Return how many bytes are consumed by that.

        Raise ``TooLarge`` for a message that is not taken: the stream is of no use then.
        """
        part = self._part
        if not part:
            self._split(content)
        else:
            part += content
            if len(part) >= self._need:
                self._split(memoryview(part))
        return self._consumed_early()

    def take(self) -> tuple[bytes, int]:
        """Return the next message, and the bytes that are consumed by that. There must be one.

        Raise ``TooLarge`` or ``Invalid`` for one that cannot be decompressed: the stream is of no use then.
        """
        message, consumed, compressed = self._messages.popleft()
        self.held -= len(message) + MESSAGE_BYTES + self._inflated
        self._inflated = 0
        if compressed:
            message = self._decompressed(message)
            self._inflated = len(message)
            self.held += self._inflated
        return message, consumed + self._consumed_early()

    def clear(self) -> None:
        """Drop all that was not taken. The stream is of no use then."""
        self._messages.clear()
        self._part = bytearray()
        self._need = PREFIX_BYTES
        self._inflated = self.held = 0

    def _consumed_early(self) -> int:
        """Return the bytes of a large message under way that its peer may replace by later ones.

        While other messages wait, there are none: what is not taken must not grow.
        """
        if self._need <= _LARGE or self._messages:
            return 0
        have = len(self._part)
        consumed, self._reported = have - self._reported, have
        return consumed

    def _split(self, data: memoryview) -> None:
        at, end = 0, data.nbytes
        if self._need > PREFIX_BYTES:
            self.held -= self._need
            self._need = PREFIX_BYTES
        while end - at >= PREFIX_BYTES:
            length = int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
            if length > self._max:
                raise TooLarge(f"a message is larger than {self._max} bytes", bytes=length)
            stop = at + PREFIX_BYTES + length
            if stop > end:
                self._need = PREFIX_BYTES + length
                self.held += self._need
                break
            message = bytes(data[at + PREFIX_BYTES : stop])
            self._messages.append((message, stop - at - self._reported, data[at] != 0))
            self.held += length + MESSAGE_BYTES
            self._reported = 0
            at = stop
        self._part = bytearray(data[at:])

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
