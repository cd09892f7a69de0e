"""The owner of an etcd prefix: the application whose members may join there. See `application_name`."""

from __future__ import annotations

from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from gazette.cluster.allocator.model import MEMBERS
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compare, Op
from gazette.consumer.application_name import Owner
from gazette.errors import Conflict, Invalid
from gazette.protocol.pb import consumer_pb2
from gazette.runtime.decoders import json_decoder

OWNER: Final = "/application"
_ATTEMPTS_MAX: Final = 10


def owner_key(root: str) -> str:
    return root + OWNER


def decode_owner(value: bytes) -> Owner:
    """Decode the owner of a prefix. Raise ``Invalid`` for any other value."""
    try:
        return json_decoder(Owner).decode(value)
    except msgspec.MsgspecError as error:
        raise Invalid(f"not the owner of a prefix: {error}") from error


async def claim_prefix(etcd: Etcd, root: str, name: str, adopt_from: str) -> Owner:
    """Claim an etcd prefix for the application ``name``, before its member joins there.

    Return the owner. Claim a prefix that has no owner, or that belongs to ``adopt_from``. Raise
    ``Invalid`` if the prefix belongs to another application, or if members of another application
    run there. Raise ``Unavailable`` if etcd does not answer, and ``Conflict`` if the owner changes during
    each of `_ATTEMPTS_MAX` attempts. A cancelled call may have claimed the prefix.
    """
    key = owner_key(root)
    for _ in range(_ATTEMPTS_MAX):
        kv = await etcd.get(key)
        owner = None if kv is None else decode_owner(kv.value)
        if owner is not None and owner.name not in (name, adopt_from):
            raise other_application(root, owner.name, name)
        if others := await _running_others(etcd, root, name):
            raise Invalid(
                f"members of application {others[0]} run on etcd prefix {root}, and this is "
                f"application {name}",
                path="etcd.prefix",
                hint="Stop them, or give this application its own prefix.",
            )
        claimed = _adopted(owner, name, adopt_from)
        if claimed == owner:
            return claimed
        revision = 0 if kv is None else kv.mod_revision
        result = await etcd.txn(
            (Compare.mod_revision(key, "=", revision),),
            (Op.put(key, msgspec.json.encode(claimed)),),
        )
        if result.succeeded:
            return claimed
    raise Conflict("the owner of the etcd prefix keeps changing", prefix=root)


def _adopted(present: Owner | None, name: str, adopt_from: str) -> Owner:
    """Return the owner ``name``, whose former names include the present owner and ``adopt_from``."""
    former = () if present is None else present.former
    added = [] if present is None else [present.name]
    for former_name in (*added, adopt_from):
        if former_name and former_name != name and former_name not in former:
            former = (*former, former_name)
    return Owner(name, former)


async def _running_others(etcd: Etcd, root: str, name: str) -> list[str]:
    """Return the names of other applications whose members run on the prefix."""
    names = set[str]()
    for kv in (await etcd.range(root + MEMBERS)).kvs:
        try:
            names.add(consumer_pb2.ConsumerSpec.FromString(kv.value).application)
        except DecodeError:
            continue  # The key space reports the damaged value.
    return sorted(names - {"", name})


def other_application(root: str, owner: str, name: str) -> Invalid:
    """Return the error of a member that would join the prefix of another application."""
    return Invalid(
        f"etcd prefix {root} belongs to application {owner}, and this is application {name}",
        path="etcd.prefix",
        hint="Give each application its own prefix. If this one was renamed, keep its name with "
        f"--consumer.application={owner}. Or stop all members and start the new ones with "
        f"--consumer.adopt-from={owner}.",
    )
