"""Codecs between messages of the application's types and payloads of frames.

Stage 11 of the byte path. Pure. A `MessageCodec` turns messages of one type into payloads of one
kind (JSON, protobuf, or raw bytes) and back. It knows the attribute ``uuid`` of the type, which is
text, a ``uuid.UUID``, or 16 bytes. Messages of a type without a UUID are not deduplicated. Other
types supply their own codec with a class method ``gazette_codec(content_type)``.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MemberDescriptorType
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from google.protobuf.message import DecodeError as ProtobufDecodeError

from gazette.errors import Invalid
from gazette.message import zero_value
from gazette.message.message import Acknowledgement
from gazette.message.uuid import (
    ACK_TXN,
    ANOTHER_PLACE,
    NIL_UUID,
    UUID_BYTES,
    UuidMint,
    parse_text,
    parse_uuid,
    texts_to_bytes,
    uuid_text,
)
from gazette.protocol.ids import JournalName

M = TypeVar("M")

AckEncoder: TypeAlias = Callable[[bytes], bytes]
"""Function from the 16 bytes of a UUID to the payload of an acknowledgement."""

DECODE_ERRORS: Final = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    Invalid,
    msgspec.MsgspecError,
    ProtobufDecodeError,
)
"""Errors that decoding a message may raise, in our parsers or in hooks of the application's types."""

_PLAIN_SETTERS: Final = (object.__setattr__, msgspec.Struct.__setattr__)


class UuidForm(ABC):
    """The representation of a UUID in a type of message."""

    @abstractmethod
    def join(self, values: list[Any]) -> bytes:
        """Return the bytes of all values, concatenated. Empty and absent values are nil. Raise if
        one is malformed.
        """

    @abstractmethod
    def of_bytes(self, uuid: bytes) -> Any:
        """Return the value to assign to the attribute."""

    @abstractmethod
    def mint(self, mint: UuidMint, flags: int) -> Any:
        """Return a new value."""


class TextForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        try:
            return texts_to_bytes(values)
        except TypeError:
            return texts_to_bytes([_text_of(value) for value in values])

    def of_bytes(self, uuid: bytes) -> str:
        return uuid_text(uuid)

    def mint(self, mint: UuidMint, flags: int) -> str:
        return mint.text(flags)


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise Invalid(f"{str(value)[:64]} is not the text of a UUID", path="uuid", hint=ANOTHER_PLACE)


class ObjectForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        return b"".join([value.bytes if value is not None else NIL_UUID for value in values])

    def of_bytes(self, uuid: bytes) -> UUID:
        return UUID(bytes=uuid)

    def mint(self, mint: UuidMint, flags: int) -> UUID:
        return UUID(bytes=mint.raw(flags))


class BytesForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        values = [value or NIL_UUID for value in values]
        if values and set(map(len, values)) != {UUID_BYTES}:
            raise Invalid(
                f"invalid length of UUID (expected {UUID_BYTES} bytes)",
                path="uuid",
                hint=ANOTHER_PLACE,
            )
        return b"".join(values)

    def of_bytes(self, uuid: bytes) -> bytes:
        return uuid

    def mint(self, mint: UuidMint, flags: int) -> bytes:
        return mint.raw(flags)


class MessageCodec(ABC, Generic[M]):
    """Codec for messages of one type. Use it in one thread at a time. It holds no message."""

    single_line: ClassVar[bool] = False
    """True if no payload contains a newline."""
    exact_lines: ClassVar[bool] = False
    """True if `decode_lines` returns one message for each line, whatever the lines hold."""

    def __init__(self, message_type: Any, form: UuidForm | None) -> None:
        self.message_type = message_type
        self.form = form
        """Representation of the UUID. None if messages of the type have no UUID."""
        self.plain_encode_into: Callable[[M, bytearray, int], None] | None = None
        """Encoder of a message behind a position of a buffer (-1: its end). None unless the UUID is an
        attribute of type text, setting it runs no code of the application, and a payload has no newline.
        """

    @abstractmethod
    def decode(self, payload: bytes) -> M:
        """Return the message of a payload. Raise one of `DECODE_ERRORS`."""

    @abstractmethod
    def encode(self, message: M) -> bytes:
        """Return the payload of a message. Raise one of `DECODE_ERRORS` if the message does not fit
        its type.
        """

    def decode_lines(self, lines: bytes) -> list[M] | None:
        """Decode whole lines in one step. Return None if the codec has no fast way to do so.

        Unless `exact_lines`, the result may merge or drop lines that are not exactly one object.
        The caller checks.
        """
        return None

    def encode_into(self, message: M, buffer: bytearray) -> None:
        """Append the payload of a message. If this raises, the caller removes what was appended."""
        buffer += self.encode(message)

    def uuids_of(self, messages: Sequence[M]) -> bytes:
        """Return the UUIDs of messages, 16 bytes each, or nothing if the type has none. Raise if
        one is malformed.
        """
        if self.form is None:
            return b""
        return self.form.join([message.uuid for message in messages])  # type: ignore[attr-defined]

    def assign(self, message: M, value: Any) -> M:
        """Return the message with a UUID: the same object, or a copy if its type is frozen."""
        message.uuid = value  # type: ignore[attr-defined]
        return message

    def stamp(self, message: M, mint: UuidMint, flags: int) -> M:
        """Assign a new UUID to a message. A message of a type without UUIDs stays as it is."""
        return message if self.form is None else self.assign(message, self.form.mint(mint, flags))

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        """Return the acknowledgement in a payload that is not a message. Return None if it is not
        one.
        """
        return None

    def acknowledgement(self, message: M, journal: JournalName) -> AckEncoder:
        """Return the encoder of acknowledgements for ``journal``, for the transaction that
        published ``message``.

        Use ``message.new_acknowledgement(journal)`` if the type has that method. Otherwise the
        acknowledgement is a message with its UUID and zeros. Raise `Invalid` if the type has no
        UUID.
        """
        if self.form is None:
            raise no_uuid(self.message_type)
        make = getattr(message, "new_acknowledgement", None)
        template: M = self._new_acknowledgement(message) if make is None else make(journal)
        form = self.form
        return lambda uuid: self.encode(self.assign(template, form.of_bytes(uuid)))

    @abstractmethod
    def _new_acknowledgement(self, message: M) -> M:
        """Return a message without content."""


class MsgspecCodec(MessageCodec[M]):
    """Codec for JSON of ``msgspec.Struct`` types, of dataclasses, and of unions of them."""

    single_line = True

    def __init__(self, message_type: Any) -> None:
        self._info = zero_value.inspect_objects(message_type)
        field = zero_value.uuid_field(self._info)
        super().__init__(message_type, None if field is None else _form_of(field.type))
        self._decoder = msgspec.json.Decoder(message_type)
        self._encoder = msgspec.json.Encoder()
        self._frozen = _is_frozen(message_type)
        if isinstance(self.form, TextForm) and not self._frozen and _sets_plainly(message_type):
            self.plain_encode_into = self._encoder.encode_into
        self._peek = None if field is None else _peek_decoder(field.encode_name, self.form)

    def decode(self, payload: bytes) -> M:
        return self._decoder.decode(payload)  # type: ignore[no-any-return]

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode_lines(self, lines: bytes) -> list[M] | None:
        return self._decoder.decode_lines(lines)

    def encode_into(self, message: M, buffer: bytearray) -> None:
        self._encoder.encode_into(message, buffer, -1)

    def assign(self, message: M, value: Any) -> M:
        if self._frozen:
            return _replace(message, value)
        message.uuid = value  # type: ignore[attr-defined]
        return message

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        return None if self._peek is None else _peek(self._peek, self.form, payload)

    def acknowledgement(self, message: M, journal: JournalName) -> AckEncoder:
        if self.form is None or hasattr(message, "new_acknowledgement"):
            return super().acknowledgement(message, journal)
        encode = msgspec.json.Encoder().encode
        # Prefer a payload of zeros that the type accepts. Fall back to the UUID alone, which
        # `acknowledgement_of` and every reader in Go understand.
        for only_uuid in (False, True):
            make = zero_value.payload_maker(self._info, type(message), only_uuid=only_uuid)
            try:
                self.decode(encode(make(self._json_uuid(NIL_UUID))))
            except DECODE_ERRORS:
                if not only_uuid:
                    continue
                if zero_value.is_array(self._info, type(message)):
                    raise Invalid(
                        f"cannot make an acknowledgement of type {type(message).__name__}: its zero"
                        " value is invalid",
                        hint="Define new_acknowledgement(self, journal) on the type.",
                    ) from None
            break
        return lambda uuid: encode(make(self._json_uuid(uuid)))

    def _json_uuid(self, uuid: bytes) -> Any:
        assert self.form is not None
        return self.form.of_bytes(uuid)

    def _new_acknowledgement(self, message: M) -> M:
        raise AssertionError("payload_maker is used instead")


class DictCodec(MessageCodec[dict[str, Any]]):
    """Codec for JSON objects as dicts, with their UUID under the key ``uuid``."""

    single_line = True

    def __init__(self) -> None:
        super().__init__(dict, TextForm())
        self._decoder = msgspec.json.Decoder(dict[str, Any])
        self._encoder = msgspec.json.Encoder()

    def decode(self, payload: bytes) -> dict[str, Any]:
        return self._decoder.decode(payload)

    def encode(self, message: dict[str, Any]) -> bytes:
        return self._encoder.encode(message)

    def decode_lines(self, lines: bytes) -> list[dict[str, Any]] | None:
        return self._decoder.decode_lines(lines)

    def uuids_of(self, messages: Sequence[dict[str, Any]]) -> bytes:
        assert self.form is not None
        return self.form.join([message.get("uuid") for message in messages])

    def assign(self, message: dict[str, Any], value: Any) -> dict[str, Any]:
        message["uuid"] = value
        return message

    def _new_acknowledgement(self, message: dict[str, Any]) -> dict[str, Any]:
        return {}


class PydanticCodec(MessageCodec[M]):
    """Codec for JSON of pydantic models."""

    single_line = True

    def __init__(self, message_type: Any) -> None:
        field = message_type.model_fields.get("uuid")
        form = None if field is None else _form_of(msgspec.inspect.type_info(field.annotation))
        super().__init__(message_type, form)
        self._frozen = bool(message_type.model_config.get("frozen"))
        # Use the alias of the field, since `encode` writes it and other programs read it.
        name = "uuid" if field is None else field.serialization_alias or field.alias or "uuid"
        self._peek = None if form is None else _peek_decoder(name, form)

    def decode(self, payload: bytes) -> M:
        return self.message_type.model_validate_json(payload)  # type: ignore[no-any-return]

    def encode(self, message: M) -> bytes:
        return message.model_dump_json(by_alias=True).encode()  # type: ignore[attr-defined, no-any-return]

    def assign(self, message: M, value: Any) -> M:
        if self._frozen:
            return message.model_copy(update={"uuid": value})  # type: ignore[attr-defined, no-any-return]
        message.uuid = value  # type: ignore[attr-defined]
        return message

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        return None if self._peek is None else _peek(self._peek, self.form, payload)

    def _new_acknowledgement(self, message: M) -> M:
        # Its required fields stay unset: readers turn the payload into an `Acknowledgement`.
        return self.message_type.model_construct()  # type: ignore[no-any-return]


class ProtobufCodec(MessageCodec[M]):
    """Codec for generated protobuf classes, with their UUID in a field ``bytes uuid``."""

    def __init__(self, message_type: Any) -> None:
        field = message_type.DESCRIPTOR.fields_by_name.get("uuid")
        if field is not None and field.type != field.TYPE_BYTES:
            raise Invalid(f"field uuid of {message_type.__name__} must be of type bytes")
        super().__init__(message_type, None if field is None else BytesForm())
        self._from_string = message_type.FromString

    def decode(self, payload: bytes) -> M:
        return self._from_string(payload)  # type: ignore[no-any-return]

    def encode(self, message: M) -> bytes:
        return message.SerializeToString()  # type: ignore[attr-defined, no-any-return]

    def _new_acknowledgement(self, message: M) -> M:
        return self.message_type()  # type: ignore[no-any-return]


class BytesCodec(MessageCodec[bytes]):
    """Codec for raw payloads of any framing. It sees no UUIDs."""

    exact_lines = True

    def __init__(self) -> None:
        super().__init__(bytes, None)

    def decode(self, payload: bytes) -> bytes:
        return payload

    def decode_lines(self, lines: bytes) -> list[bytes] | None:
        return lines.split(b"\n")[:-1]

    def encode(self, message: bytes) -> bytes:
        return message

    def _new_acknowledgement(self, message: bytes) -> bytes:
        raise AssertionError("has no UUID")


def json_codec(message_type: Any) -> MessageCodec[Any]:
    """Return the JSON codec of a type. Raise `Invalid` if the type has none."""
    if message_type is bytes:
        return BytesCodec()
    if message_type is dict:
        return DictCodec()
    if _is_protobuf(message_type):
        raise Invalid(
            f"{message_type.__name__} is a protobuf message, and the journal holds JSON",
            hint="Label the journal content-type=application/x-protobuf-fixed, or use another type.",
        )
    # Do not import pydantic: the module that defines a model has imported it.
    pydantic = sys.modules.get("pydantic")
    if (
        pydantic is not None
        and isinstance(message_type, type)
        and issubclass(message_type, pydantic.BaseModel)
    ):
        return PydanticCodec(message_type)
    return MsgspecCodec(message_type)


def protobuf_codec(message_type: Any) -> MessageCodec[Any]:
    """Return the protobuf codec of a type. Raise `Invalid` if the type has none."""
    if message_type is bytes:
        return BytesCodec()
    if _is_protobuf(message_type):
        return ProtobufCodec(message_type)
    raise Invalid(
        f"{getattr(message_type, '__name__', message_type)} is not a protobuf message class",
        hint="Use a generated class, or label the journal content-type=application/x-ndjson.",
    )


def has_validate(message_type: Any) -> bool:
    """Return True if the type has a method ``validate()``, which publishers call before publishing.

    The class method of that name that pydantic's models inherit does not count. Raise ``Invalid``
    if the method is a coroutine or generator function.
    """
    method = inspect.getattr_static(message_type, "validate", None)
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        raise Invalid(
            f"validate() of {message_type.__name__} is a coroutine or generator function, which checks"
            " nothing when it is called",
            hint="Define it with a plain `def`.",
        )
    return inspect.isfunction(method)


def no_uuid(message_type: Any) -> Invalid:
    return Invalid(
        f"messages of type {getattr(message_type, '__name__', message_type)} have no uuid, and "
        "can be published outside of transactions only",
        hint="Give the type a field `uuid: str`, or derive it from gazette.Message.",
    )


def _is_protobuf(message_type: Any) -> bool:
    return hasattr(message_type, "DESCRIPTOR") and hasattr(message_type, "FromString")


def _form_of(type_info: msgspec.inspect.Type) -> UuidForm:
    kinds = {type(part) for part in zero_value.alternatives(type_info)} - {msgspec.inspect.NoneType}
    if kinds == {msgspec.inspect.StrType}:
        return TextForm()
    if kinds == {msgspec.inspect.UUIDType}:
        return ObjectForm()
    if kinds == {msgspec.inspect.BytesType}:
        return BytesForm()
    raise Invalid("field uuid must be of type str, uuid.UUID or bytes", path="uuid")


def _is_frozen(message_type: Any) -> bool:
    config = getattr(message_type, "__struct_config__", None)
    if config is not None:
        return bool(config.frozen)
    params = getattr(message_type, "__dataclass_params__", None)
    return params is not None and bool(params.frozen)


def _sets_plainly(message_type: Any) -> bool:
    """Return False if code of the application may run when the UUID of a message is set."""
    if getattr(message_type, "__setattr__", None) not in _PLAIN_SETTERS:
        return False
    attribute = inspect.getattr_static(message_type, "uuid", None)
    return isinstance(attribute, MemberDescriptorType) or not hasattr(attribute, "__set__")


def _replace(message: M, value: Any) -> M:
    if isinstance(message, msgspec.Struct):
        return msgspec.structs.replace(message, uuid=value)
    return dataclasses.replace(message, uuid=value)  # type: ignore[type-var]


def _peek_decoder(name: str, form: UuidForm | None) -> msgspec.json.Decoder[Any]:
    kind = bytes if isinstance(form, BytesForm) else str
    peek = msgspec.defstruct("Peek", [("uuid", kind, msgspec.field(name=name))])
    return msgspec.json.Decoder(peek)


def _peek(
    decoder: msgspec.json.Decoder[Any], form: UuidForm | None, payload: bytes
) -> Acknowledgement | None:
    try:
        found = decoder.decode(payload).uuid
        uuid = found if isinstance(found, bytes) else parse_text(found)
        if parse_uuid(uuid).flags != ACK_TXN:
            return None
    except DECODE_ERRORS:
        return None
    return Acknowledgement(form.of_bytes(uuid) if form is not None else found)
