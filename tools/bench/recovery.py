"""`gazette bench playback`: the speed of playing recovery logs back, and their length."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.labels import CONTENT_RECOVERY_LOG
from gazette.protocol.checkpoint import Checkpoint, ProducerState, SourceCheckpoint
from gazette.protocol.fragment import Codec
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.playback.player import Player
from gazette.runtime.tasks import BlockingPool
from gazette.stores.sqlite.store import SQLiteStore
from tools.bench.cluster import Bench, journal_spec
from tools.bench.report import (
    Baseline,
    Figure,
    ratio_at_most,
    value_at_least,
    value_at_most,
)

SPOOLED: Final = "bench/playback/spooled"
STORED: Final = "bench/playback/stored"
LARGE: Final = "bench/playback/large"
LOG_BYTES: Final = 80 << 20
FRAGMENT_BYTES: Final = 16 << 20
WRITE_BYTES: Final = 64 << 10
ROW_BYTES: Final = 1_800
KEYS: Final = 2_000
ROWS_PER_TXN: Final = 100
SMALL_TXNS: Final = 200
SMALL_KEYS: Final = 10_000
SMALL_ROW_BYTES: Final = 100
HORIZON_SLACK: Final = 64 << 20
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS state (k INTEGER PRIMARY KEY, v BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS small (k INTEGER PRIMARY KEY, v BLOB NOT NULL);
"""
PUT: Final = "INSERT INTO state VALUES (?, ?) ON CONFLICT DO UPDATE SET v = excluded.v"
PUT_SMALL: Final = "INSERT INTO small VALUES (?, ?) ON CONFLICT DO UPDATE SET v = excluded.v"
MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class Written:
    """Results of a store that wrote a log: sizes in bytes."""

    log_bytes: int
    live_bytes: int
    horizon_bytes: int
    amplification: float


async def playback(bench: Bench) -> list[Figure]:
    """Play back logs of SQLite stores, and one of large writes, into directories.

    This process plays them, as a member would, from brokers and from stored fragments.
    """
    length = bench.scaled(FRAGMENT_BYTES)
    specs = [
        journal_spec(SPOOLED, content_type=CONTENT_RECOVERY_LOG),
        journal_spec(LARGE, content_type=CONTENT_RECOVERY_LOG),
        journal_spec(
            STORED,
            content_type=CONTENT_RECOVERY_LOG,
            codec=Codec.ZSTANDARD,
            length=length,
            refresh_s=1,
        ),
    ]
    pool = BlockingPool("bench-shard", 1)
    try:
        async with bench.journals(*specs), bench.direct_client() as direct:
            size = bench.scaled(LOG_BYTES)
            written = await _record(bench, pool, SPOOLED, lambda log: log.transactions(size))
            await bench.copy(SPOOLED, STORED)
            await _record(bench, pool, LARGE, lambda log: log.large_writes(size))
            await bench.stored_fragments(STORED)
            figures = [
                await _play(bench, "play back a SQLite store's log", bench.client, SPOOLED),
                await _play(bench, "the same, from zstandard fragments", direct, STORED),
                await _play(bench, "play back writes of 64 KiB", bench.client, LARGE),
            ]
    finally:
        pool.close()
    return [*figures, *_sizes(written)]


def _sizes(written: Written) -> list[Figure]:
    bound = 2 * written.live_bytes + HORIZON_SLACK
    note = f"the log is {written.log_bytes / MB:.0f} MB long, the state {written.live_bytes / MB:.1f} MB"
    return [
        Figure(
            "playback",
            "recovery horizon",
            "MB",
            (written.horizon_bytes / MB,),
            Baseline("2 × live state + 64 MiB", (bound / MB,)),
            ratio_at_most(1.0),
            note,
        ),
        Figure(
            "playback",
            "log bytes per byte of a small transaction",
            "×",
            (written.amplification,),
            target=value_at_most(3, "×"),
            note=f"one of {SMALL_KEYS} rows gets {SMALL_ROW_BYTES} other bytes, and the checkpoint changes",
        ),
    ]


async def _play(bench: Bench, name: str, client: Client, log: str) -> Figure:
    head = await bench.write_head(log)

    async def reading() -> float:
        async def all_of_it() -> None:
            async with client.retry_reader(ReadParams(log, end_offset=head)) as reader:
                async for _ in reader.chunks():
                    pass

        return head / MB / await bench.timed(all_of_it())

    async def playing() -> float:
        directory = bench.cluster.directory / "played"
        pool = BlockingPool("bench-player", 1)
        try:
            player = Player(FSMHints(log=log), directory, client, bench.clock, pool)
            player.finish()
            seconds = await bench.timed(player.play())
        finally:
            pool.close()
            shutil.rmtree(directory, ignore_errors=True)
        return player.progress.bytes_read / MB / seconds

    await reading()
    read, played = await bench.rounds(reading, playing)
    beside = Baseline("reading the log alone", read)
    return Figure("playback", name, "MB/s", played, beside, value_at_least(200, "MB/s"))


async def _record(
    bench: Bench, pool: BlockingPool, log: str, work: Callable[[_Log], Written]
) -> Written:
    """Own a log, as the primary of a shard does, and fill it on a thread."""
    directory = bench.cluster.directory / "recorded"
    async with bench.publisher() as (appends, _):
        player = Player(FSMHints(log=log), directory, bench.client, bench.clock, pool)
        author = random.SystemRandom().randrange(1, 1 << 32)
        player.hand_off(author)
        recovered = await player.play()

        def run() -> Written:
            return work(_Log(log, recovered.fsm, author, directory, appends))

        try:
            return await pool.run(run)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class _Log:
    """A recorder and its writers. Everything on one thread."""

    def __init__(
        self, log: str, fsm: RecoveryFSM, author: int, directory: Path, appends: AppendService
    ) -> None:
        self._recorder = Recorder.open(log, fsm, author, directory, appends)
        self._rng = random.Random(log)
        self._commits = 0

    def transactions(self, log_bytes: int) -> Written:
        """Overwrite the rows of a small database until the log has ``log_bytes``."""
        recorder, rng = self._recorder, self._rng
        store = SQLiteStore(recorder, SCHEMA)
        try:
            small = self._small_transactions(store)
            while recorder.write_head < log_bytes:
                rows = [
                    (rng.randrange(KEYS), rng.randbytes(ROW_BYTES)) for _ in range(ROWS_PER_TXN)
                ]
                store.executemany(PUT, rows)
                self._commit(store)
            return Written(
                log_bytes=self._head(),
                live_bytes=store.live_bytes,
                horizon_bytes=recorder.horizon_bytes,
                amplification=small,
            )
        finally:
            store.destroy()

    def _small_transactions(self, store: SQLiteStore) -> float:
        """Overwrite a row per transaction. Return log bytes per byte of what the transaction changed."""
        rng = self._rng
        store.executemany(
            PUT_SMALL, ((key, rng.randbytes(SMALL_ROW_BYTES)) for key in range(SMALL_KEYS))
        )
        self._commit(store)
        begin, changed = self._head(), 0
        for _ in range(SMALL_TXNS):
            store.execute(PUT_SMALL, (rng.randrange(SMALL_KEYS), rng.randbytes(SMALL_ROW_BYTES)))
            changed += SMALL_ROW_BYTES + self._commit(store)
        return (self._head() - begin) / changed

    def large_writes(self, log_bytes: int) -> Written:
        """Write files of a few megabytes, 64 KiB at a time, and remove the older ones."""
        recorder, rng = self._recorder, self._rng
        index = 0
        while self._head() < log_bytes:
            with recorder.group() as group:
                fnode = group.create(f"/{index:06d}.sst")
                for at in range(0, 64 * WRITE_BYTES, WRITE_BYTES):
                    group.write(fnode, at, rng.randbytes(WRITE_BYTES))
                group.unlink(f"/{index - 4:06d}.sst", missing_ok=True)
            index += 1
        return Written(self._head(), 4 * 64 * WRITE_BYTES, recorder.horizon_bytes, 1.0)

    def _commit(self, store: SQLiteStore) -> int:
        """Commit with a new checkpoint. Return its length in bytes."""
        self._commits += 1
        state = ProducerState(last_ack=self._commits, begin=None)
        source = SourceCheckpoint(self._commits * SMALL_ROW_BYTES, {b"\x01bench": state})
        checkpoint = Checkpoint({"bench/source": source}, {})
        # This store reads nothing of a shard.
        store.start_commit(cast("Any", None), checkpoint, ()).result(60)
        return len(checkpoint.to_bytes())

    def _head(self) -> int:
        self._recorder.flush()
        return self._recorder.barrier().result(60).commit.end
