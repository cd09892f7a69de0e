"""Tables for people and for programs, and how progress is shown."""

from __future__ import annotations

import io
from typing import Final

import grpc
import grpc.aio

from gazette.client.rpc.errors import rpc_error
from gazette.errors import Invalid, NotFound, printable
from gazette.gazctl.io.output import Table
from gazette.gazctl.io.progress import ProgressLine
from gazette.gazctl.io.terminal import Terminal
from gazette.runtime.numbers import bytes_text
from gazette.testing.clock import ManualClock

EMPTY: Final = grpc.aio.Metadata()


class Tty(io.BytesIO):
    def isatty(self) -> bool:
        return True


class TextTty(io.StringIO):
    def isatty(self) -> bool:
        return True


def table() -> Table:
    table = Table(["Name", "Bytes", "Note"], numbers=frozenset({"Bytes"}))
    table.add("a", "1", "")
    table.add("longer", "12345", "[bold]text")
    return table


def test_programs_get_plain_columns() -> None:
    terminal = Terminal(io.BytesIO(), io.BytesIO(), io.StringIO())
    assert table().text(terminal) == (
        "Name    Bytes  Note\n"  #
        "a           1\n"
        "longer  12345  [bold]text\n"
    )


def test_people_get_lines_and_markup_is_text() -> None:
    text = table().text(Terminal(io.BytesIO(), Tty(), io.StringIO()))
    assert "─" in text
    assert "[bold]text" in text


def test_progress_is_a_line_every_few_seconds(clock: ManualClock) -> None:
    terminal = Terminal(io.BytesIO(), io.BytesIO(), io.StringIO())
    with ProgressLine(terminal, clock, "playing", "bytes") as line:
        for second in range(12):
            line.update(second * 1024, 12 * 1024)
            clock.advance(1.0)
    assert terminal.stderr.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "playing: 5.0 KiB of 12.0 KiB, about 7s left",
        "playing: 10.0 KiB of 12.0 KiB, about 2s left",
    ]


def test_the_next_step_is_estimated_by_its_own_rate(clock: ManualClock) -> None:
    terminal = Terminal(io.BytesIO(), io.BytesIO(), io.StringIO())
    with ProgressLine(terminal, clock, "reading", "shards") as line:
        line.update(0, 4)
        clock.advance(100.0)
        line.update(2, 4)
        line.label, line.unit = "building", "bytes"
        line.update(0, 4096)
        clock.advance(6.0)
        line.update(1024, 4096)
    assert terminal.stderr.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "reading: 2 of 4 shards, about 1m left",
        "building: 1.0 KiB of 4.0 KiB, about 18s left",
    ]


def test_progress_is_a_bar_on_a_terminal(clock: ManualClock) -> None:
    stderr = TextTty()
    with ProgressLine(Terminal(io.BytesIO(), io.BytesIO(), stderr), clock, "playing") as line:
        line.update(1, 2)
    assert "playing" in stderr.getvalue()


def test_sizes_are_written_for_people() -> None:
    sizes = [0, 1023, 1024, 1536, 1 << 20, 5 << 30, 1 << 60]
    assert [bytes_text(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 GiB",
        "1.0 EiB",
    ]


SAID = "no\x1b[2J\x9b1m\u202egnorw\u2028\x00"
"""What a server may say to change a terminal, or to look like something else."""
SHOWN = r"no\x1b[2J\x9b1m\u202egnorw\u2028\x00"


def test_what_servers_say_does_not_control_the_terminal() -> None:
    for error in (
        NotFound(SAID, hint=SAID, journal=SAID),
        Invalid(SAID, path=SAID),
        rpc_error(
            grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, EMPTY, EMPTY, f"{SAID}\nforged", None),
            "List",
        ),
    ):
        for text in (str(error), error.message, error.hint):
            assert text.isprintable(), text
        assert SHOWN in str(error)
    stderr = io.StringIO()
    terminal = Terminal(io.BytesIO(), io.BytesIO(), stderr)
    terminal.note(f"{SAID}\n\tof two lines")
    assert stderr.getvalue() == f"{SHOWN}\n\tof two lines\n"
    table = Table(["A", "B"])
    table.add(SAID, "x\ny")
    assert table.text(terminal).splitlines()[1].split() == [SHOWN, r"x\ny"]


def test_texts_of_users_stay_as_they_are() -> None:
    for text in ("ünïcode 🙂 日本", "two\n\tlines", "a\u00a0b\u00adc"):
        assert printable(text) == text
        assert Invalid(text).message == text
