"""``gazctl journals usage``: bytes that journals take in their stores, from listings of the stores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from gazette.blobs.blob_store import BlobStore
from gazette.errors import GazetteError, Invalid, printable
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import JournalsUsageFlags
from gazette.gazctl.io.output import Table, json_text
from gazette.gazctl.journals.fragment_removal import blob_stores
from gazette.gazctl.journals.list import list_journals
from gazette.protocol.fragment import Fragment, FragmentStoreUrl
from gazette.protocol.fragment_owner import FragmentOwner
from gazette.protocol.ids import JournalName
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.text.validation import within
from gazette.runtime.numbers import bytes_text

_POSTFIX: Final = re.compile(r"(?:/(?:[^/=]+=[^/]*|[0-9]+))+$")
"""Pattern of the last directories of a path, as templates of path postfixes usually make them."""
_ALL: Final = "= all"
_NO_JOURNAL: Final = "(no journal)"


@dataclass(slots=True)
class Usage:
    """Number of objects, their ``stored`` bytes, and their ``content``: bytes before compression."""

    objects: int = 0
    stored: int = 0
    content: int = 0

    def add(self, other: Usage) -> None:
        self.objects += other.objects
        self.stored += other.stored
        self.content += other.content


@dataclass(slots=True)
class StoreUsage:
    """The objects of one store: fragments by journal, all others by directory."""

    url: str
    journals: dict[JournalName, Usage] = field(default_factory=dict)
    others: dict[str, Usage] = field(default_factory=dict)

    def only(self, selected: Iterable[JournalSpec]) -> StoreUsage:
        """Return the usage of some journals."""
        names = {spec.name for spec in selected}
        return StoreUsage(
            self.url, {name: usage for name, usage in self.journals.items() if name in names}
        )

    @property
    def total(self) -> Usage:
        total = Usage()
        for usage in (*self.journals.values(), *self.others.values()):
            total.add(usage)
        return total


async def run(context: Context) -> int:
    flags = context.flags(JournalsUsageFlags)
    for url in context.loaded.arguments:
        with within("STORE_URL"):
            FragmentStoreUrl.parse(url)
    selector = parse_selector(flags.selector, required=False)
    client = await context.broker()
    specs = [entry.spec for entry in (await list_journals(context, client, EVERYTHING)).journals]
    selected = None
    if flags.selector.strip():
        selected = [
            entry.spec for entry in (await list_journals(context, client, selector)).journals
        ]
        if not selected:
            context.terminal.note("no journal matches")
    usages, errors = await _measure_all(context, specs, selected)
    for url, error in errors.items():
        context.terminal.note(f"{url}: {error}\n{error.hint}")
    context.terminal.write(_render(context, usages, flags.format))
    return 1 if errors else 0


async def _measure_all(
    context: Context, specs: Sequence[JournalSpec], selected: Sequence[JournalSpec] | None
) -> tuple[list[StoreUsage], dict[str, GazetteError]]:
    """Return the usage of the named stores, or of the journals' stores, and errors by URL."""
    measured = specs if selected is None else selected
    named = {url for spec in measured for url in spec.fragment.stores}
    urls = sorted(set(context.loaded.arguments) or named)
    async with blob_stores(context) as stores:

        async def one(url: str) -> StoreUsage:
            active_store, finder = stores.get(url), JournalFinder(specs)
            # A URL with a query may rewrite names of journals: list by prefix, and not the whole store.
            is_whole = selected is None and "?" not in url
            prefixes = [""] if is_whole else list(_prefixes(measured))
            return await active_store.calls.run(measure, active_store.store, url, prefixes, finder)

        results = await each("usage", urls, one)
    usages: list[StoreUsage] = []
    errors: dict[str, GazetteError] = {}
    for url, result in zip(urls, results, strict=True):
        if isinstance(result, GazetteError):
            errors[url] = result
        else:
            usages.append(result if selected is None else result.only(selected))
    return usages, errors


class JournalFinder:
    """Finds the journal of an object by its path. For one thread."""

    def __init__(self, specs: Iterable[JournalSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._journals: dict[str, JournalName] = {}
        self._owners: dict[JournalName, FragmentOwner] = {}

    def fragment_at(self, path: str) -> Fragment | None:
        """Return the fragment at a path, if it belongs to an existing journal; else None."""
        directory = path.rpartition("/")[0]
        journal = self._journals.get(directory)
        if journal is None:
            journal = self._journals[directory] = self._journal_above(directory)
        if not journal:
            return None
        try:
            fragment = Fragment.parse(journal, path[len(journal) + 1 :])
        except Invalid:
            return None
        owner = self._owners.get(journal)
        if owner is None:
            owner = self._owners[journal] = FragmentOwner(self._specs[journal])
        return fragment if owner.owns(fragment.path_postfix) else None

    def _journal_above(self, directory: str) -> JournalName:
        """Return the journal with the longest name that a path begins with; empty if no name fits."""
        while directory and directory not in self._specs:
            directory = directory.rpartition("/")[0]
        return directory


def measure(
    store: BlobStore, url: str, prefixes: Sequence[str], finder: JournalFinder
) -> StoreUsage:
    """Return the usage of the objects below some prefixes of a store. Blocks."""
    store_usage = StoreUsage(url)
    for prefix in prefixes:
        for info in store.list(prefix):
            path = f"{prefix}{info.path}"
            fragment = finder.fragment_at(path)
            if fragment is None:
                directory = _POSTFIX.sub("", path.rpartition("/")[0])
                store_usage.others.setdefault(directory, Usage()).add(Usage(1, info.size))
            else:
                usage = store_usage.journals.setdefault(fragment.journal, Usage())
                usage.add(Usage(1, info.size, fragment.length))
    return store_usage


def _prefixes(specs: Iterable[JournalSpec]) -> Iterator[str]:
    """Yield the directories of journals, except those within another one."""
    last = ""
    for prefix in sorted(f"{spec.name}/" for spec in specs):
        if not last or not prefix.startswith(last):
            yield prefix
            last = prefix


def _render(context: Context, found: Sequence[StoreUsage], form: str) -> str:
    match form:
        case "json":
            return json_text(_document(found))
        case "yaml":
            return yaml.safe_dump(_document(found), sort_keys=False)
    return _table(found).text(context.terminal)


def _table(found: Sequence[StoreUsage]) -> Table:
    """Return for each store a row for each journal, most bytes first, then for each other directory.

    The last row of a store is the sum.
    """
    numbers = ("Objects", "Stored", "Content")
    table = Table(["Journal", *numbers, "Store"], numbers=frozenset(numbers))
    for store in found:
        for name, usage in _ordered(store.journals):
            _add(table, name, usage, store.url)
        for directory, usage in _ordered(store.others):
            _add(table, f"{_NO_JOURNAL} {directory}/", usage, store.url)
        _add(table, _ALL, store.total, store.url)
    return table


def _add(table: Table, name: str, usage: Usage, url: str) -> None:
    content = bytes_text(usage.content) if usage.content else ""
    table.add(name, str(usage.objects), bytes_text(usage.stored), content, url)


def _ordered(usages: dict[str, Usage]) -> list[tuple[str, Usage]]:
    return sorted(usages.items(), key=lambda item: (-item[1].stored, item[0]))


def _document(found: Sequence[StoreUsage]) -> dict[str, Any]:
    """Return sums by store, and by journal over all stores, in bytes."""
    journals: dict[JournalName, Usage] = {}
    for store in found:
        for name, usage in store.journals.items():
            journals.setdefault(name, Usage()).add(usage)
    return {
        "stores": [
            {
                "store": store.url,
                **_sums(store.total),
                "journals": [
                    {"journal": name, **_sums(usage)} for name, usage in _ordered(store.journals)
                ],
                "others": [
                    {"directory": printable(name), **_sums(usage)}
                    for name, usage in _ordered(store.others)
                ],
            }
            for store in found
        ],
        "journals": [{"journal": name, **_sums(usage)} for name, usage in _ordered(journals)],
    }


def _sums(usage: Usage) -> dict[str, int]:
    return {
        "objects": usage.objects,
        "stored_bytes": usage.stored,
        "content_bytes": usage.content,
    }
