from __future__ import annotations

import io
import logging
from collections.abc import AsyncIterator, Iterable, Iterator

import pytest

from gazette.blobs.blob_store import BlobInfo
from gazette.blobs.registry import BlobSettings, BlobStores
from gazette.errors import NotAllowed, Unavailable
from gazette.fragment.listing import list_fragments
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.fragment_owner import FragmentOwner
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.testing.clock import ManualClock
from tests.support.memory_store import MemoryStore

DATED = (
    'date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}'
    '/hour={{ .Spool.FirstAppendTime.Format "15" }}'
)


@pytest.fixture
def buckets(clock: ManualClock) -> dict[str, MemoryStore]:
    return {name: MemoryStore(clock.now) for name in ("one", "two")}


@pytest.fixture
async def stores(clock: ManualClock, buckets: dict[str, MemoryStore]) -> AsyncIterator[BlobStores]:
    stores = BlobStores(
        BlobSettings(), clock, threads=1, constructors={"s3": lambda url: buckets[url.host]}
    )
    stores.close()  # Repeated calls do not wait in these tests.
    yield stores
    stores.close()


def name(begin: int, end: int, digit: str = "a", extension: str = ".gz") -> str:
    return f"{begin:016x}-{end:016x}-{digit * 40}{extension}"


def put(store: MemoryStore, *paths: str) -> None:
    for path in paths:
        store.put(path, io.BytesIO())


def spec(*buckets: str, journal: str = "a/journal", template: str = "") -> JournalSpec:
    urls = tuple(f"s3://{bucket}/" for bucket in buckets)
    return JournalSpec(journal, fragment=FragmentSpec(stores=urls, path_postfix_template=template))


def bounds(cover: Iterable[Fragment]) -> list[tuple[int, int]]:
    return [(fragment.begin, fragment.end) for fragment in cover]


async def test_fragments_of_all_stores(
    stores: BlobStores, buckets: dict[str, MemoryStore], clock: ManualClock
) -> None:
    """With where they are and since when; of equal spans the later store's is taken."""
    put(buckets["one"], f"a/journal/{name(0, 10)}", f"a/journal/{name(10, 20)}")
    put(buckets["one"], f"a/journal/{name(40, 45)}")
    clock.advance(7)
    put(buckets["two"], f"a/journal/date=x/{name(10, 20, 'b', '.zst')}")
    put(buckets["two"], f"a/journal/{name(40, 50)}", f"b/journal/{name(50, 60)}")
    cover = await list_fragments(stores, spec("one", "two"))
    assert bounds(cover) == [(0, 10), (10, 20), (40, 50)]
    assert cover[1] == Fragment(
        "a/journal",
        10,
        20,
        b"\xbb" * 20,
        Codec.ZSTANDARD,
        "s3://two/",
        cover[0].mod_time + 7,
        "date=x",
    )
    assert cover[0].mod_time == int(clock.now()) - 7
    assert len(await list_fragments(stores, spec())) == 0


async def test_a_time_of_zero_is_still_persisted(
    stores: BlobStores, buckets: dict[str, MemoryStore]
) -> None:
    """Files restored from an archive may be of 1970."""
    buckets["one"].now = lambda: 0.0
    put(buckets["one"], f"a/journal/{name(0, 10)}")
    cover = await list_fragments(stores, spec("one"))
    assert cover[0].mod_time == 1


async def test_what_is_not_a_fragment(
    stores: BlobStores, buckets: dict[str, MemoryStore], caplog: pytest.LogCaptureFixture
) -> None:
    """Is left out and reported, once for each store."""
    put(buckets["one"], f"a/journal/{name(0, 10)}", "a/journal/README", "a/journal/.test/x")
    put(buckets["one"], f"a/journal/{name(10, 5)}", f"a/journal/{name(0, 5, extension='.lz')}")
    with caplog.at_level(logging.WARNING):
        assert bounds(await list_fragments(stores, spec("one", "two"))) == [(0, 10)]
    [record] = caplog.records
    assert record.getMessage().startswith("4 objects in s3://one/ below journal a/journal")


class Broken(MemoryStore):
    """Fails behind what it has."""

    error: Exception

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        yield from super().list(prefix)
        raise self.error


async def test_one_store_that_fails_fails_all(
    stores: BlobStores, buckets: dict[str, MemoryStore], clock: ManualClock
) -> None:
    """Half of the fragments is worse than none: the head would be wrong."""
    put(buckets["one"], f"a/journal/{name(0, 10)}")
    broken = buckets["two"] = Broken(clock.now)
    put(broken, f"a/journal/{name(10, 20)}")
    for broken.error in (Unavailable("down"), NotAllowed("may not list")):
        with pytest.raises(type(broken.error)):
            await list_fragments(stores, spec("one", "two"))


async def test_journals_below_a_journal(
    stores: BlobStores, buckets: dict[str, MemoryStore]
) -> None:
    """Each object is of one journal, whatever the other ones are called."""
    journals = ["a/journal", "a/journal/part=1", "a/journal/sub", "a/journal/sub/part=2"]
    for at, journal in enumerate(journals):
        put(buckets["one"], f"{journal}/{name(at, at + 10)}")
        put(buckets["one"], f"{journal}/date=d/{name(at + 20, at + 30)}")
    for at, journal in enumerate(journals):
        nested = [other for other in journals if other.startswith(f"{journal}/")]
        cover = await list_fragments(stores, spec("one", journal=journal), nested)
        assert bounds(cover) == [(at, at + 10), (at + 20, at + 30)]
    # Case: names that merely begin alike, and the journal itself, do no harm.
    others = [*journals, "a/journal2", "a/journal/date", "a/journal/date=d2"]
    cover = await list_fragments(stores, spec("one"), others)
    assert bounds(cover) == [(0, 10), (20, 30)]


@pytest.mark.parametrize(
    ("template", "postfix", "owned"),
    [
        # No template: its own directory, and key=value directories of an earlier one.
        ("", "", True),
        ("", "date=2024-01-01", True),
        ("", "date=2024-01-01/hour=07", True),
        ("", "date=", True),
        ("", "sub", False),
        ("", "sub/date=2024-01-01", False),
        ("", "date=2024-01-01/sub", False),
        ("", "=x", False),
        # A template: its shape as well.
        (DATED, "date=2024-01-01/hour=07", True),
        (DATED, "", True),
        (DATED, "region=eu", True),
        (DATED, "sub", False),
        ("archive", "archive", True),
        ("archive", "archive2", False),
        ("archive", "archive/sub", False),
        ("/archive/", "archive", True),
        ('archive/{{ .Spool.FirstAppendTime.Format "2006/01/02" }}', "archive/2024/01/02", True),
        ('archive/{{ .Spool.FirstAppendTime.Format "2006/01/02" }}', "other/2024/01/02", False),
        ('{{ .Spool.FirstAppendTime.Format "2006/01/02" }}', "2024/01/02", True),
        # Registers and labels may be missing.
        ('{{ .Spool.Registers.ValueOf "region" }}/data', "eu/data", True),
        ('{{ .Spool.Registers.ValueOf "region" }}/data', "data", True),
        ('{{ .Spool.Registers.ValueOf "region" }}/data', "sub", False),
        ('v1/{{ .Name }}/{{ .Spool.Registers.ValueOf "x" }}', "v1/a/journal", True),
        ("v.1", "vx1", False),
    ],
)
def test_which_postfixes_are_a_journals_own(template: str, postfix: str, owned: bool) -> None:
    """By the shape of its template, or as key=value; see the module."""
    assert FragmentOwner(spec(template=template)).owns(postfix) is owned
    # Case: never those of a journal that exists.
    if postfix:
        head = postfix.split("/")[0]
        for nested in (f"a/journal/{postfix}", f"a/journal/{head}"):
            assert not FragmentOwner(spec(template=template), [nested]).owns(postfix)


async def test_other_bytes_at_the_same_offsets_are_a_conflict(
    stores: BlobStores, buckets: dict[str, MemoryStore]
) -> None:
    """In one store or in two. Fragments that overlap, or contain one another, are not."""
    put(buckets["one"], f"a/journal/{name(0, 10)}", f"a/journal/{name(10, 20)}")
    put(buckets["one"], f"a/journal/{name(20, 30)}", f"a/journal/{name(25, 40, 'b')}")
    put(buckets["two"], f"a/journal/{name(0, 10)}", f"a/journal/{name(10, 20, 'b')}")
    put(buckets["two"], f"a/journal/{name(20, 25, 'c')}")
    cover = await list_fragments(stores, spec("one", "two"))
    (conflict,) = cover.conflicts
    assert (conflict.kept.sum, conflict.kept.backing_store) == (b"\xbb" * 20, "s3://two/")
    assert (conflict.hidden.sum, conflict.hidden.backing_store) == (b"\xaa" * 20, "s3://one/")
    assert conflict.kept in list(cover)
    assert str(conflict) == (
        f"a/journal/{name(10, 20, 'b')} in s3://two/ is read, "
        f"a/journal/{name(10, 20)} in s3://one/ is hidden"
    )
