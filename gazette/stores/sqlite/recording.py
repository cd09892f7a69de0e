"""The modes in which a SQLite store records commits: `recording_of`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import apsw

from gazette.errors import Invalid
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.store_files import StateForm
from gazette.runtime.tasks import OpFuture
from gazette.stores.sqlite.databases import RedoDatabases
from gazette.stores.sqlite.hand_over import Former
from gazette.stores.sqlite.vfs_recording import VfsRecording

Mode = Literal["redo", "vfs"]


class Recording(Protocol):
    """Recorder of a store's commits in its log."""

    @property
    def path(self) -> Path: ...

    @property
    def attached(self) -> Mapping[str, Path]: ...

    def open(self) -> apsw.Connection: ...

    def ship(
        self, wait_for: Collection[OpFuture[Any]] = (), *, changed: bool = True
    ) -> OpFuture[Any]: ...

    @property
    def live_bytes(self) -> int: ...

    def close(self) -> None: ...


def recording_of(
    recorder: Recorder, mode: Mode, databases: Iterable[str], page_size: int
) -> Recording:
    """Return the recording of a store in ``mode``, before it is opened. Blocks.

    Take over databases of the Go original. Raise ``Invalid`` for an unknown mode, and for the log of another
    store or mode. Raise ``Corrupt`` for damaged files.
    """
    if mode == "redo":
        former = Former.take(recorder, StateForm.REDO)
        return RedoDatabases(recorder, databases, page_size=page_size, former=former)
    if mode == "vfs":
        former = Former.take(recorder, StateForm.PLAIN)
        return VfsRecording(recorder, names=databases, page_size=page_size, former=former)
    raise Invalid(f"unknown recording mode {mode!r}", hint="Use 'redo' or 'vfs'.")
