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
from gazette.runtime.private_paths import make_private_directory
from gazette.runtime.tasks import TaskScope

KEY_ENV: Final = "GAZETTE_UI_KEY"
"""Variable with the key of the console's address: so its parent knows the address."""
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
    """Run a console for some addresses during the block, and say its address. It serves after a second.

    Say if the console ends before the block. ``directory`` holds its log, and the states that it shows.
    Settings of the user for other clusters do not reach it.
    """
    port, key = free_port(), secrets.token_urlsafe(24)
    scratch = directory / "console"
    make_private_directory(scratch)
    config = scratch / "gazctl.ini"
    config.touch(0o600)
    config.write_text("")
    flags = [f"--port={port}", f"--scratch-dir={scratch}", f"--config={config}"]
    flags += [f"--broker.address={brokers}"]
    flags += [f"--consumer.address={consumers}"] if consumers else []
    argv = python_module("gazette.main", "ui", *flags)
    log_path = directory / "logs" / "console.log"
    own = {name: text for name, text in environ.items() if not name.startswith("GAZCTL_")}
    process = ChildProcess("console", argv, log_path, {**own, KEY_ENV: key}, clock)
    await process.start()
    say(f"console  http://127.0.0.1:{port}/?key={key}")

    async def watch() -> None:
        code = await process.wait()
        say(f"console  ended with exit code {code}: see {log_path}")

    try:
        async with TaskScope("console") as scope:
            scope.spawn(watch(), name="watch")
            try:
                yield
            finally:
                scope.cancel()
    finally:
        await process.stop(_STOP_S)
