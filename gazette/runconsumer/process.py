"""``runconsumer.main``: runs an `Application` as a process, and exits with its exit code.

Exit codes: 0 stopped as asked; 1 failed (the log says why); 2 the configuration is wrong. SIGTERM and SIGINT
stop the process gracefully: it waits for other members to take over. A second signal ends this wait.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from gazette.client.flags import BrokerClientFlags
from gazette.cluster.process.bootstrap import (
    EXIT_FAILED,
    EXIT_OK,
    member_environment,
    print_effective,
    run_member,
    serve_until_signal,
)
from gazette.cluster.process.groups import DebugFlags, EtcdFlags, LogFlags, member_id
from gazette.cluster.process.member import ProcessFlags
from gazette.config.schema import Loaded, Schema, exit_with
from gazette.consumer.application import Application
from gazette.consumer.contract.callbacks import require_callbacks
from gazette.consumer.member import ConsumerMember
from gazette.errors import GazetteError, Invalid
from gazette.protocol.text.validation import within
from gazette.runconsumer.flags import ConsumerFlags
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.near_names import near_name
from gazette.runtime.process_exit import end_process
from gazette.runtime.random_names import two_words
from gazette.runtime.standard_streams import with_streams

log = logging.getLogger(__name__)

PREFIX_DEFAULT: Final = "/gazette/consumers/"

USAGE: Final = """usage: {program} [COMMAND] [FLAGS]

  serve          run the application (the default)
  print-config   print the effective configuration of `serve`
  specs          print the specifications of what the application declares, as YAML
  apply          make a cluster what the application declares; delete nothing

`{program} COMMAND --help` lists the flags of a command.
"""
_COMMANDS: Final = ("serve", "print-config", "specs", "apply")


def schema(application: Application[Any], program: str, bind_host: str = "") -> Schema:
    """Return the flags of ``serve``. ``bind_host`` is the default of ``--consumer.bind-host``."""
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

    Without ``--consumer.bind-host``, listen on the address ``bind_host``; if it is empty, on all addresses.

    The command line is ``[COMMAND] FLAGS``; see ``USAGE``. Settings come from flags, the environment,
    ``gazette.ini`` or ``gazette.yaml``, and defaults. The first of these that gives a setting counts.
    """
    end_process(
        with_streams(lambda: run(application, sys.argv[1:], os.environ, bind_host=bind_host))
    )


def run(
    application: Application[Any],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    bind_host: str = "",
    member: type[ConsumerMember] = ConsumerMember,
) -> int:
    """Run like ``main``, but return the exit code. ``member`` is the class that serves the application."""
    path = Path(sys.argv[0])
    # With `python -m package`, the file has the name `__main__.py`: use the directory's name.
    program = (path.parent.name if path.name == "__main__.py" else path.name) or type(
        application
    ).__name__
    command, arguments = "serve", list(argv)
    if arguments and not arguments[0].startswith("-"):
        command = arguments.pop(0)
    if command in ("help", "-h"):
        sys.stdout.write(USAGE.format(program=program))
        return EXIT_OK
    if command not in _COMMANDS:
        nearest = near_name(command, _COMMANDS)
        guess = f" (did you mean {nearest}?)" if nearest else ""
        usage = USAGE.format(program=program)
        sys.stderr.write(f"{program}: unknown command {command}{guess}\n\n{usage}")
        return 2
    options = schema(application, f"{program} {command}", bind_host)
    try:
        require_callbacks(application)
        if command in ("specs", "apply"):
            from gazette.runconsumer import specs  # Members do not need this module.

            return specs.run(application, command, f"{program} {command}", arguments, environ)
        loaded = options.load(arguments, environ)
        if command == "print-config":
            print_effective(options, loaded)
            return EXIT_OK
        flags = loaded.group(ConsumerFlags)
        return run_member(
            loaded,
            "consumer",
            flags,
            flags.limit,
            arguments,
            environ,
            lambda: _serve_one(application, loaded, member),
        )
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        log.critical("%(program)s: %(error)s", {"program": program, "error": error})
        return EXIT_FAILED


def root_of(application: Application[Any], loaded: Loaded) -> str:
    """Return the configured etcd prefix, or else a prefix with the name of the application's class."""
    prefix = loaded.group(EtcdFlags).prefix
    if loaded.sources.get("etcd.prefix") != "default" and prefix:
        return prefix
    application_type = type(application)
    module = application_type.__module__ if application_type.__module__ != "__main__" else "main"
    name = re.sub(r"[^A-Za-z0-9_.\-]", "-", f"{module}.{application_type.__qualname__}")
    return f"{PREFIX_DEFAULT}{name}"


def build(
    application: Application[Any],
    loaded: Loaded,
    clock: Clock,
    member: type[ConsumerMember] = ConsumerMember,
) -> ConsumerMember:
    """Return the member that a configuration describes, and take its ports. Call this on the event loop.

    Raise ``Invalid`` for a wrong setting, and ``Unavailable`` for a port that is in use.
    """
    flags, etcd = loaded.group(ConsumerFlags), loaded.group(EtcdFlags)
    settings = flags.settings(
        flags.id or two_words(random.SystemRandom()), root_of(application, loaded), etcd.lease
    )
    # Find mistakes before ports are taken.
    member_id("consumer", settings.zone, settings.id)
    # A query must wait longer than the lease of a dead primary, since no member takes over before its end.
    settings = replace(settings, query_timeout_s=max(settings.query_timeout_s, 2 * etcd.lease))
    with within("--broker"):
        client = loaded.group(BrokerClientFlags).client(flags.zone, clock)
    access = "use this application, and change and delete its shards"
    environment = member_environment(loaded, "consumer", flags, clock, random.Random(), access)
    config = {name: loaded.groups[name] for name in application.config_groups}
    return member(application, environment, settings, client, config=config)


async def _serve_one(
    application: Application[Any], loaded: Loaded, member: type[ConsumerMember]
) -> int:
    with ExitStack() as stack:

        def built() -> ConsumerMember:
            service = build(application, loaded, SystemClock(), member)
            stack.enter_context(service.callback_watch.watching())
            return service

        return await serve_until_signal(
            "consumer",
            built,
            loaded.group(DebugFlags).port,
            loaded.group(ConsumerFlags).bind_host,
        )
