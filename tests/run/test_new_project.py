"""`gazette new` writes a project that works as it is."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gazette.errors import Invalid
from gazette.run.new_project import run, write_project
from tests.facts import raises
from tests.run.test_run import ROOT, Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_a_project_has_an_application_a_test_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["word-count"]) == 0
    names = sorted(path.name for path in Path("word-count").iterdir())
    assert names == [".gitignore", "README.md", "app.py", "test_app.py"]
    assert "gazette run app.py --reload" in capsys.readouterr().out
    for path in Path("word-count").iterdir():
        assert "PROJECT_NAME" not in path.read_text()
    assert 'application_name = "word-count"' in Path("word-count/app.py").read_text()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no name is given"),
        (["a", "b"], "2 names are given"),
        (["word count"], "as in word-count."),
        (["9"], "as in word-count."),
        (["there"], "there exists"),
        (["no/such/name"], "cannot create no/such/name: No such file or directory"),
        (["name", "--template=x"], "unknown flag --template"),
    ],
)
def test_what_cannot_be_written_is_named(
    argv: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An existing directory stays as it is."""
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    assert run(argv) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_full_disk_leaves_no_part_of_a_project(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with raises(Invalid, path="gazette new", says="cannot write"):
            write_project(tmp_path / "word-count")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "word-count").exists()


def test_its_test_passes(tmp_path: Path) -> None:
    write_project(tmp_path / "mine")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "mine",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


async def test_the_commands_of_its_page_work(tmp_path: Path) -> None:
    """At the ports of this test, and not at those of the page."""
    directory = tmp_path / "my-words"
    write_project(directory)
    page = (directory / "README.md").read_text()
    commands = re.findall(r"^    (.*)$", page, re.MULTILINE)
    assert "gazette run app.py --reload" in commands
    (publish,) = (one for one in commands if one.startswith("printf"))
    (query,) = (one for one in commands if one.startswith("curl"))
    project = Run(directory)
    await project.start("--reload")
    try:
        await project.until("Ctrl-C stops it")
        assert publish in project.said  # The banner only adds the address of its broker.
        assert query.rpartition("9001")[2] in project.said
        await project.publish()
        await project.answers({"n": 1})
    finally:
        assert await project.stop() == 0
    for command in commands[-3:]:
        words = command.removeprefix("python ").split()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, *words),
            cwd=directory,
            env=project.environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await child.communicate()
        assert child.returncode == 0, said.decode()
        assert ("my-words" if words[1] == "specs" else "--broker.address") in said.decode()
