"""A supervisor's workers: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gazette.errors import Broken, Invalid
from gazette.runtime.clock import SystemClock
from gazette.runtime.supervisor import (
    PARENT_ENV,
    Supervisor,
    Worker,
    die_with_parent,
    shifted_port,
    this_program,
)
from gazette.runtime.tasks import TaskScope
from tests.facts import logged, raises

WAITING = """
import os, signal, sys
from gazette.runtime.supervisor import die_with_parent
die_with_parent(os.environ)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {os.getsid(0)}\\n")
os.rename(sys.argv[1], sys.argv[1] + ".ready")
number = signal.sigwait({signal.SIGTERM, signal.SIGINT})
with open(sys.argv[1] + ".ended", "w") as file:
    file.write(signal.Signals(number).name)
sys.exit(int(sys.argv[2]))
"""
"""A worker which says that it is there, waits for a signal, says which, and exits with the given code."""


def waiting(directory: Path, name: str, code: int = 0) -> Worker:
    return Worker(name, [sys.executable, "-c", WAITING, str(directory / name), str(code)])


def environ() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root}


async def appeared(path: Path) -> str:
    clock = SystemClock()
    while not path.exists():
        await clock.sleep(0.01)
    return path.read_text()


def supervisor(*workers: Worker, **options: float) -> Supervisor:
    return Supervisor(SystemClock(), workers, environ(), **options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_are_passed_on_and_everybody_is_waited_for(
    tmp_path: Path, number: signal.Signals
) -> None:
    running = supervisor(waiting(tmp_path, "a"), waiting(tmp_path, "b"))
    async with TaskScope("test") as scope:
        task = scope.spawn(running.run(), name="run")
        sessions = {(await appeared(tmp_path / f"{name}.ready")).split()[1] for name in "ab"}
        # Each has a session of its own, so that a terminal's Ctrl-C does not reach it twice.
        assert len(sessions | {str(os.getsid(0))}) == 3
        os.kill(os.getpid(), number)
        assert await task == 0
    for name in "ab":
        assert (tmp_path / f"{name}.ended").read_text() == number.name


async def test_a_worker_that_ends_unasked_ends_the_others_gracefully(tmp_path: Path) -> None:
    running = supervisor(waiting(tmp_path, "a"), waiting(tmp_path, "b"))
    async with TaskScope("test") as scope:
        task = scope.spawn(running.run(), name="run")
        for name in "ab":
            await appeared(tmp_path / f"{name}.ready")
        os.kill(running.pids["a"], signal.SIGKILL)
        assert await task == 1
    assert (tmp_path / "b.ended").read_text() == "SIGTERM"


async def test_ending_unasked_is_a_failure_even_with_exit_code_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = supervisor(Worker("short", [sys.executable, "-c", ""]), waiting(tmp_path, "b"))
    assert await running.run() == 1
    logged(caplog, worker="short", reason="exit code 0")


async def test_a_worker_that_fails_while_stopping_is_a_failure(tmp_path: Path) -> None:
    running = supervisor(waiting(tmp_path, "a"), waiting(tmp_path, "b", code=3))
    async with TaskScope("test") as scope:
        task = scope.spawn(running.run(), name="run")
        for name in "ab":
            await appeared(tmp_path / f"{name}.ready")
        running.signal_all(signal.SIGTERM)
        assert await task == 1


async def test_a_worker_that_does_not_stop_is_killed_at_the_deadline(tmp_path: Path) -> None:
    deaf = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'deaf')!r}, 'w').close()\n"
        "signal.pause()"
    )
    running = supervisor(Worker("deaf", [sys.executable, "-c", deaf]), stop_timeout_s=0.1)
    async with TaskScope("test") as scope:
        task = scope.spawn(running.run(), name="run")
        await appeared(tmp_path / "deaf")
        running.signal_all(signal.SIGTERM)
        assert await task == 1


async def test_a_program_that_cannot_be_started_is_named_and_no_process_is_left(
    tmp_path: Path,
) -> None:
    running = supervisor(waiting(tmp_path, "a"), Worker("b", ["/no/such/program"]))
    with raises(Broken, says="/no/such/program"):
        await running.run()
    with pytest.raises(ProcessLookupError):
        os.kill(running.pids["a"], 0)


async def test_workers_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    """The kernel tells them: nothing else can, after a SIGKILL."""
    program = (
        "import asyncio, os, sys\n"
        "from gazette.runtime.clock import SystemClock\n"
        "from gazette.runtime.supervisor import Supervisor, Worker\n"
        f"worker = Worker('w', [sys.executable, '-c', {WAITING!r}, {str(tmp_path / 'w')!r}, '0'])\n"
        "asyncio.run(Supervisor(SystemClock(), [worker], os.environ).run())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=environ()) as parent:
        await appeared(tmp_path / "w.ready")
        parent.kill()
    while not await appeared(tmp_path / "w.ended"):
        pass  # It exists a moment before it is written.
    assert await appeared(tmp_path / "w.ended") == "SIGTERM"


def test_an_orphan_does_not_begin_to_work() -> None:
    with raises(Broken, "supervisor"):
        die_with_parent({PARENT_ENV: "1" if os.getppid() != 1 else "2"})
    die_with_parent({})


@pytest.mark.parametrize(
    ("port", "index", "expected"),
    [("", 3, ""), ("8080", 0, "8080"), ("8080", 2, "8084"), ("unix:///a/b", 1, "unix:///a/b.1")],
)
def test_ports_of_workers_follow_from_the_first(port: str, index: int, expected: str) -> None:
    assert shifted_port(port, index, stride=2) == expected


@pytest.mark.parametrize("port", ["http", "65535"])
def test_ports_that_do_not_exist_are_refused(port: str) -> None:
    with raises(Invalid, path="port", says=f'"{port}"'):
        shifted_port(port, 1)


def test_there_must_be_a_worker() -> None:
    with pytest.raises(Invalid):
        Supervisor(SystemClock(), [], {})


def test_the_program_is_executed_as_it_was_started(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from gazette.runtime.supervisor import this_program\nprint(this_program()[-2:])\n"
    )
    for argv, expected in (
        ([sys.executable, str(script)], [sys.executable, str(script)]),
        ([sys.executable, "-m", "script"], ["-m", "script"]),
    ):
        out = subprocess.run(
            argv, capture_output=True, text=True, check=True, env=environ(), cwd=tmp_path
        )
        assert out.stdout.strip() == repr(expected)
    assert this_program()[0] == sys.executable
