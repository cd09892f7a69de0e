"""Guesses of what a user meant: for slips of each name, and never for another word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.settings import schema_of
from gazette.runtime.near_names import mistakes, near_name

COMMAND_NAMES = sorted({word for one in COMMANDS for word in one.words})
FLAGS = sorted({option.flag for one in COMMANDS for option in schema_of(one).options})
NAMES = [*COMMAND_NAMES, *FLAGS]


def slips(name: str) -> Iterator[str]:
    """Yield a name with a letter missing, doubled, another, and two swapped, at each place but the first."""
    dashes = len(name) - len(name.lstrip("-"))
    for at in range(dashes + 1, len(name)):
        yield name[:at] + name[at + 1 :]
        yield name[:at] + name[at] + name[at:]
        yield f"{name[:at]}~{name[at + 1 :]}"
        if at + 1 < len(name):
            yield name[:at] + name[at + 1] + name[at] + name[at + 2 :]


@pytest.mark.parametrize("name", NAMES)
def test_each_slip_leads_back(name: str) -> None:
    """A slip that is as near to another name may lead there."""
    for slip in slips(name):
        found = near_name(slip, NAMES)
        assert found is not None, slip
        assert mistakes(slip.strip("-"), found.strip("-")) <= 1, slip


@pytest.mark.parametrize(
    "word",
    [
        "create",
        "remove",
        "describe",
        "status",
        "topics",
        "get",
        "put",
        "--topic",
        "--name",
        "--json",
        "-",
        "",
    ],
)
def test_words_of_other_tools_are_no_slips(word: str) -> None:
    """A guess would lead astray."""
    assert near_name(word, [one for one in NAMES if one != word]) is None


def test_a_beginning_is_enough() -> None:
    assert near_name("--replicas", ["--replication", "--store"]) == "--replication"
    assert near_name("replica", ["--store"]) is None
