"""Finds the UUID in a malformed frame: `visible_uuid`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.descriptor import Descriptor

from gazette.errors import Invalid
from gazette.history import lenient_json
from gazette.history.uuid_codec import UuidCodec
from gazette.message.codec import MessageCodec, ProtobufCodec
from gazette.message.framing.csv import CSVCodec
from gazette.message.framing.framing import fixed_payload
from gazette.message.uuid import NIL_UUID, UUID_BYTES, texts_to_bytes
from gazette.message.uuid_place import names_of

_VARINT: Final = 0
_LENGTH: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
"""Lengths of values in bytes, by the kind of a field: its wire type in protobuf."""
_GROUP_STEPS: Final = {3: 1, 4: -1}
"""Change of the number of open groups, by the kinds for the begin and the end of a group."""
_KINDS: Final = frozenset({_VARINT, _LENGTH, *_FIXED_BYTES, *_GROUP_STEPS})
_VARINT_BYTES_MAX: Final = 10


def visible_uuid(codec: MessageCodec[Any], raw: bytes) -> bytes:
    """Return the UUID that a malformed frame shows, or the nil UUID.

    The UUID keeps the frame in its transaction, even if the rest of the frame is malformed.
    """
    text: str | None = None
    if isinstance(codec, UuidCodec):
        text = lenient_json.find_string(raw, codec.names)
    elif isinstance(codec, CSVCodec):
        text = raw.strip().split(b",", 1)[0].strip(b'"').decode("ascii", "replace")
    elif isinstance(codec, ProtobufCodec):
        return _of_protobuf(codec, raw)
    try:
        return texts_to_bytes([text or ""])
    except Invalid:
        return NIL_UUID


def _of_protobuf(codec: ProtobufCodec[Any], raw: bytes) -> bytes:
    """Return a frame's UUID; the nil UUID if a frame has no valid UUID."""
    payload = fixed_payload(raw)
    if codec.place is None or payload is None:
        return NIL_UUID
    numbers = _numbers(codec.message_type.DESCRIPTOR, names_of(codec.place.text))
    uuid = find_bytes(payload, numbers)
    return NIL_UUID if uuid is None or len(uuid) != UUID_BYTES else uuid


def _numbers(descriptor: Descriptor, names: Sequence[str]) -> list[int]:
    """Return a path of nested fields by their numbers."""
    numbers = []
    for name in names:
        field: Any = descriptor.fields_by_name[name]
        numbers.append(field.number)
        descriptor = field.message_type
    return numbers


def find_bytes(payload: bytes, numbers: Sequence[int]) -> bytes | None:
    """Return the bytes in a nested field of a protobuf message; None without the field.

    ``numbers`` is the path of field numbers. If a field occurs twice, the last one counts. The message may
    be malformed: read it as far as possible.
    """
    last_value: bytes | None = None
    for number, value in _texts(payload):
        if number == numbers[0]:
            inner = value if len(numbers) == 1 else find_bytes(value, numbers[1:])
            last_value = last_value if inner is None else inner
    return last_value


def _texts(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and value of each field that has a length and is in no group. End at a malformed part. The
    last value may be incomplete."""
    position = groups = 0
    while (tag := _varint(payload, position)) is not None:
        # The lowest three bits of a key are the kind of the field, all others its number.
        (key, position), kind = tag, tag[0] & 7
        varint = _varint(payload, position) if kind in (_VARINT, _LENGTH) else (0, position)
        if varint is None or kind not in _KINDS:
            return
        position = varint[1] + _FIXED_BYTES.get(kind, 0)
        groups += _GROUP_STEPS.get(kind, 0)
        if kind == _LENGTH:
            begin, position = position, position + varint[0]
            if not groups:
                yield key >> 3, payload[begin:position]


def _varint(payload: bytes, at: int) -> tuple[int, int] | None:
    """Return the number at ``at``, and its end; None if the number is incomplete or too long."""
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        if at + index >= len(payload):
            return None
        byte = payload[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    return None
