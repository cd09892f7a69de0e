"""Problems of a server's journals or shards, as an answer to a List call.

Messages of the protocol have no field for problems. So the server sends problems in the trailing metadata of
a List call that asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote, unquote

BROKERS_KEY: Final = "gazette-brokers"
"""Key in the trailing metadata of a broker's answer: the number of brokers of its cluster."""
PROBLEMS_ASKED: Final = (("gazette-problems", "1"),)
"""Metadata of a List call that asks for problems, and not for the list."""
_PROBLEM_KEY: Final = "gazette-journal-problem"
"""Key in the trailing metadata of the answer: a journal or shard and its problem, percent-encoded."""
_PROBLEMS_MAX: Final = 16
"""Greatest number of problems in one answer, because peers bound the size of metadata."""
_TEXT_MAX: Final = 400
_PLAIN: Final = " !\"#$&'()*+,-./:;<=>?@[]^_`{|}~"


def asks_for_problems(call: Any) -> bool:
    """Return True if a List call asks for problems, and not for the list."""
    metadata = [(key, value) for key, value in call.invocation_metadata() or ()]
    return PROBLEMS_ASKED[0] in metadata


def problems_metadata(problems: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata with problems, by the names of journals or shards."""
    reported = sorted(problems)[:_PROBLEMS_MAX]
    return tuple(
        (_PROBLEM_KEY, quote(f"{name} {problem[:_TEXT_MAX]}", safe=_PLAIN))
        for name, problem in reported
    )


def problems_in(trailing: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the problems that trailing metadata has, by name."""
    problems = {}
    for key, value in trailing:
        if key == _PROBLEM_KEY:
            name, _, problem = unquote(str(value)).partition(" ")
            problems[name] = problem
    return problems
