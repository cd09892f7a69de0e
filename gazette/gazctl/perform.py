"""The run of one command: its event loop, its signals and its exit code."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gazette.config.schema import Loaded
from gazette.errors import GazetteError
from gazette.gazctl.command import Command
from gazette.gazctl.context import Context
from gazette.gazctl.flags import LogFlags
from gazette.gazctl.io.terminal import EXIT_SIGNAL, Terminal, report_error
from gazette.gazctl.settings import prepare
from gazette.lazy import import_function
from gazette.runtime import log_setup
from gazette.runtime.clock import SystemClock


def perform(
    command: Command, loaded: Loaded, environ: Mapping[str, str], terminal: Terminal, in_use: str
) -> int:
    """Run a command as in a process of its own. Return the exit code. ``in_use`` names a context."""
    if "log" in command.groups:
        log = loaded.group(LogFlags)
        log_setup.setup(log.level, log.format, stream=terminal.stderr)
    try:
        if command.offline:
            return _run_offline(command, loaded, environ, terminal)
        return asyncio.run(_perform(command, loaded, environ, terminal, in_use, own_process=True))
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT


async def run_in_loop(argv: Sequence[str], environ: Mapping[str, str], terminal: Terminal) -> int:
    """Run one command in the caller's event loop. Return the exit code.

    The caller owns signals and logging.
    """
    prepared = prepare(argv, environ, terminal)
    if isinstance(prepared, int):
        return prepared
    command, loaded, in_use = prepared
    if command.offline:
        return _run_offline(command, loaded, environ, terminal)
    return await _perform(command, loaded, environ, terminal, in_use, own_process=False)


def _run_offline(
    command: Command, loaded: Loaded, environ: Mapping[str, str], terminal: Terminal
) -> int:
    context = _context(loaded, environ, terminal)
    function: Callable[[Context, Command], int] = import_function(command.target)
    try:
        return function(context, command)
    except GazetteError as error:
        return report_error(error, terminal)
    except OSError as error:
        return _report_os_error(error, terminal)


async def _perform(
    command: Command,
    loaded: Loaded,
    environ: Mapping[str, str],
    terminal: Terminal,
    in_use: str,
    *,
    own_process: bool,
) -> int:
    context = _context(loaded, environ, terminal, in_use)
    # Import on demand: for example, the completion of a command line needs no client.
    function: Callable[[Context], Awaitable[int]] = import_function(command.target)
    received = _handle_signals(context) if own_process else []
    try:
        try:
            return await function(context)
        except GazetteError as error:
            return report_error(error, terminal)
        except OSError as error:
            return _report_os_error(error, terminal)
        finally:
            await context.close()
    except asyncio.CancelledError:  # A signal may cancel the close, too.
        if not received:
            raise
        return EXIT_SIGNAL + received[-1]


def _context(
    loaded: Loaded, environ: Mapping[str, str], terminal: Terminal, in_use: str = ""
) -> Context:
    return Context(loaded, environ, terminal, SystemClock(), random.SystemRandom(), in_use)


def _handle_signals(context: Context) -> list[int]:
    """Make SIGINT and SIGTERM end the command. Return the list of the signals that have cancelled it."""
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def on_signal(number: int) -> None:
        context.interrupted_code = EXIT_SIGNAL + number
        if not context.on_signal():
            received.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return received


def _report_os_error(error: OSError, terminal: Terminal) -> int:
    """Report a failed file or stream of the user. Print nothing if the reader closed the pipe.

    Raise the error of an output that takes no bytes, which `main` reports.
    """
    if isinstance(error, BrokenPipeError):
        return EXIT_SIGNAL + signal.SIGPIPE
    terminal.stdout.flush()
    return report_error(GazetteError(str(error)), terminal)
