"""Routes and headers that a process derives from the keys of its cluster."""

from __future__ import annotations

from collections.abc import Sequence

from gazette.cluster.allocator.model import Assignment, DecodedKV
from gazette.cluster.allocator.state import State
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.protocol.ids import ProcessId
from gazette.protocol.route import EtcdHeader, Route


def route_of(assignments: Sequence[DecodedKV]) -> Route:
    """Return the route of an item from the keys of all its assignments, in key order."""
    members: list[ProcessId] = []
    primary: int | None = None
    for kv in assignments:
        assignment: Assignment = kv.decoded
        if assignment.slot == 0:
            primary = len(members)
        members.append(ProcessId(assignment.zone, assignment.suffix))
    return Route(tuple(members), primary)


def with_endpoints(route: Route, state: State) -> Route:
    """Return the route with the endpoints that its members advertise; ``""`` for a member without a key."""
    endpoints: list[str] = []
    for process_id in route.members:
        member = state.member(process_id.zone, process_id.suffix)
        endpoints.append("" if member is None else member.decoded.value.spec.endpoint)
    return Route(route.members, route.primary, tuple(endpoints))


def etcd_header(key_space: KeySpace) -> EtcdHeader:
    """Return the header of the key space's present revision."""
    header = key_space.header
    return EtcdHeader(header.cluster_id, header.member_id, header.revision, header.raft_term)
