"""A broker whose stores can hang and whose clock can jump: ``python -m tools.chaos.seams FLAGS``.

It is ``gazette serve`` with two seams. Files in the directory of ``GAZETTE_CHAOS_CONTROL`` control them:

``hang-NAME``   while it is there, calls of stores below a directory NAME do not return
``clock-ID``    seconds by which the wall clock of the broker ID is wrong

Nothing of this is in a broker that ``gazette serve`` runs.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

CONTROL_ENV: Final = "GAZETTE_CHAOS_CONTROL"
BROKER_ENV: Final = "GAZETTE_CHAOS_BROKER"
_POLL_S: Final = 0.1
_CALLS: Final = ("exists", "open", "put", "list", "remove")
"""Calls that reach a store. Signing does not."""


class Control:
    """The files by which a harness controls the seams of running brokers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def hang(self, store: str) -> None:
        """Let calls of a store hang until ``release``."""
        self._hanging(store).touch()

    def release(self, store: str) -> None:
        """Let calls of a store return. May be repeated."""
        self._hanging(store).unlink(missing_ok=True)

    def hangs(self, directory: Path) -> bool:
        """Return True while calls of the store in ``directory`` must hang."""
        return any(self._hanging(part).exists() for part in directory.parts[-2:])

    def set_clock(self, broker: str, seconds: float) -> None:
        """Make a broker's wall clock wrong by so many seconds."""
        path = self.directory / f"clock-{broker}"
        partial = path.with_suffix(".partial")
        partial.write_text(f"{seconds}")
        partial.rename(path)

    def clock(self, broker: str) -> float:
        """Return by how many seconds a broker's wall clock is to be wrong."""
        try:
            return float((self.directory / f"clock-{broker}").read_text())
        except FileNotFoundError:
            return 0.0

    def _hanging(self, store: str) -> Path:
        return self.directory / f"hang-{store}"


def install(control: Control, broker: str) -> None:
    """Put the seams into this process."""
    from gazette.blobs.file import FileStore
    from gazette.runtime.clock import SystemClock

    for name in _CALLS:
        setattr(FileStore, name, _hanging(control, getattr(FileStore, name)))
    skew, true_now = _Skew(control, broker), SystemClock().now
    threading.Thread(target=skew.follow, name="clock seam", daemon=True).start()
    SystemClock.now = lambda _: true_now() + skew.seconds  # type: ignore[assignment]


def _hanging(control: Control, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        while control.hangs(self.directory):
            _wait()
        return call(self, *args, **kwargs)

    return waiting


def _wait() -> None:
    threading.Event().wait(_POLL_S)


class _Skew:
    """Seconds by which the wall clock is wrong now."""

    def __init__(self, control: Control, broker: str) -> None:
        self.seconds = control.clock(broker)
        self._control = control
        self._broker = broker

    def follow(self) -> None:
        """Read the control file again and again, on a thread of its own."""
        while True:
            self.seconds = self._control.clock(self._broker)
            _wait()


def main(argv: list[str]) -> int:
    """Run ``gazette serve`` with these flags, with the seams in place."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    install(Control(Path(os.environ[CONTROL_ENV])), os.environ[BROKER_ENV])
    from gazette.broker.main import serve

    return serve(argv, os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
