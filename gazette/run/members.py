"""The processes of an application that `gazette run` starts, watches, and starts again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gazette.errors import Broken, Unavailable
from gazette.run.http_get import get
from gazette.runtime.clock import Clock
from gazette.runtime.decoders import json_decoder
from gazette.runtime.random_names import two_words
from gazette.runtime.supervisor import PARENT_ENV
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout

STOP_S: Final = 10.0
READY_S: Final = 60.0
_POLL_S: Final = 0.05
_CRASHES_MAX: Final = 3
_CRASHES_WITHIN_S: Final = 60.0
_EXIT_USAGE: Final = 2


@dataclass(slots=True)
class MemberProcess:
    """One process and its addresses. Its output goes to the terminal."""

    name: str
    host: str
    grpc_port: int
    http_port: int
    routes_file: Path
    process: asyncio.subprocess.Process | None = None
    ended: list[float] = field(default_factory=list)
    """Times at which the process ended without being asked to."""

    @property
    def grpc_url(self) -> str:
        return f"http://{self.host}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None


class RunMembers:
    """All processes of the application. Each process gets ``flags``, and inherits the descriptors
    ``pass_fds``."""

    def __init__(
        self,
        target: str,
        members: Sequence[MemberProcess],
        flags: Sequence[str],
        environ: Mapping[str, str],
        clock: Clock,
        say: Callable[[str], None],
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.members = tuple(members)
        self._target = target
        self._flags = tuple(flags)
        self._environ = dict(environ)
        self._clock = clock
        self._say = say
        self._pass_fds = tuple(pass_fds)
        self._rng = random.SystemRandom()

    async def start(self) -> None:
        """Start all processes, and wait until they are ready. Raise ``Broken`` if a process ends,
        ``Unavailable`` after `READY_S` seconds."""
        for member in self.members:
            await self._start(member)
        for member in self.members:
            await self._await_ready(member)

    async def keep_running(self) -> None:
        """Start each process again that ends. Raise ``Broken`` for 3 ends within 60 s, or exit code 2."""
        async with TaskScope("members") as scope:
            for member in self.members:
                scope.daemon(self._keep_running(member), name=member.name)

    async def _keep_running(self, member: MemberProcess) -> None:
        while True:
            assert member.process is not None
            await member.process.wait()
            await self._start_again(member)
            await self._say_ready(member)

    async def stop(self) -> None:
        """Stop all processes at once. Kill processes that have not ended after `STOP_S` seconds."""
        running = [one.process for one in self.members if one.running and one.process is not None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        try:
            async with timeout(STOP_S):
                for process in running:
                    await process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Kill all processes, and return when they are gone."""
        for member in self.members:
            if member.running and member.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    member.process.kill()
                await member.process.wait()

    def pids(self) -> list[int]:
        """Return the process ids, in the order of ``members``."""
        return [member.process.pid for member in self.members if member.process is not None]

    def routes(self) -> list[str]:
        """Return the HTTP routes that the application has added and that answer GET."""
        return json_decoder(list[str]).decode(self.members[0].routes_file.read_bytes())

    async def _start(self, member: MemberProcess) -> None:
        member.routes_file.unlink(missing_ok=True)
        # The lease of a killed process may outlive the process. A new id need not wait until it expires.
        identity = f"{member.name}-{two_words(self._rng)}"
        member.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gazette.run.member"),
            *(str(member.routes_file), self._target),
            f"--consumer.id={identity}",
            f"--consumer.host={member.host}",
            f"--consumer.port={member.grpc_port}",
            f"--consumer.http-port={member.http_port}",
            *self._flags,
            stdin=asyncio.subprocess.DEVNULL,
            env={**self._environ, PARENT_ENV: str(os.getpid())},
            # A terminal's Ctrl-C is for the parent, which stops its processes in order.
            start_new_session=True,
            pass_fds=self._pass_fds,
        )

    async def _await_ready(self, member: MemberProcess) -> None:
        deadline = self._clock.monotonic() + READY_S
        while not await asyncio.to_thread(_is_ready, member):
            if not member.running:
                raise Broken(
                    f"{member.name} ended before it was ready ({_how(member)})",
                    hint="What it wrote before is above.",
                )
            if self._clock.monotonic() > deadline:
                raise Unavailable(
                    f"{member.name} is not ready after {READY_S:.0f} s",
                    hint=f"Ask {member.http_url}/debug/ready what it waits for.",
                )
            await self._clock.sleep(_POLL_S)

    async def _start_again(self, member: MemberProcess) -> None:
        """Start a process again that has ended. Raise ``Broken`` if it has ended too often, or by exit code 2
        (the application cannot be used)."""
        now = self._clock.monotonic()
        member.ended = [time for time in member.ended if now - time < _CRASHES_WITHIN_S] + [now]
        assert member.process is not None
        if len(member.ended) >= _CRASHES_MAX or member.process.returncode == _EXIT_USAGE:
            times = len(member.ended)
            raise Broken(
                f"{member.name} ended {times} times within {_CRASHES_WITHIN_S:.0f} s ({_how(member)})"
                if times > 1
                else f"{member.name} ended ({_how(member)})",
                hint="What it wrote before is above.",
            )
        self._say(f"{member.name} ended ({_how(member)}); it is started again")
        await self._start(member)

    async def _say_ready(self, member: MemberProcess) -> None:
        """Say that a restarted process serves, or what it waits for. Return at once if the process ends."""
        try:
            await self._await_ready(member)
        except Broken:
            return  # `_start_again` says how the process ended.
        except Unavailable as error:
            self._say(f"{error}\n{error.hint}")
        else:
            assert member.process is not None
            self._say(f"{member.name} serves again, process {member.process.pid}")


def _is_ready(member: MemberProcess) -> bool:
    return member.routes_file.exists() and get(f"{member.http_url}/debug/ready") is not None


def _how(member: MemberProcess) -> str:
    assert member.process is not None
    code = member.process.returncode
    assert code is not None
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
