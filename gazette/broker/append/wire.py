"""Stages 3 and 5 of the byte path: fast codecs of the messages that carry an append's content.

`client/rpc/wire` does the same for clients. This module serves the broker's side of Append and of Replicate.
A chunk's content is copied once on its way in and once on its way out. Every other message takes the
generated path, as does a chunk that is not in its plain form.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from gazette.protocol.pb import broker_pb2

_CONTENT: Final = 0x22  # field 4, length-delimited: of AppendRequest and of ReplicateRequest alike
_CONTENT_TAG: Final = b"\x22"
_DELTA: Final = 0x28  # field 5 of ReplicateRequest, varint
_DELTA_TAG: Final = b"\x28"


class ReplicateContent(NamedTuple):
    """A ReplicateRequest that holds content and nothing else."""

    content: bytes
    delta: int


AppendMessage: TypeAlias = bytes | broker_pb2.AppendRequest
"""A message of an Append stream; as bytes, the content of a plain chunk. Empty bytes: commit."""
ReplicateMessage: TypeAlias = ReplicateContent | broker_pb2.ReplicateRequest


def decode_append(data: bytes) -> AppendMessage:
    """Decode a message of the Append call."""
    if not data:
        return data
    if data[0] == _CONTENT:
        try:
            length, at = _read_varint(data, 1)
        except IndexError:
            length = at = 0
        if length and at + length == len(data):
            return data[at:]
    return broker_pb2.AppendRequest.FromString(data)


def decode_replicate(data: bytes) -> ReplicateMessage:
    """Decode a message of the Replicate call."""
    try:
        if data[0] == _CONTENT:
            length, at = _read_varint(data, 1)
            end = at + length
            if length and end == len(data):
                return ReplicateContent(data[at:], 0)
            if length and data[end] == _DELTA:
                delta, after = _read_varint(data, end + 1)
                if after == len(data):
                    return ReplicateContent(data[at:end], delta)
    except IndexError:
        pass  # Not the plain form: an empty message, for one.
    return broker_pb2.ReplicateRequest.FromString(data)


def replicate_content(content: bytes, delta: int) -> bytes:
    """Return the wire form of a ReplicateRequest with that content, which must not be empty."""
    assert content, "a ReplicateRequest without content is a proposal"
    parts = [_CONTENT_TAG, _varint(len(content)), content]
    if delta:
        parts += (_DELTA_TAG, _varint(delta))
    return b"".join(parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at ``at``, and where it ends. Raise ``IndexError`` if it is cut or too long."""
    value = shift = 0
    while shift < 63:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError
