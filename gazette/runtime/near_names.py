"""The name that a user most likely meant by an unknown word: `near_name`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Final

_LETTERS_PER_MISTAKE: Final = 4
_BEGINNING_MIN: Final = 4


def near_name(word: str, names: Iterable[str]) -> str | None:
    """Return the name for which ``word`` is a likely slip, or None.

    The first letter must be the same. One mistake is permitted for each four letters: a letter that is
    missing, added or replaced, or two that are swapped. A name also fits if it begins with all letters of
    ``word``, except perhaps the last one, and shares at least `_BEGINNING_MIN` of them.
    """
    letters = word.strip("-")
    allowed = max(1, len(letters) // _LETTERS_PER_MISTAKE)
    ranked = sorted(
        (mistakes(letters, name.strip("-")), name)
        for name in names
        if name.strip("-")[:1] == letters[:1]
    )
    if ranked and ranked[0][0] <= allowed:  # The first name has the fewest mistakes.
        return ranked[0][1]
    shared = max(_BEGINNING_MIN, len(letters) - 1)
    return next(
        (name for _, name in ranked if _beginning(letters, name.strip("-")) >= shared), None
    )


def mistakes(word: str, name: str) -> int:
    """Return the least number of mistakes that turn ``name`` into ``word`` (optimal string alignment)."""
    last_row: list[int] = []
    row = list(range(len(name) + 1))
    for i, letter in enumerate(word, 1):
        row_before_last, last_row, row = last_row, row, [i]
        for j, other in enumerate(name, 1):
            cost = min(last_row[j] + 1, row[j - 1] + 1, last_row[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == name[j - 2] and word[i - 2] == other:
                cost = min(cost, row_before_last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _beginning(word: str, name: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, name, strict=False)))
