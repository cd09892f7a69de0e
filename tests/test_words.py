"""Plain words: the rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = (
    "gazette",
    "tools",
    "examples",
    "tests",
    "benchmarks",
    "pyspark_gazette",
    "pyspark_gazette_state",
)
PAGES = ("docs", "changelog.d", "README.md", "CONTRIBUTING.md", "SECURITY.md")

AVOIDED = re.compile(
    r"\b(nobody|somebody|anybody|anew|told|by itself|by themselves|in its midst|where there is room"
    r"|who|whom|whoever)\b",
    re.IGNORECASE,
)
"""Words that leave open which process or user is meant, or that few readers know."""

VERBS = """
Accept Account Act Adapt Add Adopt Advance Allocate Allow Announce Answer Append Apply Arm Ask
Assert Assign Assume Attach Attempt Authorize Await Become Begin Bind Block Bound Break Bring Buffer
Build Call Cancel Change Charge Check Claim Close Combine Commit Compare Compile Complete Compress
Confirm Connect Consume Continue Convert Copy Count Crash Create Cut Decide Decode Decompress
Decorate Delay Delete Deliver Dequeue Describe Deserialize Detach Disable Do Drain Draw Drop Empty
Encode End Enqueue Evaluate Exclude Execute Expect Extend Fail Feed Fill Find Finish Fix Fold Follow
Forbid Forget Fork Format Forward Free Give Hand Handle Hash Have Hold Ignore Import Include
Increment Inject Insert Install Judge Keep Kill Lead Learn Leave Let List Listen Lock Log Look Make
Map Mark Match Measure Merge Move Note Observe Open Overwrite Own Parse Pass Pause Perform Persist
Plan Play Prefer Prepare Print Probe Promote Propose Prune Publish Pulse Put Query Queue Raise Rank
Read Rebuild Record Recover Refresh Refuse Release Rely Remember Remove Renew Repeat Replace Report
Require Reserve Reset Resolve Restart Restore Restrict Retire Retrieve Retry Return Revoke Roll Run
Sample Save Say Scan See Send Sequence Serialize Serve Set Settle Show Silence Simulate Skip Sleep
Solve Split Spread Start Stop Store Stream Summarise Synchronize Take Tear Trace Turn Unassign Undo
Unite Unlink Update Validate Wait Wake Watch Wind Wipe Wrap Write Yield
"""
"""First words of docstrings, in order. Add a verb when a function needs another one."""


def python_files() -> Iterator[Path]:
    for name in CODE:
        for path in sorted((ROOT / name).rglob("*.py")):
            if "/pb/" not in path.as_posix() and "_pb2" not in path.name and path != Path(__file__):
                yield path


def pages() -> Iterator[Path]:
    for name in PAGES:
        path = ROOT / name
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


def avoided_words(text: str) -> list[str]:
    """Return each line with a word to avoid, with its number."""
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if AVOIDED.search(line) or "is none" in line
    ]


def docstring_problems(source: str) -> list[str]:
    """Return docstrings that do not open with a verb, or say errors in another form.

    Properties are described by noun phrases, and tests by claims.
    """
    found, verbs = [], set(VERBS.split())
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None or node.name.startswith("test_") or _is_property(node):
            continue
        opening = text.split()[0].strip(".,:;")
        if opening not in verbs:
            found.append(
                f"{node.lineno}: {node.name} opens with {opening!r}: {text.splitlines()[0]}"
            )
        if re.search(r"(^|[.:] )Raises\b", text, re.MULTILINE):
            found.append(f"{node.lineno}: {node.name} says 'Raises': say 'Raise ``X`` if …'")
    return found


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.dump(decorator) for decorator in node.decorator_list)


def test_words_to_avoid_are_in_no_file() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in [*python_files(), *pages()]
        if (lines := avoided_words(path.read_text()))
    }
    assert found == {}


def test_docstrings_of_functions_open_with_a_verb() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): problems
        for path in python_files()
        if (problems := docstring_problems(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    ["# Nobody reads it.", '"""Whoever asks."""', "if there is none", "the shard begins anew"],
)
def test_a_planted_word_is_found(line: str) -> None:
    assert avoided_words(f"fine\n{line}\n") == [f"2: {line}"]


@pytest.mark.parametrize(
    ("docstring", "number"),
    [
        ("Return the end.", 0),
        ("Whether it has ended.", 1),
        ("Returns the end.", 1),
        ("The end.", 1),
        ("Return the end. Raises ``Closed``.", 1),
        ("Return the end. Raise ``Closed`` if it has none.", 0),
    ],
)
def test_a_planted_docstring_is_found(docstring: str, number: int) -> None:
    source = f'def end():\n    """{docstring}"""\n'
    assert len(docstring_problems(source)) == number
    assert docstring_problems(source.replace("def end", "@property\ndef end")) == []
