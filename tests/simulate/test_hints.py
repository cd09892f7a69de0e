"""A hint names the mistake and the line, for causes that experiments of a simulation have found."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gazette.testing.simulation.hints import HINTS, advice
from tests.simulate.test_findings import totals


@pytest.fixture
def application(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[type]:
    """Import a module with the application whose callback has the lines of the parameter."""
    name = f"hinted_{tmp_path.name}"
    path = tmp_path / f"{name}.py"
    path.write_text(totals(*request.param) + "\n\nclass Sent:\n    n = 0\n")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module.Totals
    finally:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("application", "cause", "mistake"),
    [
        (["order = id(order)"], "varies", "process"),
        (["order = os.getpid()"], "set", "process"),
        (["Path('state').write_text('1')"], "varies", "file"),
        (["open('state')"], "varies", "file"),
        (["os.environ['LAST'] = '1'"], "varies", "file"),
        (["Sent.n += 1"], "varies", "global"),
        (["self.n[order.customer] = 1", "n = {}"], "varies", "self"),
        (["{order.cents, 1}.pop()"], "set", "set"),
        (["names = {1} | {order.cents}\nfirst = names.pop()"], "set", "set"),
    ],
    indirect=["application"],
)
def test_a_hint_fits_the_line(application: type, cause: str, mistake: str) -> None:
    hint, place = advice(cause, application)
    assert hint == HINTS[mistake]
    assert "consume_message" in place


@pytest.mark.parametrize(
    "application",
    [["self.read(order)", "@functools.lru_cache\ndef read(self, order): pass"]],
    indirect=True,
)
def test_a_cache_is_named(application: type) -> None:
    hint, place = advice("memory", application)
    assert hint == HINTS["cache"]
    assert place.endswith(" in read")


@pytest.mark.parametrize("application", [["pass"]], indirect=True)
def test_a_result_that_varies_without_a_suspect_has_a_hint_that_blames_no_one_thing(
    application: type,
) -> None:
    assert advice("varies", application) == (HINTS["varies"], "")
