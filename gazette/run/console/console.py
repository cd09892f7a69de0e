"""The answers of the console, by their routes: `Console`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from gazette.client.journals import FragmentsParams, ListedJournal
from gazette.errors import Invalid, NotFound
from gazette.gazctl.context import Context
from gazette.gazctl.journals.fragments import fragments_of
from gazette.protocol.text.duration import SECOND
from gazette.run.console import views
from gazette.run.console.changes import COMMANDS, perform_change
from gazette.run.console.cluster import ClusterWatch
from gazette.run.console.journal_reads import MESSAGES_MAX, JournalReads
from gazette.run.console.server import Answer, Arguments
from gazette.run.console.timeline import timeline
from gazette.run.console.verdicts import grouped, journal_verdicts
from gazette.runtime.numbers import is_digits
from gazette.version import __version__


class Console:
    """One console: what it knows of a cluster, and its answers. Loop-bound. Run it, and close it."""

    def __init__(self, context: Context, scratch: Path, *, allow_changes: bool) -> None:
        self._context = context
        self._watch = ClusterWatch(context)
        self._allow_changes = allow_changes

    async def run(self) -> NoReturn:
        await self._watch.run()

    async def close(self) -> None:
        self._watch.close()

    def reads(self) -> Mapping[str, Answer]:
        """Return the answers that change nothing, by the names of their routes."""
        return {
            "session": self._session,
            "cluster": self._cluster,
            "journals": self._journals,
            "journal": self._journal,
            "fragments": self._fragments,
            "messages": self._messages,
        }

    def changes(self) -> Mapping[str, Answer]:
        """Return the answers that change something. There are none unless changes are allowed."""
        return {name: self._changing(name) for name in COMMANDS} if self._allow_changes else {}

    def _changing(self, name: str) -> Answer:
        async def change(arguments: Arguments) -> dict[str, Any]:
            return await perform_change(
                self._context,
                name,
                required(arguments, "name"),
                dry_run=arguments.get("dry_run") != "no",
            )

        return change

    @property
    def _now(self) -> float:
        return self._context.clock.monotonic()

    async def _session(self, _arguments: Arguments) -> dict[str, Any]:
        return {
            "version": __version__,
            "context": self._context.in_use,
            "addresses": self._watch.addresses(),
            "changes": self._allow_changes,
        }

    async def _cluster(self, _arguments: Arguments) -> dict[str, Any]:
        await self._watch.opened()
        return views.cluster_document(self._watch, self._now)

    async def _journals(self, arguments: Arguments) -> dict[str, Any]:
        await self._watch.opened()
        watch = self._watch
        journals = views.matching(watch, arguments.get("search", ""), arguments.get("sort", "name"))
        shown, page = views.page_of(journals, arguments.get("page", "0"))
        await watch.opened([("journal", journal.spec.name) for journal in shown])
        problems = watch.problems()
        rows = [
            views.journal_row(
                journal,
                watch.sampler.rows.get(("journal", journal.spec.name)),
                problems.get(("journal", journal.spec.name), ""),
            )
            for journal in shown
        ]
        return {"rows": rows, **page}

    # -- One journal

    async def _listed(self, arguments: Arguments) -> ListedJournal:
        """Return the journal that a request names. Raise ``NotFound`` if the list has none."""
        await self._watch.opened()
        name = required(arguments, "name")
        journal = self._watch.sampler.listed.journals.get(name)
        if journal is None:
            raise NotFound(
                f"there is no journal {name[:200]}",
                hint="It may be newer than the last list, or your token does not cover it.",
            )
        return journal

    async def _journal(self, arguments: Arguments) -> dict[str, Any]:
        journal, watch = await self._listed(arguments), self._watch
        spec, key = journal.spec, ("journal", journal.spec.name)
        await watch.opened([key])
        problem = watch.problems().get(key, "")
        return {
            **views.journal_row(journal, watch.sampler.rows.get(key), problem),
            "route": views.route_document(journal.route),
            "labels": {label.name: label.value for label in spec.labels.labels},
            "stores": list(spec.fragment.stores),
            "codec": spec.fragment.codec.name,
            "fragment_bytes": spec.fragment.length,
            "retention_s": spec.fragment.retention_ns / SECOND,
            "verdicts": grouped(journal_verdicts([journal], watch.problems())),
            "shards": [
                {"id": shard.spec.id, "reads": name in views.sources_of(shard)}
                for shard in watch.sampler.listed.shards.values()
                for name in [spec.name]
                if name in (*views.sources_of(shard), shard.spec.recovery_log)
            ][:100],
        }

    async def _fragments(self, arguments: Arguments) -> dict[str, Any]:
        journal, context = await self._listed(arguments), self._context
        client, name = await context.broker(), journal.spec.name
        row = self._watch.sampler.rows.get(("journal", name))
        stored = await fragments_of(context, client, FragmentsParams(name))
        head = 0 if row is None else row.position or 0
        return {**timeline(stored, head), "now": int(context.clock.now())}

    async def _messages(self, arguments: Arguments) -> dict[str, Any]:
        reads = JournalReads(await self._context.broker(), await self._listed(arguments))
        reads.require_messages()
        count = min(number(arguments, "count", 25), MESSAGES_MAX)
        if "time_ms" in arguments:
            return await reads.at_time(number(arguments, "time_ms"), count)
        if "offset" in arguments:
            return await reads.at_offset(number(arguments, "offset"), count)
        if "next" in arguments:  # The page follows the journal: a message begins there.
            begin, head = await reads.bounds()
            at = max(number(arguments, "next"), begin)
            return {**await reads.window(at, count, max(at, head)), "first": begin, "head": head}
        return await reads.last(count)


def required(arguments: Arguments, name: str) -> str:
    """Return an argument. Raise ``Invalid`` without it."""
    if not arguments.get(name):
        raise Invalid("is missing", path=name)
    return arguments[name]


def number(arguments: Arguments, name: str, default: int = 0) -> int:
    """Return an argument as a number from 0 on. Raise ``Invalid`` for another text."""
    text = arguments.get(name, str(default))
    if not is_digits(text) or len(text) > 18:
        raise Invalid(f"invalid number ({text[:40]!r})", path=name)
    return int(text)
