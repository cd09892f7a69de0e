"""Mistakes of `tools.timer_plants`: each applies to the source of today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.timer_plants.plants import PLANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_applies_once(name: str) -> None:
    """Check that the text of each mistake is there. A change of the source changes its mistakes too."""
    plant = PLANTS[name]
    compile(plant.made_in((ROOT / plant.path).read_text()), plant.path, "exec")
    assert all((ROOT / one).exists() for one in plant.tests)
