"""``runconsumer.main``: runs an `Application` as a process, to its exit code.

Exit codes: 0 stopped as asked; 1 it broke (the log says why); 2 the configuration is wrong. SIGTERM
and SIGINT stop it gracefully. A second one ends the wait for other members to take over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from starlette.applications import Starlette

from gazette.auth import KeyedAuth, NoAuth
from gazette.client.flags import BrokerClientFlags
from gazette.config.groups import DebugFlags, EtcdFlags, LogFlags, member_id
from gazette.config.schema import Loaded, Schema, exit_with, log_warnings
from gazette.consumer.application import Application
from gazette.consumer.callbacks import require_callbacks
from gazette.consumer.member import ConsumerMember
from gazette.errors import GazetteError, Invalid
from gazette.net.diagnostics import diagnostic_routes
from gazette.net.http_guard import HttpGuard
from gazette.net.http_server import HttpServer, bind_debug
from gazette.net.server import Server, warn_of_open_server
from gazette.protocol.text.validation import within
from gazette.runconsumer.flags import ConsumerFlags, ProcessFlags
from gazette.runtime import log_setup, supervisor
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.file_limit import ConnectionLimits, raise_file_limit, warn_of_few_files
from gazette.runtime.process_exit import end_process
from gazette.runtime.random_names import two_words
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
PREFIX_DEFAULT: Final = "/gazette/consumers/"
_PORTS_PER_WORKER: Final = 2
_STOP_S: Final = 15.0

USAGE: Final = """usage: {program} [serve | print-config] [FLAGS]

  serve          run the application (the default)
  print-config   print the effective configuration

`{program} serve --help` lists the flags.
"""


def schema(application: Application[Any], program: str, bind_host: str = "") -> Schema:
    return Schema(
        program,
        {
            "": ProcessFlags,
            "consumer": ConsumerFlags,
            "broker": BrokerClientFlags,
            "etcd": EtcdFlags,
            "log": LogFlags,
            "debug": DebugFlags,
            **application.config_groups,
        },
        file_stem="gazette",
        defaults={"consumer.bind-host": bind_host},
    )


def main(application: Application[Any], *, bind_host: str = "") -> NoReturn:
    """Run an application until it is asked to stop, and leave the process.

    ``bind_host`` is the address to listen on unless ``--consumer.bind-host`` is given; empty for all.

    The command line is ``[serve] FLAGS`` or ``print-config FLAGS``. Settings come from flags, the
    environment, ``gazette.ini`` or ``gazette.yaml``, and defaults, in this order.
    """
    end_process(run(application, sys.argv[1:], os.environ, bind_host=bind_host))


def run(
    application: Application[Any],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    bind_host: str = "",
) -> int:
    """Run ``main``, but return its exit code."""
    path = Path(sys.argv[0])
    # With `python -m package` the file name says nothing.
    program = (path.parent.name if path.name == "__main__.py" else path.name) or type(
        application
    ).__name__
    command, rest = "serve", list(argv)
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
    if command not in ("serve", "print-config"):
        sys.stderr.write(f"{program}: unknown command {command}\n\n{USAGE.format(program=program)}")
        return 2
    options = schema(application, f"{program} {command}", bind_host)
    try:
        require_callbacks(application)
        loaded = options.load(rest, environ)
        if command == "print-config":
            sys.stderr.writelines(f"warning: {warning}\n" for warning in loaded.warnings)
            sys.stdout.write(options.render_ini(loaded))
            return EXIT_OK
        log_flags = loaded.group(LogFlags)
        log_setup.setup(log_flags.level, log_flags.format)
        log_warnings(loaded)
        supervisor.die_with_parent(environ)
        files = raise_file_limit()
        workers = loaded.group(ProcessFlags).workers
        if workers < 1:
            raise Invalid(f"invalid workers ({workers}; expected >= 1)", path="--workers")
        if workers > 1:
            return asyncio.run(_supervise(loaded, rest, environ, workers))
        warn_of_few_files(files, loaded.group(ConsumerFlags).limit, "--consumer.limit")
        return asyncio.run(_serve_one(application, loaded))
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        log.critical("%(program)s: %(error)s", {"program": program, "error": error})
        return EXIT_FAILED


async def _supervise(
    loaded: Loaded, argv: Sequence[str], environ: Mapping[str, str], count: int
) -> int:
    flags, debug = loaded.group(ConsumerFlags), loaded.group(DebugFlags)
    first_id = flags.id or two_words(random.SystemRandom())
    workers: list[supervisor.Worker] = []
    for index in range(count):
        name = f"{first_id}-{index}"
        arguments = [*argv, "--workers=1", f"--consumer.id={name}"]
        for flag, port, stride in (
            ("consumer.port", flags.port, _PORTS_PER_WORKER),
            ("consumer.http-port", flags.http_port, _PORTS_PER_WORKER),
            ("debug.port", debug.port, 1),
        ):
            if port:
                shifted = supervisor.shifted_port(port, index, stride=stride)
                arguments.append(f"--{flag}={shifted}")
        workers.append(supervisor.Worker(name, [*supervisor.this_program(), "serve", *arguments]))
    return await supervisor.Supervisor(SystemClock(), workers, environ).run()


def root_of(application: Application[Any], loaded: Loaded) -> str:
    """Return the etcd prefix: the configured one, else one that is the application's own."""
    prefix = loaded.group(EtcdFlags).prefix
    if loaded.sources.get("etcd.prefix") != "default" and prefix:
        return prefix
    kind = type(application)
    module = kind.__module__ if kind.__module__ != "__main__" else "main"
    name = re.sub(r"[^A-Za-z0-9_.\-]", "-", f"{module}.{kind.__qualname__}")
    return f"{PREFIX_DEFAULT}{name}"


def build(application: Application[Any], loaded: Loaded, clock: Clock) -> ConsumerMember:
    """Return the service of a configuration, with its ports taken. Call it on the event loop.

    Raise ``Invalid`` or ``Unavailable`` (a port is in use).
    """
    flags, etcd = loaded.group(ConsumerFlags), loaded.group(EtcdFlags)
    rng = random.Random()
    settings = flags.settings(
        flags.id or two_words(random.SystemRandom()), root_of(application, loaded), etcd.lease
    )
    # Find all that can be wrong before ports are taken.
    member_id("consumer", settings.zone, settings.id)
    # A query has to outlast the lease of a primary that is gone.
    settings = replace(settings, query_timeout_s=max(settings.query_timeout_s, 2 * etcd.lease))
    with within("--consumer"):
        auth = KeyedAuth.parse(clock, flags.auth_keys) if flags.auth_keys else NoAuth()
    with within("--broker"):
        client = loaded.group(BrokerClientFlags).client(flags.zone, clock)
    with within("--consumer"):
        server = Server(clock, flags.server_settings(socket.gethostname()))
        server.bind()
    if auth.keyless:
        what = "use this application, and change and delete its shards"
        warn_of_open_server(server.settings, "consumer", what)
    return ConsumerMember(
        application,
        clock,
        rng,
        server,
        etcd.settings(),
        settings,
        client,
        auth=auth,
        peer_tls=flags.peer_tls(),
        config={name: loaded.groups[name] for name in application.config_groups},
        private_diagnostics=loaded.group(DebugFlags).private,
    )


async def _serve_one(application: Application[Any], loaded: Loaded) -> int:
    port = loaded.group(DebugFlags).port
    debug_socket = bind_debug(port, loaded.group(ConsumerFlags).bind_host) if port else None
    try:
        service = build(application, loaded, SystemClock())
    except BaseException:
        if debug_socket is not None:
            debug_socket.close()
        raise
    loop = asyncio.get_running_loop()
    scope = TaskScope("consumer", on_failure=service.fail)
    starting = scope.spawn(service.start(), name="start")

    def on_signal() -> None:
        service.stop_soon()
        starting.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    debug: HttpServer | None = None
    try:
        if debug_socket is not None:
            routes = [*diagnostic_routes(service.not_ready), *service.debug_routes()]
            limit = ConnectionLimits.of_process().debug
            app = HttpGuard(Starlette(routes=routes), service.guard_rules)
            debug = HttpServer(debug_socket, app, tls=None, limit=limit)
            debug.start(scope)
        await asyncio.wait({starting})
        if not starting.cancelled():
            await service.wait()
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        try:
            await service.stop()
        finally:
            if debug is not None:
                await debug.stop(1.0)
            await scope.stop(_STOP_S)
    return EXIT_OK
