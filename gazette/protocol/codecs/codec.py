"""Stages 6, 7 and 10 of the byte path: journal bytes to file bytes and back, in bounded memory.

A fragment file holds exactly the journal's bytes in one of five codecs. Their numbers are those of
`CompressionCodec` on the wire (``gazette.protocol.fragment.Codec``). This module takes them as ints.

- ``NONE``: the bytes themselves.
- ``GZIP``: any number of gzip members, one after the other.
- ``ZSTANDARD``: zstd frames. Frames have no content size, and need none.
- ``SNAPPY``: the framed variant: blocks of at most 64 KiB, each with a CRC.
- ``GZIP_OFFLOAD_DECOMPRESSION``: one gzip member, which the store or HTTP may have decoded.

Neither direction knows where a fragment ends, or its digest: see `gazette.protocol.codecs.decoder`. Use each
object for one stream, and in one thread at a time. The libraries work without the interpreter lock.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Final, Protocol

import zstandard

from gazette.errors import Corrupt, Invalid
from gazette.protocol.codecs.zstd_blocks import ZstdBlocks

_NONE, _GZIP, _ZSTANDARD, _SNAPPY, _GZIP_OFFLOAD = range(1, 6)

_GZIP_LEVEL = 3
"""Compression level. Measured on JSON: 2.3 times as fast as level 6, for files that are 7 % larger."""

_ZSTANDARD_LEVEL = 1
"""Compression level. Measured on JSON: twice as fast as level 3, for files that are no larger."""

_SNAPPY_BLOCK_BYTES = 1 << 16
_SNAPPY_STREAM_ID = b"\xff\x06\x00\x00sNaPpY"
_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_SLICE_BYTES: Final = 1 << 12
"""Bytes of a slice of a deflate stream. The decoded content may be 1032 times as large."""
_SNAPPY_SLICE_BYTES: Final = 1 << 17


class Compressor(Protocol):
    """One stream from journal bytes to file bytes. Its memory is bounded by the input of one call."""

    def compress(self, content: bytes) -> bytes:
        """Add content. Return the file bytes that are ready, possibly none."""
        ...

    def end_batch(self) -> bytes:
        """End a batch. Return the bytes that end it: none, except for GZIP.

        GZIP closes its member, so that another machine may continue the file.
        """
        ...

    def finish(self) -> bytes:
        """Return the last bytes of the file. Do not use the object afterwards."""
        ...


class Decompressor(Protocol):
    """One stream from file bytes to journal bytes."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Add file bytes (or ``b""`` to continue). Return at most ``max_length`` journal bytes.

        The object keeps the rest of the input: pass more only if ``needs_input``. It holds at most 32 MiB of
        decoded bytes, for any input. Raise ``Corrupt`` if the input does not fit the codec.
        """
        ...

    @property
    def needs_input(self) -> bool:
        """True if ``decompress`` can return no more content without more input."""
        ...

    def finish(self) -> bytes:
        """End the file. Return the last bytes, of which there are at most two.

        An empty file is valid in every codec: it has no content. Raise ``Corrupt`` if the file is cut,
        or if not all of its content was read.
        """
        ...


def new_compressor(codec: int) -> Compressor:
    """Return a compressor of one file. Raise ``Invalid`` for a number that is not a codec."""
    match int(codec):
        case 1:  # NONE
            return _NoCompressor()
        case 2:  # GZIP
            return _GzipCompressor(members=True)
        case 3:  # ZSTANDARD
            return _ZstandardCompressor()
        case 4:  # SNAPPY
            return _SnappyCompressor()
        case 5:  # GZIP_OFFLOAD_DECOMPRESSION
            return _GzipCompressor(members=False)
    raise Invalid(f"unsupported codec ({codec})", path="compression_codec")


def new_decompressor(codec: int, *, transport_decoded: bool = False) -> Decompressor:
    """Return a decompressor of one file. Raise ``Invalid`` for a number that is not a codec.

    ``transport_decoded`` matters only for GZIP_OFFLOAD_DECOMPRESSION. Set it if the store or the HTTP library
    has undone the gzip. If it is unset, the first bytes decide: wrongly only if content begins like gzip.
    """
    match int(codec):
        case 1:  # NONE
            return _NoDecompressor()
        case 2:  # GZIP
            return _GzipDecompressor()
        case 3:  # ZSTANDARD
            return _ZstandardDecompressor()
        case 4:  # SNAPPY
            return _SnappyDecompressor()
        case 5:  # GZIP_OFFLOAD_DECOMPRESSION
            return _NoDecompressor() if transport_decoded else _OffloadDecompressor()
    raise Invalid(f"unsupported codec ({codec})", path="compression_codec")


class _NoCompressor:
    __slots__ = ()

    def compress(self, content: bytes) -> bytes:
        return content

    def end_batch(self) -> bytes:
        return b""

    def finish(self) -> bytes:
        return b""


class _GzipCompressor:
    """Compressor of gzip. With ``members``, each batch is a gzip member of its own."""

    __slots__ = ("_member", "_members", "_written")

    def __init__(self, *, members: bool) -> None:
        self._members = members
        self._written = False  # True once a member was begun.
        self._member: zlib._Compress | None = None  # None between two members.

    def compress(self, content: bytes) -> bytes:
        if self._member is None:
            self._member = zlib.compressobj(_GZIP_LEVEL, wbits=zlib.MAX_WBITS | 16)
            self._written = True
        return self._member.compress(content)

    def end_batch(self) -> bytes:
        if not self._members or self._member is None:
            return b""
        member, self._member = self._member, None
        return member.flush()

    def finish(self) -> bytes:
        # A file without content has one member, which is empty.
        head = b"" if self._written else self.compress(b"")
        member, self._member = self._member, None
        return head if member is None else head + member.flush()


class _ZstandardCompressor:
    __slots__ = ("_stream",)

    def __init__(self) -> None:
        self._stream = zstandard.ZstdCompressor(level=_ZSTANDARD_LEVEL).compressobj()

    def compress(self, content: bytes) -> bytes:
        return self._stream.compress(content)

    def end_batch(self) -> bytes:
        return b""

    def finish(self) -> bytes:
        return self._stream.flush()


class _SnappyCompressor:
    """Compressor of framed snappy.

    The library holds compressed bytes until a flush, and a flush ends a block. To keep blocks large,
    flush only after as many bytes as a block can have.
    """

    __slots__ = ("_held", "_stream")

    def __init__(self) -> None:
        import cramjam  # Not at the top: few journals need it, and it takes 3 % of a start.

        self._stream = cramjam.snappy.Compressor()
        self._held = 0  # Bytes since the last flush.

    def compress(self, content: bytes) -> bytes:
        if content:
            self._stream.compress(content)
            self._held += len(content)
        if self._held < _SNAPPY_BLOCK_BYTES:
            return b""
        self._held = 0
        return bytes(self._stream.flush())

    def end_batch(self) -> bytes:
        return b""

    def finish(self) -> bytes:
        return bytes(self._stream.finish())


class _NoDecompressor:
    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = memoryview(b"")

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if not self._held and len(data) <= max_length:
            return data
        unread = _joined(self._held, data)
        self._held = unread[max_length:]
        return bytes(unread[:max_length])

    @property
    def needs_input(self) -> bool:
        return not self._held

    def finish(self) -> bytes:
        if self._held:
            raise Corrupt("file ends before its content was read")
        return b""


class _SlicedDecompressor(ABC):
    """Decompressor that feeds its input in slices, small enough to bound the output of each slice."""

    __slots__ = ("_input", "_output")

    def __init__(self) -> None:
        self._input = memoryview(b"")  # File bytes that were not fed yet.
        self._output = memoryview(b"")  # Content of a slice that was not returned yet.

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if data:
            self._input = _joined(self._input, data)
        pieces: list[memoryview] = []
        room = max_length
        while room > 0:
            if not self._output:
                if not self._input:
                    break
                piece = self._input[: self._slice(self._input)]
                self._input = self._input[len(piece) :]
                content = self._step(piece)
                if content and not pieces and room // 2 <= len(content) <= room:
                    return content  # Perhaps less than `max_length`, but not copied.
                self._output = memoryview(content)
                continue
            part = self._output[:room]
            self._output = self._output[len(part) :]
            room -= len(part)
            pieces.append(part)
        return b"".join(pieces)

    @property
    def needs_input(self) -> bool:
        return not self._output and not self._input

    def finish(self) -> bytes:
        if not self.needs_input:
            raise Corrupt("file ends before its content was read")
        if not self._at_boundary():
            raise Corrupt("compressed stream is incomplete")
        return b""

    @abstractmethod
    def _slice(self, data: memoryview) -> int:
        """Return the length of the slice that begins ``data``. The caller passes this slice to ``_step``."""

    @abstractmethod
    def _step(self, piece: memoryview) -> bytes:
        """Return all content of one slice."""

    @abstractmethod
    def _at_boundary(self) -> bool:
        """Return True if the file may end here."""


class _GzipDecompressor(_SlicedDecompressor):
    """Decompressor of consecutive gzip members. Any other bytes after a member are an error."""

    __slots__ = ("_member",)

    def __init__(self) -> None:
        super().__init__()
        self._member: zlib._Decompress | None = None  # None between two members.

    def _slice(self, data: memoryview) -> int:
        return min(len(data), _GZIP_SLICE_BYTES)

    def _step(self, piece: memoryview) -> bytes:
        pieces: list[bytes] = []
        remaining: bytes | memoryview = piece
        while remaining:
            if self._member is None:
                self._member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            try:
                pieces.append(self._member.decompress(remaining))
            except zlib.error as error:
                raise Corrupt(f"not a gzip stream: {error}") from error
            remaining = self._member.unused_data
            if self._member.eof:
                self._member = None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _at_boundary(self) -> bool:
        return self._member is None


class _ZstandardDecompressor(_SlicedDecompressor):
    """Decompressor of consecutive zstd frames, also of skippable frames."""

    __slots__ = ("_blocks", "_frame")

    def __init__(self) -> None:
        super().__init__()
        self._blocks = ZstdBlocks()
        self._frame: zstandard.ZstdDecompressionObj | None = None  # None between two frames.

    def _slice(self, data: memoryview) -> int:
        return self._blocks.take(data)

    def _step(self, piece: memoryview) -> bytes:
        pieces: list[bytes] = []
        remaining: bytes | memoryview = piece
        while remaining:
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                pieces.append(self._frame.decompress(remaining))
            except zstandard.ZstdError as error:
                raise Corrupt(f"not a zstd stream: {error}") from error
            remaining = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _at_boundary(self) -> bool:
        return self._frame is None


class _SnappyDecompressor(_SlicedDecompressor):
    """Decompressor of framed snappy, by whole chunks (type, 24-bit length, body).

    The library decodes whole streams only. So each run of chunks gets a stream identifier of its own.
    """

    __slots__ = ("_identified", "_pending", "_skip")

    def __init__(self) -> None:
        super().__init__()
        self._pending = b""  # The first bytes of a chunk that is not whole yet.
        self._skip = 0  # Bytes of a skippable chunk to come.
        self._identified = False  # True after a stream identifier.

    def _slice(self, data: memoryview) -> int:
        return min(len(data), _SNAPPY_SLICE_BYTES)

    def _step(self, piece: memoryview) -> bytes:
        data = self._pending + piece if self._pending else bytes(piece)
        run: list[bytes] = [_SNAPPY_STREAM_ID]
        begin = 0
        while True:
            if self._skip:
                skipped = min(self._skip, len(data) - begin)
                self._skip -= skipped
                begin += skipped
            if len(data) - begin < 4:
                break
            chunk_type, length = data[begin], int.from_bytes(data[begin + 1 : begin + 4], "little")
            # Skip padding and other skippable chunks, which may have any length.
            if chunk_type >= 0x80 and chunk_type != 0xFF and self._identified:
                begin, self._skip = begin + 4, length
                continue
            self._check(chunk_type, length)
            if len(data) - begin - 4 < length:
                break
            chunk = data[begin : begin + 4 + length]
            begin += 4 + length
            if chunk_type == 0xFF:
                self._identify(chunk)
            else:
                run.append(chunk)
        self._pending = data[begin:]
        return self._decode(run)

    def _check(self, kind: int, length: int) -> None:
        """Raise ``Corrupt`` if a chunk of this type and length may not stand here."""
        if not self._identified and kind != 0xFF:
            raise Corrupt("not a snappy stream: it does not begin with a stream identifier")
        if 0x02 <= kind <= 0x7F:
            raise Corrupt("the snappy stream is damaged: reserved chunk", chunk_type=kind)
        # Permit 4 bytes of CRC, and the greatest size of a compressed block.
        if kind != 0xFF and length > 4 + 32 + _SNAPPY_BLOCK_BYTES * 7 // 6:
            raise Corrupt("the snappy stream is damaged: chunk is too long", chunk_bytes=length)
        if kind == 0xFF and length != 6:
            raise Corrupt("not a snappy stream: bad stream identifier")

    def _identify(self, chunk: bytes) -> None:
        if chunk != _SNAPPY_STREAM_ID:
            raise Corrupt("not a snappy stream: bad stream identifier")
        self._identified = True

    def _decode(self, run: list[bytes]) -> bytes:
        if len(run) == 1:
            return b""
        import cramjam

        try:
            return bytes(cramjam.snappy.decompress(b"".join(run)))
        except cramjam.DecompressionError as error:
            raise Corrupt(f"the snappy stream is damaged: {error}") from error

    def _at_boundary(self) -> bool:
        return not self._pending and not self._skip


class _OffloadDecompressor:
    """Decompressor of gzip if the input begins like gzip. Otherwise the transport has decoded the input."""

    __slots__ = ("_chosen", "_head")

    def __init__(self) -> None:
        self._head = b""
        self._chosen: Decompressor | None = None  # None until the first bytes decide.

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self._chosen is None:
            self._head += data
            if len(self._head) < 3 and _GZIP_MAGIC.startswith(self._head):
                return b""
            gzipped = self._head.startswith(_GZIP_MAGIC)
            self._chosen = _GzipDecompressor() if gzipped else _NoDecompressor()
            data, self._head = self._head, b""
        return self._chosen.decompress(data, max_length)

    @property
    def needs_input(self) -> bool:
        return self._chosen is None or self._chosen.needs_input

    def finish(self) -> bytes:
        if self._chosen is None:  # Too few bytes for a gzip member: they are the content itself.
            return self._head
        return self._chosen.finish()


def _joined(held: memoryview, data: bytes) -> memoryview:
    if not data:
        return held
    return memoryview(data) if not held else memoryview(b"".join((held, data)))
