"""Limits of blob stores on the names of objects.

An object whose name is too long can never be stored, yet appends to its journal would be acknowledged. So
names are checked when a journal is applied.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl

from gazette.blobs.blob_store import PathRewrite
from gazette.errors import Invalid
from gazette.protocol.fragment import Codec, Fragment, FragmentStoreUrl
from gazette.protocol.ids import JournalName

_COMPONENT_BYTES_MAX: Final = 255
"""Greatest length of a name in a directory, in bytes, in each usual file system."""
_FILE_PATH_BYTES_MAX: Final = 4095
_KEY_BYTES_MAX: Final = 1024
"""Greatest length of a key in S3, GCS and Azure, in bytes."""
_CLOUD: Final = frozenset({"s3", "gs", "azure", "azure-ad"})
_OFFSET_MAX: Final = (1 << 63) - 1
_ASIDE: Final = f".unconfirmed-{_OFFSET_MAX}-{_OFFSET_MAX}"


def longest_path(journal: JournalName) -> str:
    """Return the longest path of an object of a journal without a path postfix."""
    fragment = Fragment(journal, _OFFSET_MAX, _OFFSET_MAX, codec=Codec.ZSTANDARD)
    return f"{fragment.content_path()}{_ASIDE}"


def check_path(url: FragmentStoreUrl, path: str) -> None:
    """Raise ``Invalid`` if a store can never have an object at ``path``. Stores of fsspec have no known
    limit."""
    arguments = {name.lower(): value for name, value in parse_qsl(url.query)}
    rewrite = PathRewrite(arguments.get("find", ""), arguments.get("replace", ""))
    name = f"{url.path.removeprefix('/')}{rewrite.apply(path)}"
    if url.scheme in _CLOUD:
        _require("object names", name, len(name.encode()), _KEY_BYTES_MAX, url)
    elif url.scheme == "file":
        for component in name.split("/"):
            length = len(component.encode())
            _require("components of paths", component, length, _COMPONENT_BYTES_MAX, url)
        _require("paths", name, len(name.encode()), _FILE_PATH_BYTES_MAX, url)


def _require(what: str, name: str, length: int, limit: int, url: FragmentStoreUrl) -> None:
    if length > limit:
        raise Invalid(
            f"the name is too long for a {url.scheme}:// store: its {what} have at most {limit} bytes, and "
            f"this one would have {length}: {name}",
            path="Name",
            hint="Choose a shorter name, or a store with a higher limit. This store would refuse fragments.",
            bytes=length,
            limit_bytes=limit,
        )
