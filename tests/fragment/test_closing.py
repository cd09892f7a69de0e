"""Closings: what a primary that ends without etcd leaves in a store. Damaged ones prove nothing."""

from __future__ import annotations

import io
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.errors import Corrupt, Invalid, NotFound
from gazette.fragment.closing import Closing, ClosingName
from gazette.fragment.conflicts import FragmentCover
from gazette.fragment.listing import list_into
from gazette.fragment.set_aside import SetAside
from gazette.protocol.fragment import Fragment
from gazette.protocol.fragment_owner import FragmentOwner
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from tests.facts import raises
from tests.support.memory_store import MemoryStore

JOURNAL = "a/journal"
REVISIONS = st.integers(1, (1 << 63) - 1)
NAMES = st.builds(ClosingName, st.just(JOURNAL), REVISIONS, REVISIONS, REVISIONS)
TEXTS = st.text(max_size=8)


@st.composite
def closings(draw: st.DrawFn) -> Closing:
    begin, end = sorted(draw(st.tuples(st.integers(0, 1 << 62), st.integers(0, 1 << 62))))
    pairs = draw(
        st.lists(st.tuples(st.from_regex("[a-z]{1,5}", fullmatch=True), TEXTS), max_size=3)
    )
    return Closing(draw(NAMES), end, LabelSet.of(*pairs), begin)


@given(closings())
def test_what_is_written_reads_back(closing: Closing) -> None:
    assert Closing.decode(closing.name, closing.encode()) == closing
    relative = closing.name.path.removeprefix(f"{JOURNAL}/")
    assert ClosingName.parse(JOURNAL, relative) == closing.name


@given(closings(), st.data())
def test_a_damaged_one_is_refused(closing: Closing, data: st.DataObject) -> None:
    """A byte that changed, or an end that is missing."""
    content = bytearray(closing.encode())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    with suppress(Corrupt):
        found = Closing.decode(closing.name, bytes(content))
        assert found == closing  # A change of white space, or of an escape.


@given(closings(), NAMES)
def test_one_of_another_primary_is_refused(closing: Closing, other: ClosingName) -> None:
    if other != closing.name:
        with raises(Corrupt, "object", "journal"):
            Closing.decode(other, closing.encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"closing": {"end": 1e999}, "sha256": ""}).encode(),
    ],
)
def test_hostile_content_is_refused(content: bytes) -> None:
    with raises(Corrupt, "object"):
        Closing.decode(ClosingName(JOURNAL, 5, 6, 7), content)


def test_it_is_read_from_its_store() -> None:
    store, name = MemoryStore(lambda: 0.0), ClosingName(JOURNAL, 5, 6, 7)
    with pytest.raises(NotFound):
        Closing.read(name, store)


def test_no_listing_takes_it_for_a_fragment() -> None:
    """Its name has four parts: the original asks for three, and logs what it cannot read."""
    name = ClosingName(JOURNAL, 5, 6, 0xAB)
    relative = name.path.removeprefix(f"{JOURNAL}/")
    assert relative == "closed-5-6-00000000000000ab"
    assert len(relative.split("-")) == 4
    assert SetAside.parse(JOURNAL, relative) is None
    with pytest.raises(Invalid):
        Fragment.parse(JOURNAL, relative)
    for other in (
        f"b/{relative}",
        f"{relative}.raw",
        "closed-5-6-ab",
        "closed-5-6",
        "closed-5-6-x",
    ):
        assert ClosingName.parse(JOURNAL, other) is None
    store = MemoryStore(lambda: 0.0)
    store.put(name.path, io.BytesIO())
    cover = FragmentCover()
    spec = JournalSpec(JOURNAL, fragment=FragmentSpec(stores=("s3://one/",)))
    foreign = list_into(cover, store, "s3://one/", FragmentOwner(spec, []))
    assert (foreign.count, len(cover), cover.closings) == (0, 0, [("s3://one/", name)])
