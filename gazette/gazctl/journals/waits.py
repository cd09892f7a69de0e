"""Reads of journals that say why they wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.errors import GazetteError
from gazette.gazctl.context import Context
from gazette.gazctl.journals.lookup import journal_answering, reason_of, write_head
from gazette.runtime.tasks import TaskScope

_NOTE_S: Final = 5.0
"""Seconds between checks for journals of which no bytes arrive."""
_ASK_MAX: Final = 16


@dataclass(slots=True)
class WaitReasons:
    """The open readers of a command. Loop-bound."""

    context: Context
    client: Client
    readers: dict[NotedReader, None] = field(default_factory=dict)
    """A set in order: the readers that were asked about last are at its end."""

    def bounded(self, params: ReadParams) -> NotedReader:
        """Return a reader that raises ``Unavailable`` with the reason if a ``read`` takes --timeout."""
        return NotedReader(self, params, is_bounded=True)

    def unbounded(self, params: ReadParams) -> NotedReader:
        """Return a reader that waits without a limit."""
        return NotedReader(self, params, is_bounded=False)

    @asynccontextmanager
    async def noting(self) -> AsyncIterator[None]:
        """Tell the user why no bytes of a journal arrive, each reason once, in the block."""
        async with TaskScope("waits") as scope:
            scope.daemon(self._note(), name="notes")
            try:
                yield
            finally:
                scope.cancel()

    async def _note(self) -> None:
        noted: set[str] = set()
        while True:
            await self.context.clock.sleep(_NOTE_S)
            silent = [reader for reader in self.readers if reader.is_silent]
            for reader in silent[:_ASK_MAX]:
                reason = await self._reason(reader)
                if reason and reason not in noted:
                    self.context.terminal.note(f"waiting for {reason}")
                    noted.add(reason)
                if self.readers.pop(reader, self) is None:
                    self.readers[reader] = None  # The next check begins with other readers.

    async def _reason(self, reader: NotedReader) -> str:
        """Return the brokers' reason, or a text if the reader is beyond the journal's end; else empty."""
        journal, offset = reader.params.journal, reader.offset
        reason = await reason_of(self.client, journal)
        if reason or not reader.block or offset <= 0:
            return reason
        try:
            end = await write_head(self.context, self.client, journal)
        except GazetteError:
            return ""
        if offset <= end:
            return ""
        return f"{journal}: the read is at offset {offset}, beyond the journal's end at {end}"


class NotedReader(RetryReader):
    """The bytes of a journal, for a command. Loop-bound; close it."""

    def __init__(self, waits: WaitReasons, params: ReadParams, *, is_bounded: bool) -> None:
        super().__init__(waits.client, params, on_interrupted=self._on_silence)
        self.is_silent = True
        """True until bytes arrive, and again once a broker fails."""
        self._waits = waits
        self._is_bounded = is_bounded
        waits.readers[self] = None

    async def read(self, max_bytes: int = 0) -> bytes:
        if self._is_bounded:
            waits = self._waits
            async with journal_answering(waits.context, waits.client, self.params.journal):
                piece = await super().read(max_bytes)
        else:
            piece = await super().read(max_bytes)
        self.is_silent = False
        return piece

    def close(self) -> None:
        super().close()
        self._waits.readers.pop(self, None)

    def _on_silence(self) -> None:
        self.is_silent = True
