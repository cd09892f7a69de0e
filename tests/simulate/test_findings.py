"""Small applications that a simulation once judged wrongly: mistakes are found, and right ones pass."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from gazette.errors import Invalid
from gazette.run.simulate import run as simulate_command
from gazette.testing import simulate
from gazette.testing.simulation.hints import HINTS
from tests.simulate import timed_app
from tests.simulate.command import ROOT, gazette_test

IMPORTS = """\
from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from datetime import date, datetime, timedelta
from pathlib import Path

import msgspec

from gazette import Application, EventTime, Message, Output, Source
from gazette.message.mapping import fixed_mapping
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite import SQLiteStore
from gazette.windows import TableJoin


class Order(Message):
    customer: str
    cents: int


class Note(Message):
    text: str
    tags: set[str] = set()


def one_order(rng):
    yield Order(customer="a", cents=1)


def no_order(rng):
    return iter(())


def something_is_consumed(query):
    assert query("SELECT 1 FROM totals")
"""
SOURCE = 'orders = Source("orders", Order, key="customer")'
TOTALS = """\
class Totals(Application):
    {declared}

    def new_store(self, shard, recorder):
        return SQLiteStore(
            recorder, "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n INTEGER)"
        )

    def consume_message(self, shard, store, envelope, publisher):
        order = envelope.message
        upsert = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
        store.execute(upsert, (order.customer, order.cents))
        {consumed}
"""
TICKS = """\
def on_timer(self, shard, store, timer, publisher):
    {fired}
    shard.schedule("tick", shard.now + timedelta(seconds=1))
"""
TICK = 'shard.schedule("tick", shard.now + timedelta(seconds=1))'
SET_TICKS = "INSERT INTO totals VALUES ('tick', ?) ON CONFLICT DO UPDATE SET n = excluded.n"
UNTIL_FOUND = ("--seeds", "20", "--attempts", "0")
COUNT_TICKS = "INSERT INTO totals VALUES ('tick', 1) ON CONFLICT DO UPDATE SET n = n + 1"


def totals(consumed: str, *declared: str, source: str = SOURCE) -> str:
    """Return a module with an application that does more than to keep totals in its store."""
    return f"{IMPORTS}\n\n" + TOTALS.format(
        declared=textwrap.indent("\n".join([source, *declared]), "    ").strip(),
        consumed=textwrap.indent(consumed, "        ").strip(),
    )


def run(
    directory: Path, module: str, *flags: str, target: str = "app.py"
) -> subprocess.CompletedProcess[str]:
    (directory / "app.py").write_text(module)
    return gazette_test(target, *flags, directory=directory)


# Timers and transactions that follow each other.


def test_timers_that_set_themselves_again_come_to_rest(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        totals(TICK, TICKS.format(fired=f'store.execute("{COUNT_TICKS}")')),
        *("--first", "3", "--seeds", "2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_such_timers_do_is_compared(tmp_path: Path) -> None:
    fired = f'self.n += 1\n    store.execute("{SET_TICKS}", (self.n,))'
    done = run(tmp_path, totals(TICK, "n = 0", TICKS.format(fired=fired)), *UNTIL_FOUND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "name = 'tick'" in done.stdout


def test_time_passes_until_timers_of_hours_fire(tmp_path: Path) -> None:
    timer = TICK.replace("seconds=1", "hours=9")
    fired = f'self.n += 1\n    store.execute("{SET_TICKS}", (self.n,))'
    module = totals(timer, "n = 0", TICKS.format(fired=fired)).replace("seconds=1", "hours=9")
    done = run(tmp_path, module, *UNTIL_FOUND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "name = 'tick'" in done.stdout


def test_a_callback_that_sleeps_may_set_timers_by_the_time_afterwards(tmp_path: Path) -> None:
    timer = TICK.replace('"tick"', "order.customer")
    module = totals(f"time.sleep(0.3)\n{timer}", TICKS.split("    {fired}")[0] + "    pass")
    done = run(tmp_path, module, "--seeds", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_timers_that_a_transaction_sets_at_its_end_may_be_those_of_the_run(tmp_path: Path) -> None:
    finalize = f"def finalize_transaction(self, shard, store, publisher):\n    {TICK}"
    module = totals("pass", finalize, TICKS.split("    {fired}")[0] + "    pass")
    done = run(tmp_path, module, "--seeds", "2", "--transactions", "recorded")
    assert done.returncode == 0, done.stdout + done.stderr
    free = run(tmp_path, module, *UNTIL_FOUND)
    assert free.returncode == 1, free.stdout + free.stderr
    assert f"hint: {HINTS['batches']}" in free.stdout


def test_a_fold_has_sources_become_idle_when_they_did_in_the_run(tmp_path: Path) -> None:
    module = f"""\
{IMPORTS}

class Prices(Application):
    event_time = EventTime(lateness=timedelta(seconds=10), idle_after=timedelta(minutes=1))
    orders = Source("orders", Order, key="customer")
    notes = Source("notes", Note, key="text")
    priced = TableJoin("priced", wait=timedelta(minutes=5), value_type=Order, row_type=str)

    def new_store(self, shard, recorder):
        return SQLiteStore(recorder, self.priced.schema)

    def consume_message(self, shard, store, envelope, publisher):
        message = envelope.message
        if isinstance(message, Note):
            self.priced.put(shard, store, message.text, envelope.time, message.text)
        else:
            self.priced.add(shard, store, message.customer, envelope.time, message)

    def on_timer(self, shard, store, timer, publisher):
        self.priced.on_timer(shard, store, timer)
"""
    done = run(tmp_path, module, "--seeds", "36", "-k", "time passes")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_says_that_no_timer_has_fired(tmp_path: Path) -> None:
    module = totals("pass", TICKS.format(fired="raise ValueError"))
    done = run(tmp_path, module, "--seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No timer has fired in these seeds, so on_timer has not been tested." in done.stdout


def test_an_application_that_does_not_come_to_rest_is_a_finding(tmp_path: Path) -> None:
    module = totals("publisher.publish_uncommitted(type(self).orders, Order('a', 1))")
    done = run(tmp_path, module, "--seeds", "1", "--load", "one_order", "--attempts", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "transactions do not end" in done.stdout


# Outputs.

JOURNALS = """\
name: things/
replication: 1
fragment:
  {length: 16777216, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1m0s}
children:
  - {name: things/in, labels: [{name: content-type, value: application/x-ndjson}]}
  - {name: things/out, labels: [{name: content-type, value: application/x-ndjson}]}
  - name: things/shard-000
    labels: [{name: content-type, value: application/x-gazette-recoverylog}]
"""
SHARDS = """\
common: {recovery_log_prefix: things, hint_prefix: /hints, max_txn_duration: 1s}
shards:
  - id: shard-000
    sources:
      - journal: things/in
"""


def test_outputs_beside_a_source_are_compared(tmp_path: Path) -> None:
    (tmp_path / "journals.yaml").write_text(JOURNALS)
    (tmp_path / "shards.yaml").write_text(SHARDS)
    module = totals(
        "self.n += 1\npublisher.publish_uncommitted(OUT, Note(text=str(self.n)))",
        "n = 0",
        source="message_type = Order",
    )
    out = '\n\nOUT = fixed_mapping("things/out", "application/x-ndjson", (Note,))\n'
    flags = ("--journals", "journals.yaml", "--shards", "shards.yaml", *UNTIL_FOUND)
    done = run(tmp_path, module + out, *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "messages of things" in done.stdout


def test_sets_in_outputs_have_no_order(tmp_path: Path) -> None:
    note = "Note(text=order.customer, tags={order.customer, 'x', 'y', 'z', 'one', 'two'})"
    module = totals(
        f"publisher.publish_uncommitted(self.notes, {note})", 'notes = Output("notes", Note)'
    )
    done = run(tmp_path, module, "--seed", "2")  # It is one of those that another process folds.
    assert done.returncode == 0, done.stdout + done.stderr


# The surroundings of the user's code.


def test_simulated_times_are_instances_of_the_real_classes(tmp_path: Path) -> None:
    checks = """\
assert type(datetime(2026, 1, 1)) is type(datetime.now()) is type(envelope.time or shard.now)
assert repr(datetime(2026, 1, 1)) == "datetime.datetime(2026, 1, 1, 0, 0)"
assert type(datetime.fromisoformat("2026-01-01")) == datetime
assert isinstance(datetime.now(), date) and issubclass(datetime, date)
assert not isinstance(date(2026, 1, 1), datetime)
"""
    done = run(tmp_path, totals(checks), "--seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_states_may_hold_times(tmp_path: Path) -> None:
    module = f"""\
{IMPORTS}

class State(msgspec.Struct):
    at: datetime


class Totals(Application):
    {SOURCE}

    def new_store(self, shard, recorder):
        return JSONFileStore(recorder, dict[str, State | datetime | None])

    def consume_message(self, shard, store, envelope, publisher):
        at = datetime(2026, 1, 1)
        store.state[envelope.message.customer] = at
        store.state["all"] = State(at=at)
"""
    done = run(tmp_path, module, "--seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_user_prints_is_not_among_reports(tmp_path: Path) -> None:
    printed = totals("print(order)\nos.write(1, b'{raw}\\n')", source=f"print(0)\n{SOURCE}")
    done = run(tmp_path, printed, "--seeds", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["seed"] for line in done.stdout.splitlines()] == [1, 2]
    assert "{raw}" in done.stderr


# Callbacks that raise.


def test_a_callback_that_raises_has_a_hint(tmp_path: Path) -> None:
    done = run(tmp_path, totals("raise ValueError('wrong')"), *UNTIL_FOUND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"hint: {HINTS['raises']}" in done.stdout


def test_the_store_of_another_shard_is_no_store_for_a_callback(tmp_path: Path) -> None:
    module = totals(
        "self.all.append(store)\nself.all[0].query('SELECT 1')",
        "def __init__(self):\n    self.all = []",
        source=SOURCE.replace("key=", "partitions=2, key="),
    )
    done = run(tmp_path, module, *UNTIL_FOUND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"hint: {HINTS['closed']}" in done.stdout
    assert "self.all[0].query" in done.stdout


# Seeds that consume something, and seeds that do not survive.


def test_seeds_of_many_partitions_consume_messages(tmp_path: Path) -> None:
    module = totals("pass", source=SOURCE.replace("key=", "partitions=16, key="))
    done = run(tmp_path, module, "--seeds", "2", "--invariant", "something_is_consumed")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("consumed", "what", "place"),
    [
        ("while True: pass", "it does not end in time", "app.py:"),
        ("threading.Event().wait()", "it does not end in time", "app.py:"),
        ("ctypes.string_at(0)", "its process dies by SIGSEGV", "app.py:"),
        ("os._exit(7)", "its process exits with code 7", ""),
    ],
)
def test_a_seed_fails_that_hangs_or_ends_its_process(
    tmp_path: Path, consumed: str, what: str, place: str
) -> None:
    flags = ("--seeds", "1", "--timeout", "5", "--junit", "report.xml", "--json")
    done = run(tmp_path, totals(consumed), *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    failure = json.loads(done.stdout.splitlines()[-1])
    assert failure["outcome"]["what"] == what
    assert failure["place"].startswith(place)
    assert not place or failure["line"] == consumed
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert suite.attrib["failures"] == "1"
    assert "Traceback" not in done.stderr


def test_a_failure_is_not_lost_if_a_shorter_story_hangs(tmp_path: Path) -> None:
    wrong = """\
path = Path("process")
if path.exists() and path.read_text() != str(os.getpid()):
    while True: pass
path.write_text(str(os.getpid()))
raise ValueError("wrong")
"""
    done = run(tmp_path, totals(wrong), "--seeds", "1", "--timeout", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "consume_message raised ValueError" in done.stdout


def test_a_failure_says_after_which_seeds_it_comes(tmp_path: Path) -> None:
    module = totals('COUNTED.append(order)\nassert len(COUNTED) < 150, "too many"')
    done = run(tmp_path, module + "\n\nCOUNTED = []\n", "--seeds", "20")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "it fails only after seeds 2 to" in done.stdout or "seeds 3 to" in done.stdout
    assert "replay: gazette test app.py --seeds 20" in done.stdout
    assert "A global name is of one process" in done.stdout


# Mistakes in the command.


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--seeds", "0"], "Seeds begin at 1"),
        (["--seed", "0"], "Seeds begin at 1"),
        (["-k", "nomatch"], "The faults are: kill"),
        (["--minutes", "9", "-k", "nomatch"], "The faults are: kill"),
        (["--minutes", "0.02", "--shard", "1/999999999"], "no seed was run"),
        (["--seeds", "1", "--shard", "1/2"], "no seed was run"),
        (["--load", "nosuchmod:orders"], "nosuchmod cannot be imported"),
        (
            ["--journals", "missing.yaml", "--shards", "journals.yaml"],
            "missing.yaml cannot be read",
        ),
        (["--journals", "journals.yaml"], "only one of journals and shards"),
        (["--shards", "journals.yaml"], "only one of journals and shards"),
        (["--journals", "journals.yaml", "--shards", "empty.yaml"], "there is no shard"),
        (["--journals", "empty.yaml", "--shards", "shards.yaml"], "things/in, which is no journal"),
        (["--junit", "."], "--junit: . cannot be written"),
        (["--junit", "missing/report.xml"], "cannot be written"),
        (["--journals", "journals.yaml", "--shards", "short.yaml"], "invalid length (3"),
        (["--timeout", "0"], "--timeout"),
    ],
)
def test_a_command_by_which_nothing_would_run_is_refused(
    tmp_path: Path,
    flags: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "journals.yaml").write_text(JOURNALS)
    (tmp_path / "shards.yaml").write_text(SHARDS)
    (tmp_path / "short.yaml").write_text(SHARDS.replace("shard-000", "log"))
    (tmp_path / "empty.yaml").write_text("shards: []\n" if "there" in says else "children: []\n")
    application = f"{tmp_path.name}.py"  # Modules of one process have different names.
    (tmp_path / application).write_text(totals("pass"))
    monkeypatch.chdir(tmp_path)
    assert simulate_command([application, *flags]) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert "Traceback" not in errors


def test_a_store_in_a_database_is_refused(tmp_path: Path) -> None:
    module = totals("pass").replace("SQLiteStore(", "SQLStore('sqlite:///state') or (")
    module = module.replace("stores.sqlite import SQLiteStore", "stores.sql import SQLStore")
    done = run(tmp_path, module, "--seeds", "1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "an application with a SQLStore needs a database" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_policy_that_raises_is_refused(tmp_path: Path) -> None:
    module = totals("pass", "def poison_policy(self, shard):\n    raise ValueError('wrong')")
    done = run(tmp_path, module, "--seeds", "1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "poison_policy cannot be called: ValueError: wrong" in done.stderr


def test_a_policy_may_need_what_initialize_has_set(tmp_path: Path) -> None:
    declared = """\
async def initialize(self, service):
    self.policy = None

def poison_policy(self, shard):
    return self.policy
"""
    done = run(tmp_path, totals("pass", declared), "--seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_load_without_messages_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, totals("pass"), "--load", "no_order")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "load yields no message" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("seeds", [range(3), range(1, 9, 2), range(5, 5), 0])
def test_seeds_that_cannot_be_run_are_refused(seeds: int | range) -> None:
    with pytest.raises(Invalid, match="is no range of seeds"):
        simulate(timed_app.Accounts, seeds=seeds)


def test_ctrl_c_ends_a_run_with_its_reports(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(totals("pass"))
    command = ["test", "app.py", "--minutes", "9", "--json", "--junit", "report.xml"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gazette.main", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["seed"] == 1
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert ElementTree.parse(tmp_path / "report.xml").getroot().attrib["failures"] == "0"
