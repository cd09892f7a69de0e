"""The name of an application, by which it recognizes its own etcd prefix and its own state.

Two applications on one prefix would get each other's shards, and write into each other's state. Two records
prevent that:

- The key ``{root}/application`` names the application of a prefix. The first member writes the key, and
  members of another application do not start. The key has no lease: it outlives the members.
- The specification of a member, and the checkpoint of a state, hold the name. A shard fails if its
  state belongs to another application.

An application adopts a prefix or state without a name: an older version or the original wrote it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from gazette.errors import Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint

NAME_BYTES_MAX: Final = 512


class Owner(msgspec.Struct, frozen=True):
    """The application to which an etcd prefix belongs, and its former names."""

    name: str
    former: tuple[str, ...] = ()

    def may_open(self, name: str) -> bool:
        """Return True if a state of the application ``name`` belongs to this application."""
        return not name or name == self.name or name in self.former


def name_of(application: Any) -> str:
    """Return the name of an application: its ``application_name``, or its class with the module.

    The module of a script has the name of its file. Raise ``Invalid`` if `checked_name` refuses the name.
    """
    cls = type(application)
    name = application.application_name or f"{_module_of(cls)}.{cls.__qualname__}"
    return checked_name(name, f"{cls.__qualname__}.application_name")


def checked_name(name: Any, path: str) -> str:
    """Return ``name``. Raise ``Invalid`` if it cannot be the name of an application."""
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise Invalid(f"invalid application name ({name!r}; expected text)", path=path)
    if len(name.encode()) > NAME_BYTES_MAX:
        raise Invalid(
            f"application name is too long (expected <= {NAME_BYTES_MAX} bytes)", path=path
        )
    return name


def _module_of(kind: type) -> str:
    if kind.__module__ != "__main__":
        return kind.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:  # The process was started as python -m package.module.
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else "main"


def require_own_state(checkpoint: Checkpoint, owner: Owner, shard_id: str) -> None:
    """Raise ``NotAllowed`` if a shard's state belongs to another application."""
    if not owner.may_open(checkpoint.application):
        raise NotAllowed(
            f"the state of shard {shard_id} belongs to application {checkpoint.application}, "
            f"and this is application {owner.name}",
            hint="Give the shard its own recovery log or database. If the application was "
            "renamed, stop all members and start them with "
            f"--consumer.adopt-from={checkpoint.application}.",
            shard=shard_id,
        )
