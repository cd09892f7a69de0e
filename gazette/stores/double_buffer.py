"""The state of a shard on a hot standby, as two copies that take turns: the base of a `StateView`.

Queries read one copy while the other is brought up to date with the log. A copy that is read never
changes, so queries need no locks and see one commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gazette.consumer.application import StateView
from gazette.errors import Bug, Corrupt
from gazette.recoverylog.playback.staged_files import PlayedFiles


class Reader(Protocol):
    """Reader that queries are served with."""

    def close_reading(self) -> None: ...


class Copy(Protocol):
    """A private copy of the state. Used by one thread at a time."""

    def follow(self, files: PlayedFiles) -> None:
        """Bring this copy to the last commit in ``files``. The work is in proportion to what
        changed.

        Raise ``Corrupt`` or another ``GazetteError``. The copy is then built from nothing the next
        time.
        """
        ...

    def close(self) -> None: ...


CopyT = TypeVar("CopyT", bound=Copy)


class DoubleBuffer(StateView, Generic[CopyT]):
    """Two copies, and the readers of each."""

    def __init__(self, copies: Sequence[CopyT], open_reader: Callable[[CopyT], Reader]) -> None:
        self._open_reader = open_reader
        self.copies = tuple(copies)
        self._free = list(copies)
        self._used: dict[int, tuple[Reader, CopyT]] = {}

    def refresh(self, files: PlayedFiles) -> Any:
        if not self._free:
            raise Bug("both copies of a view are in use")
        # The copy that was used last is closest to the present, so it lacks least.
        copy = self._free.pop()
        try:
            try:
                copy.follow(files)
            except Corrupt:
                copy.follow(files)  # Begin again: our own copy may be the damaged part.
            reader = self._open_reader(copy)
        except BaseException:
            self._free.insert(0, copy)
            raise
        self._used[id(reader)] = (reader, copy)
        return reader

    def release(self, reader: Any) -> None:
        opened, copy = self._used.pop(id(reader))
        opened.close_reading()
        self._free.append(copy)

    def close(self) -> None:
        for reader, _ in self._used.values():
            reader.close_reading()
        self._used.clear()
        for copy in self.copies:
            copy.close()
