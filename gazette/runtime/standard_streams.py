"""The standard streams of a command, which may be closed, full, or a pipe without a reader."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_EXIT_FAILED: Final = 1
_EXIT_PIPE: Final = 128 + signal.SIGPIPE
_OF_STREAMS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})


def with_streams(run: Callable[[], int]) -> int:
    """Call ``run``, and write the buffers of the streams. Return the exit code of ``run``, or of a failed
    write. Replace a closed stream by ``/dev/null``: else the next file to be opened would get its number.
    """
    open_closed_streams()
    try:
        code = run()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return code
    except BrokenPipeError:
        return _EXIT_PIPE
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_STREAMS:
            raise  # An error of another file.
        _say(f"cannot write the output: {error.strerror}")
        return _EXIT_FAILED


def open_closed_streams() -> None:
    """Open ``/dev/null`` in place of each standard stream that is closed."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process


def _say(text: str) -> None:
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        return  # No stream is left for the text.
