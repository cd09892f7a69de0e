"""Plain words: the rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house.sources import sources, within

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
PAGES = ("docs", "changelog.d", "CHANGELOG.md", "README.md", "CONTRIBUTING.md", "SECURITY.md")

AVOIDED = re.compile(
    r"\b(nobody|somebody|anybody|anew|told|by itself|by themselves|in its midst|where there is room"
    r"|who|whom|whoever)\b|(?-i:is none)",
    re.IGNORECASE,
)
"""Words that leave open which process or user is meant, or that few readers know."""

WORDS_MAX = 20
"""Greatest number of words of a sentence."""
LONG_SHARE_MAX = 0.02
"""Greatest share of longer sentences on a page: a list of facts may need one. One is always permitted."""

VERBS = """
Abort Accept Account Acknowledge Acquire Act Adapt Add Adopt Advance Age Allocate Allow Announce
Answer Append Apply Arm Ask Assert Assign Assume Attach Attempt Authorize Await Become Begin Bend
Bind Block Borrow Bound Break Bring Buffer Build Cache Calculate Call Cancel Cap Cause Change Charge
Check Choose Claim Clear Close Collect Combine Commit Compare Compile Complete Compress Compute
Configure Confirm Connect Construct Consume Continue Convert Copy Corrupt Count Crash Create Cut
Damage Decide Decode Decompress Decorate Define Delay Delete Deliver Demand Deny Deploy Dequeue
Describe Deserialize Detach Detect Disable Distribute Divide Do Download Drain Draw Drive Drop Dump
Duplicate Echo Emit Empty Encode Encrypt End Enqueue Ensure Enter Enumerate Erase Establish Estimate
Evaluate Evict Exchange Exclude Execute Exercise Expand Expect Expire Explain Export Extend Extract
Fail Fake Feed Fetch Fill Finalize Find Finish Fix Flag Flip Flush Fold Follow Forbid Force Forget
Fork Format Forward Free Freeze Gather Generate Get Give Go Grant Guess Hammer Hand Handle Hang Hash
Have Hide Hold Identify Ignore Imitate Import Include Increase Increment Initialize Inject Inline
Insert Inspect Install Intercept Interleave Interrupt Introduce Invent Invoke Issue Iterate Join
Judge Keep Kill Lead Learn Leave Lengthen Let Lift Limit Link List Listen Load Lock Log Look Loop
Lose Lower Make Map Mark Match Measure Merge Migrate Modify Mount Move Multiply Mutate Name Narrow
Negate Normalize Note Notify Observe Occupy Offer Omit Open Operate Order Overload Override
Overwrite Own Pack Parse Participate Partition Pass Patch Pause Perform Persist Perturb Pick Place
Plan Plant Play Point Poison Poll Prefer Prepare Press Print Probe Produce Promote Propose Prove
Provide Prune Publish Pull Pulse Push Put Query Queue Quit Quote Raise Rank Reach Read Reassign
Rebalance Rebase Rebuild Receive Reconnect Record Recover Recreate Reduce Refresh Refuse Register
Reject Release Rely Remember Remove Rename Render Renew Reopen Repeat Replace Replay Reply Report
Require Reread Resend Reserve Reset Resolve Respond Restart Restore Restrict Resume Retire Retrieve
Retry Return Reuse Reverse Revoke Rewind Rewrite Roll Rotate Round Route Run Sabotage Sample Save
Say Scan Schedule Script Search See Seed Select Send Sequence Serialize Serve Set Settle Share Shift
Show Shrink Shuffle Shut Sign Signal Silence Simplify Simulate Size Skip Sleep Slow Solve Sort Spawn
Split Spread Stall Start Step Stop Store Stream Strip Stub Subscribe Substitute Subtract Sum
Summarise Summarize Supply Survive Suspend Swap Switch Synchronize Take Tear Tell Terminate Test
Throw Time Touch Trace Transfer Translate Treat Trigger Trim Truncate Trust Try Turn Unassign Undo
Unite Unlink Unpack Unregister Update Upload Use Validate Verify Visit Wait Wake Walk Warn Watch
Wind Wipe Withhold Work Wrap Write Yield Zero
"""
"""First words of docstrings, in order. Add a verb when a function needs another one."""


def pages() -> Iterator[Path]:
    for name in PAGES:
        path = ROOT / name
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


def long_sentences(page: str) -> tuple[list[str], int]:
    """Return the sentences of a page with more words than ``WORDS_MAX``, and the number of all sentences."""
    page = re.sub(r"```.*?```", "\n\n", page, flags=re.DOTALL)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\|))|\|", page)
    prose = [
        re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block)
        for block in blocks
        if not block.startswith(("    ", "#"))
    ]
    sentences = [
        sentence
        for block in prose
        for sentence in re.split(r"(?<=[.?!:;])[*_)\"]*\s+", block.strip())
        if sentence
    ]
    return [one for one in sentences if len(one.split()) > WORDS_MAX], len(sentences)


def parts(page: Path) -> list[str]:
    """Return what is a page of its own: each change of the changelog was one before its release."""
    text = page.read_text()
    return re.split(r"\n(?=- )", text) if page.name == "CHANGELOG.md" else [text]


def avoided_words(text: str) -> list[str]:
    """Return each line with a word to avoid, with its number."""
    if not AVOIDED.search(text):
        return []
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if AVOIDED.search(line)
    ]


def page_problems(page: str) -> list[str]:
    """Return the lines with a word to avoid, and the long sentences if these are too many."""
    long, count = long_sentences(page)
    return avoided_words(page) + (long if len(long) > max(LONG_SHARE_MAX * count, 1) else [])


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions of a module."""
    for node in within(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        yield from functions(node)


def docstring_problems(tree: ast.Module) -> list[str]:
    """Return docstrings that do not open with a verb, or say errors in another form.

    Properties are described by noun phrases, and tests by claims.
    """
    found, verbs = [], set(VERBS.split())
    for node in functions(tree):
        text = ast.get_docstring(node)
        if text is None or node.name.startswith("test_") or _is_property(node):
            continue
        opening = text.split()[0].strip(".,:;")
        if opening not in verbs:
            found.append(f"{node.lineno}: {node.name} opens with {opening!r}, which VERBS lacks")
        if re.search(r"(^|[.:] )Raises\b", text, re.MULTILINE):
            found.append(f"{node.lineno}: {node.name} says 'Raises': say 'Raise ``X`` if …'")
    return found


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.dump(decorator) for decorator in node.decorator_list)


def test_code_has_no_word_to_avoid_and_docstrings_open_with_a_verb() -> None:
    own = Path(__file__).relative_to(ROOT).as_posix()
    found = {
        one.name: problems
        for one in sources(ROOT, *CODE)
        if one.name != own
        if (problems := [*avoided_words(one.text), *docstring_problems(one.tree)])
    }
    assert found == {}


def test_pages_have_no_word_to_avoid_and_short_sentences() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): problems
        for path in pages()
        if (problems := [one for part in parts(path) for one in page_problems(part)])
    }
    assert found == {}


def test_a_planted_sentence_is_found() -> None:
    words = " ".join(["word"] * WORDS_MAX)
    page = f"# A title\n\n{words}. {words} more. Few.\n\n- {words}\n\n```sh\n{words} more\n```\n"
    assert long_sentences(page) == ([f"{words} more."], 4)
    # One is always permitted, two are too many.
    assert page_problems(page) == []
    assert page_problems(f"{page}\n{words} much more.") == [f"{words} more.", f"{words} much more."]


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
    assert len(docstring_problems(ast.parse(source))) == number
    property_ = ast.parse(source.replace("def end", "@property\ndef end"))
    assert docstring_problems(property_) == []
