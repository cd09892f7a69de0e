"""Removal of fragments from their stores, with the credentials of this process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate

from gazette.blobs.blob_store import BlobStore
from gazette.blobs.fsspec import check_protocols
from gazette.blobs.registry import BlobSettings, BlobStores
from gazette.client.client import Client
from gazette.errors import GazetteError, Invalid, NotAllowed
from gazette.gazctl.context import CALLS_MAX, Context, each
from gazette.gazctl.flags import BrokerFlags
from gazette.gazctl.io.progress import ProgressLine
from gazette.protocol.fragment import Fragment
from gazette.protocol.fragment_owner import FragmentOwner
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.numbers import counted
from gazette.runtime.tasks import TaskScope


@dataclass(slots=True)
class Removal:
    """The outcome of removing fragments."""

    removed: int = 0
    denied: list[str] = field(default_factory=list)
    """Reasons of stores that denied permission: their fragments stay."""
    failed: list[str] = field(default_factory=list)
    """All other reasons for which fragments stay."""


@asynccontextmanager
async def blob_stores(context: Context) -> AsyncIterator[BlobStores]:
    """Yield stores with the credentials of this process. Calls that hang get an error after a minute.

    Raise ``Invalid`` for a protocol of fsspec that cannot be allowed.
    """
    flags = context.loaded.group(BrokerFlags)
    protocols = check_protocols(flags.fsspec_protocols, "broker.fsspec-protocols")
    stores = BlobStores(
        BlobSettings(file_root=flags.file_root, fsspec_protocols=protocols),
        context.clock,
        threads=CALLS_MAX,
        rng=context.rng,
    )
    async with TaskScope("stores") as scope:
        scope.daemon(stores.watch_calls(), name="watch")
        try:
            yield stores
        finally:
            stores.close()
            scope.cancel()


class FragmentRemover:
    """Remover of fragments from some stores."""

    def __init__(self, context: Context, client: Client, stores: BlobStores) -> None:
        self._context = context
        self._client = client
        self._stores = stores

    async def owner(self, spec: JournalSpec) -> FragmentOwner:
        """Return the filter of a journal's own fragments: journals below its name have theirs in the same
        directory."""
        selector = LabelSelector.of(("name:prefix", f"{spec.name}/"))
        async with self._context.answering(self._client.address):
            nested = (await self._client.list_journals(selector)).journals
        names = [journal.spec.name for journal in nested]
        return FragmentOwner(spec, names)

    async def duplicates(
        self, spec: JournalSpec, owner: FragmentOwner, removed: Sequence[Fragment]
    ) -> list[Fragment]:
        """Return a journal's other stored fragments that lie within fragments of ``removed``.

        Brokers list one fragment for each offset. Once that fragment is removed, they would list a smaller
        fragment that it covered, or a copy in another store. Report a store that cannot be listed: its
        fragments are not returned.
        """
        fragments: list[Fragment] = []
        for url in spec.fragment.stores:
            try:
                active_store = self._stores.get(url)
                fragments += await active_store.calls.run(
                    _within, active_store.store, url, spec.name, owner, removed
                )
            except GazetteError as error:
                self._context.terminal.note(f"cannot look for duplicates of {spec.name}: {error}")
        return fragments

    def check_stores(self, fragments: Iterable[Fragment]) -> None:
        """Raise ``Invalid`` or ``NotAllowed`` if a store of these fragments cannot be used."""
        for url in sorted({fragment.backing_store for fragment in fragments}):
            _ = self._stores.get(url).store

    async def remove(self, fragments: Collection[Fragment]) -> Removal:
        """Remove fragments, several at a time. Raise the errors of `check_stores` before the first removal.
        Cancellation may leave some fragments removed."""
        result = Removal()
        self.check_stores(fragments)
        with ProgressLine(
            self._context.terminal, self._context.clock, "removing", "fragments"
        ) as line:

            async def one(fragment: Fragment) -> None:
                active_store = self._stores.get(fragment.backing_store)
                await active_store.calls.run(active_store.store.remove, fragment.content_path())
                result.removed += 1
                line.update(result.removed, len(fragments))

            outcomes = await each("remove", fragments, one)
        for fragment, outcome in zip(fragments, outcomes, strict=True):
            if isinstance(outcome, GazetteError):
                reasons = result.denied if isinstance(outcome, NotAllowed) else result.failed
                reasons.append(f"{fragment.backing_store}{fragment.content_path()}: {outcome}")
        return result


class Spans:
    """The offsets of many fragments."""

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        spans = sorted((fragment.begin, fragment.end) for fragment in fragments)
        self._begins = [begin for begin, _ in spans]
        self._ends = list(accumulate((end for _, end in spans), max))
        """By index in ``_begins``: the greatest end of all fragments up to this index."""

    def cover(self, fragment: Fragment) -> bool:
        """Return True if ``fragment`` lies within one of the fragments."""
        index = bisect_right(self._begins, fragment.begin)
        return index > 0 and fragment.end <= self._ends[index - 1]


def _within(
    store: BlobStore,
    url: str,
    journal: str,
    owner: FragmentOwner,
    removed: Sequence[Fragment],
) -> list[Fragment]:
    """Return the journal's own fragments in one store within ``removed`` fragments, without these."""
    removed_paths = {(fragment.backing_store, fragment.content_path()) for fragment in removed}
    spans = Spans(removed)
    covered: list[Fragment] = []
    for info in store.list(f"{journal}/"):
        try:
            fragment = Fragment.parse(journal, info.path)
        except Invalid:
            continue
        fragment = replace(fragment, backing_store=url, mod_time=max(info.mod_time, 1))
        if (
            owner.owns(fragment.path_postfix)
            and (url, fragment.content_path()) not in removed_paths
            and spans.cover(fragment)
        ):
            covered.append(fragment)
    return covered


def report_removal(context: Context, removal: Removal) -> int:
    """Report the failed removals. Return the exit code: 1 for a failure, but 0 for denied removals."""
    for reason in removal.denied:
        context.terminal.note(f"not permitted: {reason}")
    for reason in removal.failed:
        context.terminal.note(f"failed: {reason}")
    if removal.denied:
        context.terminal.note(
            f"kept {counted(len(removal.denied), 'fragment')}: the credentials of this process do not permit "
            "the removal"
        )
    return 1 if removal.failed else 0
