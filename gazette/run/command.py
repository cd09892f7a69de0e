"""``gazette run``: an application and all that it needs, in one command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from gazette.config.schema import Schema, exit_with
from gazette.errors import Broken, GazetteError, Invalid
from gazette.run.lock import RunLock
from gazette.run.session import RunSession
from gazette.run.settings import RunBrokerFlags, RunEtcdFlags, RunFlags
from gazette.runtime.clock import SystemClock
from gazette.runtime.file_limit import raise_file_limit
from gazette.runtime.tasks import TaskScope

_DESCRIPTION: Final = """Run an application: start etcd and a broker on this machine, create the
journals and shards that the application declares, and serve it. A restart finds the state again.
Flags after -- are those of the application: see `python app.py serve --help`."""
_EXAMPLES: Final = """examples:
  gazette run app.py --reload
  gazette run package.module:Class --standbys 1
  gazette run app.py -- --consumer.max-restarts=3"""
_TARGET: Final = "TARGET [-- FLAGS]"
_EXIT_USAGE: Final = 2


def run(argv: Sequence[str]) -> int:
    """Run the subcommand. Return 0 after a signal to stop, 1 for a failure, 2 for the user's mistake."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    own_words, args = words[:end], words[end + 1 :]
    schema = Schema(
        "gazette run",
        {"": RunFlags, "broker": RunBrokerFlags, "etcd": RunEtcdFlags},
        arguments=_TARGET,
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    try:
        loaded = schema.load(own_words, {})
        target = _target(loaded.arguments)
        flags = loaded.group(RunFlags)
        brokers = loaded.group(RunBrokerFlags).address
        etcd = loaded.group(RunEtcdFlags).address
        _check(flags, brokers, etcd)
        raise_file_limit()
        assert flags.dir is not None
        with RunLock(flags.dir, target) as lock:
            session = RunSession(
                *(target, flags, brokers, etcd, args, SystemClock(), say, os.environ, lock.is_lost)
            )
            return asyncio.run(_until_signal(session, after_crash=lock.after_crash))
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        with contextlib.suppress(OSError):  # The terminal may be closed.
            print(f"gazette run: {error}\n{error.hint}", file=sys.stderr, flush=True)
        return 1


def say(text: str, *, at: bool = True) -> None:
    """Print a line, with the time of day if ``at``. Raise ``Broken`` if the output takes no text."""
    try:
        print(f"{time.strftime('%H:%M:%S')}  {text}" if at else text, flush=True)
    except OSError as error:
        # Python writes the rest of its buffer when the process ends. That write must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Broken(
            f"cannot write to the standard output: {error.strerror}",
            hint="Everything has stopped, and the state stays. To run without a reader, write to a file.",
        ) from error


def _target(words: Sequence[str]) -> str:
    if len(words) != 1:
        raise Invalid(
            f"{len(words)} applications are named (expected 1)"
            if words
            else "no application is named",
            path="gazette run",
            hint="Name its file or class, as in gazette run app.py, and its own flags after --.",
        )
    try:
        words[0].encode()
    except UnicodeEncodeError as error:
        raise Invalid(
            "the name of the application is no UTF-8", path="gazette run", hint="Rename its file."
        ) from error
    return words[0]


def _check(flags: RunFlags, brokers: str, etcd: str) -> None:
    """Raise ``Invalid`` for flags that do not fit together, before anything is started."""
    if flags.dir is None:
        raise Invalid("a directory is needed", path="--dir")
    if bool(brokers) != bool(etcd):
        present, missing = ("broker", "etcd") if brokers else ("etcd", "broker")
        raise Invalid(
            f"a cluster is reached by both addresses, and only --{present}.address is given",
            path=f"--{missing}.address",
            hint=f"Give --{missing}.address as well, or none: then a cluster is started here.",
        )
    if flags.store and not brokers:
        raise Invalid(
            "a cluster that is started here stores into its own directory",
            path="--store",
            hint="Leave it out, or give --broker.address.",
        )
    if flags.report <= 0:
        raise Invalid("the interval must be above zero", path="--report")
    flags.member_count()
    flags.spec_settings(embedded=not brokers)


def _say_unless_closed(text: str) -> None:
    """Print a line, and ignore an output that takes no text: after SIGHUP the terminal is gone."""
    with contextlib.suppress(Broken):
        say(text, at=False)


async def _until_signal(session: RunSession, *, after_crash: bool) -> int:
    """Run the session until it ends, or a signal asks for a stop. Return its exit code; 0 after a signal."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_on_signal() -> None:
        if stopping.is_set():
            _say_unless_closed(f"still stopping (kill -9 {os.getpid()} loses nothing either) …")
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Under nohup it stays ignored.
        loop.add_signal_handler(signal.SIGHUP, stop_on_signal)
    async with TaskScope("run") as scope:
        work = scope.spawn(session.run(after_crash=after_crash), name="session")
        stop = scope.spawn(stopping.wait(), name="stop")
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            _say_unless_closed("stopping …")
            work.cancel()
            await asyncio.wait({work})
        stop.cancel()
        return 0 if work.cancelled() else work.result()
    raise AssertionError("unreachable: the scope raises, or its body returns")
