"""The option ``plan``: what it says is data, and what is not understood in full is refused."""

from __future__ import annotations

import base64
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from pyspark import cloudpickle

import gazette.spark.source.plan as plan_module
from gazette.errors import Invalid
from gazette.history.snapshot_builder import take_snapshot
from gazette.spark.source.options import ReadOptions
from gazette.spark.source.plan import Plan, decode_plan, encode_plan
from gazette.spark.source.source import GazetteDataSource, with_combine
from gazette.spark.source.table import fold_on_driver
from tests.facts import raises
from tests.spark.test_table import options as options
from tests.spark.test_table import struct


class Runs:
    """What a pickle calls as it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def text_of(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def planned(options: dict[str, str], plan: str) -> Any:
    """Return what Spark asks of the source in the process that plans, which holds the options of a query."""
    return GazetteDataSource({**options, "plan": plan}).reader(struct("word string")).partitions()


def test_a_plan_of_a_query_runs_no_code(options: dict[str, str], tmp_path: Path) -> None:
    """``SELECT … OPTIONS (plan = …)`` is open to everyone with the right to query."""
    made = tmp_path / "made-by-a-query"
    with raises(Invalid, path="option plan"):
        planned(options, text_of(pickle.dumps(Runs(made))))
    assert not made.exists()


def plan_of(options: dict[str, str]) -> Plan:
    """Return the plan of both journals."""
    parsed = ReadOptions.parse(options)
    with parsed.access.open() as access:
        folded = fold_on_driver(access, take_snapshot(access, parsed.selection), parsed)
    return Plan(folded.runs)


def test_a_plan_comes_back_as_it_was(options: dict[str, str]) -> None:
    plan = plan_of(options)
    assert [run.run.length > 0 for run in plan.runs] == [True] * 6
    assert decode_plan(encode_plan(plan)) == plan
    assert decode_plan(encode_plan(Plan(()))) == Plan(())
    rows = planned(options, encode_plan(plan))
    assert [partition.value for partition in rows] == list(plan.runs)
    assert {partition.combine for partition in rows} == {None}


def altered(text: str, change: Callable[[Any], Any]) -> str:
    """Return a plan of which the values were changed, as encoded by someone else."""
    mark, _, body = text.partition(":")
    plain = msgspec.msgpack.decode(zlib.decompress(base64.b64decode(body)))
    changed = change(plain)
    data = msgspec.msgpack.encode(plain if changed is None else changed)
    return f"{mark}:{text_of(data)}"


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.update(later=1),
        lambda plan: plan["runs"][0].update(later=1),
        lambda plan: plan["runs"][0]["run"]["pieces"][0]["fragment"].update(later=1),
        lambda plan: plan.update(combine="os:system"),
        lambda plan: plan.update(runs=5),
        lambda plan: plan.pop("runs"),
        lambda plan: [plan],
        lambda plan: plan["runs"].append(plan["runs"][0]),
        lambda plan: plan["runs"][0].update(clock_min="1"),
        lambda plan: plan["runs"][0]["run"].update(pieces=[]),
        lambda plan: plan.update(kept={0: "/etc/passwd"}),
        lambda plan: plan["runs"][1]["run"].update(beyond=plan["runs"][0]["run"]["pieces"]),
        lambda plan: plan["runs"][0]["run"]["shape"].update(malformed="run"),
        lambda plan: plan["runs"][0]["run"]["shape"].update(message="os:path"),
        lambda plan: plan["runs"][0]["run"]["pieces"][0].update(begin=-1),
        lambda plan: plan["runs"][0]["run"]["pieces"][0].update(end=1 << 40),
        lambda plan: plan["runs"][0]["run"]["pieces"][0]["fragment"].update(journal="other"),
        lambda plan: plan["runs"][0]["run"]["pieces"][0]["fragment"].update(sum=b""),
        lambda plan: plan["runs"][0]["run"]["pieces"][0]["fragment"].update(codec=77),
        lambda plan: plan["runs"][0]["run"]["pieces"][0]["fragment"].update(path_postfix="../x"),
    ],
)
def test_a_plan_that_is_not_understood_is_refused(
    options: dict[str, str], change: Callable[[Any], Any]
) -> None:
    text = encode_plan(plan_of(options))
    assert decode_plan(altered(text, lambda plan: plan)) == plan_of(options)
    with raises(Invalid, says="option plan"):
        decode_plan(altered(text, change))


def test_plans_of_other_versions_and_sizes_are_refused(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = encode_plan(plan_of(options))
    with raises(Invalid, path="option plan", says="version 3"):
        decode_plan(text.replace("plan-3:", "plan-4:"))
    for cut in (text[:-4], text[:40], text + "AAAA", "gazette-plan-3:"):
        with raises(Invalid, path="option plan"):
            decode_plan(cut)
    # What decompresses to more than it may is not decompressed further.
    monkeypatch.setattr(plan_module, "DATA_BYTES_MAX", 1 << 20)
    with raises(Invalid, path="option plan", says="1048576"):
        decode_plan("gazette-plan-3:" + text_of(bytes(1 << 26)))
    monkeypatch.setattr(plan_module, "TEXT_BYTES_MAX", len(text) - 1)
    with raises(Invalid, path="option plan", says=f"at most {len(text) - 1}"):
        encode_plan(plan_of(options))
    with raises(Invalid, path="option plan", says=f"{len(text)} bytes"):
        decode_plan(text)


def test_a_combine_comes_with_the_class_that_a_job_registers(options: dict[str, str]) -> None:
    """As Spark ships it: by value, under a name that no other source has."""
    source = cloudpickle.loads(cloudpickle.dumps(with_combine(drop_all)))
    assert source.name().startswith("gazette_")
    given = {**options, "plan": encode_plan(plan_of(options))}
    partitions = source(given).reader(struct("word string")).partitions()
    assert {partition.combine for partition in partitions} == {drop_all}


def drop_all(rows: Any) -> Any:
    return rows.slice(0, 0)
