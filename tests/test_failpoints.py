"""Failpoints: what is armed happens at the hit that was named, and nothing else does."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gazette
from gazette.errors import Invalid, Unavailable
from gazette.runtime import failpoints
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.instant_clock import eventually

PROGRAM = """
from gazette.runtime.failpoints import hit
for number in range(5):
    print(number, flush=True)
    hit("commit.finalized", f"shard-{number % 2}")
print("end", flush=True)
"""


def run(spec: str) -> subprocess.Popen[str]:
    environ = {**os.environ, failpoints.ENV: spec}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environ, stdout=subprocess.PIPE, text=True
    )


def test_a_process_dies_at_the_hit_that_was_named() -> None:
    process = run("commit.finalized(shard-0)=kill@2")
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert output.split() == ["0", "1", "2"]


def test_a_process_stops_and_goes_on() -> None:
    process = run("commit.finalized(shard-1)=stop")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate()
    assert output.split() == ["0", "1", "2", "3", "4", "end"]


def test_errors_and_globs_and_every_hit() -> None:
    with failpoints.armed("append.applied(recovery/*)=error@2; ack.appended=error@*"):
        failpoints.hit("append.applied", "recovery/a")
        failpoints.hit("append.applied", "out/a")
        with raises(Unavailable, "detail", point="append.applied"):
            failpoints.hit("append.applied", "recovery/b")
        failpoints.hit("append.applied", "recovery/a")
        for _ in range(3):
            with pytest.raises(Unavailable):
                failpoints.hit("ack.appended", "out/a")
    failpoints.hit("ack.appended", "out/a")


async def test_a_delay_is_of_the_clock(clock: ManualClock) -> None:
    with failpoints.armed("append.begin=delay:2.5"):
        async with TaskScope("test") as scope:
            task = scope.spawn(failpoints.reach("append.begin", "a/journal", clock), name="reach")
            await eventually(lambda: clock.sleepers)
            clock.advance(2.4)
            assert not task.done()
            clock.advance(0.2)
        await failpoints.reach("append.begin", "a/journal", clock)


def test_marks_are_lines_of_time_point_and_detail(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    environ = {
        **os.environ,
        failpoints.ENV: "commit.finalized(shard-1)=mark@*",
        failpoints.MARKS_ENV: str(path),
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environ, check=True)
    lines = [line.split(" ") for line in path.read_text().splitlines()]
    assert [line[1:] for line in lines] == [["commit.finalized", "shard-1"]] * 2
    assert 0 < int(lines[0][0]) <= int(lines[1][0])


def test_marks_need_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failpoints.MARKS_ENV, raising=False)
    with failpoints.armed("commit.finalized=mark"), raises(Invalid, path="GAZETTE_FAILPOINT_MARKS"):
        failpoints.hit("commit.finalized")


THREADS = """
import os, sys, threading
from gazette.runtime.failpoints import hit
path = sys.argv[1]
os.mkfifo(path)  # To open it waits for a reader, while all threads come.
threads = [threading.Thread(target=hit, args=("commit.finalized", "a\\nb c\\udc80")) for _ in range(8)]
for thread in threads:
    thread.start()
threading.Event().wait(0.2)
reader = open(path)
for _ in range(8):
    print(reader.readline(), end="")
for thread in threads:
    thread.join()
held = -1  # That of the reader.
for name in os.listdir("/proc/self/fd"):
    held += os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}") == path
print(held)
"""


def test_marks_of_threads_are_whole_lines_of_one_file(tmp_path: Path) -> None:
    """The first of them opens the file, once; a detail takes no more than its place."""
    path = tmp_path / "marks"
    environ = {
        **os.environ,
        failpoints.ENV: "commit.finalized=mark@*",
        failpoints.MARKS_ENV: str(path),
    }
    command = [sys.executable, "-c", THREADS, str(path)]
    printed = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    *lines, count = printed.stdout.splitlines()
    assert count == "1"
    assert [line.split(" ")[1:] for line in lines] == [["commit.finalized", "a_b_c\\udc80"]] * 8


def test_a_file_of_marks_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        failpoints.ENV: "commit.finalized=mark",
        failpoints.MARKS_ENV: str(tmp_path / "no" / "such"),
    }
    program = """
from gazette.errors import Invalid
from gazette.runtime.failpoints import hit
try:
    hit("commit.finalized")
except Invalid as error:
    print(error.path, error.facts["file"])
"""
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    assert printed.stdout.split() == ["GAZETTE_FAILPOINT_MARKS", str(tmp_path / "no" / "such")]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("commit.finalised=kill", "unknown failpoint"),
        ("commit.finalized=explode", "unknown action"),
        ("commit.finalized", "invalid failpoint"),
        ("commit.finalized=kill:2", "only delay takes seconds"),
        ("commit.finalized=delay", "only delay takes seconds"),
        ("commit.finalized=kill@0", "WHEN is 0, and the first hit of a point is 1"),
        ("commit.finalized=delay:1.2.3", "seconds are not a number"),
        ("commit.finalized=delay:.", "seconds are not a number"),
    ],
)
def test_what_arms_nothing_is_an_error(spec: str, text: str) -> None:
    with pytest.raises(Invalid, match=text):
        failpoints.arm(spec)
    failpoints.hit("commit.finalized", "a-shard")


PASSED = ("hit", "reach")
"""The functions by which code passes a point."""


def test_every_point_is_in_the_code_and_documented() -> None:
    """A point that nothing passes would make a test of it pass for nothing."""
    passed: set[str] = set()
    package = Path(gazette.__file__).parent
    for path in package.rglob("*.py"):
        source = path.read_text()
        if "failpoints" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and called.removeprefix("failpoints.") in PASSED:
                point = node.args[0]
                assert isinstance(point, ast.Constant), f"{path}: a point is named by a literal"
                passed.add(str(point.value))
    assert passed == set(failpoints.POINTS)


def test_a_hook_hears_of_every_point_and_decides_what_to_wait() -> None:
    heard: list[tuple[str, str]] = []

    def hook(point: str, detail: str) -> float:
        heard.append((point, detail))
        return 0.0

    with failpoints.hooked(hook):
        failpoints.hit("ack.appended", "out/a")
        with failpoints.armed("ack.appended=error"), pytest.raises(Unavailable):
            failpoints.hit("ack.appended", "out/b")
        failpoints.hit("append.begin", "out/c")
    failpoints.hit("ack.appended", "out/d")
    assert heard == [("ack.appended", "out/a"), ("append.begin", "out/c")]
