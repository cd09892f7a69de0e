"""Messages of the application's types, as payloads: the seam between types and framings.

Stage 11 of the byte path. Pure. A `MessageCodec` turns messages of one type into payloads of one
kind (JSON, protobuf, or bytes as they are) and back, and knows where the type keeps its UUID: in an
attribute ``uuid`` that is text, a ``uuid.UUID``, or 16 bytes. A type without one takes no part in
exactly-once. Types beyond those known here bring their own codec, as the result of a class method
``gazette_codec(content_type)``.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from google.protobuf.message import DecodeError as ProtobufDecodeError

from gazette.errors import Invalid
from gazette.message import zero_value
from gazette.message.message import Acknowledgement
from gazette.message.message_uuid import (
    ACK_TXN,
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
"""From the 16 bytes of a UUID to the payload of an acknowledgement."""

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
"""What decoding a message may raise, by our parsers or by hooks of the application's types."""


class UuidForm(ABC):
    """How a type holds its UUID."""

    @abstractmethod
    def join(self, values: list[Any]) -> bytes:
        """The bytes of all, concatenated. Empty and absent ones are nil. Raises if one is none."""

    @abstractmethod
    def of_bytes(self, uuid: bytes) -> Any:
        """The value that is assigned to the attribute."""

    @abstractmethod
    def mint(self, mint: UuidMint, flags: int) -> Any:
        """A new value."""


class TextForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        try:
            return texts_to_bytes(values)
        except TypeError:
            return texts_to_bytes([value or "" for value in values])

    def of_bytes(self, uuid: bytes) -> str:
        return uuid_text(uuid)

    def mint(self, mint: UuidMint, flags: int) -> str:
        return mint.text(flags)


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
            raise Invalid(f"invalid length of UUID (expected {UUID_BYTES} bytes)", path="uuid")
        return b"".join(values)

    def of_bytes(self, uuid: bytes) -> bytes:
        return uuid

    def mint(self, mint: UuidMint, flags: int) -> bytes:
        return mint.raw(flags)


class MessageCodec(ABC, Generic[M]):
    """Payloads of messages of one type. Used by one thread at a time, and holds no message."""

    single_line: ClassVar[bool] = False
    """Whether payloads never have a newline in them."""
    exact_lines: ClassVar[bool] = False
    """Whether `decode_lines` gives one message for each line, whatever is on them."""

    def __init__(self, message_type: Any, form: UuidForm | None) -> None:
        self.message_type = message_type
        self.form = form
        """None if messages of the type have no UUID."""

    @abstractmethod
    def decode(self, payload: bytes) -> M:
        """Raises one of `DECODE_ERRORS`."""

    @abstractmethod
    def encode(self, message: M) -> bytes:
        """Raises one of `DECODE_ERRORS` if the message does not fit its type."""

    def decode_lines(self, lines: bytes) -> list[M] | None:
        """Whole lines as messages, or None if the codec has no way that is faster than one by one.

        May merge or drop lines that are not one object each, unless `exact_lines`: the caller checks.
        """
        return None

    def encode_into(self, message: M, buffer: bytearray) -> None:
        """Append the payload. What was appended when it raises is the caller's to remove."""
        buffer += self.encode(message)

    def uuids_of(self, messages: Sequence[M]) -> bytes:
        """The UUIDs of messages, 16 bytes each; nothing if the type has none. Raises if malformed."""
        if self.form is None:
            return b""
        return self.form.join([message.uuid for message in messages])  # type: ignore[attr-defined]

    def assign(self, message: M, value: Any) -> M:
        """The message with that UUID: the same, or a copy if its type is frozen."""
        message.uuid = value  # type: ignore[attr-defined]
        return message

    def stamp(self, message: M, mint: UuidMint, flags: int) -> M:
        """`assign` a new UUID. A type without UUIDs is left alone."""
        return message if self.form is None else self.assign(message, self.form.mint(mint, flags))

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        """What a payload that is no message says, if it has the UUID of an acknowledgement."""
        return None

    def acknowledgement(self, message: M, journal: JournalName) -> AckEncoder:
        """How to acknowledge ``message``, and what was published with it, in ``journal``.

        By ``message.new_acknowledgement(journal)`` if the type has that, else by a message that
        carries its UUID and zeros. Raises `Invalid` if the type has no UUID.
        """
        if self.form is None:
            raise no_uuid(self.message_type)
        make = getattr(message, "new_acknowledgement", None)
        template: M = self._new_acknowledgement(message) if make is None else make(journal)
        form = self.form
        return lambda uuid: self.encode(self.assign(template, form.of_bytes(uuid)))

    @abstractmethod
    def _new_acknowledgement(self, message: M) -> M:
        """A message without content."""


class MsgspecCodec(MessageCodec[M]):
    """JSON of ``msgspec.Struct`` types, of dataclasses, and of unions of them."""

    single_line = True

    def __init__(self, message_type: Any) -> None:
        self._info = zero_value.inspect_objects(message_type)
        field = zero_value.uuid_field(self._info)
        super().__init__(message_type, None if field is None else _form_of(field.type))
        self._decoder = msgspec.json.Decoder(message_type)
        self._encoder = msgspec.json.Encoder()
        self._frozen = _is_frozen(message_type)
        self._plain = isinstance(self.form, TextForm) and not self._frozen
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

    def stamp(self, message: M, mint: UuidMint, flags: int) -> M:
        if not self._plain:
            return super().stamp(message, mint, flags)
        # What is published hundreds of thousands of times a second.
        message.uuid = mint.text(flags)  # type: ignore[attr-defined]
        return message

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        return None if self._peek is None else _peek(self._peek, self.form, payload)

    def acknowledgement(self, message: M, journal: JournalName) -> AckEncoder:
        if self.form is None or hasattr(message, "new_acknowledgement"):
            return super().acknowledgement(message, journal)
        encode = msgspec.json.Encoder().encode
        # A payload of zeros that its own type accepts, else of nothing but the UUID, which
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
                        f"cannot make an empty {type(message).__name__}",
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
    """JSON objects as they are, with their UUID under the key ``uuid``."""

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
        return texts_to_bytes([message.get("uuid") or "" for message in messages])

    def assign(self, message: dict[str, Any], value: Any) -> dict[str, Any]:
        message["uuid"] = value
        return message

    def _new_acknowledgement(self, message: dict[str, Any]) -> dict[str, Any]:
        return {}


class PydanticCodec(MessageCodec[M]):
    """JSON of pydantic models."""

    single_line = True

    def __init__(self, message_type: Any) -> None:
        field = message_type.model_fields.get("uuid")
        form = None if field is None else _form_of(msgspec.inspect.type_info(field.annotation))
        super().__init__(message_type, form)
        self._frozen = bool(message_type.model_config.get("frozen"))
        # Names as by_alias would give them, since that is what other programs read.
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
        # Without its required fields: readers see an `Acknowledgement`.
        return self.message_type.model_construct()  # type: ignore[no-any-return]


class ProtobufCodec(MessageCodec[M]):
    """Generated protobuf classes, with their UUID in a field ``bytes uuid``."""

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
    """Payloads as they are, of whatever framing. They have no UUID that we could see."""

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
    """The codec of a type for JSON. Raises `Invalid` if there is none."""
    if message_type is bytes:
        return BytesCodec()
    if message_type is dict:
        return DictCodec()
    if _is_protobuf(message_type):
        raise Invalid(
            f"{message_type.__name__} is a protobuf message, and the journal holds JSON",
            hint="Label the journal content-type=application/x-protobuf-fixed, or use another type.",
        )
    # Whoever defined a model has imported pydantic; we need not.
    pydantic = sys.modules.get("pydantic")
    if (
        pydantic is not None
        and isinstance(message_type, type)
        and issubclass(message_type, pydantic.BaseModel)
    ):
        return PydanticCodec(message_type)
    return MsgspecCodec(message_type)


def protobuf_codec(message_type: Any) -> MessageCodec[Any]:
    """The codec of a type for protobuf. Raises `Invalid` if there is none."""
    if message_type is bytes:
        return BytesCodec()
    if _is_protobuf(message_type):
        return ProtobufCodec(message_type)
    raise Invalid(
        f"{getattr(message_type, '__name__', message_type)} is not a protobuf message class",
        hint="Use a generated class, or label the journal content-type=application/x-ndjson.",
    )


def has_validate(message_type: Any) -> bool:
    """Whether messages of a type have a method ``validate()``, to be called before publishing.

    The class method of that name which pydantic's models inherit is another thing. Raises ``Invalid``
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
        f"messages of type {getattr(message_type, '__name__', message_type)} have no uuid, so they "
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
