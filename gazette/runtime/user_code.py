"""Frames of the user's own code, among those of this package, of Python and of installed libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import FrameSummary, extract_tb, walk_stack
from types import TracebackType
from typing import Final

_PACKAGE: Final = Path(__file__).resolve().parent.parent
_PYTHON: Final = Path(os.__file__).resolve().parent
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


def is_user_file(filename: str) -> bool:
    """Return True for a file that is neither this package's, nor Python's, nor installed."""
    return _is_foreign(filename) and not _INSTALLED & set(Path(filename).resolve().parts)


def shown_path(filename: str) -> str:
    """Return a path as a user reads it: relative to the working directory if the file is below it."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def user_frames(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    """Return the frames in the user's files, in the order of ``frames``."""
    return [frame for frame in frames if is_user_file(frame.filename)]


def place_in(frames: Sequence[FrameSummary]) -> str:
    """Return the user's innermost frame, as ``app.py:17 in parse``. ``frames``: the outermost first.

    Without such a frame, return the outermost one of an installed package, or else "".
    """
    # At most one frame. Without user frames, the foreign frames are those of installed packages.
    one_frame = user_frames(frames)[-1:] or [f for f in frames if _is_foreign(f.filename)][:1]
    return "".join(f"{shown_path(f.filename)}:{f.lineno} in {f.name}" for f in one_frame)


def place_of_error(error: BaseException) -> str:
    """Return the place in the user's code at which an exception was raised; see `place_in`."""
    return place_in(extract_tb(error.__traceback__))


def place_of_thread(ident: int) -> str:
    """Return the place in the user's code at which a thread is now; see `place_in`."""
    frame = sys._current_frames().get(ident)
    stack = [] if frame is None else list(walk_stack(frame))
    return place_in(
        [
            FrameSummary(caller.f_code.co_filename, lineno, caller.f_code.co_name)
            for caller, lineno in reversed(stack)
        ]
    )


def without_callers(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames, as far as they are of this package. If all frames are of
    this package, return the whole traceback.
    """
    entry = tb
    while entry is not None and _is_own(entry.tb_frame.f_code.co_filename):
        entry = entry.tb_next
    return entry or tb


def _is_own(filename: str) -> bool:
    return Path(filename).resolve().is_relative_to(_PACKAGE)


def _is_foreign(filename: str) -> bool:
    """Return True for a file that is neither this package's nor Python's. Libraries are foreign."""
    # Extensions such as apsw add frames of their C files.
    if filename.startswith("<") or filename.endswith(".c") or _is_own(filename):
        return False
    path = Path(filename).resolve()
    # Installed packages may be in the directory of Python's own modules.
    return bool(_INSTALLED & set(path.parts)) or not path.is_relative_to(_PYTHON)
