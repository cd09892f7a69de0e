"""The RocksDB store against dicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gazette.consumer.application import StateView
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.shard_state import ShardState
from gazette.stores.rocksdb.recording import RocksDBRecording
from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore
from tools.fuzz_stores.base import Difference, Fuzzer, defaults

Content = dict[str, dict[bytes, bytes]]

_KEYS: Final = 150
_COMPRESSIONS: Final = ("none", "lz4", "zstd")


class RocksDBFuzzer(Fuzzer[Content]):
    """See the module."""

    def __init__(self, seed: int, directory: Path, say: Callable[[str], None]) -> None:
        super().__init__(seed, directory, say)
        self._families = ["default"]
        self._plain: Content = {"default": {}}
        self._blobs = self.rng.random() < 0.5
        say(f"blob files: {self._blobs}")

    # -- of a kind of store

    def open_store(self, recorder: Recorder) -> RocksDBStore:
        rng = self.rng
        if len(self._families) < 4 and rng.randrange(2):
            self._families.append(f"family-{len(self._families)}")
        for name in self._families:
            self._plain.setdefault(name, {})
        names = self._families[1:]
        named: Any = names if rng.randrange(3) == 0 else {name: self._options() for name in names}
        with defaults(RocksDBRecording.__init__, horizon_slack=64 << 10):
            return RocksDBStore(
                recorder,
                column_families=named,
                options=self._options() if rng.randrange(4) else None,
                batch_bytes=rng.choice((64, 4096, 1 << 20)),
            )

    def _options(self) -> RocksDBOptions:
        """Return options so small that a short run flushes, compacts and rolls files all the time."""
        rng = self.rng
        trigger = rng.choice((2, 3, 8))

        def tune(options: Any) -> None:
            options.set_max_bytes_for_level_base(64 << 10)
            options.set_level_zero_file_num_compaction_trigger(trigger)

        compression: Any = rng.choice(_COMPRESSIONS)
        return RocksDBOptions(
            write_buffer_bytes=rng.choice((32 << 10, 48 << 10, 1 << 20)),
            table_bytes=32 << 10,
            cache_bytes=1 << 20,
            compression=compression,
            min_blob_bytes=rng.choice((50, 400)) if self._blobs else None,
            tune=tune,
        )

    def new_view(self, directory: Path) -> StateView:
        return RocksDBStore.standby_view(directory, cache_bytes=1 << 20)

    def before_transaction(self) -> None:
        database, family = self.store._database, self._family()
        match self.rng.randrange(20):
            case 0 | 1:
                self.say(f"flush {family}")
                self.store._families.get(family, database).flush(True)
            case 2:
                self.say(f"compact {family}")
                self.store._families.get(family, database).compact_range(None, None)
            case _:
                pass

    def commit_plain(self) -> tuple[Content, Any]:
        content = {name: dict(one) for name, one in self._plain.items() if one}
        return content, content

    def restore_plain(self, snapshot: Any) -> None:
        self._plain = {name: dict(snapshot.get(name, {})) for name in self._families}

    def content(self, reader: Any) -> Content:
        found: Content = {}
        with reader.view() as view:
            for name in view.column_families:
                if items := dict(view.iterate(column_family=name)):
                    found[name] = items
                key, plain = self._key(), items
                if (value := view.get(key, column_family=name)) != plain.get(key):
                    raise Difference(f"{key!r} of {name} is {value!r}, unlike in the iteration")
        return found

    def check_files(self, directory: Path, expected: Content) -> None:
        with ShardState(directory) as state:
            found = {
                name: dict(state.iterate(column_family=name)) for name in state.column_families
            }
        self.compare(
            {name: one for name, one in found.items() if one}, expected, "what RocksDB opens"
        )

    # -- the work

    def work(self) -> None:
        for _ in range(self.rng.choice((1, 3, 20, 150))):
            self._change(self._family())
        if self.rng.randrange(4) == 0:
            self._undo()
        if self.rng.randrange(4) == 0:
            self._read(self._family())

    def _family(self) -> str:
        return self.rng.choice(self._families)

    def _key(self) -> bytes:
        return b"key %03d" % self.rng.randrange(_KEYS)

    def _change(self, family: str) -> None:
        rng, key, plain = self.rng, self._key(), self._plain[family]
        match rng.randrange(20):
            case 0 | 1 | 2:
                self.say(f"delete {key!r} of {family}")
                self.store.delete(key, column_family=family)
                plain.pop(key, None)
            case 3:
                end = b"key %03d" % (int(key[4:]) + rng.randrange(40))
                self.say(f"delete range {key!r} to {end!r} of {family}")
                self.store.delete_range(key, end, column_family=family)
                for one in [one for one in plain if key <= one < end]:
                    del plain[one]
            case _:
                value = rng.randbytes(rng.choice((0, 10, 100, 500, 3000)))
                self.say(f"put {key!r} of {family}: {len(value)} bytes")
                self.store.put(key, value, column_family=family)
                plain[key] = value

    def _undo(self) -> None:
        """Change something after a savepoint, and then roll back to it or release it."""
        before = {name: dict(one) for name, one in self._plain.items()}
        self.say("savepoint")
        savepoint = self.store.savepoint()
        for _ in range(5):
            self._change(self._family())
        if self.rng.randrange(2):
            self.say("roll back")
            savepoint.roll_back()
            self._plain = before
        else:
            savepoint.release()

    def _read(self, family: str) -> None:
        rng, plain = self.rng, self._plain[family]
        low, high = sorted((self._key(), self._key()))
        reverse = rng.random() < 0.5
        found = list(self.store.iterate(begin=low, end=high, reverse=reverse, column_family=family))
        expected = sorted(
            ((key, value) for key, value in plain.items() if low <= key < high), reverse=reverse
        )
        if found != expected:
            raise Difference(f"a transaction reads {str(found)[:200]}, not {str(expected)[:200]}")
