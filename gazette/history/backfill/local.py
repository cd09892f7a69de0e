"""Runs the tasks of a backfill on this machine, without a JVM or any installation.

Each task runs in a process of its own, so that Python's lock does not keep all tasks on one core. At most
``jobs`` processes run at once. They end with the driver, however the driver ends.

Tasks, attempts and errors are sent through pipes as pickles. This is safe: only the driver and its child
processes have the ends of these pipes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from gazette.errors import Broken, Closed, GazetteError
from gazette.history.backfill.build import Attempt, OnRead, ShardTask, run_task
from gazette.history.backfill.definition import Backfill
from gazette.history.first_pass import fold_by_threads, summarise_run
from gazette.history.merge import FoldedSnapshot
from gazette.history.snapshot import RUN_BYTES, Run, Snapshot
from gazette.history.source import Access, OpenAccess
from gazette.history.summary import Summary


class LocalRunner:
    """Runner with ``jobs`` processes. For one job, or one task, it builds in this process."""

    def __init__(self, jobs: int = 0, *, run_bytes: int = RUN_BYTES) -> None:
        """Create a runner. ``jobs=0`` means one job for each core."""
        self.jobs = jobs or os.cpu_count() or 1
        self._run_bytes = run_bytes
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    @property
    def description(self) -> str:
        return f"{self.jobs} processes on this machine"

    def fold(
        self,
        access: Access,
        snapshot: Snapshot,
        on_read: OnRead,
        backfill: str | Backfill | None = None,
    ) -> FoldedSnapshot:
        """Make the first pass: find which messages have committed. Errors: see `fold_by_threads`."""

        def summarise(opened: OpenAccess, run: Run) -> Summary:
            self._check()
            summary = summarise_run(opened, run)
            on_read(run.length)
            return summary

        with access.open() as opened:
            return fold_by_threads(
                opened,
                snapshot,
                run_bytes=self._run_bytes,
                threads=self.jobs,
                summarise=summarise,
            )

    def build(self, tasks: Sequence[ShardTask], on_read: OnRead) -> list[Attempt]:
        """Build all tasks. Return attempts in order of tasks. Raise the first error, and end all tasks."""
        if self.jobs == 1 or len(tasks) == 1:
            return [self._here(task, on_read) for task in tasks]
        with concurrent.futures.ThreadPoolExecutor(min(self.jobs, len(tasks))) as pool:
            futures = [pool.submit(self._in_process, task, on_read) for task in tasks]
            try:
                # Raise as soon as any task fails, even if earlier tasks still run.
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                self.stop()
                raise
            return [future.result() for future in futures]

    def stop(self) -> None:
        """End running tasks: `fold` and `build` raise ``Closed``. Any thread."""
        with self._lock:
            self._stopped = True
            for child in self._children:
                child.kill()

    def _check(self) -> None:
        if self._stopped:
            raise Closed("the backfill was stopped")

    def _here(self, task: ShardTask, on_read: OnRead) -> Attempt:
        """Run a task in this process. After `stop`, the next read raises ``Closed``."""

        def reading(count: int) -> None:
            self._check()
            on_read(count)

        return run_task(task, reading)

    def _in_process(self, task: ShardTask, on_read: OnRead) -> Attempt:
        """Run a task in a child process. Raise the task's error, ``Closed`` after `stop`, or ``Broken`` if
        the process dies."""
        with self._child() as child:
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                _send(child.stdin, (sys.path, task))
            # Keep the pipe to the child open: when it closes, the child knows that the driver has died.
            while (message := _receive(child.stdout)) is not None:
                if isinstance(message, int):
                    on_read(message)
                elif isinstance(message, Attempt):
                    return message
                else:
                    raise message
            self._check()
            raise Broken(
                f"the process that built the state has died (exit code {child.wait()})",
                hint="Its output is above. It may have run out of memory: give --jobs 1.",
                shard=task.spec.id,
            )

    @contextlib.contextmanager
    def _child(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a child process for the block, and kill it afterwards. Raise ``Closed`` after `stop`."""
        with self._lock:
            self._check()
            child = subprocess.Popen(
                [sys.executable, "-m", "gazette.history.backfill.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._children.add(child)
        try:
            yield child
        finally:
            with self._lock:
                self._children.discard(child)
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _send(stream: IO[bytes], value: Any) -> None:
    pickle.dump(value, stream)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """Return the next value of a pipe; None if the process at the other end has died. Unpickling is safe:
    only our processes write to the pipe."""
    try:
        return pickle.load(stream)  # noqa: S301
    except (EOFError, pickle.UnpicklingError):  # The value may be incomplete.
        return None


def work(stdin: IO[bytes], stdout: IO[bytes]) -> int:
    """Run one task in a child process, and send its outcome to the driver. End when the driver ends."""
    received = _receive(stdin)
    if received is None:
        return 1
    driver_path, task = received
    sys.path[:] = driver_path
    threading.Thread(target=_end_with, args=(stdin,), name="driver", daemon=True).start()
    lock = threading.Lock()

    def send(value: Any) -> None:
        with lock:
            _send(stdout, value)

    try:
        send(run_task(task, send))
    except BaseException as error:  # noqa: BLE001 - the driver raises it
        send(as_picklable(error, task.spec.id))
        return 1
    return 0


def _end_with(stdin: IO[bytes]) -> None:
    """End this process when the driver closes the pipe, or dies."""
    stdin.read()
    os._exit(1)


def as_picklable(error: BaseException, shard: str) -> BaseException:
    """Return the error, or a substitute that can be pickled."""
    try:
        loaded = pickle.loads(pickle.dumps(error))  # noqa: S301
        if type(loaded) is type(error) and str(loaded) == str(error):
            return error
    except Exception:  # noqa: BLE001, S110 - an exception's own pickling may raise anything
        pass
    return GazetteError(f"{type(error).__name__}: {error}", shard=shard)
