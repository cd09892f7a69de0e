"""Codecs against independent implementations of the same formats, in both directions."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import subprocess
import tracemalloc

import cramjam
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.errors import Corrupt, Invalid
from gazette.protocol.codecs.codec import Decompressor, new_compressor, new_decompressor
from gazette.protocol.fragment import Codec
from tests.facts import raises

STREAM_ID = b"\xff\x06\x00\x00sNaPpY"
CODECS = [codec for codec in Codec if codec is not Codec.INVALID]
COMPRESSING = [codec for codec in CODECS if codec is not Codec.NONE]


def oneshot_decode(codec: Codec, data: bytes) -> bytes:
    match codec:
        case Codec.NONE:
            return data
        case Codec.GZIP | Codec.GZIP_OFFLOAD_DECOMPRESSION:
            return gzip.decompress(data)
        case Codec.ZSTANDARD:
            return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        case Codec.SNAPPY:
            return bytes(cramjam.snappy.decompress(data))
    raise AssertionError


def oneshot_encode(codec: Codec, content: bytes) -> bytes:
    match codec:
        case Codec.NONE:
            return content
        case Codec.GZIP | Codec.GZIP_OFFLOAD_DECOMPRESSION:
            return gzip.compress(content)
        case Codec.ZSTANDARD:
            return zstandard.ZstdCompressor().compress(content)
        case Codec.SNAPPY:
            return bytes(cramjam.snappy.compress(content))
    raise AssertionError


def cut(content: bytes, rng: random.Random, longest: int) -> list[bytes]:
    pieces, at = [], 0
    while at < len(content):
        length = rng.randint(1, longest)
        pieces.append(content[at : at + length])
        at += length
    return pieces


def encode(codec: Codec, content: bytes, rng: random.Random, longest: int = 300_000) -> bytes:
    compressor = new_compressor(codec)
    out = []
    for piece in cut(content, rng, longest):
        out.append(compressor.compress(piece))
        if rng.random() < 0.3:
            out.append(compressor.end_batch())
    return b"".join((*out, compressor.finish()))


def decode(decompressor: Decompressor, pieces: list[bytes], most: int = 1 << 16) -> bytes:
    out = []
    for piece in pieces:
        assert decompressor.needs_input
        got = decompressor.decompress(piece, most)
        while True:
            assert len(got) <= most
            out.append(got)
            if decompressor.needs_input:
                break
            got = decompressor.decompress(b"", most)
    out.append(decompressor.finish())
    return b"".join(out)


def some_content(seed: int, length: int) -> bytes:
    """Return content of which half compresses well, half not at all."""
    rng = random.Random(seed)
    words = [rng.randbytes(6).hex().encode() for _ in range(50)]
    out = bytearray()
    while len(out) < length:
        out += rng.randbytes(700) if rng.random() < 0.1 else b" ".join(rng.choices(words, k=60))
    return bytes(out[:length])


def test_numbers_are_those_of_the_protocol() -> None:
    """Every codec of the protocol can be written and read, and no other number."""
    for codec in CODECS:
        assert decode(new_decompressor(codec), [encode(codec, b"abc", random.Random(1))]) == b"abc"
    for number in (0, 6, -1):
        with raises(Invalid, path="compression_codec", says=f"({number})"):
            new_compressor(number)
        with raises(Invalid, path="compression_codec", says=f"({number})"):
            new_decompressor(number)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    length=st.sampled_from([0, 1, 2, 3, 1000, 65_536, 200_001]),
    longest=st.sampled_from([3000, 100_000, 1 << 20]),
    most=st.sampled_from([100, 4096, 1 << 20]),
)
def test_both_directions_agree_with_independent_tools(
    codec: Codec, seed: int, length: int, longest: int, most: int
) -> None:
    """What we write others read, and what others write we read, however it is cut."""
    rng = random.Random(seed)
    content = some_content(seed, length)

    ours = encode(codec, content, rng, longest)
    assert oneshot_decode(codec, ours) == content

    pieces = cut(oneshot_encode(codec, content), rng, longest)
    assert decode(new_decompressor(codec), pieces, most) == content
    assert decode(new_decompressor(codec), cut(ours, rng, longest), most) == content


@pytest.mark.parametrize(
    ("codec", "tool"), [(Codec.GZIP, "gzip"), (Codec.ZSTANDARD, "zstd")], ids=["gzip", "zstd"]
)
def test_command_line_tools_agree(codec: Codec, tool: str) -> None:
    """Operators read fragments with these, and may write them."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    content = some_content(7, 3 << 20)
    ours = encode(codec, content, random.Random(7), 1 << 20)
    assert subprocess.run([tool, "-dc"], input=ours, capture_output=True).stdout == content
    theirs = subprocess.run([tool, "-c"], input=content, capture_output=True).stdout
    assert decode(new_decompressor(codec), [theirs]) == content


def test_gzip_closes_a_member_per_batch() -> None:
    """Each batch is a gzip file of its own; the offload codec writes exactly one member."""
    for codec, members in ((Codec.GZIP, 3), (Codec.GZIP_OFFLOAD_DECOMPRESSION, 1)):
        compressor = new_compressor(codec)
        parts = []
        for batch in (b"one" * 99, b"two" * 99):
            parts.append(compressor.compress(batch) + compressor.end_batch())
            parts.append(compressor.end_batch())  # An empty batch adds nothing.
        parts.append(compressor.compress(b"three") + compressor.finish())
        whole = b"".join(parts)
        assert gzip.decompress(whole) == b"one" * 99 + b"two" * 99 + b"three"
        assert whole.count(b"\x1f\x8b\x08") == members
        if members > 1:
            assert gzip.decompress(parts[0]) == b"one" * 99


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_cut_file_is_corrupt_wherever_it_is_cut(codec: Codec) -> None:
    """No prefix passes for a whole file, but the empty one and one that ends between two chunks."""
    content = some_content(3, 2000)
    data = oneshot_encode(codec, content)
    for length in range(1, len(data)):
        decompressor = new_decompressor(codec)
        if codec is Codec.SNAPPY and length == len(STREAM_ID):
            continue  # A stream without blocks is whole; its length gives it away.
        if codec is Codec.GZIP_OFFLOAD_DECOMPRESSION and length < 3:
            continue  # Too short to tell from content that was decoded already.
        with pytest.raises(Corrupt):
            decode(decompressor, [data[:length]])


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY])
def test_flipped_bits_are_never_content(codec: Codec) -> None:
    """Checksums of gzip and snappy catch what decoding itself does not."""
    content = some_content(4, 3000)
    data = oneshot_encode(codec, content)
    rng = random.Random(5)
    caught = 0
    for _ in range(400):
        at = rng.randrange(len(data))
        damaged = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        try:
            assert decode(new_decompressor(codec), [damaged]) == content
        except Corrupt:
            caught += 1
    assert caught > 350


@pytest.mark.parametrize("codec", COMPRESSING)
def test_rubbish_is_corrupt(codec: Codec) -> None:
    """Bytes of another format are refused; so is what follows a whole file."""
    if codec is not Codec.GZIP_OFFLOAD_DECOMPRESSION:
        with pytest.raises(Corrupt):
            decode(new_decompressor(codec), [b"this is no compressed file" * 100])
    with pytest.raises(Corrupt):
        decode(new_decompressor(codec), [oneshot_encode(codec, b"abc") + b"trailing rubbish"])


@pytest.mark.parametrize("codec", COMPRESSING)
def test_files_can_be_joined(codec: Codec) -> None:
    """Files one behind the other are the file of their contents."""
    data = b"".join(oneshot_encode(codec, bytes([n]) * 70_000) for n in range(4))
    expected = b"".join(bytes([n]) * 70_000 for n in range(4))
    assert decode(new_decompressor(codec), cut(data, random.Random(1), 37)) == expected


def test_zstandard_skips_skippable_frames() -> None:
    """Metadata frames of other tools carry no content."""
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"content")
    data = skippable + frame + skippable
    for longest in (1, 1000):
        pieces = cut(data, random.Random(2), longest)
        assert decode(new_decompressor(Codec.ZSTANDARD), pieces) == b"content"


def test_zstandard_writes_no_content_size() -> None:
    """A streaming writer does not know it, and readers must not need it."""
    data = encode(Codec.ZSTANDARD, b"content" * 1000, random.Random(1))
    assert zstandard.frame_content_size(data) == -1


def test_snappy_skips_padding_and_unknown_chunks() -> None:
    """Padding and skippable chunks of any length carry no content; reserved ones are refused."""
    blocks = bytes(cramjam.snappy.compress(b"abc" * 50_000))[len(STREAM_ID) :]
    large = b"\xfe" + (1 << 20).to_bytes(3, "little") + bytes(1 << 20)
    small = b"\x99\x03\x00\x00xyz"
    data = STREAM_ID + large + small + blocks + STREAM_ID + small + blocks + large
    for longest in (1000, 1 << 21):
        pieces = cut(data, random.Random(2), longest)
        assert decode(new_decompressor(Codec.SNAPPY), pieces) == b"abc" * 100_000
    with pytest.raises(Corrupt, match="reserved"):
        decode(new_decompressor(Codec.SNAPPY), [STREAM_ID + b"\x02\x01\x00\x00x"])
    with pytest.raises(Corrupt, match="identifier"):
        decode(new_decompressor(Codec.SNAPPY), [blocks])
    with raises(Corrupt, "chunk_bytes"):
        decode(new_decompressor(Codec.SNAPPY), [STREAM_ID + b"\x01\xff\xff\x7f"])


def test_snappy_blocks_do_not_exceed_the_format() -> None:
    """A block that claims more than 64 KiB is refused, whatever it would decode to."""
    raw = bytes(cramjam.snappy.compress_raw(bytes(1 << 20)))
    body = b"\0\0\0\0" + raw
    assert len(body) < 1 << 16
    with pytest.raises(Corrupt):
        decode(
            new_decompressor(Codec.SNAPPY),
            [STREAM_ID + b"\x00" + len(body).to_bytes(3, "little") + body],
        )


def test_snappy_writes_whole_blocks() -> None:
    """Small pieces are gathered, so that the file does not consist of tiny blocks."""
    content = some_content(9, 500_000)
    compressor = new_compressor(Codec.SNAPPY)
    pieces = [content[at : at + 100] for at in range(0, len(content), 100)]
    ours = b"".join(compressor.compress(piece) for piece in pieces) + compressor.finish()
    assert len(ours) < 1.02 * len(bytes(cramjam.snappy.compress(content)))


def test_offload_reads_what_was_decoded_already() -> None:
    """Bytes that do not begin as gzip pass; `transport_decoded` passes those that do, too."""
    codec = Codec.GZIP_OFFLOAD_DECOMPRESSION
    for content in (b"", b"x", b"\x1f", b"\x1f\x8b", b"\x1f\x8b\x07", b"plain content"):
        for longest in (1, 100):
            pieces = cut(content, random.Random(1), longest)
            assert decode(new_decompressor(codec), pieces) == content
    inner = gzip.compress(b"a journal of gzip files")
    assert decode(new_decompressor(codec, transport_decoded=True), [inner]) == inner
    assert decode(new_decompressor(codec), [gzip.compress(inner)]) == inner


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_bomb_stays_in_its_bounds(codec: Codec) -> None:
    """256 MiB of zeros are given in pieces, of which few are held at any time."""
    compressor = new_compressor(codec)
    zeros = bytes(1 << 20)
    parts = [compressor.compress(zeros) for _ in range(256)]
    data = b"".join((*parts, compressor.finish()))
    decompressor = new_decompressor(codec)
    tracemalloc.start()
    got = len(decompressor.decompress(data, 1 << 16))
    while not decompressor.needs_input and got < 64 << 20:
        got += len(decompressor.decompress(b"", 1 << 16))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert got >= 64 << 20
    # Joining its pieces may hold a slice's output twice; the compressed input is ours.
    assert peak < len(data) + 2 * (32 << 20) + (1 << 20)


def test_random_content_does_not_grow_much() -> None:
    """Content that cannot be compressed is stored, in all codecs."""
    content = os.urandom(1 << 20)
    for codec in CODECS:
        assert len(encode(codec, content, random.Random(1))) < len(content) * 1.01
