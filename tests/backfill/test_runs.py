"""What runs have left is listed: objects, branches of logs, and directories of processes that died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import msgspec
import pytest

from gazette.client.shards import ShardClient
from gazette.errors import Corrupt, NotFound
from gazette.history.backfill.inventory import (
    Intent,
    branch_orphans,
    in_force,
    intents_of,
    list_runs,
    scratch_orphans,
    staged_orphans,
    step_of,
)
from gazette.history.backfill.plan import Plan
from gazette.history.backfill.staging import DirectoryStaging, appending_name
from gazette.protocol.hints import FnodeSegments, FSMHints, Segment
from gazette.recoverylog.scratch import BUILDS, abandoned, scratch_directory, sweep
from gazette.runtime.clock import SystemClock
from tests.facts import raises

LOG = "recovery/shard"
BUILDING = """
import sys, pathlib
from gazette.recoverylog.scratch import *
with scratch_directory(BUILDS, pathlib.Path(sys.argv[1])) as path:
    (path / 'state').write_bytes(b'state')
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def staging(tmp_path: Path) -> DirectoryStaging:
    return DirectoryStaging(tmp_path / "staging")


def names(staging: DirectoryStaging) -> dict[str, str]:
    return {one.where: one.reason for one in staged_orphans(staging)}


def test_steps_of_a_run() -> None:
    assert step_of((), 0) == "begun"
    assert step_of(["PLAN.json", "states/a.1"], 2) == "planned"
    built = ["PLAN.json", "MANIFEST.json"]
    assert step_of(built, 2) == "built"
    assert step_of([*built, "appended/a.1.json"], 2) == "built"
    assert step_of([*built, "appended/a.1.json", "appended/b.1.json"], 2) == "appended"
    assert step_of(["PUBLISHED.json"], 0) == "published"


def test_runs_and_their_orphans(staging: DirectoryStaging) -> None:
    assert list_runs(staging) == []
    plan = Plan("app:Backfill", ["a", "b"], {}, "now")
    staging.create("run/PLAN.json", plan.to_json())
    for name in ("a.1", "a.2", "b.1"):
        staging.create(f"run/states/{name}", b"state")
        staging.create(f"run/states/{name}.json", b"{}")
    staging.create("run/states/b.2", b"sta")
    staging.create("run/states/.partial-x", b"s")
    (run,) = list_runs(staging)
    assert (run.run_id, run.backfill, run.shards, run.step) == ("run", "app:Backfill", 2, "planned")
    assert (run.objects, run.bytes > 15) == (9, True)
    # Case: not built; a run that is resumed takes the last attempt of each shard.
    again, torn = "another attempt has built the same state", "incomplete"
    found = names(staging)
    assert {name for name, reason in found.items() if reason == again} == {
        "run/states/a.1",
        "run/states/a.1.json",
    }
    assert {name for name, reason in found.items() if reason.startswith(torn)} == {
        "run/states/b.2",
        "run/states/.partial-x",
    }
    # Case: built, of other attempts; with what a killed process has left at the top.
    manifest = msgspec.json.encode({"attempts": {"a": "1", "b": "1"}})
    staging.create("run/MANIFEST.json", manifest)
    staging.create("run/.partial-y", b"")
    staging.create("run/appended/a.1.json", b"{}")
    assert names(staging).keys() == {
        "run/states/a.2",
        "run/states/a.2.json",
        "run/states/b.2",
        "run/states/.partial-x",
        "run/.partial-y",
    }
    assert list_runs(staging)[0].step == "built"
    # Case: published.
    staging.create("run/PUBLISHED.json", b"{}")
    left = {one.name for one in staging.list()} - {"run/PUBLISHED.json"}
    assert names(staging).keys() == left
    for name in left:
        staging.remove(name)
    (run,) = list_runs(staging)
    assert (run.step, run.objects, run.backfill) == ("published", 1, "")


def test_a_plan_that_is_not_valid_is_reported(staging: DirectoryStaging) -> None:
    staging.create("run/PLAN.json", b"[]")
    with raises(Corrupt, says="`array`"):
        list_runs(staging)
    # Case: a note that cannot be decoded.
    staging.create("run/appending/shard.1.2.json", b"{}")
    with raises(Corrupt, says="`log`"):
        intents_of(staging)


def hints(author: int, first_offset: int, log: str = "") -> FSMHints:
    segment = Segment(author, 1, first_offset, 0, 9, 0, log)
    return FSMHints(log=LOG, live_nodes=(FnodeSegments(1, (segment,)),))


def test_a_branch_is_an_orphan_unless_hints_name_it() -> None:
    first, again, other = Intent(LOG, 7, 100, 50), Intent(LOG, 7, 300, 50), Intent(LOG, 8, 500, 50)
    intents = [first, again, other]
    assert in_force(intents, ()) == set()
    assert in_force(intents, (None,)) == set()
    # Of two copies of one state, that from which the hints read.
    assert in_force(intents, (hints(7, 310),)) == {again}
    assert in_force(intents, (hints(7, 110),)) == {first}
    assert in_force(intents, (hints(7, 310), None, hints(8, 500, LOG))) == {again, other}
    assert in_force(intents, (hints(7, 310, "recovery/other"),)) == set()
    assert in_force(intents, (hints(9, 310),)) == set()


async def test_branches_are_asked_for_by_shard(staging: DirectoryStaging) -> None:
    class Shards:
        async def get_hints(self, shard: str) -> object:
            if shard == "shard/two":
                raise NotFound("no such shard")

            class Found:
                primary = hints(7, 310)
                backups = ()

            return Found

    for shard, begin in (("shard/one", 300), ("shard/one", 100), ("shard/two", 40)):
        intent = msgspec.json.encode(Intent(LOG, 7, begin, 50))
        staging.create(appending_name("run", shard, "a1", f"{begin}"), intent)
    found = intents_of(staging)
    assert [one.begin for one, _ in found["shard/one"]] == [100, 300]
    orphans = await branch_orphans(found, cast("ShardClient", Shards()))
    assert [one.where for one in orphans] == [f"{LOG}@100", f"{LOG}@40"]
    assert "gazctl shards prune" in orphans[0].remedy


def test_a_build_is_abandoned_when_its_process_has_died(tmp_path: Path) -> None:
    now = SystemClock().now() + 1
    with scratch_directory(BUILDS, tmp_path) as path:
        (path / "state").write_bytes(b"state")
        assert list(abandoned(tmp_path, now)) == []
        assert sweep(tmp_path, now) == []
    assert list(tmp_path.iterdir()) == []
    child = subprocess.Popen(
        [sys.executable, "-c", BUILDING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    assert list(abandoned(tmp_path, now + 60)) == []
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    (tmp_path / "of another program").mkdir()
    (tmp_path / f"{BUILDS}of-another-program").mkdir()
    (orphan,) = scratch_orphans(tmp_path, now + 60)
    assert (orphan.where, orphan.bytes) == (str(path), 5)
    assert list(abandoned(tmp_path, 0)) == []
    assert len(sweep(tmp_path, now + 60)) == 1
    left = sorted(one.name for one in tmp_path.iterdir())
    assert left == [f"{BUILDS}of-another-program", "of another program"]


def test_a_directory_that_is_about_to_be_locked_is_let_alone(tmp_path: Path) -> None:
    (tmp_path / f".new-{BUILDS}abcd_123").mkdir()
    now = SystemClock().now() + 1
    assert list(abandoned(tmp_path, now)) == []
    assert len(list(abandoned(tmp_path, now + 120))) == 1
