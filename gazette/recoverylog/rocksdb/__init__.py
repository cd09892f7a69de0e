"""How RocksDB databases stand in a recovery log."""
