"""Engines and tables for stores in SQL databases, shared by all shards of a process."""

from __future__ import annotations

import threading
from typing import Any, Final

from gazette.errors import Invalid, not_installed

try:
    import sqlalchemy as sa
    from sqlalchemy import event, exc
except ImportError as error:
    raise not_installed("SQLStore", "sqlalchemy", "postgres") from error

TABLE: Final = "gazette_checkpoints"
READING: Final = "gazette_reading"
"""Execution option of a transaction that does not write: it waits for no writer of a SQLite file."""
_CREATE_ATTEMPTS: Final = 5

_shared: dict[tuple[str, int], sa.Engine] = {}
_sharing = threading.Lock()


def checkpoint_table(metadata: sa.MetaData, name: str = TABLE) -> sa.Table:
    """Return the table of checkpoints, for the application's metadata and its migrations."""
    return sa.Table(
        name,
        metadata,
        sa.Column("shard_fqn", sa.Text, primary_key=True),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("checkpoint", sa.LargeBinary, nullable=False),
    )


def create_checkpoint_table(engine: sa.Engine, name: str = TABLE) -> None:
    """Create the table of checkpoints if it is absent."""
    metadata = sa.MetaData()
    checkpoint_table(metadata, name)
    create_tables(engine, metadata)


def create_tables(engine: sa.Engine, metadata: sa.MetaData) -> None:
    """Create the tables that are missing. Members and shards may call this at the same time.

    ``metadata`` has the table of checkpoints (`checkpoint_table`), and tables of the application. Existing
    tables are not checked. Errors of SQLAlchemy reach the caller.
    """
    for attempt in range(1, _CREATE_ATTEMPTS + 1):
        try:
            metadata.create_all(engine, checkfirst=True)
        except (exc.IntegrityError, exc.ProgrammingError, exc.OperationalError):
            # Another process may have created a table at the same time. The next attempt finds it.
            if attempt == _CREATE_ATTEMPTS:
                raise
        else:
            return


def create_engine(url: str, **options: Any) -> sa.Engine:
    """Return an engine of SQLAlchemy with the settings that stores need. All shards may share it.

    Connections to a server are tested when they leave the pool: a restart may have broken them. SQLite uses
    WAL mode. A transaction takes the write lock at its begin, and waits up to 30 s for the lock; a store's
    query takes no lock. Raise ``Invalid`` for a URL of no known database, or if its driver is not installed.
    """
    try:
        backend = sa.make_url(url).get_backend_name()
        if backend != "sqlite":
            return sa.create_engine(url, **{"pool_pre_ping": True, **options})
    except (exc.ArgumentError, exc.NoSuchModuleError, ImportError) as error:
        # Leave the URL out: it may have a password.
        raise Invalid(
            f"no database can be reached by this URL: {type(error).__name__}",
            hint="Write postgresql+psycopg://user@host/name, or sqlite:////a/file; and install "
            "the driver, pip install 'pygazette[postgres]'.",
        ) from error
    engine = sa.create_engine(url, **{"connect_args": {"timeout": 30}, **options})

    def connected(connection: Any, _record: object) -> None:
        # Otherwise the driver would begin transactions by its own rules.
        connection.isolation_level = None
        # In WAL mode, queries can run while a shard writes.
        connection.execute("PRAGMA journal_mode=WAL").close()

    def begin(connection: sa.Connection) -> None:
        reading = connection.get_execution_options().get(READING, False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begin)
    return engine


def shared_engine(url: str, metadata: sa.MetaData) -> sa.Engine:
    """Return the process's only engine for a URL and ``metadata``. Create the missing tables of ``metadata``.

    Any thread; the first call blocks until the tables are created. ``metadata`` is the
    application's, with `checkpoint_table`; keep the object while the process runs. Raise ``Invalid``
    for a URL of no known database, and SQLAlchemy's errors if a table cannot be created.
    """
    key = (url, id(metadata))
    with _sharing:
        engine = _shared.get(key)
        if engine is None:
            engine = create_engine(url)
            try:
                create_tables(engine, metadata)
            except BaseException:
                engine.dispose()
                raise
            _shared[key] = engine
        return engine
