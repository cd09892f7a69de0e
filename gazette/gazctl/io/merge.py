"""Merging of several journals into one output: journals take turns only between messages."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from gazette.errors import GazetteError, Invalid
from gazette.gazctl.io.message_boundaries import EdgeFinder
from gazette.gazctl.io.terminal import Terminal
from gazette.runtime.mutex import Mutex
from gazette.runtime.tasks import BlockingPool

HELD_BYTES_MAX: Final = 4 << 20
"""Upper bound of the bytes held until their message ends. During a longer message, other streams wait."""


class OutputFile:
    """A file or stdout. A thread writes it, because its reader may be slow."""

    def __init__(self, path: str, terminal: Terminal) -> None:
        """Create or empty the file; ``-`` is stdout. Raise ``Invalid`` if the file cannot be opened."""
        self._path = path
        self._own = path != "-"
        try:
            self._file: BinaryIO = (
                Path(path).open("wb") if self._own else terminal.stdout  # noqa: SIM115 - closed by close()
            )
        except OSError as error:
            raise Invalid(f"cannot write to {path}: {error.strerror}", path="--output") from error
        self._pool = BlockingPool("output", 1)
        self.bytes_written = 0

    async def write(self, data: bytes | bytearray) -> None:
        """Write ``data``. Raise ``GazetteError`` (such as for a full disk) or ``BrokenPipeError``."""
        await self._pool.run(self._write, data)
        self.bytes_written += len(data)

    def _write(self, data: bytes | bytearray) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise GazetteError(f"cannot write to {self._path}: {error.strerror}") from error

    async def close(self) -> None:
        if self._own:
            await self._pool.run(self._file.close)
        self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()


class MergedOutput:
    """An output of several streams. A stream keeps the output until its message ends."""

    def __init__(self, file: OutputFile) -> None:
        self.file = file
        self._turn = Mutex("output", file)

    def stream(self, edges: EdgeFinder | None) -> MergedStream:
        return MergedStream(self._turn, edges)


class MergedStream:
    """One stream into a `MergedOutput`. Close it, or the other streams wait for ever. If a method is
    cancelled, its piece may be written or not."""

    def __init__(self, turn: Mutex[OutputFile], edges: EdgeFinder | None) -> None:
        self._turn = turn
        self._edges = edges
        self._held = bytearray()
        self._file: OutputFile | None = None
        """The output, while it is this stream's turn to write. None: another stream may write."""

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for the end of their message."""
        return len(self._held)

    async def write(self, piece: bytes, *, at_edge: bool) -> None:
        """Write the messages that end in the piece, and hold the rest. Without an edge finder, ``at_edge`` is
        True if a message may end at the end of the piece."""
        end = len(piece) if at_edge else 0
        if self._edges is not None:
            end = self._edges.feed(piece)
        if not end and self._file is None and len(self._held) + len(piece) <= HELD_BYTES_MAX:
            self._held += piece
            return
        # If no message ends here, write the whole piece: this stream has the output, or would hold too much.
        cut = end or len(piece)
        await self._write_out(piece[:cut])
        self._held += piece[cut:]
        if end:
            self.close()

    async def finish(self) -> None:
        """Write the held bytes, complete or not: the stream ends here, or continues at another offset."""
        if self._edges is not None:
            self._edges.reset()
        if self._held:
            await self._write_out(b"")
        self.close()

    async def _write_out(self, piece: bytes) -> None:
        """Wait until the output is this stream's. Then write the held bytes, and a piece."""
        if self._file is None:
            self._file = await self._turn.take()
        data = self._held + piece if self._held else piece
        await self._file.write(data)
        self._held = bytearray()

    def close(self) -> None:
        """Give the output to other streams. May be repeated."""
        if self._file is not None:
            file, self._file = self._file, None
            self._turn.give(file)
