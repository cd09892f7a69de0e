"""The end of a process, even if some of its threads hang."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import signal
import threading
from typing import Final, NoReturn

from gazette.runtime.clock import SystemClock

log = logging.getLogger(__name__)

_THREADS_S: Final = 2.0
_NAMED_MAX: Final = 8
_BUFFERED: Final = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom})


def end_process(code: int) -> NoReturn:
    """End the process with exit code ``code``, once its threads have ended or 2 s have passed.

    The interpreter would wait for ever for a thread that hangs, as in a blob store or in a query of an
    application. The log names such a thread. Functions registered with `atexit` run only if no thread hangs.
    Open files are flushed. Nothing else is torn down: for gRPC, that would take more than a second.

    SIGTERM and SIGINT are ignored meanwhile. Otherwise a second signal could kill a process that has ended
    well. Call this from the main thread, and only in a process that ends.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if alive := threads_left(_THREADS_S):
        names = ", ".join(thread.name for thread in alive[:_NAMED_MAX])
        more = f" and {len(alive) - _NAMED_MAX} more" if len(alive) > _NAMED_MAX else ""
        log.error(
            "some threads do not end; the process exits without waiting for %(threads)s",
            {"threads": f"{names}{more}"},
        )
        logging.shutdown()
    else:
        # The interpreter calls this function first when it ends. `atexit` has no public name for it.
        atexit._run_exitfuncs()
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Write the buffers of this process's files. An application may have left a file open."""
    gc.unfreeze()  # `get_objects` leaves out frozen objects.
    files = (candidate for candidate in gc.get_objects() if type(candidate) in _BUFFERED)
    # Flush text files first: each writes its text into the buffer of a binary file, which is flushed later.
    for file in sorted(files, key=lambda candidate: not isinstance(candidate, io.TextIOWrapper)):
        # The reader of a pipe may be gone, and the file may be closed or read-only.
        with contextlib.suppress(OSError, ValueError):
            file.flush()


def threads_left(timeout_s: float) -> list[threading.Thread]:
    """Return the threads, without daemons, that still run after ``timeout_s``: the exit would wait for them.

    Idle threads of closed pools end meanwhile.
    """
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s
    alive: list[threading.Thread] = []
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.daemon:
            continue
        thread.join(max(0.0, deadline - clock.monotonic()))
        if thread.is_alive():
            alive.append(thread)
    return alive
