"""Stage 9 of the byte path: takes the objects of a journal in blob stores, gives the
cover of its fragments to `index`.

The path of an object does not quite decide which journal it belongs to. Fragments of journal ``a`` may be in
subdirectories, by its ``path_postfix_template``; and all of journal ``a/b`` is in a subdirectory of ``a``,
too. ``a/b/<name>`` is a fragment of ``a`` with postfix ``b``, or one of ``a/b``. The rule:

1. An object directly in ``a/`` is a fragment of ``a``.
2. One at or below the directory of another journal that exists is never one of ``a``.
3. Otherwise, one in ``a/<postfix>/`` is a fragment of ``a`` if the postfix fits the present template. It is
   one, too, if all components of the postfix are ``key=value``. Templates are meant for those, and an
   earlier template may have left them.
4. All others are not fragments of ``a``. A deleted journal has left them, or a person has put them there.

So a template may be changed and old fragments stay readable, as long as one of the two wrote ``key=value``
components. And a journal below ``a`` may be deleted: its fragments do not become part of ``a``, unless the
rest of its name has ``key=value`` components only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from gazette.blobs.blob_store import BlobInfo, BlobStore, list_after
from gazette.blobs.registry import BlobStores
from gazette.errors import Invalid
from gazette.fragment.conflicts import FragmentCover
from gazette.fragment.set_aside import SetAside
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.journal import JournalSpec
from gazette.runtime.tasks import await_future

log = logging.getLogger(__name__)

_ACTION: Final = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_CONTROL: Final = re.compile(r"\{\{-?\s*(?:if|range|with)\b")
_KEY_VALUES: Final = re.compile(r"[^/=]+=[^/]*(/[^/=]+=[^/]*)*")


@dataclass(frozen=True, slots=True)
class Foreign:
    """Objects below a journal's directory that are not its fragments."""

    count: int = 0
    example: str = ""

    def and_one(self, path: str) -> Foreign:
        return Foreign(self.count + 1, self.example or path)


class FragmentOwner:
    """Applies the rule above for one journal. ``nested`` are the journals below it."""

    def __init__(
        self, journal: JournalName, path_postfix_template: str, nested: Collection[JournalName]
    ) -> None:
        self._journal = journal
        self._shape = _shape_of(path_postfix_template)
        head = f"{journal}/"
        self._nested = frozenset(name[len(head) :] for name in nested if name.startswith(head))

    def owns(self, postfix: str) -> bool:
        """Return True if a fragment at that postfix (``""``: none) is the journal's own."""
        if not postfix:
            return True
        if self._nested:
            components = postfix.split("/")
            for count in range(1, len(components) + 1):
                if "/".join(components[:count]) in self._nested:
                    return False
        if self._shape is not None and self._shape.fullmatch(postfix):
            return True
        return _KEY_VALUES.fullmatch(postfix) is not None


async def list_fragments(
    blob_stores: BlobStores,
    spec: JournalSpec,
    nested: Collection[JournalName] = (),
    *,
    begin: Offset = 0,
) -> FragmentCover:
    """List all stores of a journal; where two have the same span, the later store wins.

    With ``begin``, the objects that sort before a fragment of that begin are left out: of those directly in
    the journal's directory, all fragments that begin earlier.

    ``nested`` are the journals whose name begins with this one's and ``/``; others do no harm. Raise what
    any of the stores raised: half an index would invite appends at offsets that are taken. Objects which are
    not fragments of the journal are counted and logged.

    Cancellation: the running listing of a store goes on in its thread; its result is dropped.
    """
    cover = FragmentCover()
    owner = FragmentOwner(spec.name, spec.fragment.path_postfix_template, nested)
    for url in spec.fragment.stores:
        active = blob_stores.get(url)
        # Wait without a deadline: the caller must not list a store again while a listing still runs.
        listing = active.calls.submit(_list_into, cover, active.store, url, spec.name, owner, begin)
        foreign = await await_future(listing)
        active.worked()
        if foreign.count:
            log.warning(
                "%(count)d objects in %(store)s below journal %(journal)s are not its fragments, for example "
                "%(example)r",
                {
                    "count": foreign.count,
                    "store": url,
                    "journal": spec.name,
                    "example": foreign.example,
                },
            )
    return cover


def _list_into(
    cover: FragmentCover,
    store: BlobStore,
    url: str,
    journal: JournalName,
    owner: FragmentOwner,
    begin: Offset,
) -> Foreign:
    foreign = Foreign()
    prefix = f"{journal}/"
    listing = list_after(store, prefix, f"{begin:016x}") if begin else store.list(prefix)
    for info, fragment in _parsed(listing, journal):
        if fragment is None and (aside := SetAside.parse(journal, info.path)) is not None:
            if owner.owns(aside.fragment.path_postfix):
                cover.set_aside.append(replace(aside, fragment=_stored(aside.fragment, url, info)))
            continue
        if fragment is None or not owner.owns(fragment.path_postfix):
            foreign = foreign.and_one(info.path)
            continue
        cover.add(_stored(fragment, url, info))
    return foreign


def _stored(fragment: Fragment, url: str, info: BlobInfo) -> Fragment:
    # A time of zero would mean that it is not persisted.
    return replace(fragment, backing_store=url, mod_time=max(info.mod_time, 1))


def fragments_in(
    store: BlobStore, journal: JournalName, owner: FragmentOwner
) -> Iterator[Fragment]:
    """Yield the fragments of a journal in one store. Blocks; raises what the store does."""
    for info, fragment in _parsed(store.list(f"{journal}/"), journal):
        if fragment is not None and owner.owns(fragment.path_postfix):
            yield replace(fragment, mod_time=max(info.mod_time, 1))


def _parsed(
    listing: Iterator[BlobInfo], journal: JournalName
) -> Iterator[tuple[BlobInfo, Fragment | None]]:
    for info in listing:
        try:
            yield info, Fragment.parse(journal, info.path)
        except Invalid:
            yield info, None


def _shape_of(template: str) -> re.Pattern[str] | None:
    """Return a pattern for postfixes of a template: its literal text, with anything for its actions.

    A value may be empty or of several components, and empty components are left out. So a ``/`` beside
    an action belongs to the action.
    """
    if not template:
        return None
    if _CONTROL.search(template):
        # Conditions decide which part of the text is written. This module does not evaluate them.
        return re.compile(".*", re.DOTALL)
    literals = _ACTION.split(template)
    last = len(literals) - 1
    parts = []
    for at, literal in enumerate(literals):
        text = literal.strip() if last == 0 else literal
        text = text.removeprefix("/") if at > 0 or text.startswith("/") else text
        text = text.removesuffix("/") if at < last or text.endswith("/") else text
        parts.append(re.escape(text))
    return re.compile(".*".join(parts), re.DOTALL)
