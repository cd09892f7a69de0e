"""``gazctl journals list``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import JournalList, ListedJournal, journal_problems
from gazette.errors import GazetteError
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import JournalsListFlags
from gazette.gazctl.io.output import NONE, Table, proto_json, proto_text
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import broker_pb2

_ASK_S: Final = 5.0
"""Seconds to wait for a broker to name problems."""


async def run(context: Context) -> int:
    flags = context.flags(JournalsListFlags)
    selector = parse_selector(flags.selector, required=False)
    client = await context.broker()
    if flags.watch:
        async for listed in client.watch_journals(selector):
            context.terminal.write(render(context, listed, flags))
        return 0
    listed = await list_journals(context, client, selector)
    if not listed.journals:
        context.terminal.note("no journal matches")
    context.terminal.write(render(context, listed, flags))
    if flags.format == "table":
        await _note_problems(context, client, listed, selector)
    return 0


async def _note_problems(
    context: Context, client: Client, listed: JournalList, selector: LabelSelector
) -> None:
    """Ask the brokers of the listed journals for problems, and tell the user."""

    async def ask(endpoint: str) -> dict[str, str]:
        async with context.answering(endpoint, min(_ASK_S, context.timeout_s)):
            return await journal_problems(client, endpoint, selector)

    endpoints = endpoints_of(listed.journals)
    problems: dict[str, str] = {}
    for endpoint, result in zip(endpoints, await each("ask", endpoints, ask), strict=True):
        if isinstance(result, GazetteError):
            context.terminal.note(f"cannot ask {endpoint} for problems of its journals: {result}")
        else:
            problems |= result
    for journal, problem in sorted(problems.items()):
        context.terminal.note(f"{journal}: {problem}")


def endpoints_of(journals: Iterable[ListedJournal]) -> list[str]:
    """Return the endpoints of all brokers that serve the journals."""
    return sorted({url for journal in journals for url in journal.route.endpoints if url})


async def list_journals(context: Context, client: Client, selector: LabelSelector) -> JournalList:
    """Return the matching journals. Raise ``Unavailable`` after --timeout."""
    async with context.answering(client.address):
        return await client.list_journals(selector)


def render(context: Context, listed: JournalList, flags: JournalsListFlags) -> str:
    """Return a list in the requested format."""
    match flags.format:
        case "table":
            return _table(listed, flags).text(context.terminal)
        case "yaml":
            return journals_yaml(listed.journals)
        case "json":
            return proto_json(list_response(listed), one_line=flags.watch)
        case _:
            return proto_text(list_response(listed))


def journals_yaml(journals: tuple[ListedJournal, ...]) -> str:
    """Return the tree that ``journals apply`` reads."""
    from gazette.protocol.journal_tree import JournalNode  # Only this form needs YAML.

    return JournalNode.of((journal.spec, journal.mod_revision) for journal in journals).to_yaml()


def list_response(listed: JournalList) -> broker_pb2.ListResponse:
    return broker_pb2.ListResponse(
        header=listed.header.to_pb(),
        journals=[
            broker_pb2.ListResponse.Journal(
                spec=journal.spec.to_pb(),
                mod_revision=journal.mod_revision,
                create_revision=journal.create_revision,
                route=journal.route.to_pb(),
            )
            for journal in listed.journals
        ],
    )


def _table(listed: JournalList, flags: JournalsListFlags) -> Table:
    """Return a row for each journal. Mark names of suspended journals ``<S>``; others that lack replicas
    ``<present/wanted>``."""
    columns = {
        "Primary": flags.primary,
        "Replicas": flags.replicas,
        "RF": flags.rf,
        "Stores": flags.stores,
    }
    shown = [name for name, is_shown in columns.items() if is_shown]
    table = Table(["Name", *shown, *flags.label_columns], numbers=frozenset({"RF"}))
    for journal in listed.journals:
        spec, route = journal.spec, journal.route
        cells = {
            "Primary": str(route.primary_id or NONE),
            "Replicas": ",".join(map(str, route.members)) or NONE,
            "RF": str(spec.replication),
            "Stores": ",".join(spec.fragment.stores) or NONE,
        }
        mark = ""
        if spec.suspend_level is not SuspendLevel.NONE:
            mark = " <S>"
        elif len(route.members) < spec.replication:
            mark = f" <{len(route.members)}/{spec.replication}>"
        labels = [",".join(spec.labels.values_of(name)) or NONE for name in flags.label_columns]
        table.add(spec.name + mark, *(cells[name] for name in shown), *labels)
    return table
