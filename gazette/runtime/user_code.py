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

    If the application is installed as a package, return its outermost frame. Return "" without a frame.
    """
    found = user_frames(frames)[-1:] or [one for one in frames if _is_foreign(one.filename)][:1]
    return "".join(f"{shown_path(one.filename)}:{one.lineno} in {one.name}" for one in found)


def place_of_error(error: BaseException) -> str:
    """Return the place in the user's code at which an exception was raised; see `place_in`."""
    return place_in(extract_tb(error.__traceback__))


def place_of_thread(ident: int) -> str:
    """Return the place in the user's code at which a thread is now; see `place_in`."""
    frame = sys._current_frames().get(ident)
    lines = [] if frame is None else list(walk_stack(frame))
    return place_in(
        [
            FrameSummary(one.f_code.co_filename, at, one.f_code.co_name)
            for one, at in reversed(lines)
        ]
    )


def without_callers(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames, as far as these are of this package.

    If all frames are of this package, return the whole traceback.
    """
    one = tb
    while one is not None and _is_own(one.tb_frame.f_code.co_filename):
        one = one.tb_next
    return one or tb


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
