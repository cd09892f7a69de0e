"""Stage 14 of the byte path: a shard's state as one JSON file, written whole at every commit.

The reference store: small, readable with any tool, and in the form of the Go original's store.
``state.json`` has one JSON document a line: the read-through offsets, the state, the checkpoint and, if
there are timers, the timers.

The log grows by the size of the state per transaction, but a recovery reads only one transaction.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

import msgspec

from gazette.consumer.application import Shard, StateView, Store
from gazette.consumer.timers.memory_timers import MemoryTimers
from gazette.consumer.timers.timer import TimerTable
from gazette.errors import Corrupt, Invalid
from gazette.message.values import ValueEncoding
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.recoverylog.disk_errors import check_lengths, disk_error
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.playback.staged_files import PlayedFiles
from gazette.recoverylog.private_files import write_private
from gazette.recoverylog.store_files import StateForm, require_form
from gazette.runtime.decoders import json_decoder
from gazette.runtime.tasks import OpFuture

StateT = TypeVar("StateT")

STATE_PATH = "/state.json"
NEXT_PATH = "/next.json"


class JSONFileStore(Store, Generic[StateT]):
    """A store whose state is one object of a declared type, written as JSON.

    The JSON reads back as ``state_type``: ``dict[int, int]``, a Struct, a dataclass. A plain ``dict`` or
    ``list`` has only values of JSON. A commit raises ``Invalid`` for a value that would not read back
    equal, with its path, such as ``state["sales"][7]``.

    The shard's thread changes ``state`` freely. Other threads call ``read``.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        state_type: type[StateT],
        new_state: Callable[[], StateT] | None = None,
    ) -> None:
        """Open the played-back state, or make ``new_state()`` (default: ``state_type()``).

        Raise ``Invalid`` for a type that JSON cannot be decoded to, a first state that would not read back
        equal, and the log of another store. Raise ``Corrupt`` for a damaged file, or a state of another type.
        """
        if recorder is None:
            raise Invalid(
                "JSONFileStore needs a recovery log",
                hint="Set recovery_log_prefix in the shard's specification.",
            )
        make_state = _maker_of(state_type, new_state)
        self._recorder = recorder
        self._directory = recorder.directory
        self._lock = threading.Lock()
        self._thread: int | None = threading.get_ident()
        """The shard's thread; None for a view, which has no such thread."""
        self._checkpoint = Checkpoint()
        self._timers: MemoryTimers | None = None
        self._encoding: ValueEncoding[StateT] = ValueEncoding(state_type, "state_type")
        require_form(recorder.fsm.links, "JSONFileStore", StateForm.JSON)
        check_lengths(recorder)
        path = self._directory / STATE_PATH.lstrip("/")
        if path.exists():
            self.state: StateT = self._load(path.read_bytes())
        else:
            self.state = make_state()
            """State of the running transaction. Only the shard's thread uses it."""
            self._committed = self._encode()

    @classmethod
    def view(cls, state_type: type[Any], new_state: Callable[[], Any] | None = None) -> StateView:
        """Return a view for `Application.new_view`.

        Queries on a standby get an object of this class that was made without ``__init__``. Methods that use
        only ``read`` work as on the primary. Raise ``Invalid`` as ``__init__`` does for the arguments.
        """
        make_state = _maker_of(state_type, new_state)
        encoding: ValueEncoding[Any] = ValueEncoding(state_type, "state_type")

        def open_reader(files: PlayedFiles) -> Any:
            store = cls.__new__(cls)
            store._lock = threading.Lock()
            store._thread = None
            store._timers = None
            store._encoding = encoding
            require_form(files.paths, "JSONFileStore", StateForm.JSON)
            path = files.paths.get(STATE_PATH.lstrip("/"))
            if path is None:
                store.state = make_state()
                store._committed = store._encode()
            else:
                store.state = store._load(path.read_bytes())
            return store

        return _JSONFileView(open_reader)

    def _encode(self) -> bytes:
        """Return the state as JSON, to commit it. Raise ``Invalid`` if the JSON would not read back equal."""
        return self._encoding.encode(self.state, "state")

    def _load(self, data: bytes) -> StateT:
        """Return the state in a file. Take over its checkpoint and timers. Raise ``Corrupt`` for damage."""
        *lines, tail = data.split(b"\n")
        if tail:
            lines = []  # The file lost its end.
        if len(lines) < 2:
            raise Corrupt("state.json does not hold offsets and state", lines=len(lines))
        try:
            offsets = json_decoder(dict[str, int]).decode(lines[0])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"the offsets of state.json do not decode: {error}") from error
        self._committed = lines[1]
        state = self._encoding.decode(lines[1], "the state of state.json")
        try:
            checkpoint = Checkpoint.from_json(lines[2]) if len(lines) > 2 else Checkpoint()
        except ValueError as error:
            raise Corrupt(f"the checkpoint of state.json does not decode: {error}") from error
        if len(lines) > 3:
            self._timers = MemoryTimers(lines[3])
        # The offsets of the first document take precedence: older writers have them only there.
        sources = dict(checkpoint.sources)
        for journal, offset in offsets.items():
            source = sources.get(journal, SourceCheckpoint())
            sources[journal] = dataclasses.replace(source, read_through=offset)
        self._checkpoint = dataclasses.replace(checkpoint, sources=sources)
        return state

    def read(self) -> StateT:
        """Return a copy of the state. Any thread.

        On the shard's thread, return the state of the running transaction; on others, the state of the last
        commit. Raise ``Invalid`` if the running state would not read back equal.
        """
        if threading.get_ident() == self._thread:
            return self._encoding.decode(self._encode(), "state")
        with self._lock:
            committed = self._committed
        return self._encoding.decode(committed, "state")

    def plain(self) -> Any:
        """Return the state of the running transaction, as dicts, lists and other plain values of JSON."""
        return msgspec.json.decode(self._encode())

    def start_commit(
        self, shard: Shard, checkpoint: Checkpoint, wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        state = self._encode()
        offsets = {name: source.read_through for name, source in checkpoint.sources.items()}
        documents: tuple[bytes, ...] = (
            msgspec.json.encode(offsets),
            state,
            checkpoint.to_json(),
        )
        if self._timers is not None and not self._timers.is_empty:
            documents = (*documents, self._timers.to_json())
        data = b"".join(document + b"\n" for document in documents)
        next_file = self._directory / NEXT_PATH.lstrip("/")
        try:
            write_private(next_file, data)
            os.replace(next_file, self._directory / STATE_PATH.lstrip("/"))
        except OSError as error:
            raise disk_error("write the state", self._directory, error) from error
        with self._recorder.group(wait_for) as group:
            group.write(group.create(NEXT_PATH), 0, data)
            group.rename(NEXT_PATH, STATE_PATH)
        self._checkpoint = checkpoint
        with self._lock:
            self._committed = state
        return group.future

    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        return self._checkpoint

    def timer_table(self, shard: Shard) -> TimerTable:
        """Return the timers. All timers are in memory, and each commit writes all of them."""
        if self._timers is None:
            self._timers = MemoryTimers()
        return self._timers

    @property
    def holds_timers(self) -> bool:
        return self._timers is not None and self._timers.holds_timers

    def destroy(self) -> None:
        """Do nothing: no file is held open."""


def _maker_of(state_type: Any, new_state: Any) -> Callable[[], Any]:
    """Return the function that makes the first state: by default the type. Raise ``Invalid`` if it cannot be
    called."""
    make = state_type if new_state is None else new_state
    if not callable(make):
        raise Invalid(
            f"{make!r:.80} makes no state",
            path="state_type" if new_state is None else "new_state",
            hint="Give a type, such as dict[str, int], and a function that returns the first state.",
        )
    return make  # type: ignore[no-any-return]


class _JSONFileView(StateView):
    """A view that reads the whole file after each commit, since each commit writes the whole file."""

    def __init__(self, open_reader: Callable[[PlayedFiles], Any]) -> None:
        self._open_reader = open_reader

    def refresh(self, files: PlayedFiles) -> Any:
        return self._open_reader(files)

    def release(self, reader: Any) -> None:
        """Do nothing: no file is held open."""

    def close(self) -> None:
        """Do nothing: no file is held open."""
