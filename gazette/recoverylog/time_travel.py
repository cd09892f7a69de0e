"""A shard's state as of a past commit, from its recovery log.

The log has every commit since it was last pruned. To restore a commit, play the log exactly to the commit's
end. An operation with `group_time` is the first one of an append. The original appends single operations, and
commits begin with a write: in its logs, each write may begin a commit.

Hints name the files that lived when they were taken, not files deleted before. So a commit can be restored
only by hints that are older. Of several hints, play the newest hints that are older than the moment. To keep
more history, keep more backups of hints (``hint_backups``).
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
from gazette.recoverylog.log.fsm import Outcome
from gazette.recoverylog.log.log_source import CopiedLogs, LogSource
from gazette.recoverylog.log.ops import RecordedOp, Write
from gazette.recoverylog.playback.playback import BeyondTheEnd, FileAction, Playback, PrunedLog
from gazette.recoverylog.playback.staged_files import StagedFiles
from gazette.recoverylog.private_files import make_private
from gazette.recoverylog.shard_state import ShardState

_STATE: Final = "state"
_PROBE: Final = "probe"


@dataclass(frozen=True, slots=True)
class Moment:
    """Selects the last commit that meets the one field that is set. Without a field: the last commit.

    With ``time``: recorded then or before. With ``offset``: ends at this offset of the log or before. With
    ``read_through``: has read none of these sources beyond its offset. Other sources do not matter. If a
    source was deleted and created again, the offset is one of the later journal.
    """

    time: datetime | None = None
    offset: Offset | None = None
    read_through: Mapping[JournalName, Offset] | None = None

    def __post_init__(self) -> None:
        criteria = [self.time, self.offset, self.read_through]
        if sum(criterion is not None for criterion in criteria) > 1:
            raise Invalid("give only one of a time, an offset, and offsets of sources")
        if self.time is not None and self.time.tzinfo is None:
            raise Invalid(
                f"the time has no zone ({self.time})", hint="Add Z, or an offset such as +02:00."
            )
        if self.offset is not None and self.offset < 0:
            raise Invalid(f"invalid offset ({self.offset}; expected >= 0)")
        if self.read_through is not None and not self.read_through:
            raise Invalid("a checkpoint must have the offset of at least one source")

    @classmethod
    def parse(cls, text: str) -> Moment:
        """Parse a time, an offset of the log, or a checkpoint. Raise ``Invalid`` for any other text.

        Examples: ``2026-01-31T12:00:00Z``, ``123456``, ``a/source=123,another/source=456``.
        """
        if re.fullmatch(r"[0-9]+", text):
            return cls(offset=int(text))
        if "=" in text:
            sources: dict[str, int] = {}
            for part in text.split(","):
                journal, _, offset = part.rpartition("=")
                if not journal or not re.fullmatch(r"[0-9]+", offset):
                    raise Invalid(f"invalid offset of a source ({part!r}; expected journal=123)")
                sources[journal] = int(offset)
            return cls(read_through=sources)
        try:
            return cls(time=datetime.fromisoformat(text))
        except ValueError:
            raise Invalid(
                f"not a time, an offset or a checkpoint ({text!r})",
                hint="Give 2026-01-31T12:00:00Z, 123456, or a/source=123,another/source=456.",
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
    """A place of the log between two commits. ``time`` is the time of the commit before the place, in Unix
    milliseconds; 0 if the log has no times."""

    offset: Offset
    time: int


@dataclass(slots=True)
class _Scan:
    """Finds the positions of a log that can be played with some hints, by observing every operation."""

    positions: list[Position] = field(default_factory=list)
    _playback: Playback | None = None
    _time: int = 0
    """Time of the last append with a time, in Unix milliseconds; 0 before such an append."""
    _author: int = 0
    _has_times: bool = False
    """True if the present author's appends have times."""
    _within_hints: bool = False
    """True while hinted operations remain to be read."""

    def run(self, source: LogSource, hints: FSMHints) -> None:
        playback = Playback(hints, observer=self._observe)
        self._playback = playback
        self._within_hints = playback.fsm.has_hints
        _play(source, playback, end=None, perform=lambda _: None)
        self.positions.append(Position(playback.offset, self._time))

    def _observe(self, op: RecordedOp, outcome: Outcome) -> None:
        """Add the position before an operation that begins an append."""
        assert self._playback is not None
        if not outcome.advances:
            return  # The operation's author did not own the log.
        if op.author != self._author:
            self._author, self._has_times = op.author, False
            is_first = True
        else:
            # Without group times, as in the original's logs, each write may begin an append.
            is_first = bool(op.group_time) or (not self._has_times and isinstance(op.action, Write))
        if is_first and not self._within_hints:
            self.positions.append(Position(op.first_offset, self._time))
        if op.group_time:
            self._time, self._has_times = op.group_time, True
        # A position counts only after the hinted range: within it, deleted files are missing.
        self._within_hints = self._playback.fsm.has_hints


def open_at(
    source: LogSource,
    hints: Sequence[FSMHints],
    directory: Path,
    at: Moment = NOW,
    *,
    prepare_connection: Callable[[apsw.Connection], None] | None = None,
) -> ShardState:
    """Open a shard's state, read-only, as it was at some moment. Blocks.

    ``hints`` are all hints of the shard, the newest first. If none of them fit, the log is played from its
    first byte, if it still has that byte. For ``prepare_connection``, see `ShardState`. Logs are only read.

    ``directory`` must be missing or empty, and only this user may enter it. Afterwards it has the files;
    after an error it is removed. The call takes as long as the recovery of a shard, and about ten times as
    long if ``at`` is a checkpoint.

    Blob stores do not know where logs end: logs are read as far as stores have them, and hints of
    later bytes are skipped.

    Raise ``NotFound`` if no hints reach back to the moment: its message has the oldest moment. Raise
    ``PrunedLog`` if operations are gone, ``Corrupt`` for a damaged log, ``Invalid`` if there are no hints, if
    ``directory`` is not empty, or for a time if the log has no times. Also see `LogSource`.
    """
    if not hints:
        raise Invalid("at least one set of hints is needed, even if it has only the log's name")
    if directory.exists() and any(directory.iterdir()):
        raise Invalid(f"{directory} is not empty", hint="Choose another directory, or empty it.")
    make_private(directory)
    copied = CopiedLogs(source, directory)
    try:
        chosen, position = _choose(copied, hints, directory, at)
        return _open_state(
            copied, chosen, position, directory / _STATE, directory, prepare_connection
        )
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        copied.close()


def _choose(
    source: LogSource, hints: Sequence[FSMHints], directory: Path, at: Moment
) -> tuple[FSMHints, Position]:
    """Return the newest hints that reach back to a moment, and the position to play to.

    Try hints without files last: they play the log from its first byte. For the errors see `open_at`.
    """
    candidates = [candidate for candidate in hints if candidate.live_nodes]
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
        f"the state as of {at} cannot be rebuilt: the log and the hints begin at a later moment",
        log=hints[0].log,
        earliest_offset=earliest.offset,
        earliest_time=_datetime(earliest.time) or "unknown",
        hint="Choose a later moment. To keep more history, raise hint_backups, and prune the log later.",
    )


def _last_not_after(
    positions: Sequence[Position], at: Moment, checkpoint_of: Callable[[Position], Checkpoint]
) -> Position | None:
    """Return the last position that the moment allows; None if it allows no position. Raise ``Invalid`` for a
    time in a log without times."""
    if at.time is not None:
        limit_ms = at.time.timestamp() * 1000
        if not any(position.time for position in positions):
            raise Invalid(
                "this log does not hold the times of its operations",
                hint="The Go original, or a recorder without a clock, wrote it. Give an"
                " offset of the log, or a checkpoint.",
            )
        # Times may go back where the owner changed, since clocks differ. Stop at the first later time.
        return _last_allowed(positions, lambda position: position.time <= limit_ms)
    if at.offset is not None:
        offset = at.offset
        return _last_allowed(positions, lambda position: position.offset <= offset)
    if at.read_through is None:
        return positions[-1]
    limits = at.read_through
    latest_lives = checkpoint_of(positions[-1]).lives

    def allowed(position: Position) -> bool:
        checkpoint = checkpoint_of(position)
        sources, lives = checkpoint.sources, checkpoint.lives
        return all(
            # A source that was deleted and created again begins at 0: its former life is before any limit.
            journal not in sources
            or lives.get(journal, latest_lives.get(journal)) != latest_lives.get(journal)
            or sources[journal].read_through <= limit
            for journal, limit in limits.items()
        )

    # Within the life of a source, its offsets do not go back. So `allowed` changes once: bisect.
    low, high = 0, len(positions)
    while low < high:
        middle = (low + high) // 2
        if allowed(positions[middle]):
            low = middle + 1
        else:
            high = middle
    return positions[low - 1] if low else None


def _last_allowed(
    positions: Sequence[Position], allowed: Callable[[Position], bool]
) -> Position | None:
    """Return the last position before one that is not allowed; None if the first one is not allowed."""
    last_allowed: Position | None = None
    for position in positions:
        if not allowed(position):
            break
        last_allowed = position
    return last_allowed


def _checkpoint_of(
    source: LogSource, hints: FSMHints, position: Position, directory: Path
) -> Checkpoint:
    with _open_state(source, hints, position, directory, None) as state:
        return state.checkpoint


def _open_state(
    source: LogSource,
    hints: FSMHints,
    position: Position,
    staged: Path,
    target: Path | None,
    prepare_connection: Callable[[apsw.Connection], None] | None = None,
) -> ShardState:
    """Play a log into ``staged`` up to a position, and move the files to ``target``. Without a target,
    ``close`` of the state removes the files."""
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
    """Feed a play-back up to ``end`` of its own log; None: up to the log's end. ``perform`` gets the actions
    on files. Raise ``Corrupt`` if the logs end before hinted operations. Other errors: see `open_at`."""
    own_log = playback.log
    heads = {log: source.bounds(log)[1] for log in sorted(playback.logs)}
    playback.require_heads(heads)
    while True:
        if (next_place := playback.wanted()) is not None:
            playback.seek(*next_place)
        # `end` is after the hinted range: until that range is read, `end` only bounds how much is read.
        limit = heads[playback.log]
        if end is not None and playback.log == own_log and not playback.fsm.has_hints:
            limit = end
        if playback.read_offset >= limit:
            if playback.fsm.has_hints:
                raise playback.ended_too_early()
            return
        if end is not None and playback.log == own_log:
            limit = min(limit, end)
        log = playback.log
        for offset, data in source.read(log, playback.read_offset, limit):
            if offset > playback.read_offset:
                playback.jump(offset)
            perform(playback.feed(data))
            if playback.wanted() is not None:
                break
        else:
            if playback.read_offset < limit:  # The bytes before ``limit`` were deleted.
                playback.jump(limit)


def _datetime(milliseconds: int) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None
