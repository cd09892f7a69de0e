"""Solver in a child process, so that the interpreter lock of this process stays free.

The child is a new interpreter. It reads one ``Problem`` from stdin and writes its ``Solution`` to
stdout. This process is never forked, since its threads would not survive that.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from gazette.cluster.allocator.solver import Problem, Solution, solve
from gazette.errors import Broken, Unavailable
from gazette.runtime.decoders import msgpack_decoder

_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


def solve_in_child(problem: Problem, timeout_s: float) -> Solution:
    """Run ``solve(problem)`` in a child process. Block the calling thread, but not the interpreter.

    Raise ``Unavailable`` if the child cannot be started, or takes longer than ``timeout_s`` and is
    killed. Raise ``Broken`` with the end of the child's output if the child fails.
    """
    if not sys.executable:
        return solve(problem)  # an embedded interpreter: a stall is better than no assignments
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
            "the solver took too long", choices=problem.choices, timeout_s=timeout_s
        ) from error
    except OSError as error:
        raise Unavailable("cannot start the solver process", executable=sys.executable) from error
    if child.returncode != 0:
        raise Broken(
            "the solver process failed",
            hint="Read its output in the message. Likely causes: a missing package, or too little memory.",
            status=child.returncode,
            output=child.stderr[-2_000:].decode(errors="replace").strip(),
        )
    return msgpack_decoder(Solution).decode(child.stdout)


def main() -> None:
    """Solve one problem, as the child process."""
    problem = msgpack_decoder(Problem).decode(sys.stdin.buffer.read())
    sys.stdout.buffer.write(msgspec.msgpack.encode(solve(problem)))
