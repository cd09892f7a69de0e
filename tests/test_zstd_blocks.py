"""Blocks of zstd streams, as any encoder writes them, in pieces of any size."""

from __future__ import annotations

import random

import pytest
import zstandard

from gazette.protocol.codecs.codec import new_decompressor
from gazette.protocol.codecs.zstd_blocks import BLOCK_BYTES_MAX, ZstdBlocks
from gazette.protocol.fragment import Codec

SKIPPABLE = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"\xff" * 5


def contents(rng: random.Random) -> bytes:
    """Draw blocks of all three types: text, noise, and one byte over and over."""
    parts = [
        rng.choice(
            [
                b"some words " * rng.randint(1, 30_000),
                rng.randbytes(rng.randint(0, 300_000)),
                bytes([rng.randint(0, 255)]) * rng.randint(1, 400_000),
            ]
        )
        for _ in range(rng.randint(1, 6))
    ]
    return b"".join(parts)


def stream(rng: random.Random) -> tuple[bytes, bytes]:
    """Return frames with and without sizes, checksums and windows; and their content."""
    frames, whole = [], []
    for _ in range(rng.randint(1, 3)):
        content = contents(rng)
        compressor = zstandard.ZstdCompressor(
            level=rng.choice([-5, 1, 3]),
            write_content_size=rng.random() < 0.5,
            write_checksum=rng.random() < 0.5,
        )
        if rng.random() < 0.5:
            frames.append(compressor.compress(content))
        else:
            chunks = compressor.compressobj()
            cuts = sorted(rng.randint(0, len(content)) for _ in range(3))
            for low, high in zip([0, *cuts], [*cuts, len(content)], strict=True):
                frames.append(chunks.compress(content[low:high]))
                frames.append(chunks.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
            frames.append(chunks.flush())
        whole.append(content)
        if rng.random() < 0.3:
            frames.append(SKIPPABLE)
    return b"".join(frames), b"".join(whole)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_fed_at_once_has_a_bound_and_is_all(seed: int) -> None:
    rng = random.Random(seed)
    data, content = stream(rng)
    blocks, decompressor = ZstdBlocks(), None
    at, found = 0, []
    while at < len(data):
        piece = memoryview(data)[at : at + rng.choice([1, 2, 3, 7, 1000, 50_000, 10**6])]
        taken = blocks.take(piece)
        assert 0 < taken <= len(piece)
        at += taken
        rest, made = bytes(piece[:taken]), 0
        while rest:
            decompressor = decompressor or zstandard.ZstdDecompressor().decompressobj()
            found.append(decompressor.decompress(rest))
            made += len(found[-1])
            rest = decompressor.unused_data
            if decompressor.eof:
                decompressor = None
        # And what was fed before of the first of them.
        assert made <= 8 * BLOCK_BYTES_MAX
    assert b"".join(found) == content
    # It never lost its way, though a stream may be fed byte by byte.
    assert blocks.take(memoryview(SKIPPABLE * 1000)) == 1000 * len(SKIPPABLE)


def test_blocks_are_fed_together() -> None:
    """Or it would be slow: noise is in blocks of their full size."""
    data = zstandard.ZstdCompressor().compress(random.Random(1).randbytes(64 * BLOCK_BYTES_MAX))
    blocks, at, fed = ZstdBlocks(), 0, []
    while at < len(data):
        fed.append(blocks.take(memoryview(data)[at:]))
        at += fed[-1]
    assert len(fed) == 10


@pytest.mark.parametrize(
    "data",
    [b"no zstd" * 1000, zstandard.compress(b"x" * 10)[:6] + b"\xff" * 5000],
    ids=["magic", "block"],
)
def test_what_is_no_zstd_is_fed_in_small_slices(data: bytes) -> None:
    blocks, at = ZstdBlocks(), 0
    while at < len(data):
        taken = blocks.take(memoryview(data)[at:])
        assert 0 < taken <= 1100
        at += taken


def test_any_stream_is_read_by_the_codec() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        data, content = stream(rng)
        decompressor, found, at = new_decompressor(Codec.ZSTANDARD), [], 0
        while at < len(data):
            size = rng.choice([1, 100, 1 << 18])
            found.append(decompressor.decompress(data[at : at + size], 1000))
            at += size
            while not decompressor.needs_input:
                found.append(decompressor.decompress(b"", 1 << 20))
        found.append(decompressor.finish())
        assert b"".join(found) == content
