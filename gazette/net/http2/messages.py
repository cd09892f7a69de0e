"""Messages of gRPC in the content of a stream: a byte that says if they are compressed, four of length, and
the message. Pure.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Final

from gazette.errors import Invalid, TooLarge

PREFIX_BYTES: Final = 5
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

    ``bytes_max`` bounds a message, also when it is decompressed. ``encoding`` is one of `ENCODINGS`: that of
    messages that say that they are compressed.
    """

    __slots__ = ("_encoding", "_have", "_max", "_messages", "_need", "_parts", "_reported")

    def __init__(self, bytes_max: int, encoding: str = "identity") -> None:
        self._max = bytes_max
        self._encoding = encoding
        self._messages: deque[tuple[bytes, int]] = deque()
        """Each message, and the number of bytes that are consumed once it is taken."""
        self._parts: list[memoryview] = []
        self._have = 0
        self._need = PREFIX_BYTES
        self._reported = 0
        """Bytes of the message under way that were reported as consumed."""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_cut(self) -> bool:
        """Return True if a part of a message has arrived."""
        return self._have > 0

    def feed(self, content: memoryview) -> int:
        """Take content. Return how many bytes are consumed by that.

        Raise ``TooLarge`` or ``Invalid`` for a message that is not taken: the stream is of no use then.
        """
        self._parts.append(content)
        self._have += content.nbytes
        if self._have >= self._need:
            whole = content if len(self._parts) == 1 else memoryview(b"".join(self._parts))
            self._split(whole)
        return self._consumed_early()

    def take(self) -> tuple[bytes, int]:
        """Return the next message, and the bytes that are consumed by that. There must be one."""
        message, consumed = self._messages.popleft()
        return message, consumed + self._consumed_early()

    def _consumed_early(self) -> int:
        """Return the bytes of a large message under way that its peer may replace by later ones.

        While other messages wait, there are none: what is not taken must not grow.
        """
        if self._need <= _LARGE or self._messages:
            return 0
        consumed, self._reported = self._have - self._reported, self._have
        return consumed

    def _split(self, data: memoryview) -> None:
        at, end = 0, data.nbytes
        self._need = PREFIX_BYTES
        while end - at >= PREFIX_BYTES:
            length = int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
            if length > self._max:
                raise TooLarge(f"a message is larger than {self._max} bytes", bytes=length)
            stop = at + PREFIX_BYTES + length
            if stop > end:
                self._need = PREFIX_BYTES + length
                break
            message = bytes(data[at + PREFIX_BYTES : stop])
            if data[at]:
                message = self._decompressed(message)
            self._messages.append((message, stop - at - self._reported))
            self._reported = 0
            at = stop
        self._have = end - at
        self._parts = [data[at:]] if self._have else []

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
