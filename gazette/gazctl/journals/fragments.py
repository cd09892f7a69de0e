"""``gazctl journals fragments``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import yaml

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, ListedJournal, StoredFragment
from gazette.client.rpc.errors import status_of
from gazette.errors import GazetteError, NotAllowed
from gazette.fragment.index import JUMP_AGE_S
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import FragmentsFlags
from gazette.gazctl.io.output import Table, json_text, proto_text
from gazette.gazctl.io.time_args import age_text, parse_moment, time_text
from gazette.gazctl.journals.list import list_journals
from gazette.gazctl.journals.lookup import journal_answering
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status
from gazette.runtime.numbers import bytes_text

_WAIT_H: Final = JUMP_AGE_S // 3600


async def run(context: Context) -> int:
    flags = context.flags(FragmentsFlags)
    selector = parse_selector(flags.selector, required=False)
    now = context.clock.now()
    begin = parse_moment(flags.since, now, "--from")
    end = parse_moment(flags.until, now, "--to")
    client = await context.broker()
    listed = await list_journals(context, client, selector)
    if not listed.journals:
        context.terminal.note("no journal matches")
    journals = [
        journal
        for journal in listed.journals
        if journal.spec.suspend_level is not SuspendLevel.FULL
    ]

    async def one(journal: ListedJournal) -> tuple[StoredFragment, ...]:
        params = FragmentsParams(
            journal.spec.name,
            begin_mod_time=begin,
            end_mod_time=end,
            signature_ttl_s=flags.url_ttl or None,
        )
        return await fragments_of(context, client, params)

    results = await each("fragments", journals, one)
    fragments: list[StoredFragment] = []
    failed = 0
    for journal, result in zip(journals, results, strict=True):
        if isinstance(result, GazetteError):
            failed += 1
            context.terminal.note(f"{journal.spec.name}: {result}")
        else:
            fragments += result
    for stored in fragments:
        for hidden in stored.conflicts_with:
            context.terminal.note(
                f"{stored.fragment.journal}: conflict: {stored.fragment.content_name()} and "
                f"{hidden} hold different bytes at the same offsets; the first is read, and "
                "the other is hidden"
            )
    if begin == end == 0:  # A selection by time has holes of its own.
        for journal, result in zip(journals, results, strict=True):
            if not isinstance(result, GazetteError):
                note_holes(context, journal.spec.name, result)
    context.terminal.write(_render(context, fragments, flags))
    return 1 if failed else 0


def note_holes(
    context: Context, journal: str, stored: Iterable[StoredFragment], head: Offset = 0
) -> None:
    """Tell the user of offsets that no fragment covers. ``stored`` are all fragments of the journal.

    Look from the begin of the first fragment to ``head``, or to the end of the last fragment if greater.
    """
    for begin, end in holes((listed.fragment for listed in stored), head):
        context.terminal.note(
            f"{journal}: no fragment has offsets {begin} to {end} ({bytes_text(end - begin)}). "
            f"Readers that get there go on at {end}: at once if `gazctl journals reset-head` confirmed a "
            f"head after these offsets, and else {_WAIT_H} h after the next fragment was stored."
        )


def holes(fragments: Iterable[Fragment], head: Offset) -> Iterator[tuple[Offset, Offset]]:
    """Yield the ranges of offsets without a fragment, from the first fragment to the last one or ``head``."""
    spans = sorted((fragment.begin, fragment.end) for fragment in fragments)
    if not spans:
        return
    covered_end = spans[0][0]
    for begin, end in [*spans, (head, head)]:
        if covered_end < begin:
            yield covered_end, begin
        covered_end = max(covered_end, end)


async def fragments_of(
    context: Context, client: Client, params: FragmentsParams
) -> tuple[StoredFragment, ...]:
    """Return the fragments of a journal; empty if it was fully suspended meanwhile."""
    try:
        async with journal_answering(context, client, params.journal):
            return tuple(await client.list_fragments(params))
    except NotAllowed as error:
        if status_of(error) == Status.SUSPENDED.name:
            return ()
        raise


def _render(context: Context, found: list[StoredFragment], flags: FragmentsFlags) -> str:
    match flags.format:
        case "json":
            return "".join(json_text(_as_json(listed), one_line=True) for listed in found)
        case "yaml":
            return yaml.safe_dump([_as_json(listed) for listed in found], sort_keys=False)
        case "proto":
            response = broker_pb2.FragmentsResponse()
            for listed in found:
                response.fragments.add(spec=listed.fragment.to_pb(), signed_url=listed.signed_url)
            return proto_text(response)
        case _:
            return _table(context, found, urls=flags.url_ttl > 0).text(context.terminal)


def _as_json(stored: StoredFragment) -> dict[str, Any]:
    fragment = stored.fragment
    return {
        "spec": {
            "journal": fragment.journal,
            "begin": fragment.begin,
            "end": fragment.end,
            "sha1": fragment.sum.hex(),
            "compression_codec": fragment.codec.name,
            "backing_store": fragment.backing_store,
            "mod_time": fragment.mod_time,
            "path_postfix": fragment.path_postfix,
        },
        "path": fragment.content_path(),
        "signed_url": stored.signed_url,
        **({"conflicts_with": list(stored.conflicts_with)} if stored.conflicts_with else {}),
    }


def _table(context: Context, found: list[StoredFragment], *, urls: bool) -> Table:
    headers = ["Journal", "Offset", "Length", "Persisted", "SHA1", "Compression"]
    table = Table([*headers, *(["URL"] if urls else [])], numbers=frozenset({"Offset", "Length"}))
    now = context.clock.now()
    for listed in found:
        fragment = listed.fragment
        persisted = "<not persisted>"
        if fragment.mod_time:
            age = age_text(now - fragment.mod_time)
            persisted = f"{time_text(fragment.mod_time)} ({age} ago)"
        table.add(
            fragment.journal,
            str(fragment.begin),
            bytes_text(fragment.length),
            persisted,
            fragment.sum.hex()[:12] + "...",
            fragment.codec.name,
            *([listed.signed_url] if urls else []),
        )
    return table
