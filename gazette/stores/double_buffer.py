"""A shard's state on a hot standby, as two copies that take turns: the base of a `StateView`.

Queries read one copy while the other one follows the log. A copy does not change while queries read it,
so they need no locks and see one commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gazette.consumer.application import StateView
from gazette.errors import Bug, Corrupt
from gazette.recoverylog.playback.staged_files import PlayedFiles


class Reader(Protocol):
    """The object that queries get in place of the primary's store."""

    def close_reading(self) -> None: ...


class Copy(Protocol):
    """A private copy of the state. Used by one thread at a time."""

    def follow(self, files: PlayedFiles) -> None:
        """Bring this copy to the last commit in ``files``. The work is in proportion to the changes.

        After an error (``Corrupt`` or another ``GazetteError``) the next call builds the copy from nothing.
        """
        ...

    def close(self) -> None: ...


CopyT = TypeVar("CopyT", bound=Copy)


class DoubleBuffer(StateView, Generic[CopyT]):
    """Two copies and their readers."""

    def __init__(self, copies: Sequence[CopyT], open_reader: Callable[[CopyT], Reader]) -> None:
        self._open_reader = open_reader
        self.copies = tuple(copies)
        self._free = list(copies)
        """Copies without a reader, the newest last."""
        self._used: dict[int, tuple[Reader, CopyT]] = {}

    def refresh(self, files: PlayedFiles) -> Any:
        if not self._free:
            raise Bug("both copies of a view are in use")
        # The copy that was released last is the newest, so it needs the fewest changes.
        copy = self._free.pop()
        try:
            try:
                copy.follow(files)
            except Corrupt:
                copy.follow(files)  # Perhaps only the copy was damaged: build it from nothing.
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
