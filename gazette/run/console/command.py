"""``gazette ui``: serves the console until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gazette.config.schema import Loaded, Schema, exit_with
from gazette.errors import GazetteError, Invalid, NotFound
from gazette.gazctl.context import Context
from gazette.gazctl.flags import LogFlags, SharedFlags, flag
from gazette.gazctl.io.terminal import Terminal
from gazette.gazctl.settings import FILE_STEM, GROUPS, file_sections, load_in_context
from gazette.net.http_guard import GuardRules, HttpGuard, is_loopback
from gazette.net.http_server import HttpServer, bind_tcp
from gazette.run.console.console import Console
from gazette.run.console.gate import ConsoleGate
from gazette.run.console.server import application
from gazette.run.dev.console_process import KEY_ENV
from gazette.runtime import log_setup
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import bracketed
from gazette.runtime.supervisor import die_with_parent
from gazette.runtime.tasks import TaskScope

_DESCRIPTION: Final = """Serve the console: pages that show brokers, journals, applications and shards.
It calls them as `gazctl` does, with the addresses and the token of a context."""
_EXAMPLES: Final = """examples:
  gazette ui
  gazette ui --context prod --port 8091
  gazette ui --broker.address http://broker-0:8080 --consumer.address http://app-0:8080"""
_CONNECTIONS_MAX: Final = 64
_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class UiFlags(SharedFlags):
    """Flags of ``gazette ui``."""

    port: int = flag(8090, "port of the console; 0: any free port")
    host: str = flag(
        "127.0.0.1", "address to listen on; 0.0.0.0: all, so that holders of the key can use it"
    )
    allow_host: tuple[str, ...] = flag(
        (), "name of this machine, without a port, that browsers may use for it; may be repeated"
    )
    allow_changes: bool = flag(False, "offer changes, such as to suspend a journal")
    scratch_dir: Path | None = flag(None, "local directory for states of shards that are shown")


def load(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Loaded, str]:
    """Return the settings, and the name of the context that gave the addresses."""
    schema = Schema(
        "gazette ui",
        {"": UiFlags, **GROUPS},
        file_stem=FILE_STEM,
        also_in_file=file_sections(),
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    loaded = schema.load(argv, environ)
    if loaded.sources["broker.address"] == "flag" and not loaded.group(SharedFlags).context:
        return loaded, ""  # A context would add the members, and the token, of another cluster.
    return load_in_context(schema, argv, environ, ("broker", "consumer"))


def run(argv: Sequence[str]) -> int:
    """Run the subcommand. Return 0 after a signal to stop, 1 for a failure, 2 for the user's mistake."""
    die_with_parent(os.environ)
    try:
        loaded, in_use = load(argv, os.environ)
        log = loaded.group(LogFlags)
        log_setup.setup(log.level, log.format, stream=sys.stderr)
        for warning in loaded.warnings:
            print(f"gazette ui: warning: {warning}", file=sys.stderr)
        return asyncio.run(_until_signal(loaded, in_use))
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        print(f"gazette ui: {error}\n{error.hint}", file=sys.stderr)
        return 2 if isinstance(error, NotFound) else 1


async def _until_signal(loaded: Loaded, in_use: str) -> int:
    flags = loaded.group(UiFlags)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    given_key = os.environ.get(KEY_ENV)
    key = given_key or secrets.token_urlsafe(24)
    context = Context(
        loaded, os.environ, Terminal.system(), SystemClock(), random.SystemRandom(), in_use
    )
    with tempfile.TemporaryDirectory(
        prefix="gazette-ui-", dir=flags.scratch_dir, ignore_cleanup_errors=True
    ) as scratch:
        async with serving(context, flags, key, Path(scratch)) as url:
            # The user knows a given key. Do not print it: others may read the output.
            print(f"console  {url}?key={f'${KEY_ENV}' if given_key else key}", flush=True)
            if not is_loopback(flags.host):
                print(
                    f"It listens on {flags.host}: holders of the key act with your token.",
                    flush=True,
                )
            await stopping.wait()
    return 0


@contextlib.asynccontextmanager
async def serving(context: Context, flags: UiFlags, key: str, scratch: Path) -> Any:
    """Serve the console during the block. Yield its address. Raise ``Unavailable`` for a port in use."""
    listener = bind_tcp(flags.host, flags.port)
    port = listener.getsockname()[1]
    host = "localhost" if flags.host in ("0.0.0.0", "::") else flags.host
    url = f"http://{bracketed(host)}:{port}/"
    console = Console(context, scratch, allow_changes=flags.allow_changes)
    app = ConsoleGate(application(console.reads(), console.changes()), key, f"gazette-ui-{port}")
    rules = GuardRules.of(keyless=True, endpoint=url, hosts=flags.allow_host)
    server = HttpServer(listener, HttpGuard(app, rules), tls=None, limit=_CONNECTIONS_MAX)
    try:
        async with TaskScope("console") as scope:
            server.start(scope)
            scope.daemon(console.run(), name="watch")
            try:
                yield url
            finally:
                await server.stop(_GRACE_S)
                scope.cancel()
    finally:
        await console.close()
        await context.close()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
