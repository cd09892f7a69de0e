"""The PostgreSQL server of a simulation: each run and each fold has a copy of the user's database.

All engines of SQLAlchemy in the process are connected to the copy, whatever their URLs are. The given
database is read and copied, and never written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.pool import Pool

from gazette.errors import Invalid
from gazette.runtime.clock import SystemClock
from gazette.testing.simulation.shard_history import wrapped
from gazette.testing.simulation.sql_database import TABLES, SimDatabase, quoted, sqlstate

log = logging.getLogger(__name__)

PATH: Final = "--database"
_ENV: Final = "GAZETTE_SIMULATION_DATABASE"
"""Names the copy for the other process that folds."""
_OLDEST: Final = 140000
_BYTES_MAX: Final = 1 << 28
_COPY: Final = re.compile(
    r"gazette_simulation_([0-9a-f]{8})_[0-9a-f]{8}_(prepared|elsewhere)(_copy)?"
)
"""Names of copies: the Unix time of their run, then a random number."""
_LEFT_OVER_S: Final = 6 * 3600
"""Seconds after which copies without a session count as those of a killed run."""
_IDLE_COPIES: Final = """SELECT d.datname FROM pg_database d WHERE d.datname LIKE 'gazette\\_simulation\\_%'
    AND pg_get_userbyid(d.datdba) = current_user
    AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE left(a.datname, 36) = left(d.datname, 36))"""
"""Copies of runs without a session, of the present role."""
_LOCATION: Final = frozenset(
    {"host", "hostaddr", "port", "user", "username", "password", "dbname", "database", "service"}
)
"""Arguments of connections that say where a database is."""
_USED: Final = """SELECT c.oid::regclass::text FROM pg_class c WHERE c.relkind IN ('r', 'p') AND 3 = (
    SELECT count(*) FROM pg_attribute a WHERE a.attrelid = c.oid
    AND a.attname IN ('shard_fqn', 'fence', 'checkpoint'))"""
"""Tables of checkpoints, whatever their names are."""


_SEQUENCES: Final = """SELECT count(*) FROM pg_class s WHERE s.relkind = 'S' AND NOT EXISTS (
    SELECT FROM pg_depend d WHERE d.objid = s.oid AND d.deptype IN ('a', 'i'))"""
"""The number of sequences that belong to no column."""
_DEFINITION: Final = """SELECT string_agg(concat_ws(' ', c.relkind, c.relnamespace::regnamespace, c.relname,
    a.attname, a.atttypid::regtype), ',' ORDER BY c.relnamespace::regnamespace::text, c.relname, a.attnum)
    FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped AND a.attnum > 0
    WHERE c.relnamespace::regnamespace::text !~ '^(pg_|information_schema)'"""
_END_OTHERS: Final = """SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()"""


def _definition(cursor: Any) -> str:
    cursor.execute(_DEFINITION)
    return str(cursor.fetchone()[0])


def _names(cursor: Any) -> list[str]:
    """Return the quoted names of all tables."""
    cursor.execute(TABLES)
    return [f"{quoted(schema)}.{quoted(name)}" for _, schema, name in cursor.fetchall()]


class SQLServer:
    """The server. ``attached`` prepares the first copy, and drops all copies in the end."""

    def __init__(self, url: str) -> None:
        """Remember the URL of an empty database. Raise ``Invalid`` for another server than PostgreSQL."""
        try:
            self._url = sa.make_url(url)
            if self._url.get_backend_name() != "postgresql":
                raise Invalid(
                    "a simulation needs PostgreSQL for a SQLStore",
                    path=PATH,
                    hint="Write postgresql+psycopg://user@host/name, the URL of an empty database.",
                )
            self._dialect = sa.create_engine(self._url).dialect
        except (exc.ArgumentError, exc.NoSuchModuleError, ImportError) as error:
            # Leave the URL out: it may have a password.
            raise Invalid(
                f"no database can be reached by this URL: {type(error).__name__}",
                path=PATH,
                hint="Write postgresql+psycopg://user@host/name, and install the driver.",
            ) from error
        self._inherited = os.environ.get(_ENV, "")
        now = int(SystemClock().now())
        self.prefix = self._inherited or f"gazette_simulation_{now:08x}_{secrets.token_hex(4)}"
        self._prepared = f"{self.prefix}_{'elsewhere' if self._inherited else 'prepared'}"
        self._session: Any = None
        """The session of this process that creates and drops copies."""
        self._present: SimDatabase | None = None
        """The database of all engines. None: no engine can connect."""
        self._definition: str | None = None
        """Text of all tables and columns. None: copies have more to restore than empty tables."""
        self.checkpoints: set[str] = set()
        """Names of the tables of checkpoints: they are no part of a state."""
        self.timers: set[str] = set()
        """Names of the tables of timers."""

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Connect all engines to copies within the block. Drop the copies in the end.

        Raise ``Invalid`` if the given database cannot be copied, or is in use.
        """
        if not self._inherited:
            self._copy_given()
        os.environ[_ENV] = self.prefix
        self._present = SimDatabase(self, self._prepared)
        try:
            with contextlib.ExitStack() as stack:
                for name, call in (
                    ("do_connect", self._connect),
                    ("do_execute", self._execute),
                    ("do_executemany", self._execute_many),
                    ("do_execute_no_params", self._execute_plain),
                    ("engine_disposed", self._dispose),
                ):
                    event.listen(sa.Engine, name, call)
                    stack.callback(event.remove, sa.Engine, name, call)
                event.listen(Pool, "close", self._close)
                stack.callback(event.remove, Pool, "close", self._close)
                stack.enter_context(wrapped(sa.Engine, "raw_connection", self._checkout))
                yield
        finally:
            if not self._inherited:
                del os.environ[_ENV]
                self._drop_all()

    def rest(self) -> None:
        """End all sessions, so that the prepared copy can be copied, and this process forked."""
        self._end()
        self._present = None
        with contextlib.closing(self.connect(self._prepared)) as session:
            cursor = session.cursor()
            cursor.execute(_SEQUENCES)
            has_more = bool(cursor.fetchone()[0])
            for table in _names(cursor):
                cursor.execute(f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT 1) AS rows")
                has_more = has_more or bool(cursor.fetchone()[0])
            self._definition = None if has_more else _definition(cursor)
        if not self._inherited:
            self._command(f"CREATE DATABASE {self.prefix}_elsewhere TEMPLATE {self._prepared}")
            self._end()

    def _end(self) -> None:
        if self._present is not None:
            self._present.close()
        if self._session is not None:
            self._session.close()
            self._session = None

    @contextlib.contextmanager
    def fresh(self) -> Iterator[SimDatabase]:
        """Connect all engines to a new copy within the block. Only one block runs at a time."""
        name = f"{self._prepared}_copy"
        if not self._emptied(name):
            self._command(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            self._command(f"CREATE DATABASE {name} TEMPLATE {self._prepared}")
        self._present = SimDatabase(self, name)
        try:
            yield self._present
        finally:
            self._present.close()
            self._present = None

    def _emptied(self, name: str) -> bool:
        """Empty the former copy: that is faster than another copy. Return False if it cannot be emptied."""
        if self._definition is None:
            return False
        try:
            session = self.connect(name)
        except self._dialect.loaded_dbapi.Error:
            return False  # It does not exist yet.
        with contextlib.closing(session):
            cursor = session.cursor()
            cursor.execute(_END_OTHERS)
            if _definition(cursor) != self._definition:
                return False
            if tables := _names(cursor):
                cursor.execute("SET synchronous_commit = off")
                cursor.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY CASCADE")
        return True

    def connect(self, name: str) -> Any:
        """Open a session of the simulation itself, in which each statement commits."""
        arguments, options = self._dialect.create_connect_args(self._url.set(database=name))
        connection: Any = self._dialect.connect(*arguments, **options)
        self._dialect.set_isolation_level(connection, "AUTOCOMMIT")
        return connection

    def _command(self, text: str) -> None:
        if self._session is None:
            self._session = self.connect(self._prepared)
        self._session.cursor().execute(text)

    def _copy_given(self) -> None:
        given = self._url.database or ""
        try:
            session = self.connect(given)
        except Exception as error:
            raise Invalid(
                f"the database does not answer: {error}",
                path=PATH,
                hint="Check that it is running and reachable.",
            ) from error
        with contextlib.closing(session):
            cursor = session.cursor()
            cursor.execute(
                "SELECT current_setting('server_version_num')::int, current_database(),"
                " pg_database_size(current_database())"
            )
            version, given, size = cursor.fetchone()
            if version < _OLDEST:
                raise Invalid(
                    "the server is older than PostgreSQL 14",
                    path=PATH,
                    hint="Name a database of a later server.",
                )
            cursor.execute(_USED)
            for (table,) in cursor.fetchall():
                cursor.execute(f"SELECT count(*) FROM {table}")
                if cursor.fetchone()[0]:
                    raise Invalid(
                        f"the database {given} has checkpoints of shards in {table}: it is in use",
                        path=PATH,
                        hint="Name a database for simulations. It is copied for each run.",
                    )
            if size > _BYTES_MAX:
                raise Invalid(
                    f"the database {given} has {size >> 20} MB (expected <= {_BYTES_MAX >> 20})",
                    path=PATH,
                    hint="Name a database for simulations. It is copied for each run.",
                )
            self._drop_left_over(cursor)
            try:
                cursor.execute(f"CREATE DATABASE {self._prepared} TEMPLATE {quoted(given)}")
            except Exception as error:
                raise Invalid(
                    f"the database {given} cannot be copied: {error}".rstrip(),
                    path=PATH,
                    hint=_HINTS.get(sqlstate(error), "The server's log may say more."),
                ) from error

    def _drop_left_over(self, cursor: Any) -> None:
        """Drop the copies of former runs that were killed."""
        cursor.execute(_IDLE_COPIES)
        made_before = SystemClock().now() - _LEFT_OVER_S
        for (name,) in cursor.fetchall():
            match = _COPY.fullmatch(name)
            if match is None or int(match[1], 16) >= made_before:
                continue
            with contextlib.suppress(self._dialect.loaded_dbapi.Error):  # A run uses it after all.
                cursor.execute(f"DROP DATABASE IF EXISTS {name}")
                log.warning(
                    "dropped the database %(database)s of a run that was killed", {"database": name}
                )

    def _drop_all(self) -> None:
        """Drop the copies, even those of processes that were killed."""
        self._end()
        with contextlib.closing(self.connect(self._url.database or "")) as session:
            cursor = session.cursor()
            prefix = self.prefix.replace("_", r"\_")
            cursor.execute(f"SELECT datname FROM pg_database WHERE datname LIKE '{prefix}%'")
            for (name,) in cursor.fetchall():
                cursor.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    # What engines of SQLAlchemy call.

    def _connect(self, dialect: Any, _record: Any, _arguments: Any, options: Any) -> Any:
        """Connect an engine to the present database, whatever its URL is."""
        if dialect.name == "sqlite":
            return None
        if dialect.name != "postgresql":
            raise ConnectionRefusedError(f"a simulation has no database of {dialect.name}")
        if self._present is None:
            raise ConnectionRefusedError("the run of this engine is over")
        kept = {name: value for name, value in options.items() if name not in _LOCATION}
        url = self._url.set(database=self._present.name)
        arguments, of_url = dialect.create_connect_args(url)
        return self._present.connect(lambda: dialect.connect(*arguments, **{**kept, **of_url}))

    def _checkout(self, call: Callable[[Any], Any], engine: Any) -> Any:
        if engine.dialect.name != "postgresql" or self._present is None:
            return call(engine)
        return self._present.pool_of(engine).connect()

    def _dispose(self, engine: Any) -> None:
        if self._present is not None:
            self._present.dispose(engine)

    def _close(self, connection: Any, _record: Any) -> None:
        if self._present is not None:
            self._present.forget(connection)

    def _execute(self, cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
        return self._run(
            context, statement, lambda text: context.dialect.do_execute(cursor, text, parameters)
        )

    def _execute_many(self, cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
        return self._run(
            context,
            statement,
            lambda text: context.dialect.do_executemany(cursor, text, parameters),
        )

    def _execute_plain(self, cursor: Any, statement: str, context: Any) -> bool:
        return self._run(
            context, statement, lambda text: context.dialect.do_execute_no_params(cursor, text)
        )

    def _run(self, context: Any, statement: str, run: Callable[[str], object]) -> bool:
        """Run a statement. Return False if it is not for the present database."""
        if context.dialect.name != "postgresql" or self._present is None:
            return False
        connection = context.root_connection.connection.dbapi_connection
        return self._present.run(connection, statement, run)


_HINTS: Final = {
    "42501": "Its role needs the right to create databases: ALTER ROLE … CREATEDB.",
    "55006": "End the other sessions of this database. Each run has a copy of it.",
}
"""Hints for SQLSTATEs."""
