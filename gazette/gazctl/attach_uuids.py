"""``gazctl attach-uuids``: message UUIDs for lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import msgspec

from gazette.errors import GazetteError, Invalid
from gazette.gazctl.command import Command
from gazette.gazctl.context import Context
from gazette.gazctl.flags import AttachUuidsFlags
from gazette.message import uuid as uuids
from gazette.message.framing.csv import parse_record
from gazette.message.uuid_place import names_of
from gazette.protocol.text.validation import within
from gazette.runtime.clock import Clock
from gazette.runtime.decoders import json_decoder

READ_BYTES: Final = 1 << 16
"""Bytes of one read. All lines of a read get about the same time, so a read is small."""

DEFAULT_TEMPLATE: Final = "{{.UUID}},{{.Line}}\n"
_NULL: Final = b"null"
_ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_UUID: Final = ".UUID"
_LINE: Final = ".Line"
_CSV_BEGIN: Final = "{{.UUID}},"
"""Begin of a template for CSV: the first field of a record is the UUID."""


def run(context: Context, _command: Command) -> int:
    flags = context.flags(AttachUuidsFlags)
    if flags.max_length < 1:
        raise Invalid(f"invalid length ({flags.max_length}; expected > 0)", path="--max-length")
    if flags.uuid and flags.template != DEFAULT_TEMPLATE:
        raise Invalid(
            "is given together with --uuid, which writes the line itself",
            path="--template",
            hint="Give one of the two.",
        )
    layout = PlaceInJson(flags.uuid) if flags.uuid else Template(flags.template)
    attacher = UuidAttacher(layout, context.clock, context.rng)
    stdout = context.terminal.stdout
    with ExitStack() as stack:
        # Open all files first: a wrong last name must not leave half of an output.
        inputs = [
            (name, _open(name, context, stack)) for name in context.loaded.arguments or ("-",)
        ]
        for name, file in inputs:
            skip, line_number = flags.skip_header, 1
            batches = read_lines(name, file, flags.max_length)
            if not flags.uuid and flags.template.startswith(_CSV_BEGIN):
                batches = whole_records(name, batches, flags.max_length)
            for lines in batches:
                if skip:
                    lines, line_number, skip = lines[1:], 2, False
                with within(name):
                    stdout.write(attacher.attach(lines, line_number))
                stdout.flush()  # In a pipeline, the next program gets each batch at once.
                line_number += len(lines)
    return 0


def _open(path: str, context: Context, stack: ExitStack) -> BinaryIO:
    if path == "-":
        return context.terminal.stdin
    try:
        return stack.enter_context(Path(path).open("rb"))
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", path="FILE") from error


class Layout(Protocol):
    """The form of a line with its UUID."""

    def render(self, uuid: bytes, line: bytes) -> bytes: ...


class PlaceInJson:
    """A place in the JSON object of a line. Values of other fields keep their bytes. White space between
    fields is left out."""

    def __init__(self, place: str) -> None:
        """Raise ``Invalid`` for a malformed path."""
        with within("--uuid"):
            self._names = names_of(place)
        self._form = uuids.TextForm()
        self._decode = json_decoder(dict[str, msgspec.Raw]).decode

    def render(self, uuid: bytes, line: bytes) -> bytes:
        return self._put(line, self._names, uuid) + b"\n"

    def _put(self, text: bytes, names: list[str], uuid: bytes) -> bytes:
        """Return a JSON object with the UUID in the field at ``names``. Make absent objects on this path.

        Raise ``Invalid`` if ``text`` is no object, or if the field holds another value.
        """
        try:
            fields = self._decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Invalid(f"no JSON object: {error}", path="--uuid", content=text[:64]) from error
        name, *inner_names = names
        raw = bytes(fields.get(name, _NULL))
        if inner_names:
            fields[name] = msgspec.Raw(self._put(b"{}" if raw == _NULL else raw, inner_names, uuid))
        elif not self._form.is_free(value := msgspec.json.decode(raw)):
            raise Invalid(
                f"the field {name} holds {str(value)[:64]!r}, and is where the UUID goes",
                path="--uuid",
                hint=uuids.ANOTHER_PLACE,
            )
        else:
            fields[name] = msgspec.Raw(b'"%s"' % uuid)
        return msgspec.json.encode(fields)


class Template:
    """Text with the actions ``{{.UUID}}`` and ``{{.Line}}``. Raises ``Invalid`` for another action, or one
    that is not closed."""

    def __init__(self, text: str) -> None:
        self.parts: list[tuple[str, bytes]] = []
        """Pairs of an action (``.UUID``, ``.Line`` or empty) and the text that follows it."""
        # The text before the first action; then in turn an action, and the text after it.
        first, *words = _ACTION.split(text)
        self._add("", first)
        for action, literal in zip(words[0::2], words[1::2], strict=True):
            if action.strip() not in (_UUID, _LINE):
                raise Invalid(
                    f"unknown action {{{{{action}}}}}",
                    path="--template",
                    hint="A template may hold {{.UUID}} and {{.Line}}.",
                )
            self._add(action.strip(), literal)

    def _add(self, action: str, literal: str) -> None:
        if "{{" in literal:
            raise Invalid("an action is not closed", path="--template")
        self.parts.append((action, literal.encode()))

    def render(self, uuid: bytes, line: bytes) -> bytes:
        values = {"": b"", _UUID: uuid, _LINE: line}
        return b"".join([values[name] + literal for name, literal in self.parts])


class UuidAttacher:
    """Renderer of lines, each with a UUID of one new producer, as a message outside of transactions."""

    def __init__(self, layout: Layout, clock: Clock, entropy: uuids.Entropy) -> None:
        self._layout = layout
        self._wall_clock = clock
        self._clock = uuids.Clock()
        self._mint = uuids.UuidMint(uuids.new_producer_id(entropy), self._clock)

    def attach(self, lines: list[bytes], number: int = 1) -> bytes:
        """Return lines with UUIDs. Raise ``Invalid`` with the number of a wrong line. The first line has
        ``number``."""
        self._clock.update(int(self._wall_clock.now() * 1e9))
        render, new_uuid, rendered = self._layout.render, self._mint.text, []
        with self._clock.lock:
            for line_number, line in enumerate(lines, number):
                try:
                    rendered.append(render(new_uuid(uuids.OUTSIDE_TXN).encode(), line))
                except Invalid as error:
                    raise Invalid(
                        f"line {line_number}: {error.message}",
                        path=error.path,
                        hint=error.hint,
                        **error.facts,
                    ) from error
        return b"".join(rendered)


def read_lines(name: str, file: BinaryIO, max_length: int) -> Iterator[list[bytes]]:
    """Yield the lines of a file without their ends, which may be CR LF, in batches as they arrive. Raise
    ``Invalid`` for a line of more than ``max_length`` bytes, and ``GazetteError`` if the file cannot be read.
    """
    partial, count = b"", 0
    read = getattr(file, "read1", file.read)
    while True:
        try:
            data: bytes = read(READ_BYTES)
        except OSError as error:
            raise GazetteError(f"cannot read {name}: {error.strerror}") from error
        lines = (partial + data).split(b"\n")
        partial = lines.pop()
        if not data and partial:
            lines, partial = [partial], b""
        for index, line in enumerate((*lines, partial)):
            if len(line) > max_length:
                raise Invalid(
                    f"line {count + index + 1} of {name} is longer than {max_length} bytes",
                    path="--max-length",
                )
        count += len(lines)
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
        if not data:
            return


def whole_records(
    name: str, batches: Iterable[list[bytes]], max_length: int
) -> Iterator[list[bytes]]:
    """Yield the CSV records in lines, in batches as they arrive.

    A quoted field may have newlines: no UUID must follow such a newline. Raise ``Invalid`` for a quote
    without an end, and for a record of more than ``max_length`` bytes.
    """
    record, line_number, first_line = b"", 0, 0
    for lines in batches:
        records: list[bytes] = []
        for line in lines:
            line_number += 1
            if record:
                record += b"\n" + line
            else:
                record, first_line = line, line_number
            if b'"' not in line or (first_line < line_number and line.count(b'"') % 2 == 0):
                # Quotes in pairs leave an open record open. A new record without quotes is complete.
                is_open = first_line < line_number
            else:
                is_open = parse_record(record + b"\n", 0) is None
            if len(record) > max_length:
                raise _unclosed(name, first_line, f"within {max_length} bytes")
            if not is_open:
                records.append(record)
                record = b""
        if records:
            yield records
    if record:
        raise _unclosed(name, first_line, "to its end")


def _unclosed(name: str, line: int, extent: str) -> Invalid:
    return Invalid(
        f"the quote that begins a field at line {line} of {name} is not closed {extent}",
        path="FILE",
        hint="Close the quote. Or raise --max-length. A template that does not begin with "
        "{{.UUID}} takes each line as it is.",
    )
