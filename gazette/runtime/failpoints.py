"""Points in the code at which a test can make the process die, stop, fail or wait. Off unless armed.

A point is a call, ``hit("commit.finalized", shard_id)``, which costs one look at an empty tuple. The text of
``GAZETTE_FAILPOINTS`` arms points when the process starts:

    commit.finalized=kill@3                              die at the third hit
    append.applied(recovery/*)=error@2;ack.appended=kill

``POINT(GLOB)=ACTION@WHEN``, separated by semicolons. ``GLOB`` (default: all) is matched against the
detail of a hit, a shard's id or a journal's name. ``WHEN`` (default 1) counts matching hits, or is
``*`` for each of them. Actions:

- ``kill``: SIGKILL to this process. No handler runs, nothing is flushed.
- ``stop``: SIGSTOP to this process. All threads stand still until a SIGCONT.
- ``error``: raise ``Unavailable``.
- ``delay:S``: wait S seconds: the thread for ``hit``, the task for ``reach``.
- ``mark``: append a line to the file that ``GAZETTE_FAILPOINT_MARKS`` names, for timelines across
  processes. The line has nanoseconds of the machine's monotonic clock, point and detail.

Not for production.
"""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from gazette.errors import Invalid, Unavailable
from gazette.runtime.clock import Clock, SystemClock

ENV: Final = "GAZETTE_FAILPOINTS"
MARKS_ENV: Final = "GAZETTE_FAILPOINT_MARKS"

POINTS: Final[Mapping[str, str]] = {
    "append.begin": "before an append's RPC begins; of a journal",
    "append.sent": "its content was sent, and its answer was not received; of a journal",
    "append.applied": "the broker has applied an append, and not answered yet; of a journal",
    "source.read": "bytes of a source were read, and are about to be handed to its shard; of a journal",
    "transaction.begun": "before the first message of a transaction; of a shard",
    "transaction.consumed": "some messages of a transaction were consumed; of a shard",
    "timers.fired": "some timers of a transaction have fired; of a shard",
    "commit.finalized": "the application finalized a transaction, its publishes are enqueued; of a shard",
    "commit.recording": "the store has committed locally, nothing is enqueued for the log; of a log",
    "commit.started": "Store.start_commit returned; of a shard",
    "commit.enqueued": "acknowledgements are enqueued behind the commit; of a shard",
    "sql.committing": "before the COMMIT of a SQL database; of a shard's fully qualified name",
    "sql.committed": "after that COMMIT, not reported yet; of a shard's fully qualified name",
    "ack.appended": "an acknowledgement is in its journal; of a journal",
    "transaction.acknowledged": "all acknowledgements of a transaction are in place; of a shard",
    "recovery.playing": "play-back has begun; of a log",
    "recovery.fencing": "the shard is ours, its log is about to be fenced; of a log",
    "recovery.handed_off": "play-back was handed over, its files are not in place; of a log",
    "recovery.live": "its files are in place; of a log",
    "promotion.fencing": "the shard is ours, its checkpoint is about to be restored; of a shard",
    "promotion.opened": "the store is open, and its checkpoint restored; of a shard",
    "promotion.hinted": "the recovered hints are stored; of a shard",
    "backfill.built": "a state is built, nothing of it is staged; of a shard",
    "backfill.uploading": "a state's bytes are in the staging area, and not under its name; of that name",
    "backfill.staged": "a state is staged, not reported yet; of a shard",
    "backfill.fenced": "a log is fenced, what its former state owes is not appended; of a shard",
    "backfill.acknowledging": "before each acknowledgement that a former state owes; of a shard",
    "backfill.acknowledged": "all of them are in place, nothing of the new state is; of a shard",
    "backfill.appending": "before each piece of a state is appended to its log; of a shard",
    "backfill.publishing": "all states are appended, none is published; of a shard",
    "backfill.published": "hints are stored, not reported yet; of a shard",
    "sink.published": "a task of a sink has published, not reported yet; of its producer",
    "sink.deciding": "tasks of a sink have ended, what commits is not recorded; of the commit",
    "sink.decided": "that is recorded, and nothing of it appended; of the commit",
    "sink.acknowledged": "an acknowledgement of a sink is in its journal; of a journal",
    "sink.committed": "all of them are, and Spark does not know yet; of the commit",
    "publish.deciding": "messages of a client are appended, nothing commits them; of its producer",
    "publish.decided": "that is recorded if it can be, and nothing of it appended; of its producer",
    "publish.acknowledged": "an acknowledgement of a client is in its journal; of a journal",
    "hints.storing": "before recorded hints are stored; of a shard",
}
"""All points, with the meaning of their details."""

_ENTRY: Final = re.compile(
    r"(?P<point>[a-z_.]+)(?:\((?P<glob>[^()]*)\))?=(?P<action>[a-z]+)(?::(?P<seconds>[0-9.]+))?"
    r"(?:@(?P<when>[0-9]+|\*))?"
)


class Action(enum.Enum):
    KILL = "kill"
    STOP = "stop"
    ERROR = "error"
    DELAY = "delay"
    MARK = "mark"


@dataclass(slots=True)
class _Armed:
    point: str
    glob: str
    action: Action
    seconds: float
    when: int | None
    """The number of the matching hit at which to act; None: at each hit."""
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fires(self, point: str, detail: str) -> bool:
        """Count a hit that matches. Return True if the action is due at this hit."""
        if point != self.point or not fnmatch.fnmatchcase(detail, self.glob):
            return False
        with self.lock:
            self.seen += 1
            return self.when is None or self.seen == self.when

    def perform(self, point: str, detail: str) -> float:
        """Perform the armed action, if it fires. Return the seconds to wait. ERROR raises ``Unavailable``."""
        if not self.fires(point, detail):
            return 0.0
        match self.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.ERROR:
                raise Unavailable("a failpoint", point=point, detail=detail)
            case Action.DELAY:
                return self.seconds
            case Action.MARK:
                _marks.write(point, detail)
        return 0.0


Hook: TypeAlias = Callable[[str, str], float]
"""Called with a point and its detail at each hit; returns the seconds to wait."""


@dataclass(frozen=True, slots=True)
class _Hooked:
    perform: Hook


armed_points: tuple[_Armed | _Hooked, ...] = ()
"""The armed points; usually none. Frequent code calls ``hit`` and ``reach`` only if there are some."""


def parse(text: str) -> tuple[_Armed, ...]:
    """Return the points of a text. Raise ``Invalid`` for an unknown point or action, or for another form."""
    entries = [entry_text.strip() for entry_text in text.split(";")]
    return tuple(_parse_one(entry) for entry in entries if entry)


def _parse_one(entry: str) -> _Armed:
    fields = _ENTRY.fullmatch(entry)
    if fields is None:
        raise Invalid(
            f"invalid failpoint ({entry!r})",
            path=ENV,
            hint="Write POINT(GLOB)=ACTION[:SECONDS][@WHEN].",
        )
    point, action = fields["point"], fields["action"]
    if point not in POINTS:
        raise Invalid(
            f"unknown failpoint ({point})", path=ENV, hint=f"Use one of {', '.join(POINTS)}."
        )
    if action not in {known_action.value for known_action in Action}:
        raise Invalid(
            f"unknown action ({action})", path=ENV, hint="Use kill, stop, error, delay or mark."
        )
    if (fields["seconds"] is not None) != (action == Action.DELAY.value):
        raise Invalid(f"only delay takes seconds, and it needs them ({entry!r})", path=ENV)
    when = None if fields["when"] == "*" else int(fields["when"] or 1)
    if when == 0:
        raise Invalid(f"WHEN is 0, and the first hit of a point is 1 ({entry!r})", path=ENV)
    try:
        seconds = float(fields["seconds"] or 0.0)
    except ValueError as error:
        raise Invalid(f"seconds are not a number ({entry!r})", path=ENV) from error
    glob = "*" if fields["glob"] is None else fields["glob"]
    return _Armed(point, glob, Action(action), seconds, when)


def arm(text: str) -> None:
    """Arm the points of ``text``, and disarm all others. After ``Invalid`` nothing has changed."""
    global armed_points
    armed_points = parse(text)


@contextlib.contextmanager
def armed(text: str) -> Iterator[None]:
    """Arm points within a block. One block at a time: points belong to the process."""
    global armed_points
    former_points = armed_points
    arm(text)
    try:
        yield
    finally:
        armed_points = former_points


@contextlib.contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Call ``hook`` at each point within a block, for simulations."""
    global armed_points
    former_points = armed_points
    armed_points = (*former_points, _Hooked(hook))
    try:
        yield
    finally:
        armed_points = former_points


def hit(point: str, detail: str = "") -> None:
    """Pass a point, and perform the armed actions. Call it on a thread that may block."""
    if armed_points and (seconds := _perform(point, detail)):
        threading.Event().wait(seconds)


async def reach(point: str, detail: str, clock: Clock) -> None:
    """Pass a point, and perform the armed actions, on the event loop. Cancellation: ends a delay."""
    if armed_points and (seconds := _perform(point, detail)):
        await clock.sleep(seconds)


def _perform(point: str, detail: str) -> float:
    """Perform the actions that are armed for this point. Return the seconds to wait."""
    return sum(armed_point.perform(point, detail) for armed_point in armed_points)


class _Marks:
    """The file of marks. Its descriptor is opened for the first mark, and kept."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._file: int | None = None
        self._lock = threading.Lock()
        """Held to open the file: several threads may write the first mark."""

    def write(self, point: str, detail: str) -> None:
        """Write one line, in one call: processes may share the file. Raise ``Invalid`` for no file."""
        now_ns = int(self._clock.monotonic() * 1e9)
        with self._lock:
            if self._file is None:
                self._file = self._opened()
        # Blanks and line ends in names of journals and shards could be mistaken for separators.
        detail = "_".join(detail.split())
        os.write(self._file, f"{now_ns} {point} {detail}\n".encode("utf-8", "backslashreplace"))

    def _opened(self) -> int:
        path = os.environ.get(MARKS_ENV)
        if not path:
            raise Invalid("marks need a file", path=MARKS_ENV, hint="Set it to a path.")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except OSError as error:
            raise Invalid(
                f"the file of marks cannot be opened: {error.strerror}", path=MARKS_ENV, file=path
            ) from error


_marks: Final = _Marks()
arm(os.environ.get(ENV, ""))
