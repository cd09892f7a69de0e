"""The pure parts of our HTTP/2: messages, metadata, header blocks and the guard against floods."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from typing import Any

import grpc
import hpack
import pytest

from gazette.errors import Invalid, TooLarge
from gazette.http2.flood_credit import (
    BYTES_PER_CREDIT,
    CREDIT_MAX,
    CREDIT_PER_S,
    FloodCredit,
)
from gazette.http2.frames import ConnectionFault, FaultCode, StreamFault
from gazette.http2.headers import (
    LIST_BYTES_MAX,
    Fields,
    HeaderDecoder,
    RequestHead,
    encode_fields,
)
from gazette.http2.messages import MESSAGE_BYTES, MessageQueue, prefixed
from gazette.http2.metadata import (
    block_of,
    fields_of,
    metadata_of,
    status_of,
    timeout_of,
    trailers,
)

REQUEST: Fields = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.Service/Method"),
    (b":authority", b"here"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]


# Messages.


@pytest.mark.parametrize("seed", range(20))
def test_messages_are_whole_however_they_are_cut(seed: int) -> None:
    """And each of their bytes is consumed once, when it is not held any more."""
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 4, 5, 6, 100, 70_000, 300_000)) for _ in range(12)]
    messages = [rng.randbytes(size) for size in sizes]
    content = b"".join(map(prefixed, messages))
    queue, taken, consumed, at = MessageQueue(1 << 20), [], 0, 0
    while at < len(content):
        size = rng.choice((1, 3, 5, 17, 16_384, 200_000))
        consumed += queue.feed(memoryview(content)[at : at + size])
        at += size
        assert consumed <= at
        while queue and rng.random() < 0.5:
            message, cost = queue.take()
            taken.append(message)
            consumed += cost
    while queue:
        message, cost = queue.take()
        taken.append(message)
        consumed += cost
    assert taken == messages
    assert consumed == len(content)
    assert not queue.is_cut


def test_large_messages_that_are_not_taken_do_not_grow() -> None:
    """Only one is consumed before it is taken, so the window of the stream bounds the others."""
    queue, large = MessageQueue(1 << 20), prefixed(bytes(300_000))
    content = memoryview(large * 10)
    consumed = sum(queue.feed(content[at : at + 16_384]) for at in range(0, len(content), 16_384))
    assert consumed <= len(large)
    while queue:
        consumed += queue.take()[1]
    assert consumed == len(content)


def test_a_large_message_is_consumed_as_it_arrives() -> None:
    """It need not fit into a window of the stream."""
    queue = MessageQueue(4 << 20)
    content = prefixed(bytes(4 << 20))
    assert queue.feed(memoryview(content)[: 1 << 20]) == 1 << 20
    assert queue.is_cut


def test_messages_beyond_the_limit_are_refused_by_their_head() -> None:
    queue = MessageQueue(1000)
    with pytest.raises(TooLarge):
        queue.feed(memoryview(prefixed(bytes(1001))[:5]))


def compressed(message: bytes) -> memoryview:
    return memoryview(b"\x01" + prefixed(message)[1:])


def test_compressed_messages() -> None:
    for encoding, data in (
        ("gzip", gzip.compress(b"x" * 99)),
        ("deflate", zlib.compress(b"x" * 99)),
    ):
        queue = MessageQueue(1000, encoding)
        queue.feed(compressed(data))
        assert queue.take()[0] == b"x" * 99
        # Case: it is small only while it is compressed.
        queue = MessageQueue(98, encoding)
        queue.feed(compressed(data))
        with pytest.raises(TooLarge):
            queue.take()
        for damaged in (data[:-5], b"damaged"):
            queue = MessageQueue(1000, encoding)
            queue.feed(compressed(damaged))
            with pytest.raises(Invalid):
                queue.take()
    queue = MessageQueue(1000)
    queue.feed(compressed(b"x"))
    with pytest.raises(Invalid):
        queue.take()


def test_compressed_messages_are_inflated_one_at_a_time() -> None:
    """What waits is as small as it arrived, and what was inflated counts until the next is taken."""
    bomb = gzip.compress(bytes(1 << 20))
    queue = MessageQueue(1 << 20, "gzip")
    for _ in range(100):
        queue.feed(compressed(bomb))
    waiting = 100 * (len(bomb) + MESSAGE_BYTES)
    assert queue.held == waiting
    tracemalloc.start()
    for taken in range(1, 4):
        message, consumed = queue.take()
        assert message == bytes(1 << 20)
        assert consumed == len(bomb) + 5
        assert queue.held == waiting - taken * (len(bomb) + MESSAGE_BYTES) + (1 << 20)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    queue.clear()
    assert (queue.held, len(queue), queue.is_cut) == (0, 0, False)


def test_parts_of_a_message_keep_nothing_else() -> None:
    """Each is a view of all that one reading has brought. They are joined, and count as announced."""
    queue = MessageQueue(1 << 20)
    whole = prefixed(bytes(100_000))
    tracemalloc.start()
    for at in range(2_000):
        reading = bytes(1 << 16)[:at] + whole[at : at + 1] + bytes(1 << 16)
        queue.feed(memoryview(reading)[at : at + 1])
    del reading
    assert tracemalloc.get_traced_memory()[0] < 16_384
    tracemalloc.stop()
    assert queue.held == len(whole)
    queue.feed(memoryview(whole)[2_000:])
    assert queue.held == 100_000 + MESSAGE_BYTES
    assert queue.take()[0] == bytes(100_000)
    assert queue.held == 0


# Metadata.


def test_metadata_goes_and_comes_back() -> None:
    metadata = (("a-key", "value"), ("a-bin", b"\x00\xff"), ("b-bin", b""))
    assert metadata_of(fields_of(metadata)) == metadata
    assert metadata_of([(b"te", b"trailers"), (b"grpc-timeout", b"1S"), (b"x", b"y")]) == (
        ("x", "y"),
    )
    # Case: several binary values in one field, and one that is no base64.
    assert metadata_of([(b"a-bin", b"AA==,AQ,!")]) == (("a-bin", b"\x00"), ("a-bin", b"\x01"))
    for key, value in (("key", "line\n"), ("Key", "value"), ("a key", "value"), (":path", "/")):
        with pytest.raises(ValueError):
            fields_of(((key, value),))


def test_the_time_of_a_call() -> None:
    times = {b"2H": 7200.0, b"3M": 180.0, b"4S": 4.0, b"5m": 0.005, b"6u": 6e-6, b"8n": 8e-9}
    assert {text: timeout_of([(b"grpc-timeout", text)]) for text in times} == times
    assert timeout_of([(b"x", b"1S")]) is None
    for text in (b"", b"S", b"1", b"-1S", b"123456789S", b"1s"):
        with pytest.raises(ValueError):
            timeout_of([(b"grpc-timeout", text)])


@pytest.mark.parametrize("details", ["", "plain", "100 %", "line\nline", "ünïcode 🙂", "%41"])
def test_statuses_go_and_come_back(details: str) -> None:
    fields = trailers(grpc.StatusCode.ABORTED, details, (("k", "v"),))
    assert status_of(fields) == (grpc.StatusCode.ABORTED, details)
    assert metadata_of(fields)[-1] == ("k", "v")


@pytest.mark.parametrize("letter", ["x", "%", "\n", "ü", "🙂"])
def test_long_texts_of_statuses_are_cut(letter: str) -> None:
    """Clients refuse long trailers, and end the connection."""
    fields = trailers(grpc.StatusCode.ABORTED, letter * 100_000, ())
    assert len(encode_fields(fields)) < 8192
    code, details = status_of(fields)
    assert code is grpc.StatusCode.ABORTED
    text = details.removesuffix(" ... (cut)")
    assert text != details
    assert text == letter * len(text)
    assert len(text) > 500


def test_a_text_that_is_not_unicode_is_sent() -> None:
    """Such is the name of a file that is not UTF-8."""
    fields = trailers(grpc.StatusCode.ABORTED, "no file \udcff", ())
    assert status_of(fields) == (grpc.StatusCode.ABORTED, "no file \\udcff")


def test_answers_of_servers_that_do_not_speak_grpc() -> None:
    assert status_of([(b":status", b"404")])[0] is grpc.StatusCode.UNIMPLEMENTED
    assert status_of([(b":status", b"502")])[0] is grpc.StatusCode.UNAVAILABLE
    assert status_of([(b":status", b"500")])[0] is grpc.StatusCode.UNKNOWN
    assert status_of([(b"grpc-status", b"99")])[0] is grpc.StatusCode.UNKNOWN


# Header blocks.


def test_blocks_without_a_table_are_read_by_others() -> None:
    fields = [*REQUEST, (b"long", b"v" * 100_000), (b"127", b"v" * 127), (b"e", b"")]
    decoded = hpack.Decoder(max_header_list_size=1 << 20).decode(encode_fields(fields), raw=True)
    assert [tuple(field) for field in decoded] == fields


def test_blocks_are_read_with_their_table_as_it_changes() -> None:
    """Blocks of references are remembered, but not over a change of the table."""
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    rng = random.Random(1)
    for _ in range(500):
        fields = [*REQUEST, (b"x-%d" % rng.randrange(60), b"%d" % rng.randrange(3))]
        assert decoder.decode(encoder.encode(fields)) == fields


def test_metadata_that_has_no_hash_is_sent() -> None:
    made: Any = [["key", "value"], ["key-bin", bytearray(b"\0")]]
    assert block_of(made) == encode_fields(fields_of((("key", "value"), ("key-bin", b"\0"))))


def test_blocks_that_are_remembered_are_read_as_by_a_decoder_that_remembers_none() -> None:
    """Plain blocks, references, additions, evictions and changes of the table's size, in any order."""
    rng = random.Random(2)
    for _ in range(200):
        ours, reference = HeaderDecoder(), hpack.Decoder(max_header_list_size=LIST_BYTES_MAX)
        encoder, blocks = (
            hpack.Encoder(),
            [encode_fields(REQUEST), b"", b"\x88", b"\xbe", b"\x20\x88"],
        )
        for _ in range(60):
            match rng.randrange(4):
                case 0:
                    fields = [(b"x-%d" % rng.randrange(9), b"v" * rng.choice((1, 90, 5_000)))]
                    block = encoder.encode(fields)
                case 1:
                    block = bytes([rng.choice((0x20, 0x3F))]) + encode_fields(REQUEST[:2])
                    block = block.replace(b"\x3f", b"\x3f\xe1\x1f", 1)
                case _:
                    block = rng.choice(blocks)
            blocks.append(block)
            try:
                expected = [(bytes(a), bytes(b)) for a, b in reference.decode(block, raw=True)]
            except hpack.HPACKError:
                with pytest.raises(ConnectionFault):
                    ours.decode(block)
                break  # A connection ends there.
            assert ours.decode(block) == expected


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\x80", FaultCode.COMPRESSION_ERROR),
        (b"\xff\xff\xff\xff\x0f", FaultCode.COMPRESSION_ERROR),
        (b"\x00\x05ab", FaultCode.COMPRESSION_ERROR),
        (b"\x3f\xe1\xff\x7f", FaultCode.COMPRESSION_ERROR),
        (encode_fields([(b"a", bytes(LIST_BYTES_MAX))]), FaultCode.ENHANCE_YOUR_CALM),
    ],
)
def test_blocks_that_cannot_be_read(block: bytes, code: FaultCode) -> None:
    with pytest.raises(ConnectionFault) as caught:
        HeaderDecoder().decode(block)
    assert caught.value.code is code


def test_the_table_changes_its_size_twice_in_a_block_at_most() -> None:
    """The smallest size since the last block, and the present one (RFC 7541, 4.2)."""
    block = encode_fields(REQUEST)
    changes = (b"\x20", b"\x3f\xe1\x1f", b"\x21", b"\x3f\x00")
    for one in changes:
        for other in changes:
            assert HeaderDecoder().decode(one + other + block) == REQUEST
            for third in changes:
                with pytest.raises(ConnectionFault) as caught:
                    HeaderDecoder().decode(one + other + third + block)
                assert caught.value.code is FaultCode.COMPRESSION_ERROR
        with pytest.raises(ConnectionFault) as caught:
            HeaderDecoder().decode(block + one)
        assert caught.value.code is FaultCode.COMPRESSION_ERROR


def test_a_small_block_cannot_become_a_large_list() -> None:
    """A bomb: one large entry of the table, and thousands of references to it."""
    decoder = HeaderDecoder()
    decoder.decode(hpack.Encoder().encode([(b"a", b"v" * 3000)]))
    with pytest.raises(ConnectionFault):
        decoder.decode(b"\xbe" * 10_000)


@pytest.mark.parametrize(
    "fields",
    [
        REQUEST[1:],
        [*REQUEST, (b":method", b"GET")],
        [*REQUEST[:4], (b":path", b"/"), *REQUEST[4:]],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"")],
        [(b":status", b"200"), *REQUEST],
        [*REQUEST, (b"Upper", b"x")],
        [*REQUEST, (b"a b", b"x")],
        [*REQUEST, (b"a", b"x\n")],
        [*REQUEST, (b"connection", b"close")],
        [*REQUEST[:5], (b"te", b"gzip")],
        [*REQUEST, (b"content-length", b"x")],
        [*REQUEST, (b"content-length", b"1"), (b"content-length", b"2")],
    ],
)
def test_malformed_requests(fields: Fields) -> None:
    with pytest.raises(StreamFault) as caught:
        RequestHead.of(7, fields)
    assert (caught.value.stream, caught.value.code) == (7, FaultCode.PROTOCOL_ERROR)


def test_a_request() -> None:
    head = RequestHead.of(1, [*REQUEST, (b"content-length", b"12")])
    assert (head.method, head.path, head.authority) == (b"POST", b"/a.Service/Method", b"here")
    assert head.content_length == 12
    assert head.fields == [*REQUEST[4:], (b"content-length", b"12")]


# Floods.


def spend_all(credit: FloodCredit) -> int:
    """Return how much there was to be spent."""
    spent = 0
    with pytest.raises(ConnectionFault) as caught:
        while True:
            credit.spend()
            spent += 1
    assert caught.value.code is FaultCode.ENHANCE_YOUR_CALM
    return spent


def test_frames_without_content_are_paid_for_by_time_and_content() -> None:
    now = 0.0
    assert spend_all(FloodCredit(lambda: now)) == CREDIT_MAX - 1
    # Case: at half the rate that time pays for, for ever.
    credit = FloodCredit(lambda: now)
    for step in range(4 * CREDIT_MAX):
        now = 2.0 * step / CREDIT_PER_S
        credit.spend()
    # Case: content pays by its length, however it is cut.
    for parts in (1, 8):
        credit = FloodCredit(lambda: now)
        for _ in range(4 * CREDIT_MAX):
            for _ in range(parts):
                credit.earn(BYTES_PER_CREDIT // parts)
            credit.spend()
    # Case: what was answered costs nothing.
    credit = FloodCredit(lambda: now)
    for _ in range(4 * CREDIT_MAX):
        credit.spend()
        credit.refund()
