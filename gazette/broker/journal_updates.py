"""A primary's updates of its journal in etcd: the route in its assignments, and the suspension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.cluster.etcd.values import Compare, Op, Operation
from gazette.errors import Bug
from gazette.protocol.ids import Offset, Revision
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Route

if TYPE_CHECKING:
    from gazette.broker.context import BrokerContext
    from gazette.broker.resolver import Resolution


async def put_assignments(context: BrokerContext, resolution: Resolution, route: Route) -> Revision:
    """Store ``route`` in all of the journal's assignments: the allocator then considers them consistent.

    Change nothing if any assignment was changed since ``resolution``. Return the revision at which to resolve
    next. Raise ``Unavailable`` if etcd does not answer. Then the change may have been made.
    """
    value = route.without_endpoints().to_pb().SerializeToString()
    puts: list[Operation] = [
        Op.put(kv.key, value, ignore_lease=True)
        for kv in resolution.assignments
        if not kv.decoded.value.equivalent(route)
    ]
    return await _put_if_unchanged(context, resolution, _unchanged_assignments(resolution), puts)


async def put_suspend(
    context: BrokerContext, resolution: Resolution, level: SuspendLevel, offset: Offset
) -> Revision:
    """Change the suspension in the journal's specification.

    Change nothing if the journal or any of its assignments was changed since ``resolution``. Return the
    revision at which to resolve next. Raise ``Unavailable`` if etcd does not answer. Then the change may have
    been made.
    """
    if resolution.item_kv is None:
        raise Bug("suspension of a journal that does not exist", journal=resolution.journal)
    raw = resolution.item_kv.raw
    # Change the protobuf message as it was read: a `JournalSpec` would lose fields of newer versions.
    spec = broker_pb2.JournalSpec.FromString(raw.value)
    spec.suspend.CopyFrom(Suspend(level, offset).to_pb())
    compares = [
        Compare.mod_revision(raw.key, "=", raw.mod_revision),
        *_unchanged_assignments(resolution),
    ]
    return await _put_if_unchanged(
        context, resolution, compares, [Op.put(raw.key, spec.SerializeToString())]
    )


def _unchanged_assignments(resolution: Resolution) -> list[Compare]:
    return [Compare.mod_revision(kv.key, "=", kv.raw.mod_revision) for kv in resolution.assignments]


async def _put_if_unchanged(
    context: BrokerContext, resolution: Resolution, compares: list[Compare], puts: list[Operation]
) -> Revision:
    result = await context.etcd.txn(compares, puts)
    if result.succeeded:
        return result.header.revision
    # Some key is newer than in our key space, so the key space will reach another revision. It may never
    # reach the revision of the response, which also counts changes outside of our prefix.
    return resolution.seen_revision + 1
