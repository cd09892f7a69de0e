"""Applications that consume tables are simulated as they are, and folded in tables that end elsewhere."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import first_application
import pytest

from gazette import TableApplication
from gazette.errors import Invalid
from gazette.testing.simulation.hints import HINTS
from gazette.testing.simulation.setup import Setup
from gazette.testing.simulation.shard_history import Consumed
from gazette.testing.simulation.table_cuts import cut_elsewhere, takes_tables
from tests.simulate.command import ROOT, gazette_test
from tests.simulate.table_app import Accounts, Reminding

EXAMPLE = ROOT / "examples" / "order_totals.py"
APP = ROOT / "tests" / "simulate" / "table_app.py"
MISTAKES = Path(__file__).with_name("mistakes")


@pytest.mark.timeout(600)
def test_the_example_of_tables_is_right_and_the_same_in_each_process() -> None:
    first = gazette_test(str(EXAMPLE), "--seeds", "3", "--json")
    again = gazette_test(str(EXAMPLE), "--first", "3", "--seeds", "1", "--json")
    assert first.returncode == again.returncode == 0, first.stdout + first.stderr
    digests = [
        [json.loads(line)["digest"] for line in run.stdout.splitlines()] for run in (first, again)
    ]
    assert digests[0][2:] == digests[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "Accounts",
        pytest.param("Skipping", marks=pytest.mark.long),
        pytest.param("Deferring", marks=pytest.mark.long),
        pytest.param("Reminding", marks=pytest.mark.long),
    ],
)
def test_outputs_backfills_poison_deferrals_and_timers_are_as_without_tables(name: str) -> None:
    done = gazette_test(f"{APP}:{name}", "--seeds", "8", "--coverage")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "consume_table" in done.stdout
    assert ("rebuild by a backfill × done" in done.stdout) == (name == "Accounts")
    assert "No timer has fired" not in done.stdout


@pytest.mark.timeout(600)
def test_what_depends_on_the_ends_of_tables_is_found() -> None:
    mistake = str(MISTAKES / "table_first_rows.py")
    done = gazette_test(mistake, "--seeds", "3", "--attempts", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert HINTS["table"] in done.stdout
    assert "table.to_pylist()[0]" in done.stdout


@pytest.mark.timeout(600)
def test_a_call_of_execute_tables_fails_whatever_its_tables_are_named(tmp_path: Path) -> None:
    module = EXAMPLE.read_text().replace("FROM sums", "FROM call").replace("sums=sums", "call=sums")
    (tmp_path / "app.py").write_text(module)
    flags = ("--seeds", "30", "-k", "fail a call", "--coverage")
    done = gazette_test("app.py", *flags, directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fail a call × consume_table" in done.stdout


def test_messages_without_tables_are_refused_before_the_first_seed() -> None:
    class Acknowledged(Accounts):
        deliver_acks = True

    class Unknown(Accounts):
        table_meta = ("journal", "size")

    for application, what in ((Acknowledged, "no acknowledgements"), (Unknown, "no such columns")):
        with pytest.raises(Invalid, match=what):
            Setup.of(application)


def rows(journal: str, *begins: int) -> Consumed:
    return Consumed(0.0, 0.0, journal=journal, spans=tuple((begin, begin + 1) for begin in begins))


STEPS = [rows("a", 1, 2, 3), rows("a", 4), rows("b", 1, 2), rows("a", 5, 6, 7, 8)]


def cuts(application: TableApplication[Any], seed: int) -> list[Consumed]:
    return list(cut_elsewhere(application, STEPS, random.Random(seed)))


@pytest.mark.parametrize("application", [Accounts, Reminding])
def test_other_tables_have_the_same_rows_in_the_same_order(
    application: type[TableApplication[Any]],
) -> None:
    of_run = [(step.journal, span) for step in STEPS for span in step.spans]
    for seed in range(20):
        tables = cuts(application(), seed)
        assert [(table.journal, span) for table in tables for span in table.spans] == of_run


def test_rows_of_two_tables_are_together_unless_timers_need_their_times() -> None:
    tables = {table.spans for seed in range(20) for table in cuts(Accounts(), seed)}
    assert any({(3, 4), (4, 5)} <= {*spans} for spans in tables)
    parts = [{*step.spans} for step in STEPS]
    for seed in range(20):
        for table in cuts(Reminding(), seed):
            assert any({*table.spans} <= part for part in parts)


def test_only_a_table_application_takes_tables() -> None:
    assert takes_tables(Accounts())
    assert not takes_tables(first_application.WordCount())
