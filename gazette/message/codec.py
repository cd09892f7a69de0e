"""Codecs between messages of the application's types and payloads of frames.

Stage 11 of the byte path. Pure. A `MessageCodec` turns messages of one type into payloads of one format
(JSON, protobuf, raw bytes) and back. The codec knows the place of the UUID in the type. Messages of a type
without a UUID are not deduplicated. Any other class supplies its own codec, by a class method
``gazette_codec(content_type)``.
"""

from __future__ import annotations

import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

import msgspec
from google.protobuf.message import Error as ProtobufError

from gazette.errors import Invalid
from gazette.message import field_classes, number_literals, zero_value
from gazette.message.exact_numbers import ExactDocument, float_or_text
from gazette.message.message import Acknowledgement
from gazette.message.readable_model import ReadableModel
from gazette.message.uuid import (
    ACK_TXN,
    ANOTHER_PLACE,
    NIL_UUID,
    TextForm,
    UuidForm,
    UuidMint,
    parse_text,
    parse_uuid,
)
from gazette.message.uuid_place import (
    DEFAULT_PLACE,
    UuidPlace,
    dict_place,
    object_place,
    peek_decoder,
    protobuf_place,
    pydantic_place,
)
from gazette.message.value_types import decoder_of, is_customized
from gazette.message.values import ValueEncoding, finite
from gazette.protocol.ids import JournalName
from gazette.runtime.decoders import complete_model, json_decoder

M = TypeVar("M")

AckEncoder: TypeAlias = Callable[[bytes], bytes]
"""Function from the 16 bytes of a UUID to the payload of an acknowledgement."""

CODEC_ERRORS: Final = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    Invalid,
    msgspec.MsgspecError,
    ProtobufError,
)
"""Errors that encoding or decoding a message may raise, in our parsers or in the application's types."""

_MAY_BE_NON_FINITE: Final = re.compile(rb"null|NaN|Infinity")
_NON_FINITE: Final = re.compile(rb"NaN|Infinity")
_require_syntax: Final = json_decoder(msgspec.Raw).decode
_PLAIN_SETTERS: Final = (object.__setattr__, msgspec.Struct.__setattr__)


class MessageCodec(ABC, Generic[M]):
    """Codec for messages of one type. Use it in one thread at a time. It keeps no message between calls."""

    single_line: ClassVar[bool] = False
    """True if no payload contains a newline."""
    not_free_hint: ClassVar[str] = ANOTHER_PLACE
    """The hint of the error for a place of the UUID that holds another value."""
    root: ClassVar[str] = ""
    """First part of a path to a value in a message. Empty if paths begin with a field."""
    exact_lines: ClassVar[bool] = False
    """True if `decode_lines` returns one message for each line, even if a line is malformed."""

    def __init__(
        self, message_type: Any, form: UuidForm | None, place: UuidPlace[M] | None = None
    ) -> None:
        """Make a codec. Without a ``place``, the UUID is the attribute ``uuid`` of a message."""
        self.message_type = message_type
        self.form = form
        """Representation of the UUID. None if messages of the type have no UUID."""
        self.place = place
        self.decode_lines: Callable[[bytes], list[M]] | None = None
        """Function that decodes whole lines in one step. None if the codec has no fast way to do so.

        Unless `exact_lines`, the function may merge or drop lines that are not exactly one object:
        the caller checks the result.
        """
        self.uuids_of: Callable[[Sequence[M]], bytes] = lambda _messages: b""
        """Function that returns the UUIDs of messages, 16 bytes each, or nothing if the type has none.

        The function raises one of `CODEC_ERRORS` for a malformed UUID.
        """
        if form is not None:
            get = attrgetter("uuid") if place is None or place.is_plain else place.get
            self.uuids_of = partial(form.read_all, get)
        self.fits: Callable[[M], bool] = field_classes.never_known
        """Function that returns True for a message that surely reads back equal. In codecs of JSON, `encode`
        checks all other messages."""
        self.values: ValueEncoding[M] | None = None
        """Check for messages for which `fits` is False. None if `encode` has its own check, or needs none."""
        self.plain_encode_into: Callable[[M, bytearray, int], None] | None = None
        """Function that encodes a message into a buffer at a position (-1: its end). Use it only for messages
        for which `fits` is True. None unless all of this is so: the UUID is an attribute of type text,
        setting it runs no code of the application, and no payload has a newline."""

    @abstractmethod
    def decode(self, payload: bytes) -> M:
        """Return the message of a payload. Raise one of `CODEC_ERRORS`."""

    @abstractmethod
    def encode(self, message: M) -> bytes:
        """Return the payload of a message. Raise one of `CODEC_ERRORS` if it would not read back equal."""

    def encode_into(self, message: M, buffer: bytearray) -> None:
        """Append the payload of a message. After an error, the caller removes the appended bytes."""
        buffer += self.encode(message)

    def assign(self, message: M, value: Any) -> M:
        """Return the message with a UUID: the same object, or a copy if its type is frozen."""
        if self.place is not None:
            return self.place.put(message, value)
        message.uuid = value  # type: ignore[attr-defined]
        return message

    def stamp(self, message: M, mint: UuidMint, flags: int) -> M:
        """Assign a new UUID to a message. A message of a type without UUIDs stays as it is.

        Raise `Invalid` if the place of the UUID holds a value that no publisher wrote.
        """
        form = self.form
        if form is None:
            return message
        former = getattr(message, "uuid", None) if self.place is None else self.place.get(message)
        if former is not None:
            self.require_free(former)
        return self.assign(message, form.mint(mint, flags))

    def require_free(self, value: Any) -> None:
        """Raise `Invalid` for a value that no publisher wrote: a new UUID would silently replace it."""
        if self.form is None or self.form.is_free(value):
            return
        place = DEFAULT_PLACE if self.place is None else self.place.text
        raise Invalid(
            f"the field {place} holds {str(value)[:64]!r}, and is where the publisher puts the UUID",
            path=place,
            hint=self.not_free_hint,
        )

    def explained(self, message: Any, error: BaseException) -> BaseException:
        """Return an `InvalidValue` with the part that could not be encoded; ``error`` if it is not known."""
        return error if self.values is None else self.values.refused(message, error, self.root)

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        """Return the acknowledgement in a payload that does not decode as a message; None if the payload is
        no acknowledgement."""
        return None

    def acknowledges(self, message: M) -> bool:
        """Return True for an acknowledgement. Raise one of `CODEC_ERRORS` for a malformed UUID."""
        uuid = self.uuids_of([message])
        return bool(uuid) and parse_uuid(uuid).flags == ACK_TXN

    def acknowledgement(self, message: M, journal: JournalName) -> AckEncoder:
        """Return the encoder of acknowledgements for ``journal``, of the transaction that has ``message``.

        Use ``message.new_acknowledgement(journal)`` if the type has that method. Otherwise the
        acknowledgement is a message with its UUID and zeros, or the UUID alone. Raise `Invalid` if the type
        has no UUID, or if neither form is possible for it.
        """
        if self.form is None:
            raise no_uuid(self.message_type)
        make = getattr(message, "new_acknowledgement", None)
        template: M = self._new_acknowledgement(message) if make is None else make(journal)
        form = self.form
        return lambda uuid: self._payload(self.assign(template, form.of_bytes(uuid)))

    @abstractmethod
    def _new_acknowledgement(self, message: M) -> M:
        """Return a message without content."""

    def _payload(self, message: M) -> bytes:
        """Return the payload of an acknowledgement, which need not read back as a message."""
        return self.encode(message)


class MsgspecCodec(MessageCodec[M]):
    """Codec for JSON of ``msgspec.Struct`` types, of dataclasses, and of unions of them."""

    values: ValueEncoding[M]
    single_line = True

    def __init__(self, message_type: Any, place: str | None = "") -> None:
        self._info = zero_value.inspect_objects(message_type)
        uuid_place = object_place(self._info, place)
        super().__init__(message_type, None if uuid_place is None else uuid_place.form, uuid_place)
        self._decoder = decoder_of(message_type, self._info)
        self.decode_lines = self._decoder.decode_lines
        self._encoder = msgspec.json.Encoder()
        self._holds_floats = any(map(number_literals.holds_floats, self._info))
        self.values = ValueEncoding[M](message_type)
        is_attribute = uuid_place is None or uuid_place.is_plain
        self.fits = field_classes.check_of(self._info, "uuid" if is_attribute else "")
        is_plain = is_attribute and isinstance(self.form, TextForm)
        if is_plain and _sets_plainly(message_type) and not any(map(is_customized, self._info)):
            self.plain_encode_into = self._encoder.encode_into
        self._peek = None if uuid_place is None else _peek_of(uuid_place)

    def decode(self, payload: bytes) -> M:
        try:
            return self._decoder.decode(payload)  # type: ignore[no-any-return]
        except msgspec.DecodeError:
            decode = self._decoder.decode
            message = number_literals.decoded(decode, payload) if self._holds_floats else None
            # Readers of all types must understand an acknowledgement: refuse literals that JSON lacks.
            if message is None or self.acknowledges(message):
                raise
            return message  # type: ignore[no-any-return]

    def encode(self, message: M) -> bytes:
        payload = self._encoder.encode(message)
        if not self.fits(message):
            self.values.require_equal(message, payload, self.root)
        return payload

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        return None if self._peek is None else self._peek(payload)

    def acknowledgement(self, message: M, journal: JournalName) -> AckEncoder:
        if self.place is None or hasattr(message, "new_acknowledgement"):
            return super().acknowledgement(message, journal)
        names = self.place.names
        encode = msgspec.json.Encoder().encode
        # Prefer a payload of zeros that the type accepts. Fall back to the UUID alone, which
        # `acknowledgement_of` and every reader in Go understand.
        for only_uuid in (False, True):
            make = zero_value.payload_maker(self._info, type(message), names, only_uuid=only_uuid)
            try:
                self.decode(encode(make(self._json_uuid(NIL_UUID))))
            except CODEC_ERRORS:
                if not only_uuid:
                    continue
                # The UUID alone need not decode as a message. But an array must have all fields.
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

    def _payload(self, message: M) -> bytes:
        return self._encoder.encode(message)


class DictCodec(MessageCodec[dict[str, Any]]):
    """Codec for JSON objects as dicts, with their UUID under the key ``uuid`` or in another place."""

    values: ValueEncoding[dict[str, Any]]
    single_line = True
    root = "message"

    def __init__(self, place: str | None = "", message_type: Any = dict) -> None:
        uuid_place = dict_place(place)
        super().__init__(message_type, None if uuid_place is None else uuid_place.form, uuid_place)
        hook = float_or_text if message_type is ExactDocument else None
        self._decoder = json_decoder(dict[str, Any], float_hook=hook)
        self.decode_lines = self._decoder.decode_lines
        self._encoder = msgspec.json.Encoder()
        self.values = ValueEncoding[dict[str, Any]](dict[str, Any])
        self.fits = field_classes.is_json
        self._peek = None if uuid_place is None else _peek_of(uuid_place)

    def decode(self, payload: bytes) -> dict[str, Any]:
        return self._decoder.decode(payload)

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        return None if self._peek is None else self._peek(payload)

    def encode(self, message: dict[str, Any]) -> bytes:
        payload = self._encoder.encode(message)
        if not self.fits(message):
            self.values.require_equal(message, payload, self.root)
        return payload

    def _new_acknowledgement(self, message: dict[str, Any]) -> dict[str, Any]:
        return {}


class PydanticCodec(MessageCodec[M]):
    """Codec for JSON of pydantic models."""

    single_line = True

    def __init__(self, message_type: Any, place: str | None = "") -> None:
        complete_model(message_type)
        uuid_place = pydantic_place(message_type, place)
        super().__init__(message_type, None if uuid_place is None else uuid_place.form, uuid_place)
        self._writes_strings = message_type.model_config.get("ser_json_inf_nan") == "strings"
        self._model = ReadableModel(message_type, self.decode)
        self.fits = self._model.fits
        self._peek = None if uuid_place is None else _peek_of(uuid_place)

    def decode(self, payload: bytes) -> M:
        message: M = self.message_type.model_validate_json(payload)
        if _NON_FINITE.search(payload) and self.acknowledges(message):
            _require_syntax(payload)  # Pydantic reads NaN and infinities, which JSON does not have.
        return message

    def encode(self, message: M) -> bytes:
        payload = self._payload(message)
        # Pydantic writes NaN and infinities as null, or as they are: look for them in the message's values.
        if not self._writes_strings and _MAY_BE_NON_FINITE.search(payload):
            values = message.model_dump(mode="json", warnings=False)  # type: ignore[attr-defined]
            for name, value in values.items():
                finite(value, name)
        if not self.fits(message):
            self._model.require(message, payload)
        return payload

    def explained(self, message: Any, error: BaseException) -> BaseException:
        return self._model.unreadable(message, error)

    def _payload(self, message: M) -> bytes:
        # `encode` reads the payload back, and so finds all faults of which the serializer would warn.
        text: str = message.model_dump_json(by_alias=True, warnings=False)  # type: ignore[attr-defined]
        return text.encode()

    def acknowledgement_of(self, payload: bytes) -> Acknowledgement | None:
        return None if self._peek is None else self._peek(payload)

    def acknowledgement(self, message: M, journal: JournalName) -> AckEncoder:
        if self.place is None or len(self.place.names) == 1:
            return super().acknowledgement(message, journal)
        form, encode = self.place.form, msgspec.json.Encoder().encode
        names = self.place.names
        return lambda uuid: encode(zero_value.only_at(names, form.of_bytes(uuid)))

    def _new_acknowledgement(self, message: M) -> M:
        # Required fields stay unset: readers turn the payload into an `Acknowledgement`.
        return self.message_type.model_construct()  # type: ignore[no-any-return]


class ProtobufCodec(MessageCodec[M]):
    """Codec for generated protobuf classes, with their UUID in a field ``bytes uuid``."""

    def __init__(self, message_type: Any, place: str | None = "") -> None:
        uuid_place = protobuf_place(message_type, place)
        super().__init__(message_type, None if uuid_place is None else uuid_place.form, uuid_place)
        self._from_string = message_type.FromString

    def decode(self, payload: bytes) -> M:
        return self._from_string(payload)  # type: ignore[no-any-return]

    def encode(self, message: M) -> bytes:
        return message.SerializeToString()  # type: ignore[attr-defined, no-any-return]

    def _new_acknowledgement(self, message: M) -> M:
        return self.message_type()  # type: ignore[no-any-return]

    def _payload(self, message: M) -> bytes:
        # An acknowledgement lacks the fields that a type of proto2 requires.
        return message.SerializePartialToString()  # type: ignore[attr-defined, no-any-return]


class BytesCodec(MessageCodec[bytes]):
    """Codec for raw payloads of any framing: bytes are messages without UUIDs."""

    exact_lines = True

    def __init__(self) -> None:
        super().__init__(bytes, None)
        self.decode_lines = lambda lines: lines.split(b"\n")[:-1]

    def decode(self, payload: bytes) -> bytes:
        return payload

    def encode(self, message: bytes) -> bytes:
        return message

    def _new_acknowledgement(self, message: bytes) -> bytes:
        raise AssertionError("has no UUID")


def json_codec(message_type: Any, place: str | None = "") -> MessageCodec[Any]:
    """Return the JSON codec of a type with its UUID in ``place``. Raise `Invalid` for classes of protobuf."""
    if message_type is bytes:
        return BytesCodec()
    if message_type in (dict, ExactDocument):
        return DictCodec(place, message_type)
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
        return PydanticCodec(message_type, place)
    return MsgspecCodec(message_type, place)


def protobuf_codec(message_type: Any, place: str | None = "") -> MessageCodec[Any]:
    """Return the codec of a class of protobuf with its UUID in ``place``, or of bytes. Raise `Invalid` for
    other types."""
    if message_type is bytes:
        return BytesCodec()
    if _is_protobuf(message_type):
        return ProtobufCodec(message_type, place)
    raise Invalid(
        f"{getattr(message_type, '__name__', message_type)} is not a protobuf message class",
        hint="Use a generated class, or label the journal content-type=application/x-ndjson.",
    )


def has_validate(message_type: Any) -> bool:
    """Return True if the type has a method ``validate()``, which publishers call before publishing.

    Pydantic's models inherit a class method ``validate``, which does not count. Raise ``Invalid``
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


def _sets_plainly(message_type: Any) -> bool:
    """Return False if code of the application may run when the UUID of a message is set."""
    if getattr(message_type, "__setattr__", None) not in _PLAIN_SETTERS:
        return False
    # A slot, or an attribute without a descriptor such as a property.
    attribute = inspect.getattr_static(message_type, "uuid", None)
    return isinstance(attribute, MemberDescriptorType) or not hasattr(attribute, "__set__")


def _peek_of(place: UuidPlace[Any]) -> Callable[[bytes], Acknowledgement | None]:
    """Return a function that returns the acknowledgement in a payload, or None for another payload."""
    peek = peek_decoder(place.names)

    def acknowledgement_of(payload: bytes) -> Acknowledgement | None:
        try:
            uuid = parse_text(peek(payload))
            if parse_uuid(uuid).flags != ACK_TXN:
                return None
        except CODEC_ERRORS:
            return None
        return Acknowledgement(place.form.of_bytes(uuid))

    return acknowledgement_of
