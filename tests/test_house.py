"""The budget of size: lines of each room, and what one append or one transaction runs through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.house import budget, counts
from tools.house.counts import Lines, count, over
from tools.house.privates import count_uses
from tools.house.sources import Source, parsed, sources

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def house() -> counts.House:
    return count(ROOT)


def walked(*arguments: str) -> tuple[int, int]:
    """Return the files and functions of a walk, in a process of its own: it profiles all threads."""
    command = [sys.executable, "-m", "tools.house", *arguments]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    words = printed.splitlines()[0].rpartition(": ")[2].split()
    return int(words[0]), int(words[2])


def test_no_room_has_more_lines_than_its_budget(house: counts.House) -> None:
    """A larger budget needs a line in docs/architecture.md that says what for."""
    assert over(house.rooms, budget.ROOMS) == []


def test_budgets_name_rooms_that_exist(house: counts.House) -> None:
    assert set(budget.ROOMS) == set(house.rooms)


def test_no_more_classes_constructors_and_files_are_over_the_limits(house: counts.House) -> None:
    assert len(house.wide_classes) <= budget.WIDE_CLASSES
    assert len(house.long_constructors) <= budget.LONG_CONSTRUCTORS
    assert len(house.long_files) <= budget.LONG_FILES


def test_the_large_wheel_keeps_to_its_budget(house: counts.House) -> None:
    assert 0 < house.wheels["pygazette-client"] < house.wheels["pygazette"] <= budget.WHEEL_LINES


def test_no_more_variables_have_vague_names(house: counts.House) -> None:
    assert house.vague.total() <= budget.VAGUE_NAMES, house.vague


@pytest.mark.parametrize("replication", [1, 3])
def test_a_small_append_keeps_to_its_budget(replication: int) -> None:
    files, functions = walked("append", "--replication", str(replication))
    assert 10 < files <= budget.APPEND[replication].files
    assert 50 < functions <= budget.APPEND[replication].functions


def test_a_transaction_keeps_to_its_budget() -> None:
    files, functions = walked("transaction")
    assert 20 < files <= budget.TRANSACTION.files
    assert 100 < functions <= budget.TRANSACTION.functions


def test_tests_use_no_more_of_what_is_private() -> None:
    """Take a seam that users have: a parameter, a metric, an answer, a file, or `gazette.testing`."""
    uses = count_uses(sources(ROOT, "tests"))
    assert uses.privates.total() <= budget.PRIVATE_USES, "\n".join(uses.show())
    assert uses.patches.total() <= budget.PATCHES, "\n".join(uses.show())


@pytest.mark.parametrize(
    ("text", "privates", "patches"),
    [
        ("a._b", 1, 0),
        ("a._b._c = self._d.e", 2, 0),
        ("self._a + cls._b + a.__class__ + os._exit + a._replace(b=1)", 0, 0),
        ("self.a._b", 1, 0),
        ("from a import _b, c", 1, 0),
        ("from a._b import c, d", 2, 0),
        ("getattr(a, '_b')", 1, 0),
        ("getattr(a, 'b')", 0, 0),
        ("monkeypatch.setattr(a, 'b', 1); monkeypatch.setitem(a, 'b', 1)", 0, 2),
        ("patch.delattr(a, 'b'); monkeypatch.setenv('a', 'b')", 0, 1),
    ],
)
def test_what_counts_as_private(text: str, privates: int, patches: int) -> None:
    uses = count_uses([Source("a.py", text, parsed(text))])
    assert (uses.privates.total(), uses.patches.total()) == (privates, patches)


def test_lines_are_counted_by_kind(tmp_path: Path) -> None:
    source = '"""One.\n\nTwo."""\n\n# Why.\nx = 1  # not a line of its own\n\n\ndef f():\n    """Do."""\n'
    quoted = 'y = """\n# no comment\n"""\n'
    package = tmp_path / "gazette" / "room"
    package.mkdir(parents=True)
    (package / "a.py").write_text(source + quoted)
    (package / "a_pb2.py").write_text("x = 1\n" * 99)
    wide = "".join(f"    field{n}: int\n" for n in range(budget.FIELDS_MAX + 1))
    (package / "b.py").write_text(f"class Wide:\n{wide}")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    house = count(tmp_path)
    lines = house.rooms["room/"]
    assert lines == Lines(2, 10 + 3 + 14, 2 + 3 + 14, 4, 1, 3)
    assert [n for n, _ in house.wide_classes] == [budget.FIELDS_MAX + 1]
    # Case: over its budget, or without one.
    assert over(house.rooms, {"room/": 27}) == []
    assert len(over(house.rooms, {"room/": 26})) == 1
    assert len(over(house.rooms, {})) == 1
    assert list(house.show())
