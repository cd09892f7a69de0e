"""Processes of `fold_app` without the second that it takes a process to import it.

``python -m tests.faults.fold_forge`` has imported it, and forks itself for each line of its input: the
process that comes of it has not run anything of the application before. `Forge` is its other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from gazette.errors import Broken
from gazette.run.dev.processes import ChildProcess
from gazette.runtime.clock import Clock
from gazette.runtime.supervisor import PARENT_ENV
from gazette.runtime.tasks import TaskScope

_LINE_BYTES: Final = 1 << 20
_EAGER: Final = (
    "gazette.runconsumer.process",
    "psycopg",
    "rocksdict",
    "sqlalchemy.dialects.sqlite",
)


# -- the process


def serve() -> None:
    """Fork for each line of the input; a line of the output for each begin and end of a process."""
    for name in ("tests.faults.fold_app", *_EAGER):
        with contextlib.suppress(ImportError):  # Of a store that is not tried here.
            importlib.import_module(name)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _say({"ready": os.getpid()})
    pending = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap()
        if 0 in ready:
            if not (read := os.read(0, _LINE_BYTES)):
                return  # Our parent is gone; our children get SIGTERM with our end.
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if (pid := os.fork()) == 0:
                    os.close(woken)
                    os.close(wake)
                    _become(order)
                _say({"order": order["order"], "pid": pid})


def _say(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _become(order: dict[str, Any]) -> NoReturn:
    """Act as if this process had just been started like that."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent = os.getppid()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, opened in enumerate((nothing, log, log)):
        os.dup2(opened, number)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.environ[PARENT_ENV] = str(parent)
    sys.argv = ["fold_app", *order["argv"]]
    code = 1
    try:
        from gazette import runconsumer
        from gazette.runtime import failpoints
        from tests.faults import fold_app

        failpoints.arm(os.environ.get(failpoints.ENV, ""))
        runconsumer.main(fold_app.new_application())
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - a process says it in its log, and ends
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- its other end


class _Forked:
    """A process that the forge made, as `ChildProcess` uses those of asyncio."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # It has ended: the report is on its way.
            os.kill(self.pid, number)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class ForgedProcess(ChildProcess):
    """``argv`` is that of the application alone."""

    def __init__(
        self,
        forge: Forge,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        environ: Mapping[str, str],
        clock: Clock,
    ) -> None:
        super().__init__(name, argv, log_path, environ, clock)
        self._forge = forge

    async def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_begin = self.log_path.stat().st_size if self.log_path.exists() else 0
        made: Any = await self._forge.make(self._argv, self.log_path, self._environ)
        self._process = made


class Forge:
    """``start``, then ``stop``, which ends what it made."""

    def __init__(self) -> None:
        self._scope = TaskScope("forge")
        self._process: asyncio.subprocess.Process | None = None
        self._orders = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[_Forked]] = {}
        self._alive: dict[int, _Forked] = {}

    async def start(self, environ: Mapping[str, str]) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.faults.fold_forge",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=dict(environ),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise Broken("the forge did not start", code=await self._process.wait())
        self._scope.daemon(self._listen(), name="listen")

    async def stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()
        await self._scope.stop()

    async def make(
        self, argv: Sequence[str], log_path: Path, environ: Mapping[str, str]
    ) -> _Forked:
        process, number = self._process, next(self._orders)
        assert process is not None
        assert process.stdin is not None
        made = asyncio.get_running_loop().create_future()
        self._waiting[number] = made
        order = {
            "order": number,
            "argv": list(argv),
            "log": str(log_path),
            "environ": dict(environ),
        }
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()
        forked: _Forked = await made
        return forked

    async def _listen(self) -> NoReturn:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "pid" not in said:
                self._alive.pop(said["ended"]).ended(said["code"])
                continue
            forked = self._alive[said["pid"]] = _Forked(said["pid"])
            made = self._waiting.pop(said["order"])
            if made.cancelled():  # No task wants it any more.
                forked.send_signal(signal.SIGKILL)
            else:
                made.set_result(forked)
        broken = Broken("the forge ended", code=await self._process.wait())
        for made in self._waiting.values():
            made.set_exception(broken)
        raise broken


if __name__ == "__main__":
    serve()
