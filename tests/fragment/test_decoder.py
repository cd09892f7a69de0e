from __future__ import annotations

import gzip
import hashlib
import io
import random
from dataclasses import replace

import pytest
import zstandard

from gazette.errors import Corrupt, Invalid
from gazette.protocol.codecs.codec import new_compressor
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import Codec, Fragment
from gazette.runtime.tasks import BlockingPool
from tests.facts import raises

CONTENT = b"".join(b"line %d of some text\n" % n for n in range(20_000))
CODECS = [codec for codec in Codec if codec is not Codec.INVALID]


def encoded(codec: Codec, content: bytes = CONTENT) -> bytes:
    compressor = new_compressor(codec)
    return compressor.compress(content) + compressor.end_batch() + compressor.finish()


def fragment(codec: Codec, content: bytes = CONTENT, begin: int = 1000) -> Fragment:
    return Fragment(
        "a/journal",
        begin,
        begin + len(content),
        hashlib.sha1(content).digest(),
        codec,
        backing_store="file:///root/",
        mod_time=1,
    )


def read_all(file: DecodedFile, most: int = 10_000) -> bytes:
    return b"".join(iter(lambda: file.read(most), b""))


@pytest.mark.parametrize("codec", CODECS)
def test_a_fragment_is_read(codec: Codec) -> None:
    """Whole, or from an offset on, in pieces that are no longer than asked for."""
    rng = random.Random(1)
    for offset in (0, 1, 12_345, len(CONTENT)):
        decoder = FragmentDecoder(fragment(codec))
        with DecodedFile(io.BytesIO(encoded(codec)), decoder) as file:
            file.skip_to(1000 + offset)
            assert file.offset == 1000 + offset
            got = b""
            while piece := file.read(most := rng.randint(1, 50_000)):
                assert len(piece) <= most
                got += piece
            assert got == CONTENT[offset:]
            assert file.read(1) == b""


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_in_bytes_out(codec: Codec) -> None:
    """The decoder does not care how the file arrives."""
    data, at, rng = encoded(codec), 0, random.Random(2)
    decoder, got = FragmentDecoder(fragment(codec)), b""
    while at < len(data):
        length = rng.randint(1, 3000)
        got += decoder.decode(data[at : at + length], 700)
        at += length
        while not decoder.needs_input:
            got += decoder.decode(b"", 700)
        assert decoder.offset == 1000 + len(got)
        assert decoder.remaining == len(CONTENT) - len(got)
    assert got + decoder.finish() == CONTENT


@pytest.mark.parametrize("codec", CODECS)
def test_the_first_byte_too_many_is_an_error(codec: Codec) -> None:
    """Bombs are not unpacked: the length is known from the name."""
    with raises(Corrupt, "file", "offset", end=1000 + len(CONTENT)) as raised:
        read_all(
            DecodedFile(
                io.BytesIO(encoded(codec, CONTENT + b"!")), FragmentDecoder(fragment(codec))
            )
        )
    facts = raised.value.facts
    assert facts["journal"] == "a/journal"
    assert 1000 + len(CONTENT) - 10_000 <= facts["offset"] <= 1000 + len(CONTENT)
    assert facts["file"].startswith("file:///root/a/journal/00000000000003e8-")
    bomb = encoded(codec, bytes(100 << 20))
    small = FragmentDecoder(fragment(codec, b"small"))
    with raises(Corrupt, "file", "offset", end=1005):
        small.decode(bomb, 1 << 30)


@pytest.mark.parametrize("codec", CODECS)
def test_a_cut_file_is_an_error(codec: Codec) -> None:
    """The error says where, in the journal and in the store."""
    data = encoded(codec)
    for length in (0, 1, len(data) // 2, len(data) - 1):
        file = DecodedFile(io.BytesIO(data[:length]), FragmentDecoder(fragment(codec)))
        with pytest.raises(Corrupt) as raised:
            read_all(file)
        assert raised.value.facts["journal"] == "a/journal"
        assert 1000 <= raised.value.facts["offset"] <= 1000 + len(CONTENT)
        assert "file:///root/a/journal" in str(raised.value)


@pytest.mark.parametrize("codec", CODECS)
def test_another_content_is_an_error(codec: Codec) -> None:
    """Of the same length, it is found by its digest when it was read whole."""
    other = CONTENT[:-1] + b"?"
    file = DecodedFile(io.BytesIO(encoded(codec, other)), FragmentDecoder(fragment(codec)))
    with pytest.raises(Corrupt, match="SHA-1"):
        read_all(file)
    # Case: a caller that compares it elsewhere may leave it out.
    decoder = FragmentDecoder(fragment(codec), verify=False)
    assert read_all(DecodedFile(io.BytesIO(encoded(codec, other)), decoder)) == other


LONG = CONTENT * 12


@pytest.mark.parametrize("damaged_at", [None, 0, len(LONG) // 2, len(LONG) - 1])
@pytest.mark.parametrize("closes_at", [None, 0, 3_000_000])
def test_the_digest_may_be_computed_by_another_thread(
    damaged_at: int | None, closes_at: int | None
) -> None:
    """All of the content is in it, also if that thread is taken away on the way."""
    content = bytearray(LONG)
    if damaged_at is not None:
        content[damaged_at] ^= 1
    sums = BlockingPool("sums", 1)
    decoder = FragmentDecoder(fragment(Codec.ZSTANDARD, LONG), sums=sums)
    with DecodedFile(io.BytesIO(encoded(Codec.ZSTANDARD, bytes(content))), decoder) as file:
        length = 0

        def read() -> None:
            nonlocal length
            while piece := file.read(100_000):
                length += len(piece)
                if closes_at is not None and length > closes_at:
                    sums.close()

        if damaged_at is None:
            read()
        else:
            with pytest.raises(Corrupt, match="SHA-1"):
                read()
        sums.close()
        assert length == len(LONG)


def test_a_raw_file_can_be_entered_anywhere() -> None:
    """Nothing before the offset need be read; then there is no digest to compare."""
    raw = fragment(Codec.NONE)
    decoder = FragmentDecoder(raw, start=1000 + 777)
    assert read_all(DecodedFile(io.BytesIO(CONTENT[777:]), decoder)) == CONTENT[777:]
    with raises(Corrupt, "file", missing=1):
        decoder = FragmentDecoder(raw, start=1000 + 777)
        read_all(DecodedFile(io.BytesIO(CONTENT[777:-1]), decoder))
    for offset in (999, 1000 + len(CONTENT) + 1):
        with pytest.raises(Invalid):
            FragmentDecoder(raw, start=offset)
    with raises(Invalid, says="GZIP"):
        FragmentDecoder(fragment(Codec.GZIP), start=1001)


def test_offload_that_the_transport_has_decoded() -> None:
    """By a store or HTTP; a journal of gzip files needs an option for that."""
    codec = Codec.GZIP_OFFLOAD_DECOMPRESSION
    assert read_all(DecodedFile(io.BytesIO(CONTENT), FragmentDecoder(fragment(codec)))) == CONTENT
    inner = gzip.compress(CONTENT)
    decoded = FragmentDecoder(fragment(codec, inner), transport_decoded=True)
    assert read_all(DecodedFile(io.BytesIO(inner), decoded)) == inner
    short = fragment(codec, b"\x1f")
    assert read_all(DecodedFile(io.BytesIO(b"\x1f"), FragmentDecoder(short))) == b"\x1f"


def test_a_long_tail_without_content_is_an_error() -> None:
    """Frames that are to be skipped cannot keep a reader busy behind the end."""
    tail = b"\x50\x2a\x4d\x18" + (8 << 20).to_bytes(4, "little") + bytes(8 << 20)
    data = zstandard.ZstdCompressor().compress(CONTENT)
    short = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    zstd = fragment(Codec.ZSTANDARD)
    assert read_all(DecodedFile(io.BytesIO(data + short), FragmentDecoder(zstd))) == CONTENT
    with raises(Corrupt, journal="a/journal", offset=1000 + len(CONTENT)):
        read_all(DecodedFile(io.BytesIO(data + tail), FragmentDecoder(zstd)))


def test_an_offset_that_is_not_there() -> None:
    """Skipping beyond the end says so, and closing closes the file."""
    source = io.BytesIO(CONTENT)
    with DecodedFile(source, FragmentDecoder(fragment(Codec.NONE))) as file:
        with raises(Corrupt, journal="a/journal", offset=1 << 40):
            file.skip_to(1 << 40)
    assert source.closed
    empty = replace(fragment(Codec.NONE, b""), sum=hashlib.sha1().digest())
    assert read_all(DecodedFile(io.BytesIO(), FragmentDecoder(empty))) == b""
