"""How SQLite databases stand in a recovery log."""
