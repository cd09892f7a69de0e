"""RocksDB databases in a recovery log."""
