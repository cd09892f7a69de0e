"""A codec of JSON lines that reads only the UUID: `UuidCodec`. Pure."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from gazette.errors import Bug, Invalid
from gazette.history import lenient_json
from gazette.history.lenient_json import NO_JSON
from gazette.message.codec import MessageCodec
from gazette.message.uuid import TextForm
from gazette.runtime.decoders import json_decoder


class UuidCodec(MessageCodec[Any]):
    """Codec of JSON objects that keeps only the UUID."""

    single_line = True

    def __init__(self, uuid_field: str) -> None:
        """Make a codec. Dots in ``uuid_field`` join nested names. Raise `Invalid` for an empty name."""
        names = uuid_field.split(".")
        if not all(names):
            raise Invalid(f"invalid name of a field ({uuid_field!r})", path="uuid_field")
        peek_type: Any = Any
        for name in reversed(names):
            field = msgspec.field(default=None, name=name)
            peek_type = msgspec.defstruct("Peek", [("value", peek_type | None, field)])
        form = TextForm()
        super().__init__(peek_type, form)
        self.uuids_of = partial(form.read_all, self.value_of)
        self.names = names
        """Path of names to the UUID."""
        self._decoder = json_decoder(peek_type)
        self.decode_lines = self._decoder.decode_lines

    def decode(self, payload: bytes) -> Any:
        """Return the message; None for a blank line, which Spark skips too. Raise one of `CODEC_ERRORS` for a
        malformed line."""
        try:
            return self._decoder.decode(payload)
        except msgspec.ValidationError:
            raise  # The line is JSON, but not an object with such a UUID.
        except NO_JSON:
            return None if lenient_json.is_blank(payload) else self._decode_lenient(payload)

    def _decode_lenient(self, payload: bytes) -> Any:
        """Decode a line that only Spark accepts: reduce it to the path to the UUID, as strict JSON. Raise
        ``Invalid`` for an acknowledgement: only a line of strict JSON commits messages."""
        reduced = b"null"
        value = payload
        for name in self.names:
            value = lenient_json.members(value).get(name, b"null")
            if value == b"null":
                break
        else:
            reduced = lenient_json.strict(value)
        for name in reversed(self.names):
            reduced = b"{%b:%b}" % (msgspec.json.encode(name), reduced)
        message = self._decoder.decode(reduced)
        if self.acknowledges(message):
            raise Invalid("an acknowledgement is JSON by its standard")
        return message

    def value_of(self, message: Any) -> Any:
        """Return the value that a decoded message has in the place of the UUID, or None."""
        for _ in self.names:
            if message is None:
                return None
            message = message.value
        return message

    def encode(self, message: Any) -> bytes:
        raise Bug("a codec that only peeks at messages writes none")

    def _new_acknowledgement(self, message: Any) -> Any:
        raise Bug("a codec that only peeks at messages writes none")
