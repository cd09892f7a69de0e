"""Metadata of gRPC calls as headers, statuses as trailers, and the timeout of a call. Pure."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
import grpc.aio

from gazette.http2.frames import FaultCode
from gazette.http2.headers import Fields, encode_fields, is_field

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


class Metadatum(NamedTuple):
    """A pair of metadata that has arrived, with the names that `grpc.aio` gives its parts."""

    key: str
    value: str | bytes


EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]
"""The value that ``read`` returns after the last message."""
CONTENT_TYPE: Final = b"application/grpc"
_CONTENT_TYPES: Final = frozenset({CONTENT_TYPE, b"application/grpc+proto"})
"""Content types of calls: gRPC, with messages of protobuf."""
_STATUS_200: Final = b"\x88"
"""The field ``:status: 200``, by its index in the static table."""
HEAD_BLOCK: Final = _STATUS_200 + encode_fields([(b"content-type", CONTENT_TYPE)])
"""The head of each answer that has a message."""
OK_BLOCK: Final = encode_fields([(b"grpc-status", b"0")])
"""The trailers of a call that ended well."""

_OF_THE_PROTOCOL: Final = frozenset(
    {
        b"te",
        b"content-type",
        b"content-length",
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"grpc-message-type",
        b"grpc-status",
        b"grpc-message",
    }
)
_BINARY: Final = b"-bin"
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_TIMEOUT_MAX: Final = 10**8
"""Upper bound of the number in a timeout, which has at most eight digits."""
_SECONDS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_PLAIN: Final = re.compile(rb"[ -~]*")
_STATUS_OF_HTTP: Final = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    b"429": grpc.StatusCode.UNAVAILABLE,
    b"502": grpc.StatusCode.UNAVAILABLE,
    b"503": grpc.StatusCode.UNAVAILABLE,
    b"504": grpc.StatusCode.UNAVAILABLE,
}
STATUS_OF_RESET: Final = {
    FaultCode.REFUSED_STREAM.name: grpc.StatusCode.UNAVAILABLE,
    FaultCode.CANCEL.name: grpc.StatusCode.CANCELLED,
    FaultCode.ENHANCE_YOUR_CALM.name: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FaultCode.INADEQUATE_SECURITY.name: grpc.StatusCode.PERMISSION_DENIED,
}
"""Status of a call whose stream is reset, by the code of the reset. Any other code gives INTERNAL."""
_CODES: Final = {b"%d" % code.value[0]: code for code in grpc.StatusCode}
_HTTP_STATUS: Final = re.compile(rb"[1-9][0-9][0-9]")
_DETAILS_BYTES: Final = 7_000
"""Upper bound of the text of a status, as it is sent. Clients refuse trailers of more than 8 KiB, and may end
the connection."""
_CUT: Final = b" ... (cut)"
"""The end of a text that was longer."""


def is_grpc(content_type: bytes) -> bool:
    """Return True for the content type of gRPC messages, with any parameters."""
    return content_type.partition(b";")[0].strip().lower() in _CONTENT_TYPES


class ReplyHead(NamedTuple):
    """The values in a header list of an answer, which is its head or its trailers."""

    metadata: Metadata
    http: bytes
    """The status of HTTP; empty if absent."""
    is_grpc: bool
    encoding: str
    code: grpc.StatusCode
    """The status of the call. Like ``details``, it applies only to trailers."""
    details: str


@lru_cache(maxsize=64)
def reply_of(fields: tuple[tuple[bytes, bytes], ...]) -> ReplyHead:
    """Return the values of a server's header list, cached. Raise ``ValueError`` for a forbidden field."""
    values = dict(fields)
    return ReplyHead(
        metadata_of([field for field in fields if field[0][:1] != b":"]),
        values.get(b":status", b""),
        is_grpc(values.get(b"content-type", b"")),
        values.get(b"grpc-encoding", b"identity").decode("latin-1"),
        *status_of(fields),
    )


def metadata_of(fields: Fields) -> Metadata:
    """Return the metadata that an application sees in headers. Leave out the headers of gRPC itself, and
    binary values that are not base64. Raise ``ValueError`` for a field that HTTP/2 does not permit."""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name in _OF_THE_PROTOCOL:
            continue
        if not is_field(name, value):
            raise ValueError("a header's name or value has a forbidden character")
        key = name.decode("ascii")
        if not name.endswith(_BINARY):
            metadata.append(Metadatum(key, value.decode("latin-1")))
            continue
        for part in value.split(b","):
            try:
                padded = part.strip() + b"=" * (-len(part.strip()) % 4)
                metadata.append(Metadatum(key, base64.b64decode(padded, validate=True)))
            except binascii.Error:
                continue
    return tuple(metadata)


@lru_cache(maxsize=64)
def _kept_block_of(metadata: Metadata) -> bytes:
    return encode_fields(fields_of(metadata))


def block_of(metadata: Metadata) -> bytes:
    """Return metadata as a part of a header block, cached. Raise ``ValueError`` for forbidden text."""
    try:
        return _kept_block_of(metadata)
    except TypeError:  # Lists and arrays of bytes have no hash.
        return encode_fields(fields_of(metadata))


def fields_of(metadata: Iterable[tuple[str, str | bytes]]) -> Fields:
    """Return metadata as headers. Raise ``ValueError`` for text that is no header."""
    fields: Fields = []
    for key, value in metadata:
        name = key.encode("ascii")
        if not is_field(name, b""):
            raise ValueError(f"metadata {key!r} has a name that headers cannot have")
        if name.endswith(_BINARY):
            data = value.encode() if isinstance(value, str) else value
            fields.append((name, base64.b64encode(data).rstrip(b"=")))
            continue
        text = value.encode("ascii") if isinstance(value, str) else value
        if not _PLAIN.fullmatch(text):
            raise ValueError(f"metadata {key} has a character that headers cannot have")
        fields.append((name, text))
    return fields


def timeout_of(fields: Fields) -> float | None:
    """Return the timeout of a call in seconds; None if it has none. Raise ``ValueError`` if malformed."""
    for name, value in fields:
        if name == b"grpc-timeout":
            match = _TIMEOUT.fullmatch(value)
            if match is None:
                raise ValueError("grpc-timeout is not a number with a unit")
            return int(match[1]) * _SECONDS[match[2]]
    return None


def timeout_field(seconds: float) -> tuple[bytes, bytes]:
    """Return the header by which a client gives the timeout of a call."""
    milliseconds = max(0, math.ceil(seconds * 1e3))
    if milliseconds < _TIMEOUT_MAX:
        return b"grpc-timeout", b"%dm" % milliseconds
    return b"grpc-timeout", b"%dS" % min(math.ceil(seconds), _TIMEOUT_MAX - 1)


def trailers(code: grpc.StatusCode, details: str, metadata: Metadata) -> Fields:
    """Return the trailers that end a call."""
    fields: Fields = [(b"grpc-status", str(code.value[0]).encode())]
    if details:
        fields.append((b"grpc-message", _quoted(details)))
    return fields + fields_of(metadata)


def status_of(fields: Iterable[tuple[bytes, bytes]]) -> tuple[grpc.StatusCode, str]:
    """Return the code and the text in a server's trailers, which may hold anything."""
    values = dict(fields)
    status = values.get(b"grpc-status")
    if status is None:
        http = values.get(b":status", b"")
        code = _STATUS_OF_HTTP.get(http, grpc.StatusCode.UNKNOWN)
        number = http.decode() if _HTTP_STATUS.fullmatch(http) else "none"
        return code, f"the server does not speak gRPC (status of HTTP: {number})"
    details = _unquoted(values.get(b"grpc-message", b""))
    status_code = _CODES.get(status)
    if status_code is None:
        return (
            grpc.StatusCode.UNKNOWN,
            details or "the server gave a status that gRPC does not have",
        )
    return status_code, details


def _quoted(text: str) -> bytes:
    """Return text in which bytes that a header cannot have are percent-encoded. Cut long text."""
    data = text.encode(errors="backslashreplace")
    if _PLAIN.fullmatch(data) and b"%" not in data:
        return data if len(data) <= _DETAILS_BYTES else data[:_DETAILS_BYTES] + _CUT
    quoted, length = [], 0
    for index, code in enumerate(data):
        quoted.append(bytes([code]) if 0x20 <= code <= 0x7E and code != 0x25 else b"%%%02X" % code)
        length += len(quoted[-1])
        if length > _DETAILS_BYTES:  # Cut before a character, and not within its bytes.
            return _quoted(data[:index].decode(errors="ignore")) + _CUT
    return b"".join(quoted)


def _unquoted(value: bytes) -> str:
    """Return the text of a header whose other bytes are percent-encoded. Accept malformed text."""
    decoded = re.sub(rb"%([0-9A-Fa-f]{2})", lambda match: bytes([int(match[1], 16)]), value)
    return decoded.decode(errors="replace")
