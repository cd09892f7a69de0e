"""A shard's state as of some commit of the past, from its recovery log.

The log has every commit since it was pruned last, so any of them can be had back: play the log up to
there, and no further. Where that may be is told by the first operation of every append (`group_time`);
in logs of the original, which appends single operations, a write may begin anywhere.

What can be reached is bounded by hints: they name what was live when they were taken, and say nothing of
files that were gone by then. So of several hints those are played that are the newest, but older than
the moment. What was pruned is gone; keep more backups of hints (``hint_backups``) to keep more history.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import apsw

from gazette.errors import Corrupt, Invalid, NotFound
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import JournalName, Offset
from gazette.recoverylog.fsm import Outcome
from gazette.recoverylog.log_source import CopiedLogs, LogSource
from gazette.recoverylog.ops import RecordedOp, Write
from gazette.recoverylog.playback import BeyondTheEnd, FileAction, Playback, PrunedLog
from gazette.recoverylog.private_files import make_private
from gazette.recoverylog.shard_state import ShardState
from gazette.recoverylog.staged_files import StagedFiles

_STATE: Final = "state"
_PROBE: Final = "probe"


@dataclass(frozen=True, slots=True)
class Moment:
    """Of which commit the state is wanted: the last one that is not later. With nothing: the last.

    ``time``: that was recorded then or before. ``offset``: that ends in the log there or before.
    ``read_through``: that has read each of these sources that far or less; other sources do not matter.
    """

    time: datetime | None = None
    offset: Offset | None = None
    read_through: Mapping[JournalName, Offset] | None = None

    def __post_init__(self) -> None:
        given = [self.time, self.offset, self.read_through]
        if sum(one is not None for one in given) > 1:
            raise Invalid("a moment is one of a time, an offset, and offsets of sources")
        if self.time is not None and self.time.tzinfo is None:
            raise Invalid(f"a time needs a zone ({self.time})", hint="Add Z, or +02:00.")
        if self.offset is not None and self.offset < 0:
            raise Invalid(f"invalid offset ({self.offset}; expected >= 0)")
        if self.read_through is not None and not self.read_through:
            raise Invalid("a checkpoint needs the offset of a source")

    @classmethod
    def parse(cls, text: str) -> Moment:
        """Read ``2026-01-31T12:00:00Z``, ``123456`` (an offset of the log), or a checkpoint as
        ``a/source=123,another/source=456``. Raises ``Invalid``."""
        if re.fullmatch(r"[0-9]+", text):
            return cls(offset=int(text))
        if "=" in text:
            sources: dict[str, int] = {}
            for part in text.split(","):
                journal, _, offset = part.rpartition("=")
                if not journal or not re.fullmatch(r"[0-9]+", offset):
                    raise Invalid(f"not a source and its offset ({part!r}; expected journal=123)")
                sources[journal] = int(offset)
            return cls(read_through=sources)
        try:
            return cls(time=datetime.fromisoformat(text))
        except ValueError:
            raise Invalid(
                f"neither a time, nor an offset, nor a checkpoint ({text!r})",
                hint="Say 2026-01-31T12:00:00Z, 123456, or a/source=123,another/source=456.",
            ) from None

    def __str__(self) -> str:
        if self.time is not None:
            return self.time.isoformat()
        if self.offset is not None:
            return f"offset {self.offset}"
        if self.read_through is not None:
            return ",".join(f"{name}={offset}" for name, offset in self.read_through.items())
        return "now"


NOW: Final = Moment()


@dataclass(frozen=True, slots=True)
class Position:
    """A place of the log between two commits. ``time``: when the one before it was recorded, in Unix
    milliseconds; 0 if the log does not say."""

    offset: Offset
    time: int


@dataclass(slots=True)
class _Scan:
    """Finds the positions of a log that hints lead to. Told of every operation."""

    positions: list[Position] = field(default_factory=list)
    _playback: Playback | None = None
    _time: int = 0
    _author: int = 0
    _groups: bool = False
    _hinted: bool = False

    def run(self, source: LogSource, hints: FSMHints) -> None:
        playback = Playback(hints, observer=self._note)
        self._playback = playback
        self._hinted = playback.fsm.has_hints
        _play(source, playback, None, lambda _: None)
        self.positions.append(Position(playback.offset, self._time))

    def _note(self, op: RecordedOp, outcome: Outcome) -> None:
        assert self._playback is not None
        if not outcome.advances:
            return  # Of somebody who did not own the log.
        if op.author != self._author:
            self._author, self._groups = op.author, False
            begins = True
        else:
            begins = bool(op.group_time) or (not self._groups and isinstance(op.action, Write))
        if begins and not self._hinted:
            self.positions.append(Position(op.first_offset, self._time))
        if op.group_time:
            self._time, self._groups = op.group_time, True
        # The operation that ends the hinted range may itself have been the beginning of nothing.
        self._hinted = self._playback.fsm.has_hints


def open_at(
    source: LogSource,
    hints: Sequence[FSMHints],
    directory: Path,
    at: Moment = NOW,
    *,
    prepare_connection: Callable[[apsw.Connection], None] | None = None,
) -> ShardState:
    """Open a shard's state, read-only, as it was at some moment.

    ``prepare_connection``: as of `ShardState`.

    ``hints`` are all that the shard has, the newest first; with none whose files fit, the log is played
    from its first byte, if it still has that. Logs are only read. ``directory`` must be missing or empty;
    it holds the files afterwards, and nothing if this fails. Blocks, for as long as the recovery of a
    shard takes (for a checkpoint some ten times that). Only this user may enter the directory.

    A source that does not know where its logs end (a fragment store) is read as far as it has them; then
    hints that name more are passed over.

    Raises ``NotFound`` if no hints reach back to the moment (its message says how far they do),
    ``PrunedLog``, ``Corrupt``, and what ``source`` and `ShardState` do.
    """
    if not hints:
        raise Invalid("at least one set of hints is needed, if only of the log's name")
    if directory.exists() and any(directory.iterdir()):
        raise Invalid(f"{directory} is not empty", hint="Choose another, or empty it.")
    make_private(directory)
    copied = CopiedLogs(source, directory)
    try:
        chosen, position = _choose(copied, hints, directory, at)
        return _state(copied, chosen, position, directory / _STATE, directory, prepare_connection)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        copied.close()


def _choose(
    source: LogSource, hints: Sequence[FSMHints], directory: Path, at: Moment
) -> tuple[FSMHints, Position]:
    candidates = [one for one in hints if one.live_nodes]
    candidates.append(FSMHints(log=hints[0].log))
    earliest: Position | None = None
    unfit: Corrupt | None = None
    for candidate in dict.fromkeys(candidates):
        scan = _Scan()
        try:
            scan.run(source, candidate)
        except PrunedLog as error:
            unfit = unfit or error
            continue
        except BeyondTheEnd as error:
            if source.knows_heads:
                raise
            unfit = unfit or error
            continue
        position = _last_not_after(
            scan.positions,
            at,
            lambda position, hints=candidate: _checkpoint_of(  # type: ignore[misc]
                source, hints, position, directory / _PROBE
            ),
        )
        if position is not None:
            return candidate, position
        earliest = scan.positions[0]
    if earliest is None:
        assert unfit is not None
        raise unfit
    raise NotFound(
        f"the log no longer leads back to {at}: no hints are that old",
        log=hints[0].log,
        earliest_offset=earliest.offset,
        earliest_time=_datetime(earliest.time) or "unknown",
        hint="Keep more backups of hints (hint_backups) and prune later, to keep more history.",
    )


def _last_not_after(
    positions: Sequence[Position], at: Moment, checkpoint_of: Callable[[Position], Checkpoint]
) -> Position | None:
    """The last position that the moment allows; None: not even the first is."""
    if at.time is not None:
        wanted = at.time.timestamp() * 1000
        if not any(position.time for position in positions):
            raise Invalid(
                "this log does not say when its operations were recorded",
                hint="It was written by the Go original, or by a recorder without a clock. Give an"
                " offset of the log, or a checkpoint.",
            )
        # Clocks of owners differ: what counts is where a later time appears first.
        return _last(positions, lambda position: position.time <= wanted)
    if at.offset is not None:
        offset = at.offset
        return _last(positions, lambda position: position.offset <= offset)
    if at.read_through is None:
        return positions[-1]
    limits = at.read_through

    def allowed(position: Position) -> bool:
        sources = checkpoint_of(position).sources
        return all(
            journal not in sources or sources[journal].read_through <= limit
            for journal, limit in limits.items()
        )

    # Sources are only ever read forward: the answer changes once.
    low, high = 0, len(positions)
    while low < high:
        middle = (low + high) // 2
        if allowed(positions[middle]):
            low = middle + 1
        else:
            high = middle
    return positions[low - 1] if low else None


def _last(positions: Sequence[Position], allowed: Callable[[Position], bool]) -> Position | None:
    found: Position | None = None
    for position in positions:
        if not allowed(position):
            break
        found = position
    return found


def _checkpoint_of(
    source: LogSource, hints: FSMHints, position: Position, directory: Path
) -> Checkpoint:
    with _state(source, hints, position, directory, None) as state:
        return state.checkpoint


def _state(
    source: LogSource,
    hints: FSMHints,
    position: Position,
    staged: Path,
    target: Path | None,
    prepare_connection: Callable[[apsw.Connection], None] | None = None,
) -> ShardState:
    """Play up to a position into ``staged``, whose content then moves to ``target``. Without one, files
    go with the state."""
    playback = Playback(hints)
    files = StagedFiles(staged)
    try:
        files.prepare()
        _play(source, playback, position.offset, files.perform)
        files.make_live(playback.fsm)
    except BaseException:
        files.abandon()
        raise
    if target is not None:
        for path in list(staged.iterdir()):
            path.rename(target / path.name)
        staged.rmdir()
    return ShardState(
        target or staged,
        log=hints.log,
        offset=position.offset,
        time=_datetime(position.time),
        owns_directory=target is None,
        prepare_connection=prepare_connection,
    )


def _play(
    source: LogSource,
    playback: Playback,
    end: Offset | None,
    perform: Callable[[list[FileAction]], None],
) -> None:
    """Feed a play-back up to ``end`` of its own log, or to the write head."""
    own = playback.log
    heads = {log: source.bounds(log)[1] for log in sorted(playback.logs)}
    playback.require_heads(heads)
    while True:
        if (wanted := playback.wanted()) is not None:
            playback.seek(*wanted)
        limit = heads[playback.log]
        if end is not None and playback.log == own and not playback.fsm.has_hints:
            limit = end
        if playback.read_offset >= limit:
            if playback.fsm.has_hints:
                raise playback.missing()
            return
        if end is not None and playback.log == own:
            limit = min(limit, end)
        log = playback.log
        for at, data in source.read(log, playback.read_offset, limit):
            if at > playback.read_offset:
                playback.jump(at)
            perform(playback.feed(data))
            if playback.wanted() is not None:
                break
        else:
            if playback.read_offset < limit:
                playback.jump(limit)


def _datetime(milliseconds: int) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None
