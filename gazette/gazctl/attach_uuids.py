"""``gazctl attach-uuids``: message UUIDs for lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from gazette.errors import GazetteError, Invalid
from gazette.gazctl.commands import Command
from gazette.gazctl.context import Context
from gazette.gazctl.flags import AttachUuidsFlags
from gazette.message.uuid import OUTSIDE_TXN, Entropy, UuidMint, new_producer_id
from gazette.message.uuid import Clock as MessageClock
from gazette.runtime.clock import Clock

READ_BYTES: Final = 1 << 16
"""Bytes of one read. The clock is read once for each batch, so batches are small."""

_ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_UUID: Final = ".UUID"
_LINE: Final = ".Line"


def run(context: Context, _command: Command) -> int:
    flags = context.flags(AttachUuidsFlags)
    if flags.max_length < 1:
        raise Invalid(f"invalid length ({flags.max_length}; expected > 0)", path="--max-length")
    attacher = UuidAttacher(Template(flags.template), context.clock, context.rng)
    stdout = context.terminal.stdout
    with ExitStack() as stack:
        # Open all files first: a typing error in the last name must not leave half of an output.
        inputs = [
            (name, _open(name, context, stack)) for name in context.loaded.arguments or ("-",)
        ]
        for name, file in inputs:
            skip = flags.skip_header
            for lines in read_lines(name, file, flags.max_length):
                stdout.write(attacher.attach(lines[1:] if skip else lines))
                stdout.flush()  # In a pipeline, each batch of input goes out at once.
                skip = False
    return 0


def _open(path: str, context: Context, stack: ExitStack) -> BinaryIO:
    if path == "-":
        return context.terminal.stdin
    try:
        return stack.enter_context(Path(path).open("rb"))
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", path="FILE") from error


class Template:
    """Text with ``{{.UUID}}`` and ``{{.Line}}`` in it. Raises ``Invalid`` for other actions."""

    def __init__(self, text: str) -> None:
        self.parts: list[tuple[str, bytes]] = []
        """Pairs of an action (``.UUID``, ``.Line`` or empty) and the text that follows it."""
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
    """Renderer of lines, each with a UUID of one new producer. Each message is committed alone."""

    def __init__(self, template: Template, clock: Clock, entropy: Entropy) -> None:
        self._template = template
        self._wall_clock = clock
        self._clock = MessageClock()
        self._mint = UuidMint(new_producer_id(entropy), self._clock)

    def attach(self, lines: list[bytes]) -> bytes:
        self._clock.update(int(self._wall_clock.now() * 1e9))
        render, text = self._template.render, self._mint.text
        with self._clock.lock:
            return b"".join([render(text(OUTSIDE_TXN).encode(), line) for line in lines])


def read_lines(name: str, file: BinaryIO, max_length: int) -> Iterator[list[bytes]]:
    """Yield the lines of a file without their ends, in batches as they come.

    Raise ``Invalid`` for a line that is longer than ``max_length`` bytes.
    """
    rest, count = b"", 0
    read = getattr(file, "read1", file.read)
    while True:
        try:
            data: bytes = read(READ_BYTES)
        except OSError as error:
            raise GazetteError(f"cannot read {name}: {error.strerror}") from error
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        if not data and rest:
            lines, rest = [rest], b""
        for at, line in enumerate((*lines, rest)):
            if len(line) > max_length:
                raise Invalid(
                    f"line {count + at + 1} of {name} is longer than {max_length} bytes",
                    path="--max-length",
                )
        count += len(lines)
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
        if not data:
            return
