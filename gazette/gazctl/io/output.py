"""Formats of results: tables, and text forms of protocol buffers."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gazette.errors import printable
from gazette.gazctl.io.terminal import Terminal

if TYPE_CHECKING:
    from google.protobuf.message import Message

# Each form of output imports its library when it is written: a plain table needs none.

NONE = "<none>"
"""Text of an empty cell."""


@dataclass(slots=True)
class Table:
    """Rows of text under headers. ``numbers``: headers of columns to align right."""

    headers: Sequence[str]
    numbers: frozenset[str] = frozenset()
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append([printable(cell, one_line=True) for cell in cells])

    def text(self, terminal: Terminal) -> str:
        """Return the table as text.

        For a terminal, draw lines and wrap to its width. For programs, write one line for each row, with
        two spaces between columns.
        """
        return self._rich() if terminal.stdout.isatty() else self._plain()

    def _plain(self) -> str:
        lines = [list(self.headers), *(list(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.headers))]
        text = io.StringIO()
        for line in lines:
            cells = [
                cell.rjust(width) if header in self.numbers else cell.ljust(width)
                for header, cell, width in zip(self.headers, line, widths, strict=True)
            ]
            text.write("  ".join(cells).rstrip() + "\n")
        return text.getvalue()

    def _rich(self) -> str:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
        for header in self.headers:
            justify: Any = "right" if header in self.numbers else "left"
            table.add_column(Text(header), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        text = io.StringIO()
        width = shutil.get_terminal_size().columns
        Console(file=text, force_terminal=True, width=width).print(table)
        return text.getvalue()


def proto_json(message: Message, *, one_line: bool = False) -> str:
    """Return JSON with the field names of the ``.proto`` file, including zero fields."""
    from google.protobuf.json_format import MessageToDict

    value = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json_text(value, one_line=one_line)


def json_text(value: Any, *, one_line: bool = False) -> str:
    if one_line:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def proto_text(message: Message) -> str:
    """Return the text form of a protocol buffer."""
    from google.protobuf.text_format import MessageToString

    text: str = MessageToString(message, as_utf8=True)
    return text
