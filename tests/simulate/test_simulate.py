"""Applications are simulated: mistakes are found with the right hint, and a right application has none."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import first_application
import pytest

from gazette.errors import Invalid
from gazette.run.simulate import run as simulate_command
from gazette.testing import SimulationFailed, simulate
from gazette.testing.simulation.hints import HINTS
from tests.simulate import invariants
from tests.simulate.command import ROOT, gazette_test

FIRST = str(ROOT / "examples" / "first_application.py")
MISTAKES = Path(__file__).with_name("mistakes")
OF_MISTAKES = {
    "state_in_self": ("self", "self.totals"),
    "random_sample": ("random", "random.random()"),
    "system_time": ("time", "time.time()"),
    "system_date": ("time", "datetime.now(UTC)"),
    "http_call": ("network", "urlopen"),
    "publishes_outside": ("publish", "publish_committed"),
    "order_of_a_set": ("set", "for first in names"),
    "naive_retry": ("retry", "except Exception"),
    "float_sums": ("float", "price: float"),
    "catches_everything": ("swallow", "except BaseException"),
    "own_thread": ("thread", "threading.Thread"),
    "global_counter": ("global", "next(numbers)"),
    "table_state_in_self": ("self", "self.totals"),
    "table_first_rows": ("table", "to_pylist()[0]"),
    "table_float_sums": ("float", "price: float"),
    "table_publishes_outside": ("publish", "publish_committed"),
}
"""By application: the mistake whose hint is right, and a part of the line that is shown."""
FOUND_WITHIN = 20
"""Seeds."""
QUICK = ("state_in_self",)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in OF_MISTAKES],
)
def test_a_mistake_is_found_with_its_hint_and_its_line(name: str) -> None:
    done = gazette_test(str(MISTAKES / f"{name}.py"), "--seeds", str(FOUND_WITHIN))
    assert done.returncode == 1, done.stdout + done.stderr
    mistake, line = OF_MISTAKES[name]
    assert HINTS[mistake] in done.stdout, done.stdout
    shown = re.search(r"your code: (\S+):\d+.*\n *(.*)", done.stdout)
    assert shown is not None, done.stdout
    assert shown.group(1).endswith(f"{name}.py")
    assert line in shown.group(2)


@pytest.mark.timeout(600)
def test_a_right_application_has_no_mistake_and_a_seed_is_the_same_in_each_process(
    tmp_path: Path,
) -> None:
    junit = tmp_path / "report.xml"
    first = gazette_test(FIRST, "--seeds", "3", "--json", "--junit", str(junit))
    again = gazette_test(FIRST, "--first", "3", "--seeds", "1", "--json")
    assert first.returncode == again.returncode == 0, first.stdout + first.stderr
    digests = [
        {outcome["seed"]: outcome["digest"] for outcome in map(json.loads, run.stdout.splitlines())}
        for run in (first, again)
    ]
    assert list(digests[0]) == [1, 2, 3]
    assert list(digests[1]) == [3]
    assert digests[1].items() <= digests[0].items()
    suite = ElementTree.parse(junit).getroot()
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("3", "0")


def test_parts_and_names_of_faults_choose_seeds() -> None:
    halves = [gazette_test(FIRST, "--seeds", "4", "--json", "--shard", f"{n}/2") for n in (1, 2)]
    seeds = [[json.loads(line)["seed"] for line in half.stdout.splitlines()] for half in halves]
    assert seeds == [[2, 4], [1, 3]]
    killed = gazette_test(FIRST, "--seeds", "12", "--json", "-k", "hold")
    faults = [json.loads(line)["faults"] for line in killed.stdout.splitlines()]
    assert faults
    assert all("hold beyond the lease" in of_seed for of_seed in faults)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "0 applications"),
        (["first_application:WordCount", "--shard", "5/4"], "--shard"),
        (["first_application:WordCount", "--shard", "\u00b2/3"], "--shard"),
        (["first_application:WordCount", "--load", "nothing"], "--load"),
    ],
)
def test_a_mistake_in_the_command_is_said(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate_command(arguments) == 2
    assert names in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_an_invariant_of_the_user_is_checked(gazette_simulation: Callable[..., object]) -> None:
    with pytest.raises(SimulationFailed, match="the invariant does not hold"):
        gazette_simulation(first_application.WordCount, seeds=1, invariant=invariants.never)


def test_a_class_without_a_name_is_refused() -> None:
    class Local(first_application.WordCount):
        pass

    with pytest.raises(Invalid, match="no name of a module"):
        simulate(Local)


@pytest.mark.timeout(600)
def test_the_page_shows_what_its_application_does(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    application, loads = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "app.py").write_text(application)
    (tmp_path / "loads.py").write_text(loads)
    found = gazette_test("app.py", directory=tmp_path)
    shown = re.search(r"`gazette test app.py` finds it:\n\n(.*?)\n\nThe story", page, re.DOTALL)
    assert shown is not None
    assert found.stdout.startswith(re.sub("^    ", "", shown.group(1), flags=re.MULTILINE))
    upsert = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
    right = re.sub(
        r"        self\.totals\[.*",
        f'        store.execute("{upsert}", (order.customer, order.cents))',
        application,
        flags=re.DOTALL,
    )
    (tmp_path / "app.py").write_text(right)
    flags = ("--seeds", "2", "--load", "loads:orders", "--invariant", "loads:no_customer_is_rich")
    done = gazette_test("app.py", *flags, directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
