"""Stage 8 of the byte path: takes the bytes of completed fragments from `persister`, keeps them as objects,
gives them to `listing` and to readers.

This is the protocol of blob stores. Implementations are synchronous, safe for use by several threads, and run
in a pool of threads. They do not retry, count or log: wrappers do that.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol, runtime_checkable
from urllib.parse import parse_qsl

from gazette.errors import Invalid


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """An object of a listing. ``path`` is relative to the listed prefix, ``mod_time`` is in Unix seconds, and
    ``size`` is in bytes as stored."""

    path: str
    mod_time: int
    size: int


class BlobStore(Protocol):
    """Objects under a root, by path. Paths are relative, clean, and separated by ``/``.

    All methods may raise

    * ``Invalid`` for a path that is not clean, would leave the root, or can never be stored,
    * ``NotAllowed`` if credentials do not suffice, or the bucket or directory does not exist,
    * ``Unavailable`` if the store cannot be reached or failed; the call may be repeated.
    """

    def exists(self, path: str) -> bool:
        """Return True if there is an object at ``path``."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Read an object's bytes as they are stored. Raise ``NotFound`` if there is no such object.

        A read that fails raises ``Unavailable``. The store may have undone a stored content encoding, or not:
        see ``codecs.new_decompressor``.
        """
        ...

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        """Store all bytes of ``source``, from its position to its end.

        On return the object is durable and whole. No reader ever sees a part of the object: if reading
        ``source`` or storing fails, ``path`` stays as it was. An existing object is replaced.
        ``content_encoding`` is stored with the object, if the store can keep it.
        """
        ...

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """List all objects below ``prefix``, which is empty or ends in ``/``, at any depth.

        A prefix without objects gives an empty listing. Objects that a ``put`` has not completed are left
        out. The order is not defined. Errors are raised during the iteration.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove an object. Do nothing if it is absent."""
        ...

    def sign_get(self, path: str, ttl_s: float) -> str:
        """Return a URL that lets its bearer read the object for ``ttl_s`` seconds. Do not check that the
        object exists.

        The URL needs no credentials for the store, if the store can make such URLs. Otherwise the URL only
        says where the object is.
        """
        ...


@runtime_checkable
class LocalSigner(Protocol):
    """A store that can usually sign URLs by computation alone, without a request."""

    def sign_now(self, path: str, ttl_s: float) -> str | None:
        """Return the URL of ``sign_get`` by computation alone; None if that is not possible now.

        Event loops call this method: it takes no lock that another call may hold for long.
        """
        ...


@runtime_checkable
class OrderedListing(Protocol):
    """A store whose listings can begin after a path, at a lower cost than a whole listing."""

    def list_after(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        """List as ``BlobStore.list``, without the objects whose path is ``after`` or sorts before it.

        Paths, relative to ``prefix``, sort by their UTF-8 bytes. The order of the listing itself is not
        defined.
        """
        ...


def list_after(store: BlobStore, prefix: str, after: str) -> Iterator[BlobInfo]:
    """List the objects below ``prefix`` whose paths sort after ``after``, by any store."""
    if isinstance(store, OrderedListing):
        return store.list_after(prefix, after)
    return (info for info in store.list(prefix) if info.path > after)


def validate_path(path: str) -> None:
    """Raise ``Invalid`` unless ``path`` can be an object's path: relative, clean, without ``..``."""
    if not path or path.startswith("/") or posixpath.normpath(path) != path or "\0" in path:
        raise Invalid(f"must be a clean path ({path!r})", path="path")
    if path == "." or path.split("/", 1)[0] == "..":
        raise Invalid(f"cannot traverse outside the store ({path!r})", path="path")


def validate_prefix(prefix: str) -> None:
    """Raise ``Invalid`` unless ``prefix`` can be a listing's prefix: empty, or a path followed by ``/``."""
    if not prefix:
        return
    if not prefix.endswith("/"):
        raise Invalid(f"must end in '/' ({prefix!r})", path="prefix")
    validate_path(prefix[:-1])


@dataclass(frozen=True, slots=True)
class PathRewrite:
    """Replaces the first ``find`` of a path by ``replace``, from the query of a store's URL.

    Use it for journals that were renamed, while their fragments stay where they are.
    """

    find: str = ""
    replace: str = ""

    def apply(self, path: str) -> str:
        return path.replace(self.find, self.replace, 1) if self.find else path


def parse_query(query: str, names: Collection[str]) -> dict[str, str]:
    """Return the arguments of a store's URL, by their names in lower case.

    ``names`` (lower case) are the arguments of the store; case does not matter in the URL. Raise ``Invalid``
    for an unknown argument, and for an argument that is given twice.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise Invalid(f"parsing store URL arguments: {error}") from error
    arguments: dict[str, str] = {}
    for name, value in pairs:
        argument = name.lower()
        if argument not in names:
            expected = ", ".join(sorted(names))
            raise Invalid(f"parsing store URL arguments: invalid path {name!r}; known: {expected}")
        if argument in arguments:
            raise Invalid(f"parsing store URL arguments: {name!r} is given twice")
        arguments[argument] = value
    return arguments


def parse_rewrite(arguments: dict[str, str]) -> PathRewrite:
    """Return the ``find`` and ``replace`` that every store takes."""
    return PathRewrite(arguments.get("find", ""), arguments.get("replace", ""))
