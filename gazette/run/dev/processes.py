"""Child processes of a local cluster: started, watched, killed, and never left behind."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gazette.errors import Broken, Unavailable
from gazette.runtime.clock import Clock
from gazette.runtime.private_paths import append_private, make_private_directory
from gazette.runtime.supervisor import PARENT_ENV
from gazette.runtime.timeouts import timeout

LOG_TAIL_BYTES: Final = 2_000
_READY_EVERY_S: Final = 0.02


class ChildProcess:
    """One process and its log file. The child gets SIGTERM when this process dies, in any way. ``pass_fds``
    are file descriptors that the child inherits."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        environ: Mapping[str, str],
        clock: Clock,
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._argv = list(argv)
        self._environ = dict(environ)
        self._clock = clock
        self._pass_fds = tuple(pass_fds)
        self._process: asyncio.subprocess.Process | None = None
        self._log_begin = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        make_private_directory(self.log_path.parent)
        with append_private(self.log_path) as log:
            self._log_begin = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environ, PARENT_ENV: str(os.getpid())},
                start_new_session=True,
                pass_fds=self._pass_fds,
            )

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            assert self._process is not None
            self._process.send_signal(number)

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def stop(self, timeout_s: float) -> bool:
        """Send SIGTERM, and SIGKILL after ``timeout_s``. Return True if SIGTERM was enough."""
        if not self.running:
            return True
        self.signal(signal.SIGTERM)
        try:
            async with timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            await self.kill()
            return False
        return True

    def log_tail(self) -> str:
        """Return the end of the log since the process was started."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begin, end - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    def died(self) -> Broken:
        return Broken(
            f"{self.name} ended with exit code {self.exit_code}:\n{self.log_tail()}",
            hint=f"Its whole log is in {self.log_path}.",
        )


async def await_ready(
    process: ChildProcess,
    http_port: int,
    clock: Clock,
    timeout_s: float,
    *,
    host: str = "127.0.0.1",
) -> None:
    """Return when ``/debug/ready`` of a child answers 200. Raise ``Broken`` with the end of the log if the
    child died, ``Unavailable`` after ``timeout_s``."""
    deadline = clock.monotonic() + timeout_s
    while True:
        if not process.running:
            raise process.died()
        if await asyncio.to_thread(_is_ready, host, http_port):
            return
        if clock.monotonic() > deadline:
            raise Unavailable(
                f"{process.name} did not become ready within {timeout_s:.0f} s:\n{process.log_tail()}",
                hint=f"Its whole log is in {process.log_path}.",
            )
        await clock.sleep(_READY_EVERY_S)


def _is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=2.0)
    try:
        connection.request("GET", "/debug/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]
