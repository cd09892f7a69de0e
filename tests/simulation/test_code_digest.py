"""The digest of simulated code changes with what the code does, and not with what it says."""

from __future__ import annotations

from tools.simulation.code_digest import digest_of

CODE = '''
"""Adds numbers."""

def add(a: int, b: int) -> int:
    """Return the sum."""
    return a + b  # As mathematicians do.
'''


def test_words_and_spaces_are_no_part_of_it() -> None:
    other = CODE.replace("numbers", "integers").replace("sum", "total")
    other = other.replace("  # As mathematicians do.", "").replace("a + b", "a  +  b")
    assert other != CODE
    assert digest_of({"m": other}) == digest_of({"m": CODE})


def test_code_and_names_are() -> None:
    digests = [
        digest_of({"m": CODE}),
        digest_of({"m": CODE.replace("a + b", "a - b")}),
        digest_of({"m": CODE.replace("return", "yield")}),
        digest_of({"n": CODE}),
        digest_of({"m": CODE, "n": CODE}),
        digest_of({}),
    ]
    assert len(set(digests)) == len(digests)
