"""``gazctl members``: the brokers and consumers of a cluster, from lists of journals and shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gazette.gazctl.context import Context
from gazette.gazctl.flags import MembersFlags
from gazette.gazctl.io.output import NONE, Table, json_text
from gazette.gazctl.journals.list import list_journals
from gazette.gazctl.shards.list import list_shards
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.route import Header, Route


@dataclass(slots=True)
class ListedMember:
    """A member, and the number of items that it serves."""

    kind: str
    id: ProcessId
    endpoint: str = ""
    primary: int = 0
    replicas: int = 0


async def run(context: Context) -> int:
    flags = context.flags(MembersFlags)
    members: list[ListedMember] = []
    has_consumers = context.is_given("consumer.address")
    if context.is_given("broker.address") or not has_consumers:
        journals = await list_journals(context, await context.broker(), EVERYTHING)
        routes = [member.route for member in journals.journals]
        members += members_of("broker", journals.header, routes)
    if has_consumers:
        shards = await list_shards(context, await context.consumer(), EVERYTHING)
        routes = [member.route for member in shards.shards]
        members += members_of("consumer", shards.header, routes)
    if flags.format == "json":
        context.terminal.write(
            "".join(json_text(_fields(member), one_line=True) for member in members)
        )
        return 0
    table = Table(
        ["Kind", "Zone", "ID", "Endpoint", "Primary", "Replicas"],
        numbers=frozenset({"Primary", "Replicas"}),
    )
    for member in members:
        counts = (str(member.primary), str(member.replicas))
        table.add(member.kind, member.id.zone, member.id.suffix, member.endpoint or NONE, *counts)
    context.terminal.write(table.text(context.terminal))
    context.terminal.note(
        "Lists name the member that answers, and members that serve journals or shards. Others are "
        "not shown."
    )
    return 0


def members_of(kind: str, header: Header, routes: Iterable[Route]) -> list[ListedMember]:
    """Return the member that answered, and all members of the routes, by zone and id."""
    members: dict[ProcessId, ListedMember] = {}
    for route in (header.route, *routes):
        for index, member_id in enumerate(route.members):
            member = members.setdefault(member_id, ListedMember(kind, member_id))
            if route.endpoints:
                member.endpoint = member.endpoint or route.endpoints[index]
    for route in routes:
        for index, member_id in enumerate(route.members):
            members[member_id].replicas += 1
            members[member_id].primary += index == route.primary
    if header.process_id is not None:
        members.setdefault(header.process_id, ListedMember(kind, header.process_id))
    return [members[member_id] for member_id in sorted(members)]


def _fields(member: ListedMember) -> dict[str, object]:
    return {
        "kind": member.kind,
        "zone": member.id.zone,
        "id": member.id.suffix,
        "endpoint": member.endpoint,
        "primary": member.primary,
        "replicas": member.replicas,
    }
