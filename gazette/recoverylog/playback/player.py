"""Stage 16 of the byte path: takes a recovery log from `client/read/retry_reader`, gives a directory.

A player rebuilds the files of a log in a directory. Then it tails the log (a hot standby), or ends: at the
write head (a read-only recovery), or by a *hand-off*. The hand-off is an operation that makes a new author
the owner of the log, exactly at the offset that was played.

    BACKFILL ── at the head ──► TAILING ── hand_off(author) ──► INJECTED ── read, applied ──► LIVE
        │                          │                               │ read, lost the race
        └── finish() ──────────────┴── at the head ──► LIVE        └──► read on, inject again

The append of a hand-off also sets the new author's fence. So brokers refuse the old author from then on,
even if the hand-off operation loses the race.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gazette.client.append.appender import AppendParams
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.errors import status_of
from gazette.errors import Bug, Closed, Corrupt, NotAllowed, Unavailable
from gazette.protocol.hints import FSMHints
from gazette.protocol.status import Status
from gazette.recoverylog.log.broker_logs import append_repeatable, write_head
from gazette.recoverylog.log.recorder import fence, no_op
from gazette.recoverylog.playback.file_writer import FileWriter
from gazette.recoverylog.playback.play_progress import PlayerState, PlayProgress, RecoveredState
from gazette.recoverylog.playback.playback import Handoff, Playback, PrunedLog
from gazette.recoverylog.playback.staged_files import PlayedFiles, StagedFiles, WaitingView
from gazette.runtime.clock import Clock
from gazette.runtime.failpoints import reach
from gazette.runtime.metrics import RECOVERED_BYTES
from gazette.runtime.tasks import Pool, TaskScope

if TYPE_CHECKING:
    from gazette.client.client import Client

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_BYTES = 1 << 20

SUSPENDED_POLL_S = 2.0
"""Seconds after which a standby asks again whether a fully suspended log has been resumed."""

CATCH_UPS_MAX = 3
"""Greatest number of waits for new appends before a hand-off, if the owner never pauses.

Then the hand-off is appended anyway. This hand-off may lose the race, but its fence stops the owner: the next
hand-off succeeds.
"""


class Player:
    """Plays one log into one directory. Loop-bound. Files are written in ``pool``.

    ``directory`` is wiped first. A failure or a cancellation removes it.
    """

    def __init__(
        self,
        hints: FSMHints,
        directory: Path,
        client: Client,
        clock: Clock,
        pool: Pool,
        *,
        older_hints: Sequence[FSMHints] = (),
        stall_timeout_s: float = 60.0,
    ) -> None:
        """Make a player. If the log has lost operations that ``hints`` need, play ``older_hints`` in turn.

        ``stall_timeout_s`` bounds the wait for bytes that the log must have.
        """
        self.hints = hints
        """Hints of the present attempt."""
        self.directory = directory
        self.tailing = asyncio.Event()
        """Set when the player has reached the head for the first time."""
        self.state = PlayerState.BACKFILL
        self._client = client
        self._clock = clock
        self._pool = pool
        self._older_hints = list(older_hints)
        self._stall_timeout_s = stall_timeout_s
        self._playback = Playback(hints)
        self._files = StagedFiles(directory)
        self._author: int | None = None
        self._permit: Callable[[], Awaitable[None]] | None = None
        self._finish_requested = False
        self._requested = asyncio.Event()
        """Set once a hand-off or an end was asked for."""
        self._woken = asyncio.Event()
        """Set when the loop of `play` should check for new requests."""
        self._views: list[WaitingView[Any]] = []
        self._cut_offset: int | None = None
        """Offset at which views are taken: the end of an append. None: no view waits for an offset."""
        self._beyond_cut = b""
        """Bytes that were read beyond the cut."""
        self._read_through = 0
        """Offset up to which the log has bytes, as far as the player knows."""
        self._catch_ups = 0
        """Number of waits for new appends since a hand-off was asked for: see `CATCH_UPS_MAX`."""
        self._tailed_at_request = False
        """True if the hand-off was requested after the head had been reached."""
        self._fenced = False
        """True if the log's registers have the new author's fence."""
        self._bytes_read = 0
        self._started = clock.monotonic()
        self._writer = FileWriter(self._files, pool)
        self._reader: RetryReader | None = None
        self._pending: asyncio.Task[bytes | OffsetJump] | None = None
        """The read whose result was not fed yet."""

    @property
    def progress(self) -> PlayProgress:
        offset = self._playback.read_offset
        # While a standby tails, its reader learns the head of the log from the broker.
        head = 0 if self._reader is None else self._reader.write_head
        return PlayProgress(
            state=self.state,
            log=self._playback.log,
            offset=offset,
            read_through=max(self._read_through, head, offset),
            bytes_read=self._bytes_read,
            seconds=self._clock.monotonic() - self._started,
        )

    def hand_off(self, author: int, *, permit: Callable[[], Awaitable[None]] | None = None) -> None:
        """Ask ``play`` to take the log over as ``author``, and to end.

        ``play`` awaits ``permit`` each time before it fences the log, which may be long after this call: the
        fence stops the log's owner at that time. An error of ``permit`` ends ``play``.
        """
        if self._finish_requested or self._author is not None:
            raise Bug("a player is ended once", log=self.hints.log)
        self._author, self._permit = author, permit
        self._tailed_at_request = self.tailing.is_set()
        self._requested.set()
        self._woken.set()

    def finish(self) -> None:
        """Ask ``play`` to end at the write head, and to leave the log to its owner."""
        if self._finish_requested or self._author is not None:
            raise Bug("a player is ended once", log=self.hints.log)
        self._finish_requested = True
        self._requested.set()
        self._woken.set()

    def note_head(self, head: int) -> None:
        """Note that the log ends at ``head``: `play` raises ``Unavailable`` if the bytes before ``head`` do
        not come. Do nothing before `tailing` is set, and after `hand_off`."""
        if self.tailing.is_set() and self._author is None and head > self._read_through:
            self._read_through = head
            self._woken.set()

    async def view(self, call: Callable[[PlayedFiles], T]) -> T:
        """Call ``call`` with the files as of the end of an append, at the time of this call or later.

        Wait until the player has reached the head once. ``call`` runs on a thread of the pool, and play-back
        waits for it. An error of ``call`` reaches the caller, an ``OSError`` as a `GazetteError`. Raise
        ``Corrupt`` for changed files, and ``Closed`` if play-back ends first. After a cancellation ``call``
        may still run.
        """
        view = WaitingView(call, asyncio.get_running_loop().create_future())
        if self.state in (PlayerState.LIVE, PlayerState.FAILED):
            raise Closed("play-back has ended", log=self.hints.log)
        self._views.append(view)
        self._woken.set()
        result: T = await view.result
        return result

    async def play(self) -> RecoveredState:
        """Play until a requested `hand_off` or `finish` is done.

        Raise ``Corrupt`` if the log lacks operations that the hints name. Raise ``Unavailable`` if no bytes
        arrive for ``stall_timeout_s`` seconds although the log must have more. Cancellation removes the
        directory. A hand-off may or may not have been appended: the next recovery hands off again.
        """
        succeeded = False
        try:
            async with TaskScope(f"player {self.hints.log}") as scope:
                state = await self._play_some_hints(scope)
                scope.cancel()
            self.state = PlayerState.LIVE
            succeeded = True
            return state
        finally:
            self._close_reader()
            self._end_views()
            if not succeeded:
                self.state = PlayerState.FAILED
                # Start the removal without an await: a cancelled task must not await.
                try:
                    self._pool.submit(self._files.abandon)
                except (
                    RuntimeError,
                    Unavailable,
                ):  # The process is about to end, or gets no thread.
                    self._files.abandon()

    async def _play_some_hints(self, scope: TaskScope) -> RecoveredState:
        """Play with the first hints whose operations the log still has. Raise ``PrunedLog`` if the log lacks
        operations of all hints."""
        while True:
            await self._pool.run(self._files.prepare)
            try:
                return await self._play(scope)
            except PrunedLog as error:
                if not self._older_hints:
                    raise
                log.warning("%(error)s; trying older hints", {"error": error})
            self._close_reader()
            await self._writer.give_up()  # The next attempt wipes the directory.
            self.hints = self._older_hints.pop(0)
            self._playback = Playback(self.hints)

    async def _play(self, scope: TaskScope) -> RecoveredState:
        """Play with the present hints until a `hand_off` or `finish` is done. For the errors see `play`."""
        playback = self._playback
        await reach("recovery.playing", playback.log, self._clock)
        heads = await self._check_heads()
        self._read_through = heads[playback.log]
        while True:
            if (next_place := playback.wanted()) is not None:
                self._close_reader()
                playback.seek(*next_place)
                self._read_through = heads[next_place[0]]
            at_head = self._is_at_head
            if at_head and await self._ends_at_head():
                break
            if self._requested.is_set():
                self._cut_offset = None  # The hand-off needs no stop at a cut for a view.
            elif self._views and self.tailing.is_set():
                await self._writer.settle(scope)
                await self._take_views()
            if at_head:
                await self._writer.begin(scope)
            await self._read_some(scope)
            if playback.handoff is Handoff.APPLIED:
                break
        await self._writer.settle(scope)
        await reach("recovery.handed_off", playback.log, self._clock)
        await self._pool.run(self._files.make_live, playback.fsm)
        await reach("recovery.live", playback.log, self._clock)
        return RecoveredState(
            self.hints.log, playback.fsm, self.directory, self._author, playback.offset
        )

    @property
    def _is_at_head(self) -> bool:
        return self._playback.read_offset >= self._read_through

    async def _ends_at_head(self) -> bool:
        """Serve requests that wait for the head. Return True if play-back ends here. A hand-off moves the
        head: the player must then read it."""
        playback = self._playback
        if playback.fsm.has_hints:
            raise playback.ended_too_early()
        if playback.handoff is Handoff.UNREAD:
            # Nothing is left to read, and the hand-off neither applied nor lost a race.
            raise self._torn()
        if not self.tailing.is_set():
            self.state = PlayerState.TAILING
            self.tailing.set()
        if not self._requested.is_set() or await self._must_catch_up():
            return False
        if self._finish_requested:
            return True
        await self._append_handoff()
        return False

    async def _take_views(self) -> None:
        """Serve the requests for views, or set the offset up to which to read first."""
        playback = self._playback
        if self._cut_offset is None:
            self._cut_offset = await self._write_head(playback.log)
            self._read_through = max(self._read_through, self._cut_offset)
        if playback.read_offset < self._cut_offset:
            return
        self._cut_offset = None
        views, self._views = self._views, []
        for view in views:
            try:
                if playback.incomplete:
                    raise self._torn()
                result = await self._pool.run(self._files.view, playback.fsm, view.call)
            except asyncio.CancelledError:
                self._views = views  # For `_end_views`.
                raise
            except BaseException as error:  # noqa: BLE001 - the caller of `view` raises it
                view.fail(error)
            else:
                view.succeed(result)

    def _end_views(self) -> None:
        views, self._views = self._views, []
        for view in views:
            view.fail(Closed("play-back has ended", log=self.hints.log))

    async def _must_catch_up(self) -> bool:
        """Return True if the player must read more before it ends or takes the log over. Raise ``Corrupt`` if
        the log ends within an operation."""
        playback = self._playback
        if self._needs_no_head:
            return False
        head = await self._write_head(playback.log)
        if playback.incomplete and playback.read_offset == head:
            raise self._torn()
        if playback.read_offset < head and self._catch_ups < CATCH_UPS_MAX:
            self._catch_ups += 1
            self._read_through = head
            return True
        if playback.incomplete and self._finish_requested:
            # The bytes read so far end within an operation. The log has the rest.
            self._read_through = max(head, playback.read_offset + 1)
            return True
        return False

    @property
    def _needs_no_head(self) -> bool:
        """True if the log can be taken over without asking a broker for its head.

        This holds for a standby whose reader waits for bytes, and once the new author's fence is set. If
        the log has grown, the hand-off loses its race and is appended again.
        """
        if self._author is None or self._playback.incomplete:
            return False
        waits = self._pending is not None and not self._pending.done()
        return self._fenced or (self._tailed_at_request and waits)

    def _torn(self) -> Corrupt:
        return Corrupt(
            "the recovery log ends within an operation and cannot be continued",
            log=self._playback.log,
            offset=self._playback.offset,
            hint="A program that is not a recorder appended to this journal. Recover from a copy of the"
            " log up to that offset, or from older hints into another log.",
        )

    async def _check_heads(self) -> dict[str, int]:
        """Return the write head of every log to read. Raise ``Corrupt`` if hints reach beyond a head."""
        heads = {name: await self._write_head(name) for name in sorted(self._playback.logs)}
        self._playback.require_heads(heads)
        return heads

    async def _write_head(self, name: str) -> int:
        # A player that only recovers belongs to a command, which reports a refusal at once.
        return await write_head(self._client, name, is_owner=not self._finish_requested)

    async def _append_handoff(self) -> None:
        """Append the hand-off. The player must then read it."""
        playback = self._playback
        author = self._author
        assert author is not None
        if playback.handoff is Handoff.LOST:
            log.info(
                "hand-off of %(journal)s lost a race; injecting it again",
                {"journal": playback.log},
            )

        async def permit() -> None:
            if self._permit is not None:
                await self._permit()
            await reach("recovery.fencing", playback.log, self._clock)

        playback.expect_handoff(author)
        result = await append_repeatable(
            self._client,
            AppendParams(journal=playback.log, union_registers=fence(author)),
            no_op(playback.fsm, author),
            permit,
            is_owner=True,
        )
        self._fenced = True
        self._read_through = result.commit.end

    async def _read(self, reader: RetryReader) -> bytes | OffsetJump:
        """Return the next bytes. Wait while the log is suspended.

        Return an `OffsetJump` over deleted bytes, and do not raise it: an error would end the whole scope.
        """
        while True:
            try:
                return await reader.read(READ_BYTES)
            except OffsetJump as jump:
                return jump
            except NotAllowed as error:
                if status_of(error) != Status.SUSPENDED.name:
                    raise
            # The log is suspended and has no fragments. The next append resumes it.
            head = await self._write_head(self._playback.log)
            if head > self._playback.read_offset:
                return OffsetJump(self._playback.log, self._playback.read_offset, head)
            await self._clock.sleep(SUSPENDED_POLL_S)

    async def _read_some(self, scope: TaskScope) -> None:
        """Read and feed one chunk. At the head, return without a chunk when a request arrives, unless a
        hand-off remains to be read. Raise ``Unavailable`` if no bytes arrive before the head."""
        if self._beyond_cut:
            extra, self._beyond_cut = self._beyond_cut, b""
            await self._writer.add(scope, self._playback.feed(self._up_to_cut(extra)), len(extra))
            return
        if self._pending is None:
            if self._reader is None:
                self._reader = RetryReader(
                    self._client,
                    ReadParams(
                        journal=self._playback.log,
                        offset=self._playback.read_offset,
                        block=True,
                    ),
                    clock=self._clock,
                )
            self._pending = scope.spawn(self._read(self._reader), name="read")
        waits: set[asyncio.Task[object]] = {self._pending}
        request: asyncio.Task[object] | None = None
        at_head = self._is_at_head
        if at_head and self._playback.handoff is not Handoff.UNREAD:
            request = scope.spawn(self._woken.wait(), name="request")
            waits.add(request)
        try:
            done, _ = await asyncio.wait(
                waits,
                timeout=None if at_head else self._stall_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if request is not None:
                request.cancel()
                self._woken.clear()
        if not done:
            raise Unavailable(
                "play-back stalled: the log holds more bytes, but none arrive",
                log=self._playback.log,
                offset=self._playback.read_offset,
                write_head=self._read_through,
                seconds=self._stall_timeout_s,
                hint="Check the brokers of this journal and its fragment store.",
            )
        if self._pending in done:
            assert self._reader is not None
            await self._feed(scope, self._reader, self._pending)

    async def _feed(
        self, scope: TaskScope, reader: RetryReader, task: asyncio.Task[bytes | OffsetJump]
    ) -> None:
        """Feed the result of ``task``, a finished read, and begin the next read."""
        self._pending = None
        data = task.result()
        if isinstance(data, OffsetJump):
            log.warning(
                "recovery log %(journal)s jumps to offset %(offset)d",
                {"journal": self._playback.log, "offset": data.offset},
            )
            self._playback.jump(data.offset)
            self._close_reader()
            return
        if not data:
            self._close_reader()
            return
        self._bytes_read += len(data)
        RECOVERED_BYTES.inc(len(data))
        actions = self._playback.feed(self._up_to_cut(data))
        if self._playback.wanted() is None and self._playback.handoff is not Handoff.APPLIED:
            # Read the next chunk while files are written.
            self._pending = scope.spawn(self._read(reader), name="read")
        await self._writer.add(scope, actions, len(data))

    def _up_to_cut(self, data: bytes) -> bytes:
        """Return the bytes up to the cut, and keep the later bytes for the time after the views."""
        if self._cut_offset is None:
            return data
        count = max(0, self._cut_offset - self._playback.read_offset)
        self._beyond_cut = data[count:]
        return data[:count]

    def _close_reader(self) -> None:
        """Close the reader, and drop the bytes that were read ahead."""
        self._beyond_cut = b""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None


__all__ = ["PlayProgress", "Player", "PlayerState", "RecoveredState"]
