"""Contexts of `gazette run`: they are there while it runs, and take no place of the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from gazette.errors import Invalid, Unavailable
from gazette.gazctl.contexts import Contexts
from gazette.gazctl.run_contexts import RunContext, published, run_contexts
from gazette.testing.broker import BrokerFixture
from tests.gazctl.runner import Runner, offline

FIRST = RunContext("http://127.0.0.1:1", "http://127.0.0.1:2", "app.py", "/first")
SECOND = RunContext("http://127.0.0.1:3", "http://127.0.0.1:4", "other.py", "/second")


@pytest.fixture
def alone(tmp_path: Path, gazctl: Runner) -> Runner:
    """Return commands of a user without settings, in a home of their own."""
    return Runner({"HOME": str(tmp_path)})


async def test_a_run_is_found_without_flags_while_it_is_there(
    broker: BrokerFixture, alone: Runner
) -> None:
    run = RunContext(broker.endpoint, "http://127.0.0.1:2", "app.py", "/here")
    with published(alone.environ, run) as name:
        assert name == "run"
        await alone.ok("journals", "list")
        assert "127.0.0.1:2" in (await alone("shards", "list")).err
        listed = await alone.ok("context", "list")
        assert listed.rows == [["*", "run", broker.endpoint, "http://127.0.0.1:2"]]
        assert "run is there while app.py runs in /here" in listed.err
        for use in (["--context=run"], ["--broker.address", broker.endpoint]):
            await alone.ok("journals", "list", *use)
    assert run_contexts(alone.environ) == {}
    assert "there are no contexts" in (await alone.ok("context", "list")).err
    result = await alone("journals", "list", "--context=run")
    assert result.code == 1
    assert "there is no context run" in result.err


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--broker.address=http://127.0.0.1:5"], {}),
        ([], {"BROKER_ADDRESS": "http://127.0.0.1:5"}),
        (["--context=mine"], {}),
        ([], {"GAZCTL_CONTEXT": "mine"}),
    ],
)
async def test_each_address_of_the_user_goes_before_a_run(
    alone: Runner, argv: list[str], environ: dict[str, str]
) -> None:
    await alone.ok("context", "set", "mine", "--broker.address=http://127.0.0.1:5")
    with published(alone.environ, FIRST):
        result = await Runner(alone.environ | environ)("journals", "list", *argv)
    assert "127.0.0.1:5" in result.err


async def test_the_context_in_use_and_a_file_go_before_a_run(alone: Runner, tmp_path: Path) -> None:
    """No address of a run is mixed with one of another cluster."""
    await alone.ok("context", "set", "mine", "--broker.address=http://127.0.0.1:5")
    await alone.ok("context", "use", "mine")
    with published(alone.environ, FIRST):
        assert "127.0.0.1:5" in (await alone("journals", "list")).err
        assert "127.0.0.1:1" in (await alone("journals", "list", "--context=run")).err
        assert (await alone.ok("context", "list")).rows[0][:2] == ["*", "mine"]
        await alone.ok("context", "delete", "mine")
        (tmp_path / "cwd" / "gazctl.ini").write_text("[Broker]\nAddress = http://127.0.0.1:6\n")
        assert "127.0.0.1:6" in (await alone("journals", "list")).err
        assert "localhost:8080" in (await alone("shards", "list", "--timeout=2s")).err


async def test_the_users_own_context_of_that_name_stays(alone: Runner) -> None:
    own = "--broker.address=http://127.0.0.1:5"
    await alone.ok("context", "set", "run", own)
    file = Path(alone.environ["HOME"], ".config", "gazette", "contexts.yaml")
    before = file.read_bytes()
    with published(alone.environ, FIRST) as name:
        assert name == "run-2"
        assert "127.0.0.1:5" in (await alone("journals", "list", "--context=run")).err
        await alone.ok("context", "set", "run-2", own)
        assert "127.0.0.1:5" in (await alone("journals", "list", "--context=run-2")).err
        await alone.ok("context", "delete", "run-2")
        result = await alone("context", "use", "run-2")
        assert result.code == 2
        assert "GAZCTL_CONTEXT=run-2" in result.err
    assert file.read_bytes() == before


async def test_of_two_runs_none_is_chosen_in_silence(alone: Runner) -> None:
    """Each has a name. The name of one that has ended is free again."""
    with ExitStack() as stack:
        assert stack.enter_context(published(alone.environ, FIRST)) == "run"
        with published(alone.environ, SECOND) as name:
            assert name == "run-2"
            result = await alone("journals", "list")
            assert result.code == 2
            assert "run (app.py in /first), run-2 (other.py in /second)" in result.err
            assert "--context=run" in result.err
            assert "127.0.0.1:3" in (await alone("journals", "list", "--context=run-2")).err
            assert [row[0] for row in (await alone.ok("context", "list")).rows] == ["run", "run-2"]
            stack.close()
            assert "127.0.0.1:3" in (await alone("journals", "list")).err
            with published(alone.environ, FIRST) as again:
                assert again == "run"


async def test_runs_in_one_cluster_share_its_brokers(alone: Runner) -> None:
    """Commands on journals need no flag. Commands on shards have to say which application."""
    other = RunContext(FIRST.broker, SECOND.consumer, "other.py", "/second")
    with published(alone.environ, FIRST), published(alone.environ, other):
        assert "127.0.0.1:1" in (await alone("journals", "list")).err
        assert "2 applications are run" in (await alone("shards", "list")).err
        assert "127.0.0.1:4" in (await alone("shards", "list", "--context=run-2")).err


def test_a_killed_run_is_not_there(tmp_path: Path) -> None:
    """Its file is left. The next run takes the name."""
    code = (
        "import os, sys\n"
        "from gazette.gazctl.run_contexts import RunContext, published\n"
        "with published({'HOME': sys.argv[1]}, RunContext('http://a', 'http://b', 'app.py', '/')):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert ended.returncode == -9
    environ = {"HOME": str(tmp_path)}
    assert [path.name for path in (tmp_path / ".config/gazette/runs").iterdir()] == ["run.json"]
    assert run_contexts(environ) == {}
    with published(environ, FIRST) as name:
        assert name == "run"
        assert [run.broker for run in run_contexts(environ).values()] == [FIRST.broker]


def test_files_that_are_no_contexts_and_runs_of_other_machines_do_not_count(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    directory = tmp_path / ".config" / "gazette" / "runs"
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(published(environ, FIRST))
        (directory / "run.json").write_text("no JSON")
        there = (directory / "run-2.json").read_text()
        host = run_contexts(environ)["run-3"].host
        (directory / "run-2.json").write_text(there.replace(f'"{host}"', '"elsewhere"'))
        assert list(run_contexts(environ)) == ["run-3"]


@pytest.mark.parametrize("home", ["", "file", "bad"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, home: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "bad" / ".config" / "gazette").mkdir(parents=True)
    (tmp_path / "bad" / ".config" / "gazette" / "contexts.yaml").write_text("contexts: [here]\n")
    environ = {"HOME": str(tmp_path / home)} if home else {}
    with pytest.raises(Invalid) as caught, published(environ, FIRST):
        raise AssertionError("it was written")
    assert caught.value.path
    if home == "file":
        assert run_contexts(environ) == {}


def test_contexts_that_are_set_at_the_same_time_all_stay(tmp_path: Path) -> None:
    names = [f"context-{at}" for at in range(24)]

    def create(name: str) -> int:
        return offline(
            "context", "set", name, "--broker.address=http://a:1", HOME=str(tmp_path)
        ).code

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(create, names)) == {0}
    listed = offline("context", "list", HOME=str(tmp_path))
    assert sorted(row[0] for row in listed.rows) == sorted(names)


def test_a_process_that_keeps_the_contexts_is_named_and_not_waited_for_without_end(
    tmp_path: Path,
) -> None:
    environ = {"HOME": str(tmp_path)}
    with Contexts.changing(environ) as contexts:
        contexts.named["kept"] = {}
        with pytest.raises(Unavailable, match="another process"):
            with Contexts.changing(environ, wait_s=0.1):
                pass
    assert list(Contexts.load(environ).named) == ["kept"]
