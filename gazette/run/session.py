"""One run: a cluster, and an application on the cluster. The application restarts when its files change."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, Protocol

from gazette.client.client import Client
from gazette.client.rpc.preflight import require_kind, require_reachable
from gazette.client.shards import ShardClient
from gazette.consumer.declare.apply import (
    changes_needed,
    fitted,
    put_declared,
    require_healthy,
    warnings_of,
)
from gazette.consumer.declare.changes import DeclaredChanges
from gazette.consumer.declare.declaration import Declaration
from gazette.errors import Broken, Conflict, GazetteError, Invalid, NotAllowed
from gazette.run.announcement import announced
from gazette.run.banner import banner
from gazette.run.changed_files import ChangedFiles
from gazette.run.consumption import ConsumptionReport, space_text
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.console_process import console_beside
from gazette.run.dev.processes import ChildProcess
from gazette.run.member import DESCRIBE, Description
from gazette.run.members import MemberProcess, RunMembers
from gazette.run.settings import RunFlags
from gazette.runtime.clock import Clock
from gazette.runtime.decoders import json_decoder
from gazette.runtime.ports import free_port, port_is_free
from gazette.runtime.private_paths import make_private_directory
from gazette.runtime.supervisor import PARENT_ENV
from gazette.runtime.tasks import TaskScope

HOST: Final = "127.0.0.1"
PREFIX: Final = "/gazette/consumers/"
_CRASH_S: Final = 20.0  # Longest wait for processes of a run that was killed.
_RETRY_S: Final = 0.2
_CONNECT_S: Final = 10.0
_STOP_S: Final = 20.0
_LOOK_S: Final = 1.0
_IMPORT_NOTICE_S: Final = 10.0
_EXIT_USAGE: Final = 2


class Says(Protocol):
    """Prints a line, with the time of day if ``at``."""

    def __call__(self, text: str, *, at: bool = True) -> None: ...


@dataclass(frozen=True, slots=True)
class ClusterAddresses:
    """The addresses of a cluster. ``local`` None: this process has not started the cluster."""

    brokers: str
    etcd: str
    local: LocalCluster | None = None


class RunSession:
    """All that `gazette run` does between its flags and its exit code. Loop-bound.

    ``arguments`` are the application's own flags. ``say`` prints a line. ``is_lost`` returns True once the
    directory was removed.
    """

    def __init__(
        self,
        target: str,
        flags: RunFlags,
        brokers: str,
        etcd: str,
        arguments: Sequence[str],
        clock: Clock,
        say: Says,
        environ: Mapping[str, str],
        is_lost: Callable[[], bool],
    ) -> None:
        assert flags.dir is not None
        self._target = target
        self._flags = flags
        self._addresses = (brokers, etcd)
        self._arguments = tuple(arguments)
        self._clock = clock
        self._say = say
        self._environ = dict(environ)
        self._is_lost = is_lost
        self._disk_is_full = False
        self._directory = flags.dir.absolute()
        self._scratch = self._directory / "run"
        self._settings = flags.spec_settings(embedded=not brokers)
        self._given = {
            name
            for name, value in (("stores", flags.store), ("replication", flags.replication))
            if value
        }
        self._ports: list[tuple[int, int]] = []  # gRPC and HTTP port of each process, once chosen.
        self._banner: list[str] = []  # Printed last. The same banner is not printed again.

    async def run(self, *, after_crash: bool = False) -> int:
        """Run until cancelled. Return 2 if the application cannot be used. Raise the error that ends the run.

        With ``after_crash``, processes of a killed run may still be ending. Cancellation ends all processes.
        """
        make_private_directory(self._scratch)
        description = await self._describe()
        if description is None:
            return _EXIT_USAGE
        self._say(f"starting {self._target} …", at=False)
        if after_crash:
            self._say("the last run was killed: waiting for the end of its processes …", at=False)
        async with (
            self._cluster(after_crash) as cluster,
            Client(cluster.brokers, route_cache_size=0, clock=self._clock) as client,
        ):
            if cluster.local is None:
                await require_reachable(
                    client,
                    "broker",
                    connect_s=_CONNECT_S,
                    hint="Check that it runs there, or leave --broker.address out.",
                )
                await require_kind(client, "broker", timeout_s=_CONNECT_S)
            if cluster.local is None and not self._flags.replication:
                self._settings = await fitted(self._settings, client)
            async with TaskScope("cluster") as scope:
                if (local := cluster.local) is not None:
                    scope.daemon(self._require_directory(), name="directory")
                    scope.daemon(local.keep_etcd(self._say_etcd), name="etcd")
                    scope.daemon(local.keep_brokers(self._say_broker), name="brokers")
                try:
                    async with self._announced(cluster):
                        while True:
                            description = await self._generation(description, cluster, client)
                finally:
                    scope.cancel()
        raise AssertionError("unreachable: generations follow each other until cancelled")

    @asynccontextmanager
    async def _announced(self, cluster: ClusterAddresses) -> AsyncIterator[None]:
        """Announce the run to `gazctl` during the block. With `--ui`, run a console beside it."""
        members = ",".join(member.grpc_url for member in self._processes())
        say = partial(self._say, at=False)
        # Without the user's variables for another cluster, which must not reach the console of this one.
        environ = cluster.local.environ if cluster.local else self._environ
        surroundings = (self._directory, environ, self._clock, say)
        console = console_beside(*surroundings, brokers=cluster.brokers, consumers=members)
        with announced(self._environ, self._target, cluster.brokers, members, say):
            async with console if self._flags.ui else nullcontext():
                yield

    async def _generation(
        self, described: Description, cluster: ClusterAddresses, client: Client
    ) -> Description:
        """Serve the application until its files change. Return the description of the changed application."""
        declaration = described.declaration
        members = RunMembers(
            self._target,
            self._processes(),
            self._member_flags(declaration, cluster),
            self._environ if cluster.local is None else cluster.local.environ,
            self._clock,
            self._say,
            # Members that outlive this process need etcd, which ends after all that inherit this descriptor.
            pass_fds=() if cluster.local is None else (cluster.local.etcd.lifeline,),
        )
        try:
            # Put journals first: members need the outputs. Start members next: only members list shards.
            await self._put_journals(declaration, client, embedded=cluster.local is not None)
            await members.start()
            async with ShardClient(
                members.members[0].grpc_url, route_cache_size=0, clock=self._clock
            ) as shards:
                await self._apply(declaration, client, shards)
                self._say_banner(described, cluster, members)
                return await self._serve(described, members, client, shards)
        except (Broken, Conflict, Invalid, NotAllowed) as error:
            if cluster.local is not None and isinstance(error, Conflict | NotAllowed):
                error.hint += (
                    f" To begin again with an empty state, remove {_shown(self._directory)}."
                )
            if not self._flags.reload:
                raise
            await members.stop()
            self._say_error(error)
            return await self._next(described)
        finally:
            await (members.kill() if self._is_lost() else members.stop())

    async def _put_journals(
        self, declaration: Declaration, client: Client, *, embedded: bool
    ) -> None:
        """Put journals. In a cluster that ran already, check their stores first, and print warnings."""

        async def find() -> DeclaredChanges:
            changes = await self._changes(declaration, client, None)
            if not embedded:
                await require_healthy(client, changes)
            return changes

        changes = await put_declared(find, client)
        for line in () if embedded else await warnings_of(changes, client):
            self._say(line)

    async def _serve(
        self,
        described: Description,
        members: RunMembers,
        client: Client,
        shards: ShardClient,
    ) -> Description:
        """Watch processes and files. Return the next description that can be applied."""
        declaration = described.declaration
        journals = [name for source in declaration.sources for name in source.journals]
        report = ConsumptionReport(
            lambda: [member.http_url for member in members.members if member.running],
            journals,
            declaration.shards,
            client,
            self._clock,
        )
        async with TaskScope("serve") as scope:
            scope.daemon(members.keep_running(), name="members")
            scope.daemon(self._report(report), name="report")
            if not self._flags.reload:
                await asyncio.get_running_loop().create_future()  # Wait until cancelled.
            next_description = described
            while True:
                next_description = await self._next(next_description)
                try:
                    await self._changes(next_description.declaration, client, shards)
                except GazetteError as error:
                    self._say_error(error)
                    self._say("the application goes on as it was, until the next change")
                else:
                    break
            scope.cancel()
        self._say("its files have changed: starting it again …")
        return next_description

    async def _report(self, report: ConsumptionReport) -> None:
        while True:
            await self._clock.sleep(self._flags.report)
            for line in await report.look():
                self._say(line)
            warning = await asyncio.to_thread(self._space_warning)
            if warning and not self._disk_is_full:
                self._say(warning)
            self._disk_is_full = bool(warning)

    def _space_warning(self) -> str:
        try:
            free_bytes = shutil.disk_usage(self._directory).free
        except OSError:
            return ""  # The directory was removed: `_require_directory` ends the run.
        return space_text(_shown(self._directory), free_bytes)

    async def _next(self, described: Description) -> Description:
        """Return the description of the application once its files have changed and can be loaded."""
        files = ChangedFiles(described.files)
        while True:
            await files.wait(self._clock)
            description = await self._describe()
            if description is not None:
                return description
            self._say("waiting for the next change: the run continues once the file is mended")

    async def _describe(self) -> Description | None:
        """Load the application in a child process. Return None if the child has reported what is wrong. Raise
        ``Broken`` if the child ends otherwise."""
        path = self._scratch / "description.json"
        path.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gazette.run.member", DESCRIBE, str(path), self._target),
            stdin=asyncio.subprocess.DEVNULL,
            env={**self._environ, PARENT_ENV: str(os.getpid())},
            start_new_session=True,
        )
        try:
            code = await self._ended(process)
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if code == _EXIT_USAGE:
            return None
        if code != 0:
            raise Broken(
                f"{self._target} ends the process that imports it, with exit code {code}",
                hint="What it wrote is above. Nothing at the level of the module may end the process.",
            )
        return json_decoder(Description).decode(path.read_bytes())

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Return the exit code of the process that imports the application. Report a long import."""
        async with TaskScope("import") as scope:
            scope.daemon(self._say_importing(), name="notice")
            code = await process.wait()
            scope.cancel()
        return code

    async def _say_importing(self) -> None:
        began = self._clock.monotonic()
        while True:
            await self._clock.sleep(_IMPORT_NOTICE_S)
            seconds = self._clock.monotonic() - began
            self._say(
                f"{self._target} is still being imported, for {seconds:.0f} s now (Ctrl-C ends it)"
            )

    async def _changes(
        self, declaration: Declaration, client: Client, shards: ShardClient | None
    ) -> DeclaredChanges:
        return await changes_needed(
            declaration,
            self._settings,
            client,
            shards,
            given=self._given | {"hot_standbys"},
            more_partitions=self._flags.more_partitions,
            changed_key=self._flags.changed_key,
        )

    async def _apply(self, declaration: Declaration, client: Client, shards: ShardClient) -> None:
        changes = await put_declared(
            lambda: self._changes(declaration, client, shards), client, shards
        )
        for line in changes.lines()[:-1]:
            if line.startswith("~"):
                self._say(line)

    @asynccontextmanager
    async def _cluster(self, after_crash: bool) -> AsyncIterator[ClusterAddresses]:
        """Yield the given addresses of a cluster, or those of a cluster that runs during the block."""
        brokers, etcd = self._addresses
        if brokers:
            self._check_ports()
            yield ClusterAddresses(brokers, etcd)
            return
        local = await self._start_cluster(after_crash)
        try:
            yield ClusterAddresses(
                ",".join(broker.grpc_url for broker in local.brokers), local.etcd.endpoint, local
            )
        finally:
            if self._is_lost():
                # The journals are gone with the directory: brokers need not store fragments.
                await local.kill_brokers()
            await local.stop(_STOP_S)

    async def _require_directory(self) -> NoReturn:
        """Raise ``Broken`` once the directory is removed."""
        while True:
            await self._clock.sleep(_LOOK_S)
            if await asyncio.to_thread(self._is_lost):
                raise Broken(
                    f"{self._directory} was removed while it was in use, and the state with it",
                    hint="Everything has stopped. The next run begins with an empty state. To begin again, "
                    "stop the run with Ctrl-C, wait for its end, and remove the directory then.",
                )

    def _require_whole(self) -> None:
        """Raise ``Invalid`` if the directory has fragments, but no data of etcd with their journals."""
        fragments, journals = self._directory / "fragments", self._directory / "etcd" / "data"
        if not journals.exists() and fragments.exists() and any(fragments.iterdir()):
            raise Invalid(
                f"{self._directory} is not whole: it has fragments of journals, and no data of etcd",
                path="--dir",
                hint=f"It was removed in part, or while a run still ended. Remove the rest "
                f"(rm -r {self._directory}), or give another directory.",
            )

    async def _start_cluster(self, after_crash: bool) -> LocalCluster:
        """Start a cluster. After a crash, try again while processes of the killed run still end."""
        self._require_whole()
        flags = self._flags
        settings = ClusterSettings(
            directory=self._directory,
            brokers=flags.brokers,
            zones=1,
            lease_ttl_s=flags.lease,
            host=HOST,
            first_port=flags.broker_port,
            port_flag="--broker-port",
            log_level=flags.log_level,
        )
        deadline = self._clock.monotonic() + (_CRASH_S if after_crash else 0.0)
        while True:
            cluster = LocalCluster(settings, self._clock, self._environ)
            try:
                self._check_ports()
                await cluster.start()
                return cluster
            except (Conflict, Invalid) as error:
                if self._clock.monotonic() >= deadline:
                    if not after_crash or isinstance(error, Invalid):
                        raise
                    raise Conflict(
                        f"processes of the last run still work in {_shown(self._directory)} "
                        f"after {_CRASH_S:.0f} s",
                        hint=f"End them (`pkill -f {self._directory}`), or give another directory: --dir.",
                    ) from error
            await self._clock.sleep(_RETRY_S)

    def _check_ports(self) -> None:
        first = self._flags.port  # 0: ports that are free are taken later.
        for port in range(first, first + 2 * self._flags.member_count()) if first else ():
            if not port_is_free(port, HOST):
                raise Invalid(
                    f"port {port} is in use",
                    path="--port",
                    hint="Stop the process that uses it, or give another port (0: any).",
                )

    def _processes(self) -> list[MemberProcess]:
        if not self._ports:  # A reload keeps the ports: clients know them.
            first, count = self._flags.port, self._flags.member_count()
            free_ports = [] if first else [free_port(HOST) for _ in range(2 * count)]
            ports = free_ports or range(first, first + 2 * count)
            self._ports = list(zip(ports[::2], ports[1::2], strict=True))
        return [
            MemberProcess(
                f"worker-{number}", HOST, grpc, http, self._scratch / f"routes-{number}.json"
            )
            for number, (grpc, http) in enumerate(self._ports, 1)
        ]

    def _member_flags(self, declaration: Declaration, cluster: ClusterAddresses) -> list[str]:
        flags = [
            f"--consumer.bind-host={HOST}",
            # All processes stop together: no other process could take over.
            "--consumer.drain-timeout=0s",
            "--consumer.drain-timeout-max=0s",
            f"--broker.address={cluster.brokers}",
            f"--etcd.address={cluster.etcd}",
            f"--etcd.lease={self._flags.lease}s",
            f"--log.level={self._flags.log_level}",
        ]
        if cluster.local is not None:
            scratch = self._directory / "scratch"
            scratch.mkdir(0o700, exist_ok=True)
            flags += [
                f"--etcd.prefix={PREFIX}{declaration.slug}",
                f"--broker.file-root={self._directory / 'fragments'}",
                f"--consumer.scratch-dir={scratch}",
            ]
        return [*flags, *self._arguments]

    def _say_banner(
        self, described: Description, cluster: ClusterAddresses, members: RunMembers
    ) -> None:
        banner_lines = partial(
            banner,
            described.declaration,
            described.samples,
            members.routes(),
            target=self._target,
            state="" if cluster.local is None else _shown(self._directory),
            brokers=cluster.brokers,
            members=[(member.grpc_url, member.http_url) for member in members.members],
        )
        if banner_lines() == self._banner:
            self._say(f"{self._target} runs again")
            return
        self._banner = banner_lines()
        for line in banner_lines(pids=members.pids()):
            self._say(line, at=False)

    def _say_etcd(self, code: int | None) -> None:
        self._say(f"etcd ended with exit code {code}, and was started again")

    def _say_broker(self, broker: ChildProcess, ready: bool) -> None:
        if ready:
            self._say(f"{broker.name} serves again")
            return
        self._say(
            f"{broker.name} ended with exit code {broker.exit_code}, and is started again "
            f"(its log: {_shown(broker.log_path)})"
        )

    def _say_error(self, error: GazetteError) -> None:
        self._say(f"{error}\n{error.hint}", at=False)


def _shown(path: Path) -> str:
    cwd = Path.cwd()
    text = str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
    return f"{text}/" if path.is_dir() else text
