"""Settings of all connections to a SQLite state, and the places where each PRAGMA is permitted.

In SQLite, most settings, all functions and all collations belong to one connection: queries would lack a
setting of the writing connection. Within a transaction, SQLite ignores some settings in silence. So a PRAGMA
is permitted only where it has its full effect, and refused by name elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import apsw

from gazette.errors import Invalid, NotAllowed

PragmaValue = bool | int | str
PrepareConnection = Callable[[apsw.Connection], None]

READING: Final = frozenset(
    {
        "application_id",
        "collation_list",
        "compile_options",
        "data_version",
        "database_list",
        "encoding",
        "foreign_key_check",
        "foreign_key_list",
        "freelist_count",
        "function_list",
        "index_info",
        "index_list",
        "index_xinfo",
        "integrity_check",
        "module_list",
        "page_count",
        "page_size",
        "pragma_list",
        "quick_check",
        "schema_version",
        "table_info",
        "table_list",
        "table_xinfo",
        "user_version",
    }
)
_SETTABLE: Final = frozenset(
    {"application_id", "encoding", "page_size", "schema_version", "user_version"}
)
"""PRAGMAs of `READING` that write if they have an argument."""
TRANSACTIONAL: Final = frozenset(
    {
        "analysis_limit",
        "application_id",
        "defer_foreign_keys",
        "incremental_vacuum",
        "legacy_alter_table",
        "optimize",
        "shrink_memory",
        "user_version",
    }
)
"""PRAGMAs for the application's SQL, with an effect within a transaction that queries do not need."""
_TUNING: Final = frozenset({"automatic_index", "cache_size", "cache_spill", "mmap_size", "threads"})
"""Settings of one connection that change no result: permitted in the application's SQL, too."""
_SWITCHES: Final = frozenset(
    {
        "automatic_index",
        "case_sensitive_like",
        "cell_size_check",
        "foreign_keys",
        "ignore_check_constraints",
        "read_uncommitted",
        "recursive_triggers",
        "reverse_unordered_selects",
        "trusted_schema",
    }
)
CONNECTION: Final = _SWITCHES | _TUNING | {"max_page_count", "secure_delete", "temp_store"}
"""Settings of one connection: ``connection_pragmas`` sets them on all connections."""
_RECORDING: Final = "recording depends on it"
_PROCESS: Final = "it applies to the whole process"
_NO_DISK: Final = "the recovery log makes commits durable, and nothing waits for a disk"
_FIXED: Final = "it is fixed when the database is made"
_DEPRECATED: Final = "it is deprecated, and changes what statements return"
REFUSED: Final[Mapping[str, str]] = {
    "auto_vacuum": f"{_FIXED}; vacuum() gives free pages back",
    "busy_timeout": "the store's checkpoints rest on it",
    "checkpoint_fullfsync": _NO_DISK,
    "count_changes": _DEPRECATED,
    "data_store_directory": _PROCESS,
    "empty_result_callbacks": _DEPRECATED,
    "encoding": _FIXED,
    "full_column_names": _DEPRECATED,
    "fullfsync": _NO_DISK,
    "hard_heap_limit": _PROCESS,
    "journal_mode": _RECORDING,
    "journal_size_limit": _RECORDING,
    "locking_mode": f"{_RECORDING}, and queries could not read",
    "page_size": f"{_FIXED}; give page_size to SQLiteStore",
    "query_only": "the store could not commit",
    "schema_version": "a schema that is taken for another damages the database",
    "short_column_names": _DEPRECATED,
    "soft_heap_limit": _PROCESS,
    "synchronous": _NO_DISK,
    "temp_store_directory": _PROCESS,
    "wal_autocheckpoint": _RECORDING,
    "wal_checkpoint": "only the store makes checkpoints, once they are recorded",
    "writable_schema": "a schema that was written by hand may not open on the next owner",
}
"""By name, why the PRAGMA must not be set. ``wal_checkpoint`` is refused even without a value."""

_WORD: Final = re.compile(r"[A-Za-z_]+")
_ON: Final = frozenset({"1", "on", "yes", "true"})
_OFF: Final = frozenset({"0", "off", "no", "false"})


def check_pragma(name: str, value: str | None) -> None:
    """Raise ``NotAllowed`` for a PRAGMA that an application's SQL must not use. Such a PRAGMA would break the
    store or have no effect, or queries would lack its effect."""
    name = name.lower()
    if name in TRANSACTIONAL or (name in READING and (value is None or name not in _SETTABLE)):
        return
    reason = REFUSED.get(name)
    if reason is not None:
        if value is None and name != "wal_checkpoint":
            return
        raise NotAllowed(
            f"PRAGMA {name} is refused: {reason}", hint="Leave it out of the application's SQL."
        )
    if name not in CONNECTION:
        raise NotAllowed(
            f"PRAGMA {name} is refused: neither Gazette nor its documentation knows it, and "
            "SQLite ignores unknown ones",
            hint="Check the spelling.",
        )
    if value is None or name in _TUNING:
        return
    why = "SQLite ignores it within a transaction" if name == "foreign_keys" else "queries lack it"
    raise NotAllowed(
        f"PRAGMA {name} is refused here: it is a setting of one connection, and {why}",
        hint=f"Give it to all connections: SQLiteStore(connection_pragmas={{{name!r}: {value!r}}}).",
    )


def is_reading_pragma(name: str, value: str | None) -> bool:
    """Return True for a PRAGMA that is known to change nothing."""
    name = name.lower()
    if name in READING:
        return value is None or name not in _SETTABLE
    return value is None and name in CONNECTION


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    value: str
    expected: int | None
    """The value that SQLite must report afterwards; None if the report is not checked."""


class ConnectionSetup:
    """Gives each connection the same settings, functions and collations."""

    def __init__(
        self,
        pragmas: Mapping[str, PragmaValue] | None = None,
        prepare: PrepareConnection | None = None,
    ) -> None:
        """Check the settings. Raise ``Invalid`` for a PRAGMA or a value that no connection accepts."""
        self._settings = [_setting(name, value) for name, value in (pragmas or {}).items()]
        self._prepare = prepare

    def set_pragmas(self, connection: apsw.Connection) -> None:
        """Apply the settings, outside a transaction. Raise ``Invalid`` for a switch that SQLite ignores."""
        for setting in self._settings:
            connection.execute(f"PRAGMA {setting.name}={setting.value}").fetchall()
            if setting.expected is None:
                continue
            actual = connection.execute(f"PRAGMA {setting.name}").fetchall()
            if actual != [(setting.expected,)]:
                raise Invalid(
                    f"SQLite did not accept PRAGMA {setting.name}={setting.value}",
                    path="connection_pragmas",
                    hint="This build of SQLite may lack the feature: leave the setting out.",
                )

    def call_prepare(self, connection: apsw.Connection) -> None:
        """Call the application's ``prepare_connection``. Raise ``Invalid`` if it returns a value."""
        if self._prepare is None:
            return
        result: object = self._prepare(connection)
        if result is not None:
            close = getattr(result, "close", None)
            if callable(close):
                close()  # Otherwise Python would warn of a coroutine that is never awaited.
            raise Invalid(
                f"prepare_connection returned {type(result).__name__}; expected None",
                hint="Use a plain function, neither a coroutine function nor a generator.",
            )


def _setting(name: str, value: PragmaValue) -> _Setting:
    """Return a setting as SQL. Raise ``Invalid`` for a PRAGMA or a value that no connection accepts."""
    path = f"connection_pragmas[{name!r}]"
    name = name.lower()
    if name not in CONNECTION:
        reason = REFUSED.get(name)
        if reason is not None:
            raise Invalid(f"PRAGMA {name} is refused: {reason}", path=path, hint="Leave it out.")
        if name in READING | TRANSACTIONAL:
            raise Invalid(
                f"PRAGMA {name} is not a setting of a connection",
                path=path,
                hint="Execute it in the schema, or in a migration.",
            )
        raise Invalid(f"unknown PRAGMA {name}", path=path, hint="Check the spelling.")
    text = str(int(value) if isinstance(value, bool) else value)
    if name in _SWITCHES:
        if text.lower() not in _ON | _OFF:
            raise Invalid(f"invalid value {value!r}", path=path, hint="Use True or False.")
        on = int(text.lower() in _ON)
        # SQLite does not report case_sensitive_like.
        return _Setting(name, str(on), None if name == "case_sensitive_like" else on)
    if not isinstance(value, int) and not _WORD.fullmatch(text):
        raise Invalid(f"invalid value {value!r}", path=path, hint="Use a number or a word.")
    return _Setting(name, text, None)
