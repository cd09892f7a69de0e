"""The console that `gazette dev`, `run` and `demo` start beside a cluster, as a process of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from gazette.run.dev.processes import ChildProcess, python_module
from gazette.runtime.clock import Clock
from gazette.runtime.ports import free_port

KEY_ENV: Final = "GAZETTE_UI_KEY"
"""Variable with the key of the console's address: its parent knows the address then."""
_STOP_S: Final = 5.0


@asynccontextmanager
async def console_beside(
    directory: Path,
    environ: Mapping[str, str],
    clock: Clock,
    say: Callable[[str], object],
    *,
    brokers: str,
    consumers: str = "",
) -> AsyncIterator[None]:
    """Run a console for some addresses during the block, and say its address. It serves a second later.

    ``directory`` holds its log, and the states that it shows.
    """
    port, key = free_port(), secrets.token_urlsafe(24)
    scratch = directory / "console"
    scratch.mkdir(0o700, parents=True, exist_ok=True)
    flags = [f"--port={port}", f"--scratch-dir={scratch}", f"--broker.address={brokers}"]
    flags += [f"--consumer.address={consumers}"] if consumers else []
    argv = python_module("gazette.main", "ui", *flags)
    log_path = directory / "logs" / "console.log"
    process = ChildProcess("console", argv, log_path, {**environ, KEY_ENV: key}, clock)
    await process.start()
    say(f"console  http://127.0.0.1:{port}/?key={key}")
    try:
        yield
    finally:
        await process.stop(_STOP_S)
