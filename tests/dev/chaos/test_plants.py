"""Mistakes get into the brokers of `tools.chaos_plants`, and into no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.chaos_plants.hook import PLANT_ENV
from tools.chaos_plants.plants import PLANTS

ROOT = Path(__file__).parents[3]
SITE = ROOT / "tools" / "chaos_plants" / "site"
SEES = """
import sys
from gazette.broker import key_space, lease_guard
from gazette.broker.replication import upload_gate
holds, complete = lease_guard.LeaseGuard().holds, upload_gate.UploadGate.spool_complete
print([holds, key_space.spec_of.__name__, complete.__module__, "tools.chaos_plants.hook" in sys.modules])
"""
SOUND = "[False, 'spec_of', 'gazette.broker.replication.upload_gate', {hooked}]"


@pytest.mark.parametrize("name", ["", *PLANTS])
def test_a_mistake_is_in_its_process_only(name: str) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"}
    environ.pop(PLANT_ENV, None)
    if name:
        environ[PLANT_ENV] = name
    seen = subprocess.run(
        [sys.executable, "-c", SEES], env=environ, check=True, capture_output=True, text=True
    ).stdout.strip()
    expected = {
        "": SOUND,
        "late-uploads": SOUND.replace(
            "gazette.broker.replication.upload_gate", "tools.chaos_plants.plants"
        ),
        "lives-by-name": SOUND.replace("'spec_of'", "'by_name'"),
        "no-lease": SOUND.replace("[False", "[True"),
    }[name]
    assert seen == expected.format(hooked=True)


def test_shipped_code_knows_nothing_of_it() -> None:
    for path in (ROOT / "gazette").rglob("*.py"):
        assert PLANT_ENV not in path.read_text()
