"""Stage 14 of the byte path, away from the shard: builds a store's state as a branch of its recovery log.

A `StateBuilder` opens the store of the application's ``new_store``, over a recorder whose log is a local
file. The commits become a file of operations, and hints for it: a `BuiltState`. Its checkpoint says where
the live shard continues. SQLite records its database as images at the end, and RocksDB takes whole tables
(`RocksDBStore.ingest`). So a build costs little more than the plain database would.

A store without a recovery log (`SQLStore`) is built in place: its commit publishes the state. It must be
`Claimable`, so that a late attempt cannot change a state that a live shard has opened since.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from gazette.consumer.application import Application, Store, checked_store
from gazette.consumer.contract.callbacks import require_callbacks
from gazette.consumer.transaction.shard_timers import (
    ShardTimers,
    WithTimers,
    declared_times,
    no_timers,
    open_timers,
)
from gazette.errors import Bug, Invalid, NotAllowed
from gazette.message.envelope import Envelope
from gazette.message.uuid import clock_unix_ns
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints, decode_hints
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.log.log_file import Branch, LogFile, offline_recorder
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.private_files import make_private
from gazette.runtime.clock import SystemClock
from gazette.runtime.decoders import json_decoder
from gazette.runtime.tasks import OpFuture
from gazette.stores.claims import BackfillClaim, Claimable, HeldState

PIECE_BYTES: Final = 4 << 20
"""Approximate bytes of an appended piece. Each piece ends at the end of one of the store's appends."""
_COMMIT_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class BuiltState:
    """A state that was built: a branch of ``log``, in a file of ``size`` bytes.

    Offsets in ``hints`` and ``ends`` count from the file's begin. If ``log`` is empty, the state is in its
    database already, and there is no file.
    """

    shard: str
    log: str
    branch: Branch
    hints: FSMHints
    ends: tuple[int, ...]
    size: int
    sha256: str
    checkpoint: Checkpoint
    messages: int = 0
    """Number of messages from which the state was built. If it is unknown, the number of a fold's rows."""
    facts: dict[str, Any] = field(default_factory=dict)
    """``verified``: a replay gave the same state. ``found``: the database had the state already."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(
            {
                "shard": self.shard,
                "log": self.log,
                "author": self.branch.author,
                "first_seq_no": self.branch.first_seq_no,
                "hints": self.hints.to_json().decode(),
                "ends": self.ends,
                "size": self.size,
                "sha256": self.sha256,
                "checkpoint": self.checkpoint.to_json().decode(),
                "messages": self.messages,
                "facts": self.facts,
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> BuiltState:
        """Decode the result of `to_json`. Raise ``Invalid`` for other bytes, and ``Corrupt`` if the hints or
        the checkpoint in it do not decode."""
        try:
            value = json_decoder(_Encoded).decode(data)
        except msgspec.MsgspecError as error:
            raise Invalid(f"not the description of a built state: {error}") from error
        return cls(
            value.shard,
            value.log,
            Branch(value.author, value.first_seq_no),
            decode_hints(value.hints.encode()),
            tuple(value.ends),
            value.size,
            value.sha256,
            Checkpoint.from_json(value.checkpoint.encode()),
            value.messages,
            value.facts,
        )


class _Encoded(msgspec.Struct):
    shard: str
    log: str
    author: int
    first_seq_no: int
    hints: str
    ends: list[int]
    size: int
    sha256: str
    checkpoint: str
    messages: int
    facts: dict[str, Any]


class _MessageTime(SystemClock):
    """A clock whose time is the greatest time of the messages so far."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds


class OfflineShard(WithTimers):
    """The shard that an application's callbacks get while its state is built."""

    def __init__(
        self,
        spec: ShardSpec,
        fqn: str,
        commit: Callable[[], OpFuture[Any]],
        application: Application[Any] | None = None,
    ) -> None:
        self._application = application
        self._clock = _MessageTime()
        self.timers: ShardTimers | None = None
        """Set for an application with ``on_timer``, while its state is built."""
        self._spec = spec
        self._fqn = fqn
        self._commit = commit
        self.waits: list[OpFuture[Any]] = []
        """Futures of the application that the next commit waits for."""

    @property
    def id(self) -> str:
        return self._spec.id

    @property
    def fqn(self) -> str:
        if not self._fqn:
            raise Invalid(
                "the shard's key in etcd is not known while its state is built",
                shard=self.id,
                hint="Give the consumer's --etcd.prefix as the backfill's --prefix.",
            )
        return self._fqn

    @property
    def spec(self) -> ShardSpec:
        return self._spec

    def publish_future(self, future: OpFuture[Any]) -> None:
        self.waits.append(future)

    def _open_timers(self) -> ShardTimers:
        if self.timers is None:
            raise no_timers(self._application, self.id)
        return self.timers

    def open_timers(self, store: Store) -> None:
        """Let the application set timers, if it defines ``on_timer``. For the errors see `open_timers`."""
        assert self._application is not None
        self._clock = _MessageTime()
        # Messages come in the order of publication. Without declared times, this is the order of their times:
        # the watermark waits for no source. Sources with declared times wait for each other, as on a shard.
        sources = None if declared_times(self._application, self) else ()
        self.timers = open_timers(self._application, self, store, self._clock, sources)
        if self.timers is not None:
            self.timers.begin()

    @property
    def now(self) -> datetime:
        """Processing time: the greatest time of the messages so far, in UTC. ``NotAllowed`` before any."""
        if not self._clock.seconds:
            raise NotAllowed(
                "the processing time of a build is that of its messages, and none was read",
                shard=self.id,
                hint="Use envelope.time, or read messages first.",
            )
        return super().now

    def advance(self, envelope: Envelope[Any]) -> None:
        """Advance processing time to the time of a message, if that is later."""
        if envelope.clock:
            self._clock.seconds = max(self._clock.seconds, clock_unix_ns(envelope.clock) / 1e9)

    def observe(self, batch: Sequence[Envelope[Any]]) -> None:
        """Note consumed messages: the watermark follows them."""
        timers = self.timers
        for envelope in batch if timers is not None else ():  # Without timers, no time matters.
            self.advance(envelope)
            if timers is not None and timers.observes:
                timers.observe(envelope)

    @property
    def commits_on_the_way(self) -> bool:
        """True if ``commit`` may be called before the state is finished.

        This needs a recovery log. Without a log, every commit would take effect at once.
        """
        return bool(self._spec.recovery_log)

    def commit(self) -> OpFuture[Any]:
        """Commit the writes to the store so far. Block, and return a future that has succeeded.

        Call it for states that do not fit into memory, if ``commits_on_the_way``: else ``Bug`` is raised. No
        reader sees the commit before ``finish``.
        """
        return self._commit()


def claimable(store: Store, shard: str) -> Claimable:
    """Return ``store``, which has no recovery log. Raise ``Invalid`` if a backfill cannot claim its state."""
    if not isinstance(store, Claimable):
        raise Invalid(
            f"the state of a {type(store).__name__} without a recovery log cannot be backfilled",
            hint="Implement held() and claim() of gazette.stores.claims.Claimable, as SQLStore does.",
            shard=shard,
        )
    return store


class StateBuilder:
    """Builder of the state of one shard in ``directory``, which must be empty or absent. One thread.

        with StateBuilder(application, spec, directory, rng) as builder:
            builder.store.executemany("INSERT …", rows)
            built = builder.finish(checkpoint)
            upload(builder.path, built)

    The directory is removed at the end of the block.
    """

    def __init__(
        self,
        application: Application[Any],
        spec: ShardSpec,
        directory: Path,
        rng: random.Random,
        *,
        fqn: str = "",
        claim: BackfillClaim | None = None,
    ) -> None:
        """Open the store in an empty directory. Errors of the application's ``new_store`` reach the caller.

        ``claim`` is for a store without a recovery log. Raise ``Fenced`` if the claim is not in force, and
        ``Invalid`` if the directory is not empty.
        """
        self.shard = OfflineShard(spec, fqn, self.commit, application)
        self.directory = directory.absolute()
        self.path = self.directory / "log"
        self._branch = Branch.new(rng)
        self._file: LogFile | None = None
        self._recorder: Recorder | None = None
        self._opened: Store | None = None
        self._built: BuiltState | None = None
        self._claim = claim
        make_private(self.directory)
        if next(self.directory.iterdir(), None) is not None:
            raise Invalid("a state is built in an empty directory", directory=str(self.directory))
        try:
            if spec.recovery_log:
                files = self.directory / "files"
                make_private(files)
                self._file = LogFile(self.path)
                self._recorder = offline_recorder(
                    spec.recovery_log, self._branch, files, self._file
                )
            require_callbacks(application)
            store = checked_store(application.new_store(self.shard, self._recorder))
            self._opened = store
            self.held = self._open(store)
            """The content of a store in a database when it was opened; empty for other stores."""
            self.shard.open_timers(store)
        except BaseException:
            self.close()
            raise

    def _open(self, store: Store) -> HeldState:
        """Restore a state with a log, or claim a state in a database. Return the held state."""
        if self._recorder is not None:
            return HeldState(0, store.restore_checkpoint(self.shard))
        if self._claim is None:
            raise Bug("a state in a database was begun without a claim", shard=self.shard.id)
        return claimable(store, self.shard.id).claim(self.shard, self._claim)

    @property
    def store(self) -> Any:
        """The application's store."""
        return self._opened

    @property
    def is_done(self) -> bool:
        """True if an attempt of the same run has committed the state in the database, and no owner has opened
        the state since. False for a store with a recovery log. Blocks."""
        if self._claim is None or self._opened is None:
            return False
        store = claimable(self._opened, self.shard.id)
        return store.held(self.shard).is_of(self._claim.token)

    def in_place(self, checkpoint: Checkpoint, facts: dict[str, Any]) -> BuiltState:
        """Return the state that is already in the database (`is_done`). Write nothing."""
        hints = FSMHints(log="none")
        return BuiltState(
            self.shard.id,
            "",
            self._branch,
            hints,
            (),
            0,
            "",
            checkpoint,
            0,
            {**facts, "found": True},
        )

    def commit(self, checkpoint: Checkpoint | None = None) -> OpFuture[Any]:
        """Commit the writes so far, once the application's futures are done. Block, and return a future that
        has succeeded. Without ``checkpoint``, further commits must follow.

        In a store without a recovery log, every commit takes effect at once: give a checkpoint to each.
        """
        if self._built is not None or self._opened is None:
            raise Bug("a commit of a state that is finished", shard=self.shard.id)
        if checkpoint is None and self._recorder is None:
            raise Bug("a store without a recovery log has one commit", shard=self.shard.id)
        if (timers := self.shard.timers) is not None:
            timers.finish()
        waits, self.shard.waits = self.shard.waits, []
        for future in waits:
            future.result(_COMMIT_TIMEOUT_S)
        committed = self._opened.start_commit(self.shard, checkpoint or Checkpoint(), ())
        committed.result(_COMMIT_TIMEOUT_S)
        if timers is not None:
            timers.begin()
        return committed

    def finish(
        self, checkpoint: Checkpoint, *, messages: int = 0, facts: dict[str, Any] | None = None
    ) -> BuiltState:
        """Commit, with the checkpoint from which the live shard goes on. Write nothing after this. Raise
        ``Invalid`` if the store has recorded no file."""
        self.commit(checkpoint)
        recorder, file = self._recorder, self._file
        spec = self.shard.spec
        if recorder is None or file is None:
            hints = FSMHints(log="none")
            self._built = BuiltState(
                spec.id, "", self._branch, hints, (), 0, "", checkpoint, messages, facts or {}
            )
            return self._built
        hints = recorder.end()
        if not hints.live_nodes:
            raise Invalid(
                "the store recorded no file, so there is nothing to publish",
                shard=spec.id,
                hint="Stores must record their files with the recorder that new_store is given.",
            )
        file.close()
        self._built = BuiltState(
            spec.id,
            spec.recovery_log,
            self._branch,
            hints,
            pieces(file.ends),
            file.end,
            file.sha256,
            checkpoint,
            messages,
            facts or {},
        )
        return self._built

    def close(self) -> None:
        """Release the store and remove the directory."""
        store, self._opened = self._opened, None
        try:
            if store is not None:
                store.destroy()
        finally:
            if self._file is not None:
                self._file.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pieces(ends: list[int]) -> tuple[int, ...]:
    """Return the ends of pieces, out of the ends of appends. All pieces but the last have `PIECE_BYTES` or
    more."""
    piece_ends: list[int] = []
    begin = 0
    for end in ends:
        if end - begin >= PIECE_BYTES:
            piece_ends.append(end)
            begin = end
    if ends and (not piece_ends or piece_ends[-1] != ends[-1]):
        piece_ends.append(ends[-1])
    return tuple(piece_ends)
