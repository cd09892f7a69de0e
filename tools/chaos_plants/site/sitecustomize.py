"""Imported by Python at the start of each process of such a run: it is on the path of these only."""

from __future__ import annotations

from tools.chaos_plants.hook import install

install()
