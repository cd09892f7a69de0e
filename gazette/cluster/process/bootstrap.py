"""Run a process of a cluster: from its settings to its exit code.

Exit codes: 0 it stopped as asked; 1 it failed (the log says why); 2 the configuration is wrong. SIGTERM and
SIGINT stop it gracefully. A second signal ends the wait for other processes to take over.
"""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from starlette.applications import Starlette

from gazette.cluster.process.cluster_member import ClusterMember
from gazette.cluster.process.groups import DebugFlags, EtcdFlags, LogFlags
from gazette.cluster.process.member import MemberFlags, ProcessFlags
from gazette.cluster.process.membership import MemberEnvironment
from gazette.config.schema import Loaded, Schema, log_warnings
from gazette.errors import Invalid
from gazette.net.http_guard import HttpGuard
from gazette.net.http_server import HttpServer, bind_debug
from gazette.net.server import Server, warn_of_open_server
from gazette.protocol.text.validation import within
from gazette.runtime import log_setup, supervisor
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.file_limit import ConnectionLimits, raise_file_limit, warn_of_few_files
from gazette.runtime.random_names import two_words
from gazette.runtime.tasks import TaskScope

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
_PORTS_PER_WORKER: Final = 2
_STOP_S: Final = 15.0


def print_effective(options: Schema, loaded: Loaded) -> None:
    """Print the settings in effect, in the form of a settings file. Warnings go to stderr."""
    sys.stderr.writelines(f"warning: {warning}\n" for warning in loaded.warnings)
    sys.stdout.write(options.render_ini(loaded))


def run_member(
    loaded: Loaded,
    group: str,
    flags: MemberFlags,
    limit: int,
    argv: Sequence[str],
    environ: Mapping[str, str],
    serve: Callable[[], Coroutine[Any, Any, int]],
) -> int:
    """Run ``serve`` or, for several workers, a process for each of them. Return the exit code.

    ``group`` is the name of ``flags``. ``limit`` is the greatest number of items that the process takes.
    Raise ``Invalid`` for settings that cannot be used.
    """
    log_flags = loaded.group(LogFlags)
    log_setup.setup(log_flags.level, log_flags.format)
    log_warnings(loaded)
    supervisor.die_with_parent(environ)
    file_limit = raise_file_limit()
    workers = loaded.group(ProcessFlags).workers
    if workers < 1:
        raise Invalid(f"invalid workers ({workers}; expected >= 1)", path="--workers")
    if workers > 1:
        debug_port = loaded.group(DebugFlags).port
        return asyncio.run(_supervise(group, flags, debug_port, argv, environ, workers))
    warn_of_few_files(file_limit, limit, f"--{group}.limit")
    gc.freeze()  # Modules stay: the first collection need not visit them while callers wait.
    return asyncio.run(serve())


def member_environment(
    loaded: Loaded, group: str, flags: MemberFlags, clock: Clock, rng: random.Random, what: str
) -> MemberEnvironment:
    """Bind the ports of a member, and return its surroundings. Call this on the event loop.

    ``group`` is the name of ``flags``. Warn, in the log, if other machines can do ``what`` without a key.
    Raise ``Invalid`` or ``Unavailable`` (a port is in use).
    """
    etcd = loaded.group(EtcdFlags).settings()
    with within(f"--{group}"):
        auth = flags.auth(clock)
        server = Server(clock, flags.server_settings(socket.gethostname()))
        server.bind()
    if auth.keyless:
        warn_of_open_server(server.settings, group, what)
    is_private = loaded.group(DebugFlags).private
    return MemberEnvironment(clock, rng, server, etcd, auth, flags.peer_tls(), is_private)


async def _supervise(
    group: str,
    flags: MemberFlags,
    debug_port: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    count: int,
) -> int:
    """Run ``count`` members as separate processes. Their ids and ports follow from these flags."""
    first_id = flags.id or two_words(random.SystemRandom())
    workers: list[supervisor.Worker] = []
    for index in range(count):
        name = f"{first_id}-{index}"
        arguments = [*argv, "--workers=1", f"--{group}.id={name}"]
        for flag, port, stride in (
            (f"{group}.port", flags.port, _PORTS_PER_WORKER),
            (f"{group}.http-port", flags.http_port, _PORTS_PER_WORKER),
            ("debug.port", debug_port, 1),
        ):
            if port:
                shifted = supervisor.shifted_port(port, index, stride=stride)
                arguments.append(f"--{flag}={shifted}")
        workers.append(supervisor.Worker(name, [*supervisor.this_program(), "serve", *arguments]))
    return await supervisor.Supervisor(SystemClock(), workers, environ).run()


async def serve_until_signal(
    name: str, build: Callable[[], ClusterMember[Any]], debug_port: str, bind_host: str
) -> int:
    """Run the member that ``build`` returns until a signal stops it. Return the exit code.

    Serve its diagnostics at ``debug_port``, unless that is empty. Raise the member's error if it failed.
    """
    debug_socket = bind_debug(debug_port, bind_host) if debug_port else None
    try:
        member = build()
    except BaseException:
        if debug_socket is not None:
            debug_socket.close()
        raise
    loop = asyncio.get_running_loop()
    scope = TaskScope(name, on_failure=member.fail)
    starting = scope.spawn(member.start(), name="start")

    def on_signal() -> None:
        member.stop_soon()
        starting.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    debug: HttpServer | None = None
    try:
        if debug_socket is not None:
            debug = _debug_server(debug_socket, member)
            debug.start(scope)
        await asyncio.wait({starting})
        if not starting.cancelled():
            freeze_heap()
            await member.wait()
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        try:
            await member.stop()
        finally:
            if debug is not None:
                await debug.stop(1.0)
            await scope.stop(_STOP_S)
    return EXIT_OK


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection. Call it once a process has started.

    A full collection visits every object that is not frozen, and the event loop waits meanwhile. The modules
    and the key space of a broker are some hundred thousand objects, which took 40 ms each time. All appends
    in flight waited for that. A frozen object is still freed when its last reference goes.

    Journals that come later are also hundreds of thousands of objects. At each growth by a quarter, Python
    would visit all of them. That took a quarter of the processor while 2,000 journals were created
    (`benchmarks/bench_many_journals.py`). So the oldest generation is visited a tenth as often.
    """
    gc.collect()
    gc.freeze()
    young, middle, oldest = gc.get_threshold()
    gc.set_threshold(young, middle, 10 * oldest)


def _debug_server(sock: socket.socket, member: ClusterMember[Any]) -> HttpServer:
    app = HttpGuard(Starlette(routes=member.diagnostics()), member.guard_rules)
    return HttpServer(sock, app, tls=None, limit=ConnectionLimits.of_process().debug)
