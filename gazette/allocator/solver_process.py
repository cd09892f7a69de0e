"""Solving in a child process, so that the interpreter lock of this one stays free.

The child is a fresh interpreter that reads one ``Problem`` from stdin and writes its ``Solution`` to
stdout; it never forks this process, whose gRPC threads would not survive that.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from gazette.allocator.solver import Problem, Solution, solve
from gazette.errors import Broken, Unavailable

_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


def solve_in_child(problem: Problem, timeout_s: float) -> Solution:
    """``solve(problem)``, elsewhere. Blocks the calling thread, but not the interpreter.

    Raises ``Unavailable`` if the child takes longer than ``timeout_s`` (it is killed then) or cannot be
    started, and ``Broken`` with the end of its output if it fails.
    """
    if not sys.executable:
        return solve(problem)  # embedded: better a stall than no assignments
    command = [sys.executable, "-c", _CHILD.format(module=__name__), *sys.path]
    try:
        child = subprocess.run(
            command,
            input=msgspec.msgpack.encode(problem),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            "solving took too long", choices=problem.choices, timeout_s=timeout_s
        ) from error
    except OSError as error:
        raise Unavailable(
            "cannot start a process to solve in", executable=sys.executable
        ) from error
    if child.returncode != 0:
        raise Broken(
            "the solving process failed",
            hint="Read its output in the message; a missing package or too little memory are likely.",
            status=child.returncode,
            output=child.stderr[-2_000:].decode(errors="replace").strip(),
        )
    return msgspec.msgpack.decode(child.stdout, type=Solution)


def main() -> None:
    """The child's side."""
    problem = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Problem)
    sys.stdout.buffer.write(msgspec.msgpack.encode(solve(problem)))
