"""The extras of the package that blob stores need, beyond a plain installation."""

from __future__ import annotations

import importlib.util
from typing import Final

from gazette.errors import Invalid

FSSPEC_PREFIX: Final = "fsspec+"
"""``fsspec+sftp://host/path/`` is a store on fsspec's file system ``sftp``."""

EXTRAS: Final = {
    "s3": "s3",
    "gs": "gcs",
    "azure": "azure",
    "azure-ad": "azure",
    "fsspec": "fsspec",
}
"""The extra to install for a scheme. ``fsspec`` stands for all schemes that begin with ``FSSPEC_PREFIX``."""


def kind_of(scheme: str) -> str:
    """Return the key of a scheme in tables such as `EXTRAS`."""
    return "fsspec" if scheme.startswith(FSSPEC_PREFIX) else scheme


def not_installed(scheme: str) -> Invalid:
    """Return the error that says which extra to install."""
    key = kind_of(scheme)
    return Invalid(
        f"no blob store for {scheme}:// is installed: "
        f"it comes with `pip install 'pygazette[{EXTRAS.get(key, key)}]'`",
        path="stores",
        hint="Install the extra on every broker, or use another store.",
    )


def require(scheme: str, *modules: str) -> None:
    """Raise the ``Invalid`` of ``not_installed`` unless all of the top-level modules are installed.

    Do not import them. Stores are made on the event loop, and an import takes too long there.
    """
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise not_installed(scheme)
