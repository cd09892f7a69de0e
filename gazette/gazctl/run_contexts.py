"""Contexts of `gazette run`. A context is a file that its run keeps locked. A killed run leaves the file
unlocked."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from gazette.errors import Invalid
from gazette.gazctl.contexts import Contexts, contexts_directory, not_found
from gazette.runtime.private_paths import make_private_directory

DIRECTORY: Final = "runs"
_NAME: Final = "run"
_SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True)
class RunContext:
    """The addresses of a run, and the application that it runs."""

    broker: str
    consumer: str
    target: str
    directory: str
    host: str = ""
    """Name of the machine: other machines do not reach these addresses."""

    @property
    def addresses(self) -> dict[str, str]:
        return {"broker": self.broker, "consumer": self.consumer}


@contextmanager
def published(environ: Mapping[str, str], run: RunContext) -> Iterator[str]:
    """Let `gazctl` of this user find a run during the block. Yield the name of its context, which is unique.

    The file of the context is locked until the block or the process ends, in whatever way. Raise ``Invalid``
    without a home directory, or if the file cannot be written.
    """
    home = contexts_directory(environ)
    if home is None:
        raise Invalid(
            "there is no place for contexts",
            path="HOME",
            hint="Set HOME to a directory that can be written.",
        )
    user_contexts = Contexts.load(environ).named
    directory = home / DIRECTORY
    content = json.dumps(asdict(replace(run, host=socket.gethostname()))).encode()
    try:
        make_private_directory(directory)
        name, fd = _taken(directory, frozenset(user_contexts))
    except OSError as error:
        raise Invalid(
            f"contexts cannot be written: {error.strerror}",
            path=str(directory),
            hint="Give this user the right to write there.",
        ) from error
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)
        yield name
    finally:
        (directory / f"{name}{_SUFFIX}").unlink(missing_ok=True)
        os.close(fd)


def run_contexts(environ: Mapping[str, str]) -> dict[str, RunContext]:
    """Return the contexts of all present runs of this user on this host, by name."""
    home = contexts_directory(environ)
    if home is None:
        return {}
    host = socket.gethostname()
    paths = sorted((home / DIRECTORY).glob(f"*{_SUFFIX}"), key=lambda path: path.stem)
    live_runs = ((path.stem, _live(path)) for path in paths)
    return {name: run for name, run in live_runs if run is not None and run.host == host}


def the_run_context(
    environ: Mapping[str, str], kinds: Collection[str]
) -> tuple[str, RunContext] | None:
    """Return the context of the only present run; None without a run. Of several runs with equal addresses
    of these ``kinds``, return one. Raise ``Invalid`` if several runs have different addresses."""
    runs = run_contexts(environ)
    if len({tuple(run.addresses[kind] for kind in kinds) for run in runs.values()}) > 1:
        names = ", ".join(f"{name} ({run.target} in {run.directory})" for name, run in runs.items())
        raise Invalid(
            f"{len(runs)} applications are run, and no address is given: {names}",
            path="--context",
            hint=f"Say which one, as by --context={next(iter(runs))} or GAZCTL_CONTEXT.",
        )
    return next(iter(runs.items()), None)


def addresses_of(environ: Mapping[str, str], contexts: Contexts, name: str) -> dict[str, str]:
    """Return the addresses of a context of the user, or of a run. Raise ``NotFound`` if there is neither."""
    if name in contexts.named:
        return contexts.named[name]
    runs = run_contexts(environ)
    if name in runs:
        return runs[name].addresses
    raise not_found(name, {*contexts.named, *runs}, "--context")


def _taken(directory: Path, own: frozenset[str]) -> tuple[str, int]:
    """Return a name that neither a present run nor a context of the user (``own``) has, and the descriptor of
    its locked file. Reuse files of ended runs."""
    for number in itertools.count(1):
        name = _NAME if number == 1 else f"{_NAME}-{number}"
        if name in own:
            continue
        path = directory / f"{name}{_SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # A run that ends removes its file. If it did so after the open, the locked file has no name any more.
        if (
            _try_lock(fd, fcntl.LOCK_EX)
            and path.exists()
            and os.path.samestat(os.fstat(fd), path.stat())
        ):
            return name, fd
        os.close(fd)
    raise AssertionError("unreachable: there is always one more number")


def _live(path: Path) -> RunContext | None:
    """Return the context in a file; None if the run has ended, or the file has no whole context (yet)."""
    try:
        with path.open("rb") as file:
            if _try_lock(file.fileno(), fcntl.LOCK_SH):
                return None  # No run holds the lock: the run has ended.
            run = RunContext(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None
    return run if all(isinstance(value, str) for value in asdict(run).values()) else None


def _try_lock(fd: int, kind: int) -> bool:
    """Lock a file until it is closed. Return False if another process has its lock."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
