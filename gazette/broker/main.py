"""``gazette serve``: a broker from its settings to its exit code.

Exit codes: 0 it stopped as asked; 1 it failed, or could not leave in good order (the log says which); 2 the
configuration is wrong. SIGTERM and SIGINT stop it gracefully. A second signal ends the wait for other brokers
to take over; the broker still persists what it has.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from starlette.applications import Starlette

from gazette.auth import KeyedAuth, NoAuth
from gazette.broker.flags import BrokerFlags, ProcessFlags
from gazette.broker.service import BrokerService
from gazette.config.groups import DebugFlags, EtcdFlags, LogFlags, member_id
from gazette.config.schema import Loaded, Schema, exit_with, log_warnings
from gazette.errors import GazetteError, Invalid
from gazette.net.diagnostics import diagnostic_routes
from gazette.net.http_guard import HttpGuard
from gazette.net.http_server import HttpServer, bind_debug
from gazette.net.server import Server, warn_of_open_server
from gazette.protocol.text.validation import within
from gazette.runtime import log_setup, supervisor
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.file_limit import ConnectionLimits, raise_file_limit, warn_of_few_files
from gazette.runtime.random_names import two_words
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
TERMINATION_LOG: Final = Path("/dev/termination-log")
_PORTS_PER_WORKER: Final = 2


def schema(program: str = "gazette serve") -> Schema:
    return Schema(
        program,
        {
            "": ProcessFlags,
            "broker": BrokerFlags,
            "etcd": EtcdFlags,
            "log": LogFlags,
            "debug": DebugFlags,
        },
        file_stem="gazette",
    )


def serve(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a broker, or several, until a signal stops it. Return the exit code."""
    try:
        loaded = schema().load(argv, environ)
        log_flags = loaded.group(LogFlags)
        log_setup.setup(log_flags.level, log_flags.format)
        log_warnings(loaded)
        supervisor.die_with_parent(environ)
        files = raise_file_limit()
        debug = loaded.group(DebugFlags)
        if debug.private and not debug.port:
            raise Invalid("--debug.private requires --debug.port", path="debug.private")
        workers = loaded.group(ProcessFlags).workers
        if workers < 1:
            raise Invalid(f"invalid workers ({workers}; expected >= 1)", path="--workers")
        if workers > 1:
            return asyncio.run(_supervise(loaded, argv, environ, workers))
        warn_of_few_files(files, loaded.group(BrokerFlags).limit, "--broker.limit")
        return asyncio.run(_serve_one(loaded))
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        log.critical("gazette serve: %(error)s", {"error": error})
        with suppress(OSError):
            if TERMINATION_LOG.exists():  # Kubernetes shows this file with the pod.
                TERMINATION_LOG.write_text(f"{error}\n{error.hint}\n")
        return EXIT_FAILED


def print_config(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the effective configuration of ``gazette serve``, as a file it could be read from."""
    program = schema("gazette print-config")
    try:
        loaded = program.load(argv, environ)
        sys.stderr.writelines(f"warning: {warning}\n" for warning in loaded.warnings)
        sys.stdout.write(program.render_ini(loaded))
    except Invalid as error:
        return exit_with(error, sys.stderr)
    return EXIT_OK


async def _supervise(
    loaded: Loaded, argv: Sequence[str], environ: Mapping[str, str], count: int
) -> int:
    """Run ``count`` brokers as separate processes. Their ids and ports follow from those given."""
    flags = loaded.group(BrokerFlags)
    first_id = flags.id or two_words(random.SystemRandom())
    debug = loaded.group(DebugFlags)
    workers: list[supervisor.Worker] = []
    for index in range(count):
        name = f"{first_id}-{index}"
        arguments = [*argv, "--workers=1", f"--broker.id={name}"]
        for flag, port, stride in (
            ("broker.port", flags.port, _PORTS_PER_WORKER),
            ("broker.http-port", flags.http_port, _PORTS_PER_WORKER),
            ("debug.port", debug.port, 1),
        ):
            if port:
                shifted = supervisor.shifted_port(port, index, stride=stride)
                arguments.append(f"--{flag}={shifted}")
        workers.append(supervisor.Worker(name, [*supervisor.this_program(), "serve", *arguments]))
    return await supervisor.Supervisor(SystemClock(), workers, environ).run()


def _build(loaded: Loaded, clock: Clock, rng: random.Random) -> BrokerService:
    flags, etcd = loaded.group(BrokerFlags), loaded.group(EtcdFlags)
    process_id = member_id("broker", flags.zone, flags.id or two_words(rng)).suffix
    settings = flags.settings(process_id, etcd.prefix, etcd.lease)
    etcd_settings = etcd.settings()
    with within("--broker"):
        auth = KeyedAuth.parse(clock, flags.auth_keys) if flags.auth_keys else NoAuth()
        server = Server(clock, flags.server_settings(socket.gethostname()))
        server.bind()
    if auth.keyless:
        what = "read, append to, change and delete every journal"
        warn_of_open_server(server.settings, "broker", what)
    return BrokerService(
        clock,
        rng,
        server,
        etcd_settings,
        settings,
        auth=auth,
        peer_tls=flags.peer_tls(),
        private_diagnostics=loaded.group(DebugFlags).private,
    )


async def _serve_one(loaded: Loaded) -> int:
    service = _build(loaded, SystemClock(), random.Random())
    loop = asyncio.get_running_loop()
    scope = TaskScope("broker", on_failure=service.fail)
    starting = scope.spawn(service.start(), name="start")

    def on_signal() -> None:
        service.stop_soon()
        starting.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    debug: HttpServer | None = None
    try:
        debug = _start_debug(loaded.group(DebugFlags).port, service, scope)
        await asyncio.wait({starting})
        if not starting.cancelled():
            await service.wait()
    finally:
        try:
            await service.stop()
        finally:
            if debug is not None:
                await debug.stop(1.0)
            await scope.stop()
    return EXIT_OK


def _start_debug(port: str, service: BrokerService, scope: TaskScope) -> HttpServer | None:
    if not port:
        return None
    sock = bind_debug(port, service.server.settings.bind_host)
    limit = ConnectionLimits.of_process().debug
    app = HttpGuard(Starlette(routes=diagnostic_routes(service.not_ready)), service.guard_rules)
    server = HttpServer(sock, app, tls=None, limit=limit)
    server.start(scope)
    return server
