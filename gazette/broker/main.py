"""``gazette serve``: a broker from its settings to its exit code.

Exit codes: 0 it stopped as asked; 1 it failed, or could not leave in good order (the log says which); 2 the
configuration is wrong. SIGTERM and SIGINT stop it gracefully. A second signal ends the wait for other
brokers to take over; the broker still persists its spools.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gazette.broker.flags import BrokerFlags
from gazette.broker.service import BrokerService
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
from gazette.errors import GazetteError, Invalid
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.random_names import two_words

log = logging.getLogger(__name__)

TERMINATION_LOG: Final = Path("/dev/termination-log")


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
        flags, debug = loaded.group(BrokerFlags), loaded.group(DebugFlags)
        if debug.private and not debug.port:
            raise Invalid("--debug.private requires --debug.port", path="debug.private")
        return run_member(
            loaded, "broker", flags, flags.limit, argv, environ, lambda: _serve_one(loaded)
        )
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        log.critical("gazette serve: %(error)s", {"error": error})
        with suppress(OSError):
            if TERMINATION_LOG.exists():  # Kubernetes shows this file with the pod.
                TERMINATION_LOG.write_text(f"{error}\n{error.hint}\n")
        return EXIT_FAILED


def print_config(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the effective configuration of ``gazette serve``, in the form of a configuration file."""
    program = schema("gazette print-config")
    try:
        loaded = program.load(argv, environ)
        print_effective(program, loaded)
    except Invalid as error:
        return exit_with(error, sys.stderr)
    return EXIT_OK


def _build(loaded: Loaded, clock: Clock, rng: random.Random) -> BrokerService:
    flags, etcd = loaded.group(BrokerFlags), loaded.group(EtcdFlags)
    process_id = member_id("broker", flags.zone, flags.id or two_words(rng)).suffix
    settings = flags.settings(process_id, etcd.prefix, etcd.lease)
    permissions = "read, append to, change and delete every journal"
    return BrokerService(
        member_environment(loaded, "broker", flags, clock, rng, permissions), settings
    )


async def _serve_one(loaded: Loaded) -> int:
    return await serve_until_signal(
        "broker",
        lambda: _build(loaded, SystemClock(), random.Random()),
        loaded.group(DebugFlags).port,
        loaded.group(BrokerFlags).bind_host,
    )
