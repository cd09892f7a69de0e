"""``gazctl shards recover``: play back the files of a shard from its recovery log."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams
from gazette.client.shards import ShardClient
from gazette.errors import Corrupt, Invalid, NotAllowed, NotFound
from gazette.gazctl.context import Context
from gazette.gazctl.flags import RecoverFlags
from gazette.gazctl.io.output import Table
from gazette.gazctl.journals.fragments import fragments_of
from gazette.gazctl.shards.list import get_shard
from gazette.protocol.hints import FSMHints
from gazette.protocol.shard import ShardSpec
from gazette.protocol.text.validation import within
from gazette.recoverylog.convert import convert
from gazette.recoverylog.log.broker_logs import BrokerLogs
from gazette.recoverylog.playback.player import Player, RecoveredState
from gazette.recoverylog.shard_state import ShardState, to_standalone
from gazette.recoverylog.time_travel import Moment, open_at
from gazette.runtime.numbers import bytes_text
from gazette.runtime.private_paths import make_private_directory
from gazette.runtime.tasks import BlockingPool

STAGING: Final = ".gazctl-recover"
"""Directory within the target directory: recovered files are moved from there, without a copy."""


async def run(context: Context) -> int:
    flags = context.flags(RecoverFlags)
    if flags.convert is not None:
        return await _convert(context, flags, flags.convert)
    if not flags.id:
        raise Invalid("a shard is required", path="--id")
    if flags.dir is None:
        raise Invalid("a directory is required", path="--dir")
    moment = None
    if flags.at:
        if flags.backup >= 0:
            raise Invalid(
                "--at chooses among all hints, and excludes --backup", hint="Leave out --backup."
            )
        with within("--at"):
            moment = Moment.parse(flags.at)
    with sole_use(flags.dir):
        return await _recover(context, flags, flags.dir, moment)


async def _recover(
    context: Context, flags: RecoverFlags, target: Path, moment: Moment | None
) -> int:
    pool = BlockingPool("recover", 2)
    try:
        await pool.run(check_directory, target, force=flags.force)
        consumer, client = await context.consumer(), await context.broker()
        spec = (await get_shard(context, consumer, flags.id)).spec
        if not spec.recovery_log:
            raise Invalid(f"{spec.id} has no recovery log: its state is elsewhere", path="--id")
        if moment is None:
            hints = await choose_hints(context, consumer, client, spec, flags.backup)
            log = (await play(context, client, hints, target / STAGING, pool)).log
        else:
            state = await travel(context, consumer, client, spec, moment, target / STAGING, pool)
            await pool.run(state.close)
            log = state.log
        databases = await pool.run(finish_directory, target)
        table = await pool.run(_table, target)
    finally:
        pool.close()
    context.terminal.write(table.text(context.terminal))
    context.terminal.note(f"recovered {spec.id} from {log} into {target}")
    for name in databases:
        context.terminal.note(f"{target / name} is a SQLite database")
    return 0


async def _convert(context: Context, flags: RecoverFlags, directory: Path) -> int:
    """Make databases of a directory that another player has filled. Needs no cluster. Raise ``Invalid`` for
    flags of a recovery."""
    values = {
        "--id": flags.id,
        "--dir": flags.dir,
        "--force": flags.force,
        "--at": flags.at,
        "--backup": flags.backup >= 0,
    }
    for flag in (name for name, value in values.items() if value):
        raise Invalid("does not go with --convert", path=flag, hint="Leave it out.")
    pool = BlockingPool("convert", 1)
    try:
        databases = await pool.run(convert, directory)
        table = await pool.run(_table, directory)
    finally:
        pool.close()
    context.terminal.write(table.text(context.terminal))
    for database in databases:
        about = f"; some could not be checked ({database.unchecked})" if database.unchecked else ""
        context.terminal.note(f"{database.path} is a SQLite database{about}")
    return 0


@contextmanager
def sole_use(directory: Path) -> Iterator[None]:
    """Make a directory, and keep other recoveries away from it in the block. Raise ``Invalid`` if it cannot
    be used, and ``NotAllowed`` if another recovery uses it."""
    try:
        make_private_directory(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Invalid(f"cannot use {directory}: {error.strerror}", path="--dir") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotAllowed(
                f"another recovery writes to {directory}",
                path="--dir",
                hint="Wait until it ends, or give another directory.",
            ) from None
        except OSError:
            pass  # This file system has no locks.
        yield
    finally:
        os.close(descriptor)


def check_directory(directory: Path, *, force: bool) -> None:
    """Remove the staging directory of an interrupted recovery.

    Raise ``Invalid`` if the directory cannot be used, or has other files without ``force``.
    """
    try:
        # An interrupted recovery may have left the staging directory. No other program uses it.
        shutil.rmtree(directory / STAGING, ignore_errors=True)
        occupied = next(directory.iterdir(), None)
    except OSError as error:
        raise Invalid(f"cannot use {directory}: {error.strerror}", path="--dir") from error
    if occupied is not None and not force:
        raise Invalid(
            f"{directory} is not empty (it has {occupied.name})",
            path="--dir",
            hint="Choose another directory, or replace its content with --force.",
        )


async def choose_hints(
    context: Context, consumer: ShardClient, client: Client, spec: ShardSpec, backup: int = -1
) -> FSMHints:
    """Return the newest hints of a shard, or the hints of a ``backup``.

    Without stored hints, return empty hints if the log can be played from its first byte. Raise ``NotFound``
    if there is no such backup. Raise ``Corrupt`` if there are no hints and the log was pruned: a play-back
    would give an empty state.
    """
    async with context.answering(consumer.address):
        stored = await consumer.get_hints(spec.id)
    if backup >= 0:
        backup_hints = stored.backups[backup] if backup < len(stored.backups) else None
        if backup_hints is None:
            raise NotFound(
                "the shard has no such backup of its hints", shard=spec.id, backup=backup
            )
        return backup_hints
    for hints in (stored.primary, *stored.backups):
        if hints is not None:
            return hints
    log = spec.recovery_log
    fragments = await fragments_of(context, client, FragmentsParams(log))
    begin = min((stored_fragment.fragment.begin for stored_fragment in fragments), default=0)
    if begin > 0:
        raise Corrupt(
            "the shard has no hints, and its recovery log was pruned",
            shard=spec.id,
            log=log,
            begin=begin,
            hint=f"Restore its hints in etcd, at {spec.hint_primary_key}.",
        )
    return FSMHints(log=log)


async def travel(
    context: Context,
    consumer: ShardClient,
    client: Client,
    spec: ShardSpec,
    moment: Moment,
    directory: Path,
    pool: BlockingPool,
) -> ShardState:
    """Recover the state of a past moment, and say which it is. The caller closes the result."""
    async with context.answering(consumer.address):
        stored = await consumer.get_hints(spec.id)
    hints = [slot for slot in (stored.primary, *stored.backups) if slot is not None]
    source = BrokerLogs(client, asyncio.get_running_loop(), stall_timeout_s=context.timeout_s)
    state = await pool.run(
        open_at, source, hints or [FSMHints(log=spec.recovery_log)], directory, moment
    )
    time = "" if state.time is None else f", recorded at {state.time.isoformat()}"
    context.terminal.note(f"the state at offset {state.offset}{time}")
    return state


async def play(
    context: Context, client: Client, hints: FSMHints, directory: Path, pool: BlockingPool
) -> RecoveredState:
    """Play the log of ``hints`` to its write head, into a directory. Show the progress."""
    player = Player(
        hints, directory, client, context.clock, pool, stall_timeout_s=context.timeout_s
    )
    player.finish()

    def amounts() -> tuple[int, int]:
        progress = player.progress
        return progress.bytes_read, progress.bytes_read + progress.lag_bytes

    async with context.reporting_progress(f"playing {hints.log}", amounts):
        return await player.play()


def finish_directory(directory: Path) -> list[str]:
    """Convert the recovered files to plain databases, and replace the directory's content by the files.
    Return the names of the databases."""
    staging = directory / STAGING
    databases = list(to_standalone(staging))
    for path in directory.iterdir():
        if path.name != STAGING:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for path in list(staging.iterdir()):
        path.rename(directory / path.name)
    staging.rmdir()
    return databases


def _table(directory: Path) -> Table:
    table = Table(["File", "Size"], numbers=frozenset({"Size"}))
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            table.add(str(path.relative_to(directory)), bytes_text(path.stat().st_size))
    return table
