"""Runs at the start of each process of a run with a mistake: no other process has it on its path."""

from __future__ import annotations

from tools.chaos_plants.hook import install

install()
