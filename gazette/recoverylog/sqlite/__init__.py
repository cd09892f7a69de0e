"""SQLite databases in a recovery log."""
