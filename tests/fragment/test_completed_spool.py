from __future__ import annotations

import gzip
import hashlib
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path

import cramjam
import pytest
import zstandard
from prometheus_client import REGISTRY

from gazette.errors import Corrupt, Unavailable
from gazette.fragment.completed_spool import CompletedSpool, SpoolCompression
from gazette.fragment.local_file import LocalFile
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.runtime.tasks import BlockingPool

CONTENT = b"".join(b"line %d of some text\n" % n for n in range(100_000))
CODECS = [codec for codec in Codec if codec is not Codec.INVALID]


@pytest.fixture
async def pool() -> AsyncIterator[BlockingPool]:
    pool = BlockingPool("spools", 1)
    yield pool
    pool.close()


def completed(
    directory: Path, pool: BlockingPool, codec: Codec, content: bytes = CONTENT
) -> CompletedSpool:
    file = LocalFile(directory)
    file.pwrite(content, 0)
    file.pwrite(b"rolled back", len(content))
    digest = hashlib.sha1(content).digest()
    return CompletedSpool(
        fragment=Fragment("a/journal", 500, 500 + len(content), digest, codec),
        registers=EMPTY_LABELS,
        first_append_time=1.0,
        file=file,
        compression=None if codec is Codec.NONE else SpoolCompression(file, codec, pool),
    )


def decoded(codec: Codec, data: bytes) -> bytes:
    match codec:
        case Codec.NONE:
            return data
        case Codec.ZSTANDARD:
            return zstandard.ZstdDecompressor().stream_reader(data).read()
        case Codec.SNAPPY:
            return bytes(cramjam.snappy.decompress(data))
    return gzip.decompress(data)


def file_of(spool: CompletedSpool) -> LocalFile:
    assert isinstance(spool.file, LocalFile)
    return spool.file


def failures() -> float:
    return REGISTRY.get_sample_value("gazette_spool_compression_failures_total") or 0.0


class FullFile(LocalFile):
    """On a disk with room for so many bytes."""

    room = 0

    def pwrite(self, content: bytes, position: int) -> None:
        if position + len(content) > self.room:
            raise Unavailable("no space left")
        super().pwrite(content, position)


@pytest.mark.parametrize("codec", CODECS)
async def test_a_file_is_the_fragment(tmp_path: Path, pool: BlockingPool, codec: Codec) -> None:
    """Its bytes decode to the committed ones, as often as it is opened, and it can be re-read."""
    spool = completed(tmp_path, pool, codec)
    for _ in range(2):
        with spool.open() as source:
            data = source.read()
            assert decoded(codec, data) == CONTENT
            assert source.seekable()
            assert source.seek(0, io.SEEK_END) == len(data)
            assert source.read() == b""
            source.seek(0)
            assert source.read(100) == data[:100]
            assert source.read() == data[100:]
    assert spool.content_encoding == ("gzip" if codec is Codec.GZIP_OFFLOAD_DECOMPRESSION else "")


@pytest.mark.parametrize("codec", CODECS)
async def test_a_damaged_spool_is_not_given(
    tmp_path: Path, pool: BlockingPool, codec: Codec
) -> None:
    """One byte that changed on disk makes every attempt to persist fail."""
    for at in (0, len(CONTENT) // 2, len(CONTENT) - 1):
        spool = completed(tmp_path, pool, codec)
        file_of(spool).pwrite(bytes([CONTENT[at] ^ 1]), at)
        for _ in range(2):
            with pytest.raises(Corrupt, match="SHA-1") as raised, spool.open() as source:
                while source.read(100_000):
                    pass
            assert raised.value.facts["journal"] == "a/journal"


@pytest.mark.parametrize("codec", CODECS)
async def test_a_spool_that_is_too_short_is_not_given(
    tmp_path: Path, pool: BlockingPool, codec: Codec
) -> None:
    """A file that lost its end fails, too."""
    spool = completed(tmp_path, pool, codec)
    file_of(spool).truncate(len(CONTENT) - 1)
    for _ in range(2):
        with pytest.raises(Corrupt, match="shorter"), spool.open() as source:
            while source.read(100_000):
                pass


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec is not Codec.NONE])
@pytest.mark.parametrize("room", [0, 3000])
async def test_without_room_it_is_compressed_while_read(
    tmp_path: Path, pool: BlockingPool, codec: Codec, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must not keep us from persisting: that is what will free it."""
    full = type("Full", (FullFile,), {"room": room})
    monkeypatch.setattr(LocalFile, "sibling", lambda file: full(file.directory))
    before = failures()
    spool = completed(tmp_path, pool, codec)
    for _ in range(2):
        with spool.open() as source:
            assert not source.seekable()
            assert decoded(codec, source.read()) == CONTENT
    assert failures() == before + 1
    assert spool.compression is not None
    assert spool.compression._output is None  # And so the space is free again.

    # Case: as much when the primary ran out of it midway.
    spool = completed(tmp_path, pool, codec)
    assert spool.compression is not None
    spool.compression.advance(len(CONTENT))
    await pool.run(int)
    with spool.open() as source:
        assert decoded(codec, source.read()) == CONTENT
    spool.compression.advance(len(CONTENT) + (5 << 20))
    await pool.run(int)

    # Case: damage is found all the same.
    file_of(spool).pwrite(b"?", 77)
    with pytest.raises(Corrupt), spool.open() as source:
        source.read()


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
async def test_compression_follows_commits_by_the_megabyte(
    tmp_path: Path, pool: BlockingPool, codec: Codec
) -> None:
    """Less is not worth a batch; what a batch left is done at the end."""
    content = os.urandom(3 << 20)
    spool = completed(tmp_path, pool, codec, content)
    compression = spool.compression
    assert compression is not None
    compression.advance((1 << 20) - 1)
    await pool.run(int)
    assert compression.through == 0
    for length in (1 << 20, (1 << 20) + 5, (2 << 20) + 7):
        compression.advance(length)
        await pool.run(int)
    assert compression.through == (2 << 20) + 7
    with spool.open() as source:
        data = source.read()
    assert decoded(codec, data) == content
    if codec is Codec.GZIP:
        members = 0
        while data:
            stream = __import__("zlib").decompressobj(wbits=31)
            stream.decompress(data)
            data = stream.unused_data
            members += 1
        assert members == 3
    # Case: a commit that was reported late does no harm.
    compression.advance(9 << 20)
    await pool.run(int)
    with spool.open() as source:
        assert decoded(codec, source.read()) == content


async def test_one_spool_does_not_keep_the_thread(tmp_path: Path, pool: BlockingPool) -> None:
    """After a turn the others have theirs."""
    content = bytes(20 << 20)
    first = completed(tmp_path, pool, Codec.SNAPPY, content)
    second = completed(tmp_path, pool, Codec.SNAPPY, content)
    one, two = first.compression, second.compression
    assert one is not None
    assert two is not None
    one.advance(len(content))
    two.advance(len(content))
    turns = []
    for _ in range(6):
        turns.append(await pool.run(lambda: (one.through, two.through)))
    assert any(turn == (8 << 20, 8 << 20) for turn in turns)
    assert turns[-1] == (20 << 20, 20 << 20)


async def test_a_spool_is_read_from_its_start(tmp_path: Path, pool: BlockingPool) -> None:
    """Its digest is that of the whole: reading a part would prove nothing."""
    spool = completed(tmp_path, pool, Codec.NONE)
    with spool.open() as source:
        source.seek(1 << 20)
        with pytest.raises(io.UnsupportedOperation):
            source.read(1)
