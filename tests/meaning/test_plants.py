"""Mistakes of `tools.meaning_plants`: each place has one, and each applies to the source of today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.meaning.test_meaning import PLACES
from tools.meaning_plants.plants import PLANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_applies_once(name: str) -> None:
    """Check that the text of each mistake is there. A change of the source changes its mistakes too."""
    plant = PLANTS[name]
    compile(plant.made_in((ROOT / plant.path).read_text()), plant.path, "exec")


def test_each_place_has_a_mistake() -> None:
    found = {test.partition("[")[2].rstrip("]") for one in PLANTS.values() for test in one.tests}
    assert found == {check.__name__ for check, _, _ in PLACES}
