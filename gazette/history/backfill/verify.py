"""Compares built states with the result of a replay through the application."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

from gazette.consumer.application import Store, checked_store
from gazette.errors import Corrupt
from gazette.history.backfill.build import OnRead, ShardTask, read_messages
from gazette.history.backfill.content import Difference, first_difference, timers_of
from gazette.history.backfill.definition import Backfill, replay
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.log_file import Branch, LogFile
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.playback.playback import Playback
from gazette.recoverylog.playback.staged_files import StagedFiles
from gazette.recoverylog.scratch import OPENED, REPLAYS, scratch_directory
from gazette.stores.state_builder import BuiltState, OfflineShard, StateBuilder

_READ_BYTES: Final = 4 << 20


@contextmanager
def opened_state(
    backfill: Backfill, task: ShardTask, built: BuiltState, path: Path
) -> Iterator[tuple[Store, Checkpoint]]:
    """Open a built state as a promotion does: play its log back, and open its store.

    Yield the store, and its restored checkpoint. Raise ``Corrupt`` if the state cannot be opened.
    """
    with scratch_directory(OPENED, task.scratch) as scratch:
        directory = scratch / "files"
        playback = Playback(built.hints)
        files = StagedFiles(directory)
        files.prepare()
        try:
            with path.open("rb") as file:
                while True:
                    if (wanted := playback.wanted()) is not None:
                        playback.seek(*wanted)
                    file.seek(playback.read_offset)
                    if not (data := file.read(_READ_BYTES)):
                        break
                    files.perform(playback.feed(data))
            if playback.fsm.has_hints:
                raise playback.ended_too_early()
            files.make_live(playback.fsm)
        except BaseException:
            files.abandon()
            raise
        with opened_files(backfill, task.spec, playback.fsm, directory, task.fqn) as opened:
            yield opened


@contextmanager
def opened_files(
    backfill: Backfill, spec: ShardSpec, fsm: RecoveryFSM, directory: Path, fqn: str = ""
) -> Iterator[tuple[Store, Checkpoint]]:
    """Open played-back files of a shard's log with the application's store, for reading.

    Changes that the store records go to a temporary file beside ``directory``, removed at the end.
    """
    log = LogFile(directory.with_name(directory.name + ".log"))
    try:
        author = Branch.new(random.SystemRandom()).author
        recorder = Recorder(fsm, author, directory, log, spec.recovery_log, 0, offline=True)
        application = backfill.new_application()
        shard = OfflineShard(spec, fqn, _no_commit, application)
        store = checked_store(application.new_store(shard, recorder))
        try:
            yield store, store.restore_checkpoint(shard)
        finally:
            store.destroy()
    finally:
        log.close()
        log.path.unlink()


def _no_commit() -> Any:
    raise Corrupt("a state that is compared does not change")


def verify(
    task: ShardTask, built: BuiltState, path: Path, on_read: OnRead = lambda _: None
) -> Difference | None:
    """Return the first difference between a built state, staged at ``path``, and a replay. Blocks.

    Return None if both are equal. Open both with the application's store. Compare checkpoints, too.
    """
    backfill = task.load()
    with scratch_directory(REPLAYS, task.scratch) as scratch:
        rng = random.SystemRandom()
        application = backfill.new_application()
        with StateBuilder(application, task.spec, scratch / "state", rng, fqn=task.fqn) as builder:
            with task.access.open() as access:
                messages = read_messages(task, backfill, access, on_read)
                replay(application, builder.shard, builder.store, messages, discard=True)
            builder.commit(task.checkpoint)
            with opened_state(backfill, task, built, path) as (store, checkpoint):
                if checkpoint != task.checkpoint:
                    return Difference(0, checkpoint, task.checkpoint)
                shard = builder.shard
                return first_difference(
                    chain(backfill.content(shard, store), timers_of(shard, store)),
                    chain(backfill.content(shard, builder.store), timers_of(shard, builder.store)),
                )
