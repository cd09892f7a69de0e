"""Several member processes under one: ``--workers N``.

Python has one interpreter lock, so a host with several cores runs several members. Each is a new execution of
the same program with its own id and ports (nothing is forked once gRPC has started). For the cluster, each
process is a separate member: the allocator spreads work over the members of a host as over hosts.

The supervisor does no other work. It passes SIGTERM and SIGINT on, waits for all workers, and exits with 0
only if all workers did. If a worker ends without a signal, it is not restarted. All other workers are stopped
gracefully, and the exit code is not 0. So the manager of *this* process (Kubernetes, systemd) sees the
failure and decides. If the supervisor itself is killed, Linux sends SIGTERM to its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gazette.errors import Broken, Invalid
from gazette.runtime.clock import Clock
from gazette.runtime.numbers import is_digits
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

PARENT_ENV: Final = "GAZETTE_SUPERVISOR_PID"
EXIT_WORKER_FAILED: Final = 1
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Worker:
    """The command of one worker: ``argv`` begins with the program, ``environ`` has additional variables."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


def this_program() -> list[str]:
    """Return the command that started this process, to be executed again."""
    return [sys.executable, *_interpreter_flags(), *_script()]


def _interpreter_flags() -> list[str]:
    return [f"-W{option}" for option in sys.warnoptions]


def _script() -> list[str]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return ["-m", spec.name.removesuffix(".__main__")]
    return [os.path.abspath(sys.argv[0])]


def shifted_port(port: str, index: int, *, stride: int = 1) -> str:
    """Return the port of worker ``index``: that of worker 0, plus ``stride`` for each worker before.

    Empty (any free port) stays empty. The path of a ``unix://`` socket gets the index as its suffix. Raise
    ``Invalid`` if ``port`` is no number, or the sum is above 65,535.
    """
    if not port:
        return ""
    if port.startswith("unix://"):
        return f"{port}.{index}"
    if not is_digits(port) or int(port) + stride * index > 65_535:
        raise Invalid(f'invalid port "{port}" for worker {index}', path="port")
    return str(int(port) + stride * index)


def die_with_parent(environ: Mapping[str, str]) -> None:
    """Let Linux send SIGTERM to this worker when the supervisor dies. Call this at the worker's start.

    No effect in a process that is not a worker. Raise ``Broken`` if the supervisor is dead already, also on
    other systems.
    """
    parent = environ.get(PARENT_ENV, "")
    if not is_digits(parent):
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        raise Broken("the supervisor of this worker is gone", supervisor=parent)


class Supervisor:
    """Runs workers until they end, or until a signal to stop.

    Workers that still run ``stop_timeout_s`` after the first signal are killed. None: no limit, since each
    worker bounds its own exit.
    """

    def __init__(
        self,
        clock: Clock,
        workers: Sequence[Worker],
        environ: Mapping[str, str],
        *,
        stop_timeout_s: float | None = None,
    ) -> None:
        if not workers:
            raise Invalid("at least one worker is needed", path="workers")
        self._clock = clock
        self._workers = tuple(workers)
        self._environ = dict(environ)
        self._stop_timeout_s = stop_timeout_s
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._died = False  # True once a worker ended without a signal.

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def signal_all(self, number: int) -> None:
        """Send a signal to all workers that live. From now on, the end of a worker is expected."""
        self._stopping.set()
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    async def run(self) -> int:
        """Start all workers, and return the exit code when the last worker has ended.

        Raise ``Broken`` if a worker cannot be started. Cancellation: workers are sent SIGTERM.
        """
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.signal_all, number)
        try:
            async with TaskScope("supervisor") as scope:
                watches = await self._start_all(scope)
                deadline = scope.spawn(self._kill_late(), name="deadline")
                await asyncio.wait(watches)
                deadline.cancel()
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            self.signal_all(signal.SIGTERM)
        return self._exit_code()

    async def _start_all(self, scope: TaskScope) -> list[asyncio.Task[None]]:
        """Start all workers. Return tasks that end when the workers do.

        If a worker cannot be started, stop the others, wait for them, and raise ``Broken``.
        """
        watches: list[asyncio.Task[None]] = []
        try:
            for worker in self._workers:
                watches.append(await self._start(scope, worker))
        except Broken:
            self.signal_all(signal.SIGTERM)
            if watches:
                await asyncio.wait(watches)
            raise
        return watches

    async def _start(self, scope: TaskScope, worker: Worker) -> asyncio.Task[None]:
        environ = {**self._environ, **worker.environ, PARENT_ENV: str(os.getpid())}
        try:
            process = await asyncio.create_subprocess_exec(
                *worker.argv,
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,
                # A terminal's Ctrl-C must reach only the supervisor, which passes it to each worker, once.
                start_new_session=True,
            )
        except OSError as error:
            raise Broken(f"cannot start worker {worker.name}: {error}") from error
        self._processes[worker.name] = process
        if self._stopping.is_set():
            process.terminate()
        return scope.spawn(self._watch(worker.name, process), name=worker.name)

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._stopping.is_set():
            return
        log.error(
            "worker %(worker)s ended without a signal to stop (%(reason)s); stopping the others",
            {"worker": name, "reason": _how(code)},
        )
        self._died = True
        self.signal_all(signal.SIGTERM)

    async def _kill_late(self) -> None:
        await self._stopping.wait()
        if self._stop_timeout_s is None:
            return
        await self._clock.sleep(self._stop_timeout_s)
        for name, process in self._processes.items():
            if process.returncode is None:
                log.error("worker %(worker)s did not stop in time and is killed", {"worker": name})
                process.kill()

    def _exit_code(self) -> int:
        failed = {
            name: process.returncode
            for name, process in self._processes.items()
            if process.returncode
        }
        for name, code in failed.items():
            log.error(
                "worker %(worker)s failed: %(reason)s", {"worker": name, "reason": _how(code)}
            )
        return EXIT_WORKER_FAILED if failed or self._died else 0


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"
