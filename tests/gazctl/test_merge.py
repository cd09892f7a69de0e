"""Several streams into one output, never within a message of another."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from gazette.errors import Invalid
from gazette.gazctl.io.merge import HELD_BYTES_MAX, MergedOutput, OutputFile
from gazette.gazctl.io.message_boundaries import LineEdges
from gazette.gazctl.io.terminal import Terminal
from gazette.runtime.tasks import TaskScope
from tests.facts import raises


@pytest.fixture
def terminal() -> Terminal:
    return Terminal(io.BytesIO(), io.BytesIO(), io.StringIO())


def written(terminal: Terminal) -> bytes:
    assert isinstance(terminal.stdout, io.BytesIO)
    return terminal.stdout.getvalue()


async def test_lines_are_written_whole(terminal: Terminal) -> None:
    async with OutputFile("-", terminal) as file:
        output = MergedOutput(file)
        one, two = output.stream(LineEdges()), output.stream(LineEdges())
        await one.write(b"one a\none", at_edge=False)
        await two.write(b"two a\ntwo", at_edge=False)
        assert written(terminal) == b"one a\ntwo a\n"
        assert (one.held_bytes, two.held_bytes) == (3, 3)
        await one.write(b" b\n", at_edge=False)
        # What is held when a stream ends is written too, ended or not.
        await two.finish()
        assert written(terminal) == b"one a\ntwo a\none b\ntwo"


async def test_a_message_that_is_too_long_to_hold_keeps_others_waiting(terminal: Terminal) -> None:
    async with OutputFile("-", terminal) as file:
        output = MergedOutput(file)
        long, other = output.stream(LineEdges()), output.stream(LineEdges())
        piece = b"x" * (HELD_BYTES_MAX // 2 + 1)
        await long.write(piece, at_edge=False)
        assert written(terminal) == b""
        await long.write(piece, at_edge=False)
        assert len(written(terminal)) == 2 * len(piece)
        async with TaskScope("test") as scope:
            waiting = scope.spawn(other.write(b"other\n", at_edge=False), name="other")
            assert await asyncio.wait({waiting}, timeout=0.02) == (set(), {waiting})
            await long.write(b"end\nnext", at_edge=False)
            await waiting
        assert written(terminal) == 2 * piece + b"end\nother\n"
        await long.finish()


async def test_without_edges_the_caller_says_where_messages_end(terminal: Terminal) -> None:
    async with OutputFile("-", terminal) as file:
        stream = MergedOutput(file).stream(None)
        await stream.write(b"a", at_edge=False)
        assert written(terminal) == b""
        await stream.write(b"b", at_edge=True)
        assert written(terminal) == b"ab"


async def test_a_stream_that_failed_lets_others_write(terminal: Terminal) -> None:
    async with OutputFile("-", terminal) as file:
        output = MergedOutput(file)
        failed, other = output.stream(LineEdges()), output.stream(LineEdges())
        await failed.write(b"x" * (HELD_BYTES_MAX + 1), at_edge=False)
        failed.close()
        await other.write(b"other\n", at_edge=False)
        assert written(terminal).endswith(b"other\n")


async def test_files_are_replaced_and_directories_refused(
    tmp_path: Path, terminal: Terminal
) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"former content")
    async with OutputFile(str(path), terminal) as file:
        await file.write(b"new")
        assert file.bytes_written == 3
    assert path.read_bytes() == b"new"
    with raises(Invalid, path="--output"):
        OutputFile(str(tmp_path), terminal)
