"""Helpers for tests of applications: `AppDriver`, an etcd, a broker, a consumer, journals in
memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gazette.testing.app_driver import AppDriver as AppDriver

__all__ = ["AppDriver"]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.

    def __getattr__(name: str) -> Any:
        # Lazily, so that importing one module of the package does not import the others.
        if name != "AppDriver":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from gazette.testing.app_driver import AppDriver

        return AppDriver
