"""Helpers for tests of applications: `AppDriver`, an etcd, a broker, a consumer, journals in
memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.lazy import lazy_names

if TYPE_CHECKING:
    from gazette.testing.app_driver import AppDriver as AppDriver

_HOMES = {"AppDriver": "gazette.testing.app_driver"}

__all__ = ["AppDriver"]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.
    __getattr__ = lazy_names(__name__, _HOMES)
