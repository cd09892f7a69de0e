"""Helpers for tests of applications: `AppDriver`, an etcd, a broker, a consumer, journals in
memory, and whole clusters in simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.lazy import lazy_names

if TYPE_CHECKING:
    from gazette.testing.app_driver import AppDriver as AppDriver
    from gazette.testing.simulations import SimulationFailed as SimulationFailed
    from gazette.testing.simulations import simulate as simulate

_HOMES = {
    "AppDriver": "gazette.testing.app_driver",
    "SimulationFailed": "gazette.testing.simulations",
    "simulate": "gazette.testing.simulations",
}

__all__ = ["AppDriver", "SimulationFailed", "simulate"]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.
    __getattr__ = lazy_names(__name__, _HOMES)
