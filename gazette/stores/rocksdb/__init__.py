"""State of shards in RocksDB: `RocksDBStore`."""

from __future__ import annotations

from gazette.stores.rocksdb.store import DEFAULT as DEFAULT
from gazette.stores.rocksdb.store import RocksDBOptions as RocksDBOptions
from gazette.stores.rocksdb.store import RocksDBStore as RocksDBStore
from gazette.stores.rocksdb.store import RocksDBView as RocksDBView

__all__ = ["DEFAULT", "RocksDBOptions", "RocksDBStore", "RocksDBView"]
