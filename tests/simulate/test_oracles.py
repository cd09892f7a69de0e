"""Each seed also judges queries, states of former moments, and states that a backfill has built."""

from __future__ import annotations

from pathlib import Path

import pytest

from gazette.testing.simulation.hints import HINTS
from tests.simulate.test_findings import IMPORTS, TICKS, UNTIL_FOUND, run, totals

VIEW = "def new_view(self, shard, directory):\n    return {view}(directory)"
OWN_VIEW = VIEW.format(view="SQLiteStore.view")
CACHED = """\
class Cached(SQLiteStore):
    @functools.lru_cache
    def query(self, sql, bindings=()):
        return super().query(sql, bindings)


class Totals"""
FIRST_VIEW = """\
from gazette import StateView


class FirstView(StateView):
    def __init__(self, directory):
        self.view = SQLiteStore.view(directory)
        self.reader = None

    def refresh(self, files):
        self.reader = self.reader or self.view.refresh(files)
        return self.reader

    def release(self, reader):
        pass

    def close(self):
        self.view.close()


class Totals"""
RAISING_VIEW = FIRST_VIEW.replace(
    "self.reader = self.reader or self.view.refresh(files)",
    "if self.reader is None:\n            self.reader = 0\n            raise ValueError('at first')\n"
    "        self.reader = self.view.refresh(files)",
)
JSON_TOTALS = """\
class Totals(Application):
    orders = Source("orders", Order, key="customer")

    def new_store(self, shard, recorder):
        return JSONFileStore(recorder, dict[str, int])

    def consume_message(self, shard, store, envelope, publisher):
        order = envelope.message
        store.state[order.customer] = store.state.get(order.customer, 0) + order.cents
"""
PLANT = "\n\nfrom tools.simulation.consumer_plants import PLANTS\nPLANTS['{name}']()\n"


# Queries.


def test_answers_of_a_right_application_pass(tmp_path: Path) -> None:
    done = run(tmp_path, totals("pass", OWN_VIEW), "--first", "6", "--seeds", "3")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cache_of_answers_is_found(tmp_path: Path) -> None:
    module = totals("pass").replace("SQLiteStore(", "Cached(", 1).replace("class Totals", CACHED)
    done = run(tmp_path, module, *UNTIL_FOUND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a query of shard-000" in done.stdout
    assert "in the answer (member-" in done.stdout
    assert f"hint: {HINTS['cache']}" in done.stdout


def test_a_view_that_does_not_follow_its_log_is_found(tmp_path: Path) -> None:
    module = totals("pass", VIEW.format(view="FirstView")).replace("class Totals", FIRST_VIEW)
    done = run(tmp_path, module, *UNTIL_FOUND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a query of shard-000 gets an older state than the" in done.stdout
    assert "committed before" in done.stdout
    assert f"hint: {HINTS['query']}" in done.stdout


def test_a_query_that_fails_once_for_no_fault_is_found(tmp_path: Path) -> None:
    module = totals("pass", VIEW.format(view="FirstView"))
    done = run(tmp_path, module.replace("class Totals", RAISING_VIEW), *UNTIL_FOUND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a query of shard-000 fails: " in done.stdout


@pytest.mark.parametrize(
    ("module", "plant", "what"),
    [
        (totals("pass"), "answered-before-the-offset", "is asked for"),
        (totals("pass", OWN_VIEW), "standby-older-than-it-says", "gets an older state than"),
        pytest.param(
            f"{IMPORTS}\n\n{JSON_TOTALS}",
            "answers-of-the-running-transaction",
            "answers a state that no commit left",
            marks=pytest.mark.long,
        ),
    ],
)
def test_defects_of_members_that_answer_are_found(
    tmp_path: Path, module: str, plant: str, what: str
) -> None:
    flags = ("--seeds", "40", "--attempts", "0")
    done = run(tmp_path, module + PLANT.format(name=plant), *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    assert what in done.stdout


# Time travel.

FORGETS_COMMITS = """

from gazette.recoverylog import time_travel

before = time_travel._last_not_after
time_travel._last_not_after = lambda positions, *more: before(positions[::2], *more)
"""


@pytest.mark.parametrize("module", [totals("pass"), f"{IMPORTS}\n\n{JSON_TOTALS}"])
def test_states_of_former_moments_are_those_of_their_commits(tmp_path: Path, module: str) -> None:
    done = run(tmp_path, module, "--seeds", "4")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_defect_of_time_travel_is_found(tmp_path: Path) -> None:
    done = run(tmp_path, totals("pass") + FORGETS_COMMITS, *UNTIL_FOUND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is not the one that its commit left" in done.stdout
    assert "at that commit" in done.stdout


# Rebuilds by a backfill.

BACKFILL = """

from gazette.backfill import Backfill


class TotalsBackfill(Backfill):
    application = Totals
    discard_publications = True
"""
FORGETS_MESSAGES = """
    def build(self, shard, store, messages):
        for batch in messages:
            order = batch[0].message
            store.execute("INSERT OR REPLACE INTO totals VALUES (?, ?)", (order.customer, order.cents))
"""
RAISES = """
    def build(self, shard, store, messages):
        raise ValueError("wrong")
"""
NOTES = 'notes = Output("notes", Note)'
PUBLISHES = "publisher.publish_uncommitted(self.notes, Note(text=order.customer))"
REBUILDS = ("-k", "rebuild", "--attempts", "0")


@pytest.mark.parametrize(
    "module", [totals(PUBLISHES, NOTES), f"{IMPORTS}\n\n{JSON_TOTALS}"], ids=["sqlite", "json"]
)
def test_a_shard_continues_from_a_state_that_a_backfill_has_built(
    tmp_path: Path, module: str
) -> None:
    done = run(tmp_path, module + BACKFILL, "--seeds", "8", "--coverage", *REBUILDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rebuild by a backfill × done" in done.stdout


def test_a_backfill_that_builds_another_state_is_found(tmp_path: Path) -> None:
    done = run(tmp_path, totals("pass") + BACKFILL + FORGETS_MESSAGES, "--seeds", "20")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the state of shard-000 is not that of a run without faults" in done.stdout
    assert "the state of a shard is rebuilt by the backfill" in done.stdout
    assert f"hint: {HINTS['backfill']}" in done.stdout


def test_a_backfill_that_raises_is_found(tmp_path: Path) -> None:
    done = run(tmp_path, totals("pass") + BACKFILL + RAISES, "--seeds", "20", *REBUILDS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the backfill of shard-000 fails: ValueError: wrong" in done.stdout
    assert 'raise ValueError("wrong")' in done.stdout


def test_a_backfill_may_be_in_another_module(tmp_path: Path) -> None:
    (tmp_path / "rebuilt.py").write_text(f"from app import Totals\n{BACKFILL}")
    flags = ("--backfill", "rebuilt:TotalsBackfill", "--seeds", "4", "--coverage", *REBUILDS)
    done = run(tmp_path, totals("pass"), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rebuild by a backfill × done" in done.stdout
    wrong = run(tmp_path, totals("pass"), "--backfill", "one_order")
    assert wrong.returncode == 2, wrong.stdout + wrong.stderr
    assert "one_order is no Backfill of Totals" in wrong.stderr


def test_states_with_timers_are_not_rebuilt(tmp_path: Path) -> None:
    timers = TICKS.format(fired="pass").split("shard.schedule")[0]
    module = totals("pass", timers) + BACKFILL
    done = run(tmp_path, module, "--seeds", "8", "--coverage", *REBUILDS)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no seed was run" in done.stderr
    named = run(tmp_path, module, "--backfill", "TotalsBackfill")
    assert named.returncode == 2, named.stdout + named.stderr
    assert "an application with on_timer or a PoisonPolicy is not rebuilt" in named.stderr
