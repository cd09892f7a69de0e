"""One word, one meaning: names of public classes keep to docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tools.house.sources import sources

ROOT = Path(__file__).parents[1]
WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z][a-z0-9]*|[A-Z]+")
SHARED_BY = 3
"""Number of classes that may not share an ending that the glossary lacks."""

SAME_NAMES = {
    "Abandoned": 2,
    "Attempt": 2,
    "Batch": 2,
    "BrokerFlags": 2,
    "Call": 2,
    "Clock": 2,
    "ConsumerFlags": 2,
    "ConsumerMember": 2,
    "Content": 2,
    "Drain": 2,
    "JournalAppends": 2,
    "JournalSnapshot": 2,
    "LogFlags": 2,
    "Member": 3,
    "MemoryTxn": 2,
    "Outcome": 2,
    "Owner": 2,
    "Player": 2,
    "Progress": 2,
    "Reader": 2,
    "Report": 2,
    "Resolution": 2,
    "Resolver": 2,
    "Runner": 2,
    "Segment": 3,
    "Shard": 2,
    "ShardList": 2,
    "Span": 2,
    "State": 3,
    "StreamEnded": 2,
    "SuspendControl": 2,
    "Target": 2,
    "Template": 2,
    "Worker": 2,
}
"""Names that several modules gave to classes before this test: the list may only become shorter."""


@dataclass(frozen=True)
class Named:
    """A public class, and its module's path below ``gazette/``."""

    name: str
    path: str

    @property
    def ending(self) -> str:
        """The last word of the name."""
        words = WORDS.findall(self.name)
        return words[-1] if words else self.name


@dataclass(frozen=True)
class Glossary:
    """Terms in lower case and singular, endings with their places, and words to avoid."""

    terms: frozenset[str]
    places: dict[str, tuple[str, ...]]
    instead: dict[str, str]

    def defines(self, ending: str) -> bool:
        """Return True if the page has the word, in singular or plural."""
        word = ending.lower()
        forms = {word, word.removesuffix("s"), re.sub("ies$", "y", word)}
        return ending in self.places or bool(forms & self.terms)


def read_glossary() -> Glossary:
    page = (ROOT / "docs" / "glossary.md").read_text()
    first, endings, avoided = re.split(r"^## .*$", page, flags=re.MULTILINE)
    terms = {
        term.split()[-1].lower()
        for cell in re.findall(r"^\| \*\*(.+?)\*\*", first, re.MULTILINE)
        for term in cell.split(",")
    }
    places = {
        ending: tuple(re.findall(r"`([^`]+)`", place))
        for ending, place in re.findall(r"^\| \*\*(\w+)\*\* \|.*\|(.*)\|$", endings, re.MULTILINE)
    }
    instead = dict(re.findall(r"^\| \*\*(\w+)\*\* \| (.*) \|$", avoided, re.MULTILINE))
    return Glossary(frozenset(terms), places, instead)


@cache
def public_classes() -> Sequence[Named]:
    return [
        Named(node.name, one.name.removeprefix("gazette/"))
        for one in sources(ROOT, "gazette")
        for node in one.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def problems(classes: Sequence[Named], glossary: Glossary) -> list[str]:
    """Return what is wrong with names: one line each, with what to do."""
    found = []
    sharing = defaultdict(list)
    for one in classes:
        sharing[one.ending].append(one)
        if one.ending in glossary.instead and one.name != "GazetteError":
            instead = glossary.instead[one.ending]
            found.append(f"{one.path}: {one.name} ends in {one.ending}. Use instead: {instead}")
        places = glossary.places.get(one.ending, ())
        if places and not one.path.startswith(places):
            found.append(
                f"{one.path}: {one.name} ends in {one.ending}, a word for {' and '.join(places)}."
                " Choose another one, or extend its row in docs/glossary.md"
            )
    for ending, members in sharing.items():
        if len(members) >= SHARED_BY and not glossary.defines(ending):
            names = ", ".join(one.name for one in members)
            found.append(f"{names} share {ending}: define it in docs/glossary.md, or rename them")
    for name, count in Counter(one.name for one in classes).items():
        if count > SAME_NAMES.get(name, 1):
            where = ", ".join(one.path for one in classes if one.name == name)
            found.append(f"{name} is the name of {count} classes: {where}. Rename the newest")
    return found


def test_public_classes_keep_to_the_glossary() -> None:
    assert problems(public_classes(), read_glossary()) == []


def test_the_list_of_shared_names_has_no_more_than_there_are() -> None:
    counts = Counter(one.name for one in public_classes())
    assert {name: counts[name] for name in SAME_NAMES} == SAME_NAMES


def test_each_ending_of_the_glossary_is_in_use() -> None:
    used = {one.ending for one in public_classes()}
    assert set(read_glossary().places) <= used


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ([Named("ShardManager", "consumer/x.py")], "Resolver, Supervisor, Service"),
        ([Named("LeaseError", "etcd/x.py")], "the name of the fault"),
        ([Named("ShardSpec", "consumer/x.py")], "a word for protocol/"),
        ([Named(f"{one}Gizmo", "net/x.py") for one in "ABC"], "share Gizmo"),
        ([Named("Fence", "net/x.py"), Named("Fence", "etcd/x.py")], "net/x.py, etcd/x.py"),
    ],
)
def test_a_planted_name_is_found(planted: list[Named], said: str) -> None:
    (found,) = problems(planted, read_glossary())
    assert planted[0].name in found
    assert said in found


def test_words_of_the_glossary_pass() -> None:
    fine = [
        Named("BrokerClient", "client/x.py"),
        Named("ReplicaStatus", "protocol/x.py"),
        Named("WordStore", "stores/x.py"),
        *(Named(f"{one}Queries", "consumer/x.py") for one in "ABC"),
    ]
    assert problems(fine, read_glossary()) == []
