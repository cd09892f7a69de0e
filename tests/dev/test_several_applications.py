"""The page on several applications: its programs and commands, at ports of this test."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gazette.runtime.clock import SystemClock

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
PAGE = (ROOT / "docs" / "several-applications.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^    ((?:gazette|gazctl|printf|curl) .*)$", PAGE, re.MULTILINE)
DEV, RUN_COUNTS, RUN_TOP = COMMANDS[:3]
PUBLISH, ASK = COMMANDS[3:5]
LOOK = COMMANDS[5:]
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


class Project:
    """The directory of the page, and the processes of its commands."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environ = {"PATH": "/usr/bin:/bin", "HOME": str(directory), "PYTHONPATH": str(ROOT)}
        self.addresses = {"--port 9000": "--port 0", "--port 9010": "--port 0"}
        """Words of the page, and those that stand for them here."""
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        for name, program in zip(("counts.py", "top.py"), PROGRAMS, strict=True):
            (directory / name).write_text(program)

    def here(self, command: str) -> str:
        for word, other in self.addresses.items():
            command = command.replace(word, other)
        for program in ("gazette", "gazctl"):
            module = "gazette.main" if program == "gazette" else "gazette.gazctl.main"
            command = re.sub(rf"(^|\| ){program} ", rf"\1{sys.executable} -m {module} ", command)
        return command

    def said(self, name: str) -> str:
        return (self.directory / f"{name}.txt").read_text()

    async def start(self, name: str, command: str, text: str) -> str:
        """Start a process. Return what it says, once that has a text."""
        with (self.directory / f"{name}.txt").open("wb") as log:
            process = self.processes[name] = await asyncio.create_subprocess_exec(
                *shlex.split(self.here(command)),
                cwd=self.directory,
                env=self.environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        async with asyncio.timeout(120):
            while text not in self.said(name):
                assert process.returncode is None, self.said(name)
                await CLOCK.sleep(0.05)
        return self.said(name)

    async def start_cluster(self) -> None:
        said = await self.start("dev", f"{DEV} --port 0 --etcd-port 0", "Ctrl-C stops it")
        self.addresses["http://localhost:8080"] = re.findall(r"broker +(\S+)", said)[0]
        self.addresses["http://localhost:2379"] = re.findall(r"etcd +(\S+)", said)[0]

    async def start_application(self, name: str, command: str) -> str:
        said = await self.start(name, command, "Ctrl-C stops it")
        return str(re.findall(r"serves +(\S+)", said)[0])

    async def shell(self, command: str) -> str:
        child = await asyncio.create_subprocess_shell(
            self.here(command),
            cwd=self.directory,
            env=self.environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(60):
            written, _ = await child.communicate()
        assert child.returncode == 0, (command, written.decode())
        return written.decode()

    async def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(120):
            assert await process.wait() == 0, self.said(name)

    async def top_is(self, wanted: object) -> None:
        """Return once the query of the page has an answer."""
        answer: object = None
        for _ in range(600):
            answer = json.loads(await self.shell(f"{ASK} --silent"))
            if answer == wanted:
                return
            await CLOCK.sleep(0.1)
        raise AssertionError(f"{answer}, not {wanted}")


@pytest.fixture
async def project(tmp_path: Path) -> AsyncIterator[Project]:
    project = Project(tmp_path)
    yield project
    for name in reversed(list(project.processes)):
        await project.stop(name)


async def test_the_commands_of_the_page_work(project: Project) -> None:
    """Both applications start at the same time: each finds the journals that the other creates."""
    await project.start_cluster()
    _, top = await asyncio.gather(
        project.start_application("counts", RUN_COUNTS),
        project.start_application("top", RUN_TOP),
    )
    project.addresses["http://127.0.0.1:9011"] = top
    await project.shell(PUBLISH)
    await project.top_is({"gazette": 2})
    written = [await project.shell(command) for command in LOOK]
    assert "counts/part-000" in written[0]
    assert "words/part-001" in written[0]
    assert re.findall(r"^ +(run\S*) ", written[1], re.MULTILINE) == ["run", "run-2"]
    assert sorted(one.count("PRIMARY") for one in written[2:4]) == [1, 2]
    assert [json.loads(line)["n"] for line in written[4].splitlines()] == [1, 2]

    # Case: an application that was stopped goes on where it was.
    await project.stop("top")
    await project.shell(PUBLISH)
    project.addresses[top] = await project.start_application("top", RUN_TOP)
    await project.top_is({"gazette": 4})


async def test_the_line_of_the_cluster_runs_an_application(project: Project) -> None:
    await project.start_cluster()
    (line,) = re.findall(r"^ +(gazette run .*)$", project.said("dev"), re.MULTILINE)
    line = line.replace("app.py", "counts.py --port 0 --dir .gazette/counts")
    await project.start_application("counts", line)
    assert "words/part-000" in await project.shell("gazctl journals list")

    # Case: the page names the prefix of its members, and etcd has it.
    (prefix,) = set(re.findall(r"/gazette/consumers/counts\S*?(?=`)", PAGE))
    key = base64.b64encode(f"{prefix}/application".encode()).decode()
    etcd = project.addresses["http://localhost:2379"]
    asked = await project.shell(f"curl -s {etcd}/v3/kv/range -d '{json.dumps({'key': key})}'")
    assert json.loads(asked)["count"] == "1"
