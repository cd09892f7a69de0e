"""``gazctl``: the operator's commands on journals and shards.

Exit codes:

0: done.
1: failed, or done in part; stderr says what.
2: the command line, the configuration or a specification is wrong.
128 plus the signal's number: interrupted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from gazette.config.schema import Loaded, Schema, options_of
from gazette.errors import GazetteError, Invalid, NotFound
from gazette.gazctl.command import Command
from gazette.gazctl.commands import COMMANDS, GROUPS, schema_of
from gazette.gazctl.context import Context
from gazette.gazctl.contexts import ADDRESSES, Contexts, as_variables
from gazette.gazctl.flags import LogFlags, SharedFlags
from gazette.gazctl.io.terminal import Terminal
from gazette.gazctl.run_contexts import addresses_of, the_run_context
from gazette.lazy import import_function
from gazette.runtime import log_setup
from gazette.runtime.clock import SystemClock
from gazette.runtime.near_names import near_name
from gazette.runtime.standard_streams import open_closed_streams, with_streams
from gazette.version import __version__

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_SIGNAL: Final = 128

_GROUP_SUMMARIES: Final = {
    "journals": "Journals",
    "shards": "Shards of consumers",
    "context": "Named addresses",
}


def usage(group: str = "") -> str:
    """Return the text with all commands, or with those of a group."""
    if group:
        rows = [(entry.words[1], entry.summary) for entry in COMMANDS if entry.words[0] == group]
    else:
        rows = [
            (name, f"{summary}: {', '.join(_commands_of(name))}")
            for name, summary in _GROUP_SUMMARIES.items()
        ]
        rows += [(command.name, command.summary) for command in COMMANDS if len(command.words) == 1]
    width = max(len(name) for name, _ in rows)
    lines = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in rows)
    program = f"gazctl {group}".rstrip()
    return (
        f"gazctl {__version__}\n\nusage: {program} COMMAND [FLAGS]\n\n{lines}\n\n"
        f"`{program} COMMAND --help` lists the flags of a command.\n"
    )


def _commands_of(group: str) -> list[str]:
    return [command.words[1] for command in COMMANDS if command.words[0] == group]


def find_command(argv: Sequence[str]) -> tuple[Command | str, list[str]]:
    """Return the named command and the words after it; or a text to show, such as for ``--help``.

    If no command is named, return an empty text and the words so far. Shared flags may stand before the
    command or between its words. Raise ``Invalid`` for an unknown command.
    """
    args = list(argv)
    leading_flags: list[str] = []
    words: list[str] = []
    names = {command.words: command for command in COMMANDS}
    while tuple(words) not in names:
        leading_flags += _take_leading_flags(args)
        if not args:
            break
        word = args[0]
        if word in ("-h", "--help", "help") and not words[1:]:
            args.pop(0)
            if word == "help" and args:
                return find_command([*args, "--help"])
            return usage(words[0] if words else ""), []
        if word.startswith("-"):
            break
        candidates = sorted(
            {command.words[len(words)] for command in COMMANDS if _begins(command.words, words)}
        )
        if word not in candidates:
            near = near_name(word, candidates)
            guess = f" (did you mean {near}?)" if near else ""
            path = " ".join(["gazctl", *words])
            raise Invalid(
                f"unknown command {word}{guess}",
                # Without a group, the path would only name the program, like the message.
                path=path if words else "",
                hint=f"See `{path} --help`.",
            )
        words.append(args.pop(0))
    command = names.get(tuple(words))
    if command is not None:
        return command, [*leading_flags, *args]
    if args:
        path = " ".join(["gazctl", *words])
        raise Invalid(f"expected a command, got {args[0]}", path=path, hint=f"See `{path} --help`.")
    return "", words


def _begins(words: tuple[str, ...], begin: Sequence[str]) -> bool:
    return len(words) > len(begin) and list(words[: len(begin)]) == list(begin)


def _take_leading_flags(words: list[str]) -> list[str]:
    """Remove shared flags, with their values, from the begin of ``words``. Return flags and values."""
    shared = {
        option.flag: option
        for group, cls in {"": SharedFlags, **GROUPS}.items()
        for option in options_of(group, cls)
    }
    flags: list[str] = []
    while words and words[0].startswith("--"):
        flag, equals, _ = words[0].partition("=")
        if flag not in shared and flag != "--config":
            break
        flags.append(words.pop(0))
        if not equals and words:
            flags.append(words.pop(0))
    return flags


def run(argv: Sequence[str], environ: Mapping[str, str], terminal: Terminal) -> int:
    """Run one command as in a process of its own. Return the exit code."""
    prepared = _prepare(argv, environ, terminal)
    if isinstance(prepared, int):
        return prepared
    command, loaded, in_use = prepared
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
    """Run one command in the caller's event loop. The caller owns signals and logging. See ``run``."""
    prepared = _prepare(argv, environ, terminal)
    if isinstance(prepared, int):
        return prepared
    command, loaded, in_use = prepared
    if command.offline:
        return _run_offline(command, loaded, environ, terminal)
    return await _perform(command, loaded, environ, terminal, in_use, own_process=False)


def _prepare(
    argv: Sequence[str], environ: Mapping[str, str], terminal: Terminal
) -> tuple[Command, Loaded, str] | int:
    """Return the command, its settings and the context's name; the exit code if there is nothing to run."""
    try:
        if argv and argv[0] in ("-V", "--version", "version"):
            terminal.write(f"{__version__}\n")
            return EXIT_OK
        command, words = find_command(argv)
        if isinstance(command, str):
            if not command:
                terminal.stderr.write(usage(words[0] if words else ""))
                return EXIT_FAILED
            terminal.write(command)
            return EXIT_OK
        schema = schema_of(command)
        flags = words[: words.index("--")] if "--" in words else words
        if "-h" in flags or "--help" in flags:
            terminal.write(schema.parser().format_help())
            return EXIT_OK
        loaded, in_use = _load(command, schema, words, environ)
        for warning in loaded.warnings:
            terminal.note(f"gazctl: warning: {warning}")
    except (Invalid, NotFound) as error:
        return report_error(error, terminal)
    except BrokenPipeError:
        return EXIT_SIGNAL + signal.SIGPIPE
    return command, loaded, in_use


def _load(
    command: Command, schema: Schema, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[Loaded, str]:
    """Return the settings, and the name of the context whose addresses are used.

    Addresses of a context replace variables that the environment lacks. Without any address, use the
    addresses of the only application that `gazette run` runs. Raise ``Invalid`` for a wrong setting, or for
    several such applications. Raise ``NotFound`` for an unknown context.
    """
    loaded = schema.load(argv, environ)
    if not command.groups or command.words[0] == "context":
        return loaded, ""
    contexts = Contexts.load(environ)
    name = loaded.group(SharedFlags).context or contexts.current
    if name:
        addresses = addresses_of(environ, contexts, name)
    else:
        groups = [group for group in ADDRESSES if group in command.groups]
        only_run = the_run_context(environ, groups) if _has_no_address(loaded) else None
        if only_run is None:
            return loaded, ""
        name, addresses = only_run[0], only_run[1].addresses
    variables = {
        variable: address
        for variable, address in as_variables(addresses).items()
        if not environ.get(variable)
    }
    return schema.load(argv, {**environ, **variables}), name


def _has_no_address(loaded: Loaded) -> bool:
    sources = [loaded.sources.get(f"{group}.address", "default") for group in ADDRESSES]
    return all(source == "default" for source in sources)


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
        return await function(context)
    except GazetteError as error:
        return report_error(error, terminal)
    except OSError as error:
        return _report_os_error(error, terminal)
    except asyncio.CancelledError:
        if not received:
            raise
        return EXIT_SIGNAL + received[-1]
    finally:
        await context.close()


def _context(
    loaded: Loaded, environ: Mapping[str, str], terminal: Terminal, in_use: str = ""
) -> Context:
    return Context(loaded, environ, terminal, SystemClock(), random.SystemRandom(), in_use)


def _handle_signals(context: Context) -> list[int]:
    """Make SIGINT and SIGTERM end the command. Return a list: each signal that cancels it is added there."""
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def on_signal(number: int) -> None:
        if not context.on_signal():
            received.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return received


def report_error(error: GazetteError, terminal: Terminal) -> int:
    """Print what failed and what to do. Return the exit code."""
    with suppress(BrokenPipeError):
        text = str(error)
        terminal.note(text if text.startswith("gazctl ") else f"gazctl: {text}")
        if error.hint and error.hint != type(error).default_hint:
            terminal.note(error.hint)
    return EXIT_USAGE if isinstance(error, Invalid) else EXIT_FAILED


def _report_os_error(error: OSError, terminal: Terminal) -> int:
    """Report a failed file or stream of the user. Print nothing if the reader closed the pipe."""
    if isinstance(error, BrokenPipeError):
        return EXIT_SIGNAL + signal.SIGPIPE
    return report_error(GazetteError(str(error)), terminal)


def main() -> None:
    open_closed_streams()
    terminal = Terminal.system()

    def run_and_flush() -> int:
        code = run(sys.argv[1:], os.environ, terminal)
        terminal.stdout.flush()
        return code

    # Not `sys.exit`, which waits for every thread: a thread may wait for a pipe that no process uses.
    os._exit(with_streams(run_and_flush))


if __name__ == "__main__":
    main()
