"""The name of an application: by which it knows its own etcd prefix and its own state, and no other's.

Two applications on one prefix would be given each other's shards, and write into each other's state. So:

- the key ``{root}/application`` says to which application a prefix belongs. Its first member writes it, and
  a member of another application does not start. It has no lease: it outlives the members;
- members carry the name in their specification, and states in their checkpoint. A shard whose state
  belongs to another application fails.

What has no name was written before names, or by the original, and is adopted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError

from gazette.allocator.model import MEMBERS
from gazette.errors import Conflict, Invalid, NotAllowed
from gazette.etcd import Etcd
from gazette.etcd_values import Compare, Op
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.pb import consumer_pb2

OWNER: Final = "/application"
NAME_BYTES_MAX: Final = 512
_ATTEMPTS_MAX: Final = 10


class Owner(msgspec.Struct, frozen=True):
    """To which application an etcd prefix belongs, and which names it had before."""

    name: str
    former: tuple[str, ...] = ()

    def may_open(self, name: str) -> bool:
        """Whether a state of an application of that name is this one's."""
        return not name or name == self.name or name in self.former


def name_of(application: Any) -> str:
    """Return the name of an application: its ``application_name``, or its class with the module.

    For a script, the module is named after its file. Raises ``Invalid``.
    """
    kind = type(application)
    name = application.application_name or f"{_module_of(kind)}.{kind.__qualname__}"
    return checked_name(name, f"{kind.__qualname__}.application_name")


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
    if spec is not None and spec.name:  # python -m package.module
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else "main"


def owner_key(root: str) -> str:
    return root + OWNER


def decode_owner(value: bytes) -> Owner:
    """Raise ``Invalid`` if the value is not that of an owner."""
    try:
        return msgspec.json.decode(value, type=Owner)
    except msgspec.MsgspecError as error:
        raise Invalid(f"not the owner of a prefix: {error}") from error


async def claim_prefix(etcd: Etcd, root: str, name: str, adopt_from: str) -> Owner:
    """Make sure that an etcd prefix belongs to the application ``name``, before a member joins it.

    A prefix without an owner, or of ``adopt_from``, becomes its own. Raises ``Invalid`` if it belongs to
    another application, or if members of another one run; ``Unavailable``. Cancellation: it may be claimed.
    """
    key = owner_key(root)
    for _ in range(_ATTEMPTS_MAX):
        kv = await etcd.get(key)
        present = None if kv is None else decode_owner(kv.value)
        if present is not None and present.name not in (name, adopt_from):
            raise other_application(root, present.name, name)
        if others := await _running_others(etcd, root, name):
            raise Invalid(
                f"members of application {others[0]} run on etcd prefix {root}, and this is"
                f" application {name}",
                path="etcd.prefix",
                hint="Stop them, or give this application a prefix of its own.",
            )
        wanted = _adopted(present, name, adopt_from)
        if wanted == present:
            return wanted
        revision = 0 if kv is None else kv.mod_revision
        result = await etcd.txn(
            (Compare.mod_revision(key, "=", revision),),
            (Op.put(key, msgspec.json.encode(wanted)),),
        )
        if result.succeeded:
            return wanted
    raise Conflict("the owner of the etcd prefix changes all the time", prefix=root)


def _adopted(present: Owner | None, name: str, adopt_from: str) -> Owner:
    former = () if present is None else present.former
    added = [] if present is None else [present.name]
    for one in (*added, adopt_from):
        if one and one != name and one not in former:
            former = (*former, one)
    return Owner(name, former)


async def _running_others(etcd: Etcd, root: str, name: str) -> list[str]:
    """Return the names of other applications that have members."""
    found = set[str]()
    for kv in (await etcd.range(root + MEMBERS)).kvs:
        try:
            found.add(consumer_pb2.ConsumerSpec.FromString(kv.value).application)
        except DecodeError:
            continue  # The key space tells of it.
    return sorted(found - {"", name})


def other_application(root: str, owner: str, name: str) -> Invalid:
    """Return the error of a member that would join the prefix of another application."""
    return Invalid(
        f"etcd prefix {root} belongs to application {owner}, and this is application {name}",
        path="etcd.prefix",
        hint="Give each application a prefix of its own. If this one was renamed: keep its name with"
        f" --consumer.application={owner}, or stop all members and start the new ones with"
        f" --consumer.adopt-from={owner}.",
    )


def require_own_state(checkpoint: Checkpoint, owner: Owner, shard_id: str) -> None:
    """Raise ``NotAllowed`` if a shard's state belongs to another application."""
    if not owner.may_open(checkpoint.application):
        raise NotAllowed(
            f"the state of shard {shard_id} belongs to application {checkpoint.application}, and this"
            f" is application {owner.name}",
            hint="Give the shard a recovery log, or a database, of its own. If the application was renamed,"
            f" stop all members and start them with --consumer.adopt-from={checkpoint.application}.",
            shard=shard_id,
        )
