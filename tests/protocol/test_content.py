"""The hand-made encodings equal the generated ones."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gazette.protocol.content import (
    COMMIT,
    Content,
    append_content,
    decode_read,
    encode_append,
)
from gazette.protocol.pb import broker_pb2

contents = st.binary(min_size=1, max_size=300) | st.integers(1, 40_000).map(lambda n: b"x" * n)
offsets = st.integers(0, 300) | st.integers(0, 2**63 - 1)


@given(content=contents)
def test_an_append_chunk_is_encoded_as_by_the_generated_code(content: bytes) -> None:
    expected = broker_pb2.AppendRequest(content=content).SerializeToString()
    assert append_content(content) == expected
    assert append_content(memoryview(bytearray(content))) == expected


def test_the_commit_is_the_empty_message() -> None:
    assert broker_pb2.AppendRequest().SerializeToString() == COMMIT
    opening = broker_pb2.AppendRequest(journal="a/journal")
    assert encode_append(opening) == encode_append(opening.SerializeToString())
    with pytest.raises(AssertionError):
        append_content(b"")


@given(offset=offsets, content=contents)
def test_read_content_is_decoded_as_by_the_generated_code(offset: int, content: bytes) -> None:
    message = broker_pb2.ReadResponse(offset=offset, content=content)
    assert decode_read(message.SerializeToString()) == Content(offset, content)


@given(
    message=st.builds(
        broker_pb2.ReadResponse,
        status=st.integers(0, 15),
        offset=st.integers(-1, 2**63 - 1),
        write_head=st.integers(0, 2**63 - 1),
        fragment_url=st.text(max_size=5),
        content=st.binary(max_size=5),
        fragment=st.none() | st.just(broker_pb2.Fragment(journal="a/b")),
    )
)
def test_every_other_message_takes_the_generated_path(message: broker_pb2.ReadResponse) -> None:
    decoded = decode_read(message.SerializeToString())
    if isinstance(decoded, Content):
        decoded = broker_pb2.ReadResponse(offset=decoded.offset, content=decoded.content)
    assert decoded == message


@given(data=st.binary(max_size=40))
def test_arbitrary_bytes_are_decoded_as_by_the_generated_code(data: bytes) -> None:
    try:
        expected: object = broker_pb2.ReadResponse.FromString(data)
    except DecodeError as error:
        expected = type(error)
    try:
        decoded: object = decode_read(data)
    except DecodeError as error:
        decoded = type(error)
    if isinstance(decoded, Content):
        decoded = broker_pb2.ReadResponse(offset=decoded.offset, content=decoded.content)
    assert decoded == expected
