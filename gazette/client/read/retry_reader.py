"""Stage 10 of the byte path: takes the bytes of a journal from `client/read/reader`, across failures and
fragments."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from gazette.client.append.appender import backoff_s
from gazette.client.read.reader import OffsetJump, Reader, ReadParams
from gazette.client.rpc.errors import status_of
from gazette.client.waits import Grace
from gazette.errors import Bug, Closed, Corrupt, GazetteError, Invalid, NotAllowed, NotFound, NotYet
from gazette.protocol.fragment import Fragment
from gazette.protocol.route import Header
from gazette.protocol.status import Status
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope

if TYPE_CHECKING:
    from gazette.client.access import BrokerAccess

log = logging.getLogger(__name__)

_DIRECT_FAILURES_MAX: Final = 3
"""Number of failures to open fragments at their store before all fragments are read through brokers."""
_AHEAD_BYTES: Final = 16 << 20
"""Bytes before the end of a stored fragment at which the next fragment is opened."""


class RetryReader:
    """The bytes of a journal in order, through failures of brokers. Loop-bound. The bytes end only at
    ``end_offset``. The reader retries every error except these: ``OffsetJump``; ``NotYet`` unless it blocks;
    suspension; ``Corrupt``, also for a journal that was created again; ``Invalid``, ``Bug`` and ``Closed``.
    It raises ``NotFound`` and ``NotAllowed`` once brokers have answered so for some time (`Grace`). If
    possible, the reader opens each fragment at its store, before the last fragment ends. After
    `_DIRECT_FAILURES_MAX` failures in a row to do so, it reads all fragments through brokers.
    """

    def __init__(
        self,
        client: BrokerAccess,
        params: ReadParams,
        *,
        clock: Clock | None = None,
        on_interrupted: Callable[[], None] | None = None,
    ) -> None:
        """Create a reader; it makes no call yet.

        The reader calls ``on_interrupted`` when a broker's stream broke or ended. After that, another broker
        may serve the journal, or the journal may have been deleted and created again.
        """
        params.validate()
        self.params = params
        """The given parameters, with the present value of ``block``."""
        self.offset = params.offset
        """Offset of the next byte."""
        self.write_head = 0
        """End of the journal in a broker's last answer."""
        self.fragment: Fragment | None = None
        """The fragment of the last byte, as a broker last described it."""
        self.header: Header | None = None
        self.life = params.life
        """The life of the journal that is read, once it is known. Another life raises ``Corrupt``."""
        self._client = client
        self._clock = client.clock if clock is None else clock
        self._reader: Reader | None = None
        self._next: Reader | None = None  # Opened ahead.
        self._scope = TaskScope(f"read {params.journal}")
        self._attempt = -1  # Number of failures in a row, minus one.
        self._grace = Grace(self._clock, (NotFound, NotAllowed))  # Routes and tokens may be old.
        self._direct_failures = 0
        self._proxied = False
        """True if a broker reads the present fragment, because this process could not open it."""
        self._looked_at = -1
        """Begin of the last fragment that was opened ahead, or was to be."""
        self._closed = False
        self._on_interrupted = on_interrupted or _unheard

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def block(self) -> bool:
        return self.params.block

    def set_block(self, block: bool) -> None:
        """Have ``read`` wait at the head, or raise ``NotYet`` there. A ``read`` that waits obeys, too."""
        self.params = replace(self.params, block=block)
        if not block and self._reader is not None and self._reader.params.block:
            self._drop()

    def seek(self, offset: int) -> None:
        """Continue at another offset, in the journal's present life. Raise ``Invalid`` for a negative offset.
        No ``read`` may be waiting."""
        self.life = None
        if offset == self.offset:
            return
        if offset < 0:
            raise Invalid(f"invalid offset ({offset}; expected >= 0)", path="Offset")
        self._drop()
        self.offset = offset

    def close(self) -> None:
        """Stop reading; a ``read`` that waits raises ``Closed``. May be repeated."""
        self._closed = True
        self._drop()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield pieces until ``end_offset``. Raise the errors of ``read``."""
        while piece := await self.read():
            yield piece

    async def read(self, max_bytes: int = 0) -> bytes:
        """Return the next bytes: as many as came in one piece, at most ``max_bytes`` unless that is zero.

        Return empty bytes only at ``end_offset`` (and for ``metadata_only``). Raise ``OffsetJump`` once where
        bytes are missing: the next ``read`` continues after the gap. Raise ``NotYet`` unless blocking,
        ``Corrupt``, ``NotFound``, ``NotAllowed`` (also for a suspended journal), or ``Closed``. A cancelled
        call loses nothing: the next ``read`` makes a new call.
        """
        self._client.channels.require_loop()
        try:
            return await self._read(max_bytes)
        except asyncio.CancelledError:
            self._grace.pause()
            raise

    async def _read(self, max_bytes: int) -> bytes:
        while True:
            if self._closed:
                raise Closed("the reader was closed", journal=self.params.journal)
            if self._scope.failure is not None:
                raise self._scope.failure
            if self.params.end_offset and self.offset >= self.params.end_offset:
                self._drop()
                return b""
            reader = self._current()
            try:
                piece = await reader.read(max_bytes)
            except OffsetJump as jump:
                self._note(reader)
                self.offset = jump.offset
                raise
            except GazetteError as error:
                await self._on_error(reader, error)
                continue
            except asyncio.CancelledError:
                self._forget(reader)
                raise
            self._note(reader)
            if piece:
                if self._attempt >= 0:
                    self._client.waits.end(self)
                    self._grace.end()
                self._attempt = -1
                if reader.direct is not None:
                    self._direct_failures = 0
                    self._look_ahead(reader)
                return piece
            if self.params.metadata_only:
                self._drop()
                return b""
            await self._on_end(reader)

    def _current(self) -> Reader:
        if self._reader is None:
            next_reader, self._next = self._next, None
            if next_reader is not None and next_reader.params.offset == self.offset:
                self._reader = next_reader
            else:
                if next_reader is not None:
                    next_reader.close()
                self._reader = self._new_reader(self.offset)
        return self._reader

    def _new_reader(self, offset: int) -> Reader:
        params = replace(self.params, offset=offset, life=self.life)
        direct = not self._proxied and self._direct_failures < _DIRECT_FAILURES_MAX
        if not direct:
            params = replace(params, do_not_proxy=False)
        if self._proxied and self.fragment is not None and offset < self.fragment.end:
            # Read only this fragment through brokers: this process may be able to open other fragments.
            end = min(self.params.end_offset or self.fragment.end, self.fragment.end)
            params = replace(params, end_offset=end)
        return Reader(self._client, params, direct=direct)

    def _note(self, reader: Reader) -> None:
        """Copy those of the reader's offset, head, fragment, header and life that it knows."""
        if reader.offset >= 0:
            self.offset = reader.offset
        self.write_head = max(reader.write_head, self.write_head)
        if reader.fragment is not None:
            self.fragment = reader.fragment
        if reader.header is not None:
            self.header = reader.header
        self.life = reader.life or self.life

    def _forget(self, reader: Reader) -> None:
        reader.close()
        if self._reader is reader:
            self._reader = None

    def _drop(self) -> None:
        self._client.waits.end(self)
        self._scope.cancel()
        for reader in (self._reader, self._next):
            if reader is not None:
                reader.close()
        self._reader = self._next = None

    async def _on_end(self, reader: Reader) -> None:
        """Prepare the next attempt, after a broker ended the stream or a fragment at its store ended.

        Wait if the last attempt read nothing.
        """
        if reader.direct is None and not reader.fragment_url:
            self._on_interrupted()
        self._grace.end()
        progress = reader.offset != reader.params.offset
        stuck = not progress and reader.params.do_not_proxy and reader.fragment_url != ""
        # The broker expects us to open the fragment, and we cannot: ask for its bytes.
        self._proxied = stuck
        self._forget(reader)
        if progress or stuck:
            self._attempt = -1
            return
        self._attempt += 1
        await self._clock.sleep(backoff_s(self._attempt))

    async def _on_error(self, reader: Reader, error: GazetteError) -> None:
        """Raise the error of a read if no retry can help. Otherwise return, mostly after a wait."""
        interrupted = self._reader is not reader
        self._note(reader)
        self._forget(reader)
        if interrupted:
            return  # `set_block` or `close` closed the reader.
        self._attempt += 1
        if isinstance(error, NotYet) and not reader.params.block:
            self._client.waits.end(self)
            self._grace.end()
            self._attempt = -1
            if self.params.block:
                return  # ``block`` was changed meanwhile: ask again, and wait.
            raise error
        if isinstance(error, Corrupt | Invalid | Bug | Closed):
            raise error
        if reader.direct_failed:
            self._direct_failures += 1
            self._proxied = True
            log.info(
                "a fragment of %(journal)s is read through brokers: %(error)s",
                {"journal": self.params.journal, "error": error},
            )
            return
        self._proxied = False
        self._on_interrupted()
        if status_of(error) == Status.SUSPENDED.name:
            self._grace.end()
            raise error
        if not self._grace.covers(error) and isinstance(error, NotFound | NotAllowed):
            self._attempt = -1
            self._grace.end()
            raise error
        self._client.waits.note(self, self.params.journal, error)
        log.debug(
            "read of %(journal)s failed and is retried: %(error)s",
            {"journal": self.params.journal, "error": error},
        )
        await self._clock.sleep(backoff_s(self._attempt))

    def _look_ahead(self, reader: Reader) -> None:
        """Open the next fragment when the reader comes close to the end of this one."""
        fragment = reader.fragment
        assert fragment is not None
        end = self.params.end_offset
        if (
            self._next is None
            and fragment.end != self._looked_at
            and fragment.end - reader.offset <= _AHEAD_BYTES
            and fragment.end < self.write_head
            and not (end and fragment.end >= end)
        ):
            self._looked_at = fragment.end
            self._next = self._new_reader(fragment.end)
            self._scope.spawn(self._open_ahead(self._next), name=f"open {fragment.end}")

    async def _open_ahead(self, reader: Reader) -> None:
        try:
            await reader.open_ahead()
        except GazetteError as error:
            log.debug(
                "look-ahead of %(journal)s failed: %(error)s",
                {"journal": self.params.journal, "error": error},
            )
            if self._next is reader:
                self._next = None
                reader.close()


def _unheard() -> None:
    """Do nothing at an interruption."""
