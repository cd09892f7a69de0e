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
    application. Such a thread is named in the log and left. Otherwise functions registered with `atexit` run,
    and open files are flushed. Nothing else is torn down: for gRPC, that would take more than a second.

    SIGTERM and SIGINT are ignored meanwhile. Otherwise a second signal could kill a process that has ended
    well. Call this from the main thread, and only in a process that ends.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if left := threads_left(_THREADS_S):
        named = ", ".join(one.name for one in left[:_NAMED_MAX])
        more = f" and {len(left) - _NAMED_MAX} more" if len(left) > _NAMED_MAX else ""
        log.error(
            "some threads do not end; the process exits without waiting for %(threads)s",
            {"threads": f"{named}{more}"},
        )
        logging.shutdown()
    else:
        # The interpreter calls this first when it ends. The module has no public name for it.
        atexit._run_exitfuncs()
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Write the buffers of this process's files. An application may have left a file open."""
    gc.unfreeze()  # `get_objects` leaves out frozen objects.
    files = (one for one in gc.get_objects() if type(one) in _BUFFERED)
    # Texts first: their bytes are buffered once more, below them.
    for file in sorted(files, key=lambda one: not isinstance(one, io.TextIOWrapper)):
        # The reader of a pipe may be gone, and the file may be closed or read-only.
        with contextlib.suppress(OSError, ValueError):
            file.flush()


def threads_left(timeout_s: float) -> list[threading.Thread]:
    """Return the threads that still run after ``timeout_s``, and for which the interpreter's exit would wait.

    Idle threads of closed pools end meanwhile.
    """
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s
    left: list[threading.Thread] = []
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.daemon:
            continue
        thread.join(max(0.0, deadline - clock.monotonic()))
        if thread.is_alive():
            left.append(thread)
    return left
