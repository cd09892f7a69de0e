from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from prometheus_client import REGISTRY

from gazette.blobs.registry import BlobSettings, BlobStores
from gazette.errors import Bug, Closed, Invalid, NotAllowed, NotFound, Unavailable
from gazette.fragment.closing import Closing, ClosingName
from gazette.fragment.completed_spool import CompletedSpool, SpoolCompression
from gazette.fragment.local_file import LocalFile
from gazette.fragment.persister import Persister, PersisterSettings
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.runtime.latch import Latch
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.testing.clock import ManualClock
from tests.facts import logged, raises
from tests.support.blob_store_tests import get, paths
from tests.support.memory_store import MemoryStore

SETTINGS = PersisterSettings(parallel=4)
LIFE = 7
TENURE = 8
NAME = "0000000000000000-0000000000000007-" + hashlib.sha1(b"content").hexdigest()


class Bucket(MemoryStore):
    """Can be turned off or held, and counts."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.error: Exception | None = None
        self.remove_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.looks = threading.Event()
        self.looks.set()
        self.looked = 0
        self.attempts = 0
        self.puts = 0
        self.waited = 0
        self.active = 0
        self.active_max = 0
        self._count = threading.Lock()

    def exists(self, path: str) -> bool:
        with self._count:
            self.attempts += 1
        opened = self.looks.wait(10)
        self.looked += 1
        assert opened
        if self.error is not None:
            raise self.error
        return super().exists(path)

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        with self._count:
            self.puts += 1
            self.active += 1
            self.active_max = max(self.active, self.active_max)
        opened = self.gate.wait(10)
        self.waited += 1
        assert opened
        with self._count:
            self.active -= 1
        if self.error is not None:
            raise self.error
        super().put(path, source, content_encoding=content_encoding)

    def remove(self, path: str) -> None:
        if self.remove_error is not None:
            raise self.remove_error
        super().remove(path)


class Bench:
    """A persister over two buckets, and the specifications that it looks up."""

    def __init__(self, clock: ManualClock, directory: Path, settings: PersisterSettings) -> None:
        self.clock = clock
        self.directory = directory
        self.one, self.two = Bucket(clock.now), Bucket(clock.now)
        self.pool = BlockingPool("blobs", 8)
        self.stores = BlobStores(
            BlobSettings(),
            clock,
            threads=8,
            constructors={"s3": lambda url: {"one": self.one, "two": self.two}[url.host]},
        )
        self.stores.close()
        self.specs: dict[str, JournalSpec] = {}
        self.life = LIFE
        self.limit: int | None = None
        self.unknown = self.gone = False
        self.relied_on: list[Fragment] = []
        self.persister = Persister(
            self.stores,
            lambda journal, life: self.spec_of(journal, life),
            clock,
            limit_of=self.limit_of,
            relies_on=lambda fragment: fragment in self.relied_on,
            rng=random.Random(1),
            settings=settings,
        )
        self.spec()

    def spec(
        self,
        journal: str = "a/journal",
        stores: Sequence[str] = ("s3://one/",),
        template: str = "",
    ) -> None:
        fragment = FragmentSpec(stores=tuple(stores), path_postfix_template=template)
        self.specs[journal] = JournalSpec(journal, fragment=fragment)

    async def limit_of(self, journal: str, life: int, tenure: int) -> int | None:
        assert tenure == TENURE
        if self.unknown:
            raise Unavailable("etcd is away")
        if self.gone:
            raise NotFound("the journal was deleted")
        return self.limit

    def spec_of(self, journal: str, life: int) -> JournalSpec | None:
        return self.specs.get(journal) if life == self.life else None

    def spool(
        self, journal: str = "a/journal", content: bytes = b"content", codec: Codec = Codec.NONE
    ) -> CompletedSpool:
        file = LocalFile(self.directory)
        file.pwrite(content, 0)
        digest = hashlib.sha1(content).digest()
        return CompletedSpool(
            fragment=Fragment(journal, 0, len(content), digest, codec),
            registers=LabelSet.of(("region", "eu")),
            first_append_time=1_700_000_000.0,
            file=file,
            compression=None if codec is Codec.NONE else SpoolCompression(file, codec, self.pool),
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.clock.sleep(0)

    async def settled(self) -> None:
        """Return when every spool that is left waits for time to pass."""
        await self.until(lambda: self.clock.sleepers == self.persister.unpersisted)

    async def persisted_by_retries(self) -> None:
        """Return when no spool is left. Time passes whenever one waits for its next attempt.

        An attempt may find the thread of the former one still at work, however late it is.
        """
        while self.persister.unpersisted:
            if self.clock.sleepers:
                self.clock.advance(200)
            await self.clock.sleep(0)


@pytest.fixture
async def bench(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(clock, tmp_path, SETTINGS)
    yield bench
    bench.one.gate.set()
    bench.two.gate.set()
    await bench.persister._scope.stop()
    bench.stores.close()
    bench.pool.close()


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


async def test_a_primary_uploads_at_once(bench: Bench) -> None:
    """Under the name of the fragment, with the bytes of its codec."""
    before = metric("gazette_spool_persisted_total")
    waiting = metric("gazette_spool_unpersisted")  # of other brokers in this process
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    codec = Codec.GZIP_OFFLOAD_DECOMPRESSION
    bench.persister.spool_complete(bench.spool(codec=codec), life=LIFE, tenure=TENURE)
    assert metric("gazette_spool_unpersisted") == waiting + 2
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert paths(bench.one, "") == [f"a/journal/{NAME}", f"a/journal/{NAME}.raw"]
    assert get(bench.one, f"a/journal/{NAME}.raw") == b"content"
    assert gzip.decompress(get(bench.one, f"a/journal/{NAME}")) == b"content"
    assert bench.one.content_encoding(f"a/journal/{NAME}") == "gzip"
    assert metric("gazette_spool_persisted_total") == before + 2
    assert metric("gazette_spool_unpersisted") == waiting
    # Case: nothing to persist.
    empty = replace(bench.spool(), fragment=Fragment("a/journal", 7, 7))
    bench.persister.spool_complete(empty, life=LIFE, tenure=TENURE)
    assert bench.persister.unpersisted == 0


async def test_a_replica_waits_for_the_primary(bench: Bench) -> None:
    """Two to three minutes at most; a spool whose object it finds before that is let go."""
    bench.persister.spool_complete(bench.spool(), reassigned=Latch(), life=LIFE, tenure=TENURE)
    bench.spec("b/journal")
    bench.persister.spool_complete(
        bench.spool("b/journal"), reassigned=Latch(), life=LIFE, tenure=TENURE
    )
    bench.one.put(f"b/journal/{NAME}.raw", bench.spool().open())
    await bench.settled()
    bench.clock.advance(9)
    await bench.settled()
    assert bench.one.attempts == 0
    bench.clock.advance(6)
    await bench.until(lambda: bench.persister.unpersisted == 1)
    for _ in range(104):
        bench.clock.advance(1)
        await bench.settled()
    assert bench.one.attempts <= 6  # Looks, of which none is much behind the one before.
    assert bench.one.puts == 1
    bench.clock.advance(61)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert bench.one.puts == 2
    assert len(paths(bench.one, "")) == 2


async def test_a_replica_uploads_at_once_when_its_primary_may_be_gone(bench: Bench) -> None:
    """No time passes here: what it waited for will not happen."""
    reassigned = Latch()
    bench.persister.spool_complete(bench.spool(), reassigned=reassigned, life=LIFE, tenure=TENURE)
    await bench.settled()
    reassigned.set()
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw"]
    # Case: it was gone already.
    bench.spec("b/journal")
    bench.persister.spool_complete(
        bench.spool("b/journal"), reassigned=reassigned, life=LIFE, tenure=TENURE
    )
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert len(paths(bench.one, "")) == 2


async def test_a_replica_that_looks_leaves_a_store_alone_that_is_down(bench: Bench) -> None:
    """One outage, as for uploads; and the wait for the primary ends when it should."""
    bench.one.error = Unavailable("down")
    reassigned = Latch()
    for number in range(20):
        bench.spec(f"journal/{number}")
        bench.persister.spool_complete(
            bench.spool(f"journal/{number}"), reassigned=reassigned, life=LIFE, tenure=TENURE
        )
    await bench.settled()
    bench.clock.advance(15)
    await bench.settled()
    assert bench.one.attempts <= SETTINGS.parallel * 3
    bench.one.error = None
    reassigned.set()
    for _ in range(10):
        bench.clock.advance(1)
        await bench.clock.sleep(0)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert bench.one.puts == 20


async def test_the_present_specification_counts(bench: Bench) -> None:
    """Store and postfix as of now, even if the journal changed while the spool waited."""
    bench.persister.spool_complete(bench.spool(), reassigned=Latch(), life=LIFE, tenure=TENURE)
    await bench.settled()
    template = (
        'region={{ .Spool.Registers.ValueOf "region" }}'
        '/date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}'
    )
    bench.spec(stores=["s3://two/", "s3://one/"], template=template)
    bench.clock.advance(200)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert paths(bench.two, "") == [f"a/journal/region=eu/date=2023-11-14/{NAME}.raw"]
    assert paths(bench.one, "") == []


async def test_a_journal_that_is_gone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Is the one reason to drop a spool. One without stores has nothing to be done, either."""
    with caplog.at_level(logging.INFO):
        bench.persister.spool_complete(bench.spool("gone/journal"), life=LIFE, tenure=TENURE)
        bench.spec("b/journal", stores=[])
        bench.persister.spool_complete(bench.spool("b/journal"), life=LIFE, tenure=TENURE)
        await bench.until(lambda: bench.persister.unpersisted == 0)
    [record] = caplog.records
    assert "gone/journal" in record.getMessage()
    assert bench.one.attempts == 0


async def test_a_journal_that_was_created_again_is_another_one(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name and its stores are the same: only what is of its own life gets there."""
    bench.one.error = Unavailable("down")
    bench.persister.spool_complete(bench.spool(content=b"former"), life=LIFE, tenure=TENURE)
    await bench.settled()
    bench.life, bench.one.error = LIFE + 1, None
    with caplog.at_level(logging.INFO):
        bench.persister.spool_complete(bench.spool(), life=LIFE + 1, tenure=TENURE)
        bench.clock.advance(10)
        await bench.until(lambda: bench.persister.unpersisted == 0)
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw"]
    logged(caplog, journal="a/journal", life=LIFE)


@pytest.mark.parametrize("begun", [False, True])
async def test_what_etcd_knows_to_be_deleted_is_dropped_before_the_key_space_shows_it(
    bench: Bench, begun: bool
) -> None:
    """An upload that had begun is taken back."""
    if begun:
        bench.one.gate.clear()
    else:
        bench.gone = True
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    if begun:
        await bench.until(lambda: bench.one.active == 1)
        bench.gone = True
        bench.one.gate.set()
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert paths(bench.one, "") == []
    assert bench.one.puts == begun


@pytest.mark.parametrize("hung", [False, True])
async def test_an_upload_across_a_new_creation_is_taken_back(
    clock: ManualClock, tmp_path: Path, hung: bool
) -> None:
    """Also one that ends after its time was up: nothing else would ever remove its object."""
    bench = Bench(clock, tmp_path, replace(SETTINGS, put_timeout_s=0.01 if hung else 10.0))
    bench.one.gate.clear()
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.active == 1)
    bench.life = LIFE + 1
    if hung:
        await bench.settled()
    bench.one.gate.set()
    await bench.persisted_by_retries()
    assert paths(bench.one, "") == []
    await bench.persister._scope.stop()
    bench.pool.close()


async def test_an_upload_that_the_new_journal_relies_on_stays(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds the same bytes at the same offsets, found the object, and let its own spool go."""
    bench.one.gate.clear()
    spool = bench.spool()
    bench.persister.spool_complete(spool, life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.active == 1)
    bench.life, bench.relied_on = LIFE + 1, [spool.fragment]
    bench.one.gate.set()
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw"]
    assert "gazctl journals fragments" in caplog.text


async def test_nothing_is_uploaded_beyond_where_a_later_primary_began(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.limit = 4
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    cut = "0000000000000000-0000000000000004-" + hashlib.sha1(b"cont").hexdigest()
    assert paths(bench.one, "") == [f"a/journal/{cut}.raw"]
    logged(caplog, journal="a/journal", begin=4, end=7)
    # Case: nothing is left of it.
    bench.limit = 0
    bench.spec("b/journal")
    bench.persister.spool_complete(bench.spool("b/journal"), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert len(paths(bench.one, "")) == 1


async def test_an_upload_is_cut_where_a_later_primary_began_meanwhile(bench: Bench) -> None:
    """It asked before its upload, and must ask again behind it."""
    bench.one.gate.clear()
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.active == 1)
    bench.limit = 4
    bench.one.gate.set()
    await bench.settled()
    assert paths(bench.one, "") == []
    bench.clock.advance(5)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    cut = "0000000000000000-0000000000000004-" + hashlib.sha1(b"cont").hexdigest()
    assert paths(bench.one, "") == [f"a/journal/{cut}.raw"]


@pytest.mark.parametrize("silent", [False, True])
async def test_an_upload_of_which_nothing_is_left_ends_though_its_removal_failed(
    bench: Bench, silent: bool
) -> None:
    """It asked etcd already, and does not ask again: etcd may have fallen silent since."""
    bench.one.gate.clear()
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.active == 1)
    bench.limit, bench.one.remove_error = 0, NotAllowed("no right to remove")
    bench.one.gate.set()
    await bench.settled()
    bench.clock.advance(5)  # The second attempt finds that nothing is left.
    await bench.settled()
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw"]
    bench.one.remove_error, bench.unknown = None, silent
    async with TaskScope("test") as scope:
        scope.spawn(bench.persister.finish(10.0), name="finish")
        await bench.persisted_by_retries()
    assert paths(bench.one, "") == []


async def test_an_object_of_another_broker_is_not_taken_back(bench: Bench) -> None:
    """It was there before, and is not this broker's to remove."""
    bench.one.put(f"a/journal/{NAME}.raw", bench.spool().open())
    bench.one.gate.clear()
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.attempts == 1)
    bench.life = LIFE + 1
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw"]


async def test_a_store_that_is_down(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Is tried ever more seldom, by all spools together, and nothing is given up."""
    bench.one.error = Unavailable("down")
    tries = 3  # Each attempt is repeated twice at once, by the store itself.
    for number in range(40):
        bench.spec(f"journal/{number}")
        bench.persister.spool_complete(bench.spool(f"journal/{number}"), life=LIFE, tenure=TENURE)
    bench.spec("b/journal", stores=["s3://two/"])
    bench.persister.spool_complete(bench.spool("b/journal"), life=LIFE, tenure=TENURE)
    await bench.settled()
    # Case: another store is not held back.
    assert len(paths(bench.two, "")) == 1
    # Case: no more attempts than may run side by side, at each interval.
    assert bench.one.attempts <= SETTINGS.parallel * tries
    for _ in range(600):
        bench.clock.advance(1)
        await bench.settled()
    assert bench.persister.unpersisted == 40
    # In ten minutes: about 1, 3, 7, 15, 31, 63, 127, 247, 367, 487 and 607 seconds.
    assert 7 * tries <= bench.one.attempts <= 14 * SETTINGS.parallel * tries
    # Case: it is back.
    bench.one.error = None
    for _ in range(300):
        bench.clock.advance(1)
        await bench.settled()
    assert bench.persister.unpersisted == 0
    assert len(paths(bench.one, "")) == 40
    logged(caplog, "fragment", "error")


async def test_failures_side_by_side_are_one_outage(bench: Bench) -> None:
    """The pause after it is the first and shortest one."""
    bench.one.gate.clear()
    for number in range(SETTINGS.parallel):
        bench.spec(f"journal/{number}")
        bench.persister.spool_complete(bench.spool(f"journal/{number}"), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.active == SETTINGS.parallel)
    bench.one.error = Unavailable("down")
    bench.one.gate.set()
    uploads = bench.persister._uploads
    await bench.until(lambda: all(upload.failures for upload in uploads))
    assert bench.persister._outages["s3://one/"].failures == 1


async def test_uploads_are_bounded(bench: Bench) -> None:
    """So many at the same time, and the others in their turn."""
    bench.one.gate.clear()
    for number in range(20):
        bench.spec(f"journal/{number}")
        bench.persister.spool_complete(bench.spool(f"journal/{number}"), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.active == SETTINGS.parallel)
    bench.one.gate.set()
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert bench.one.active_max == SETTINGS.parallel
    assert bench.one.puts == 20


async def test_a_store_that_hangs_takes_no_slot_of_another(bench: Bench) -> None:
    """However many spools wait for it."""
    bench.one.gate.clear()
    for number in range(20):
        bench.spec(f"journal/{number}")
        bench.persister.spool_complete(bench.spool(f"journal/{number}"), life=LIFE, tenure=TENURE)
    bench.spec("b/journal", stores=["s3://two/"])
    bench.persister.spool_complete(bench.spool("b/journal"), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.persister.unpersisted == 20)
    assert paths(bench.two, "") == [f"b/journal/{NAME}.raw"]

    # Case: one that waits for a slot goes where its journal's fragments go by then.
    bench.spec("journal/19", stores=["s3://two/"])
    bench.one.gate.set()
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert len(paths(bench.two, "")) == 2


async def test_finish_waits_for_what_is_under_way(bench: Bench) -> None:
    """An upload of a primary that is in the middle, and what replicas left to others."""
    bench.one.gate.clear()
    bench.spec("b/journal", stores=["s3://two/"])
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    bench.persister.spool_complete(
        bench.spool("b/journal"), reassigned=Latch(), life=LIFE, tenure=TENURE
    )
    await bench.until(lambda: bench.one.active == 1)
    async with TaskScope("test") as scope:
        finish = scope.spawn(bench.persister.finish(30.0), name="finish")
        await bench.until(lambda: bench.persister.unpersisted == 1)
        # Case: replicas that stop late hand over their spools meanwhile.
        bench.spec("c/journal", stores=["s3://two/"])
        bench.persister.spool_complete(
            bench.spool("c/journal"), reassigned=Latch(), life=LIFE, tenure=TENURE
        )
        await bench.until(lambda: bench.persister.unpersisted == 1)
        assert not finish.done()
        bench.one.gate.set()
        await finish
    assert len(paths(bench.one, "")) == 1
    assert len(paths(bench.two, "")) == 2
    with pytest.raises(Closed):
        bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)


async def test_finish_keeps_trying(bench: Bench) -> None:
    """With pauses, of which none is long, until the store is back; sleepers are woken at once."""
    bench.one.error = Unavailable("down")
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.settled()
    for _ in range(300):
        bench.clock.advance(1)
        await bench.settled()
    async with TaskScope("test") as scope:
        attempts = bench.one.attempts
        finish = scope.spawn(bench.persister.finish(30.0), name="finish")
        await bench.until(lambda: bench.one.attempts > attempts)
        await bench.settled()
        attempts = bench.one.attempts
        bench.clock.advance(0.1)
        await bench.settled()
        assert bench.one.attempts == attempts
        bench.one.error = None
        bench.clock.advance(7)
        await bench.settled()
        bench.clock.advance(7)
        await finish
    assert len(paths(bench.one, "")) == 1


async def test_finish_says_what_is_lost(bench: Bench) -> None:
    """When its time is up: how many, which, and why. Nothing is dropped for that."""
    bench.one.error = Unavailable("down")
    for number in range(7):
        bench.spec(f"journal/{number}")
        bench.persister.spool_complete(bench.spool(f"journal/{number}"), life=LIFE, tenure=TENURE)
    with pytest.raises(Unavailable) as raised:
        await bench.persister.finish(1.0)
    text = str(raised.value)
    assert text.startswith("7 fragments were not persisted in time: journal/0 [0, 7): down")
    assert "and 2 more" in text
    assert bench.persister.unpersisted == 7


async def test_a_cancelled_finish_may_be_repeated(bench: Bench) -> None:
    """Stopping has stages and deadlines of its own."""
    bench.one.gate.clear()
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bench.persister.finish(30.0)
    bench.one.gate.set()
    await bench.persister.finish(30.0)
    assert len(paths(bench.one, "")) == 1


async def test_a_store_that_refuses_us_makes_way_at_the_end(bench: Bench) -> None:
    """Only while finishing, only for want of permission, and only for a store that is read."""
    bench.spec(stores=["s3://one/", "s3://two/"])
    bench.one.error = NotAllowed("access denied")
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.settled()
    assert paths(bench.two, "") == []
    await bench.persister.finish(30.0)
    assert len(paths(bench.two, "")) == 1


async def test_an_outage_does_not_divert_at_the_end(bench: Bench) -> None:
    """It may be over soon; a second store is for reading."""
    bench.spec(stores=["s3://one/", "s3://two/"])
    bench.one.error = Unavailable("down")
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    with pytest.raises(Unavailable):
        await bench.persister.finish(0.05)
    assert paths(bench.two, "") == []


async def test_an_upload_that_hangs_is_not_repeated(clock: ManualClock, tmp_path: Path) -> None:
    """Its thread is waited for again and again, and its success counts whenever it comes."""
    bench = Bench(clock, tmp_path, replace(SETTINGS, put_timeout_s=0.01))
    bench.one.gate.clear()
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    for _ in range(5):
        await bench.settled()
        clock.advance(200)
        await bench.until(lambda: clock.sleepers == 0)
    assert bench.one.puts == 1
    await bench.settled()
    bench.one.gate.set()
    await bench.persisted_by_retries()
    assert get(bench.one, f"a/journal/{NAME}.raw") == b"content"
    await bench.persister.finish(1.0)
    bench.stores.close()
    bench.pool.close()


@pytest.mark.parametrize("cause", ["time is up", "other stores", "reassigned"])
async def test_a_look_at_a_store_that_hangs_is_given_up(
    clock: ManualClock, tmp_path: Path, cause: str
) -> None:
    """It would keep the spool from being uploaded for 5 minutes."""
    look_timeout_s = 0.01 if cause == "time is up" else 60.0
    bench = Bench(clock, tmp_path, replace(SETTINGS, look_timeout_s=look_timeout_s))
    bench.one.looks.clear()
    reassigned = Latch()
    bench.persister.spool_complete(bench.spool(), reassigned=reassigned, life=LIFE, tenure=TENURE)
    await bench.settled()
    clock.advance(15)
    await bench.until(lambda: bench.one.attempts == 1)
    if cause != "time is up":
        bench.spec(stores=("s3://two/",))
    if cause == "reassigned":
        reassigned.set()
        await bench.until(lambda: bench.persister.unpersisted == 0)
        assert get(bench.two, f"a/journal/{NAME}.raw") == b"content"
    else:
        await bench.settled()
    assert bench.one.looked == 0
    bench.one.looks.set()
    await bench.persister.finish(5.0)
    bench.stores.close()
    bench.pool.close()


async def test_an_upload_that_hangs_in_a_store_that_was_taken_out_is_given_up(
    clock: ManualClock, tmp_path: Path
) -> None:
    """The journal has another one, which takes it."""
    bench = Bench(clock, tmp_path, SETTINGS)
    bench.one.gate.clear()
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.puts == 1)
    bench.spec(stores=("s3://two/",))
    await bench.settled()
    clock.advance(200.0)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert bench.one.waited == 0
    assert get(bench.two, f"a/journal/{NAME}.raw") == b"content"
    bench.one.gate.set()
    bench.stores.close()
    bench.pool.close()


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTANDARD])
async def test_a_damaged_spool_stays_out_of_the_store(
    bench: Bench, codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    """It is kept, and reported as an error; another replica has the right bytes."""
    spool = bench.spool(codec=codec)
    assert isinstance(spool.file, LocalFile)
    spool.file.pwrite(b"?", 3)
    bench.persister.spool_complete(spool, life=LIFE, tenure=TENURE)
    await bench.settled()
    bench.clock.advance(10)
    await bench.settled()
    assert paths(bench.one, "") == []
    assert bench.persister.unpersisted == 1
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    # Case: others of the same store are not held back by it.
    bench.spec("b/journal")
    bench.persister.spool_complete(bench.spool("b/journal"), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.persister.unpersisted == 1)


async def test_a_spool_is_uploaded_up_to_an_end(bench: Bench) -> None:
    """Bytes beyond the limit belong to another broker."""
    bench.persister.spool_complete(bench.spool(), end=4, life=LIFE, tenure=TENURE)
    await bench.persister.finish(30.0)
    name = "0000000000000000-0000000000000004-" + hashlib.sha1(b"cont").hexdigest()
    assert paths(bench.one, "") == [f"a/journal/{name}.raw"]
    assert get(bench.one, f"a/journal/{name}.raw") == b"cont"


async def test_a_damaged_spool_that_cannot_be_cut_is_named_at_the_end(bench: Bench) -> None:
    """Like one that cannot be uploaded: the process must not seem to have ended well."""
    spool = bench.spool()
    assert isinstance(spool.file, LocalFile)
    spool.file.pwrite(b"?", 3)
    bench.persister.spool_complete(spool, end=6, life=LIFE, tenure=TENURE)
    with raises(Unavailable, deadline_s=0.05, says="a/journal [0, 6)"):
        await bench.persister.finish(0.05)
    assert paths(bench.one, "") == []


@pytest.mark.parametrize("template", ["../{{ .Name }}", "{{ .Bogus }}", "{{ if", "a b"])
async def test_a_postfix_that_cannot_be_made(
    bench: Bench, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    """The bytes are stored without one: other versions may apply templates that fail here."""
    bench.spec(template=template)
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw"]
    line = logged(caplog, "fragment", journal="a/journal")
    assert isinstance(line["error"], Invalid)


async def test_a_defect_of_a_store_costs_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a client library throws: it is logged with where it came from, and repeated."""
    bench.one.error = ZeroDivisionError("surprise")
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.settled()
    assert "surprise" in caplog.text
    assert "Traceback" in caplog.text
    bench.one.error = None
    bench.clock.advance(10)
    await bench.until(lambda: bench.persister.unpersisted == 0)
    assert len(paths(bench.one, "")) == 1


async def test_serve_is_a_daemon(bench: Bench) -> None:
    """It ends with an error, and only when the persister itself is broken."""
    async with TaskScope("test") as scope:
        serve = scope.spawn(bench.persister.serve(), name="serve")
        bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
        await bench.until(lambda: bench.persister.unpersisted == 0)
        assert not serve.done()
        serve.cancel()

    def broken(journal: str, life: int) -> JournalSpec:
        raise KeyError(journal)

    bench.spec_of = broken  # type: ignore[method-assign]
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    with pytest.raises(Bug):
        await bench.persister.serve()
    with pytest.raises(Bug):
        await bench.persister.finish(30.0)


async def test_what_cannot_be_confirmed_is_kept_and_at_the_end_set_aside(bench: Bench) -> None:
    """The broker does not wait for etcd then: another one makes a fragment of it."""
    bench.unknown = True
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.settled()
    bench.clock.advance(200.0)
    await bench.settled()
    assert paths(bench.one, "") == []
    await bench.persister.finish(30.0)
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw.unconfirmed-{LIFE}-{TENURE}"]


async def test_what_cannot_be_confirmed_is_set_aside_in_the_next_store_if_the_first_refuses(
    bench: Bench,
) -> None:
    bench.spec(stores=["s3://one/", "s3://two/"])
    bench.unknown, bench.one.error = True, NotAllowed("access denied")
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.persister.finish(30.0)
    assert paths(bench.one, "") == []
    assert paths(bench.two, "") == [f"a/journal/{NAME}.raw.unconfirmed-{LIFE}-{TENURE}"]


async def test_what_was_uploaded_before_etcd_fell_silent_stays_and_is_marked(bench: Bench) -> None:
    """Replicas of the same bytes may have found it, and let their own go."""
    bench.one.gate.clear()
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    await bench.until(lambda: bench.one.active == 1)
    bench.unknown = True
    bench.one.gate.set()
    await bench.until(lambda: bench.clock.sleepers == 1)
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw"]
    await bench.persister.finish(0.3)
    aside = f"a/journal/{NAME}.raw.unconfirmed-{LIFE}-{TENURE}"
    assert paths(bench.one, "") == [f"a/journal/{NAME}.raw", aside]


async def test_a_defect_of_a_store_costs_other_journals_nothing_at_the_end(bench: Bench) -> None:
    """Neither while bytes are set aside, nor while a closing is put."""
    bench.unknown, bench.one.error = True, ZeroDivisionError("surprise")
    bench.spec("b/journal", stores=["s3://two/"])
    for journal in ("a/journal", "b/journal"):
        bench.persister.spool_complete(bench.spool(journal), life=LIFE, tenure=TENURE)
    bench.spec("c/journal")
    bench.persister.close(closing_of("c/journal"), asyncio.Event())
    with raises(Unavailable, deadline_s=0.5, says="a/journal [0, 7): surprise"):
        await bench.persister.finish(0.5)
    aside = f"b/journal/{NAME}.raw.unconfirmed-{LIFE}-{TENURE}"
    assert paths(bench.two, "") == [aside]


def closing_of(journal: str = "a/journal") -> Closing:
    return Closing(ClosingName(journal, LIFE, TENURE, 9), 7, LabelSet.of(("a", "b")), 7)


CLOSED = f"a/journal/closed-{LIFE}-{TENURE}-0000000000000009"


async def test_a_closing_is_put_at_the_end_and_behind_its_bytes(bench: Bench) -> None:
    """It names the first offset that was not stored before."""
    bench.unknown = True
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    bench.spec("b/journal")
    bench.persister.spool_complete(bench.spool("b/journal"), life=LIFE, tenure=TENURE)
    bench.persister.close(closing_of(), asyncio.Event())
    await bench.settled()
    assert paths(bench.one, "") == []
    bench.one.gate.clear()
    async with TaskScope("test") as scope:
        finish = scope.spawn(bench.persister.finish(30.0), name="finish")
        await bench.until(lambda: bench.one.active == 2)
        assert CLOSED not in paths(bench.one, "")
        bench.one.gate.set()
        await finish
    found = paths(bench.one, "")
    assert CLOSED in found
    assert sum(".unconfirmed-" in path for path in found) == 2
    closing = Closing.read(closing_of().name, bench.one)
    assert (closing.begin, closing.end) == (0, 7)


async def test_a_closing_is_not_put_if_etcd_has_what_it_says(bench: Bench) -> None:
    settled = asyncio.Event()
    bench.persister.close(closing_of(), settled)
    settled.set()
    await bench.settled()
    await bench.persister.finish(30.0)
    assert paths(bench.one, "") == []


async def test_a_closing_is_put_into_the_next_store_if_the_first_refuses(bench: Bench) -> None:
    bench.spec(stores=("s3://one/", "s3://two/"))
    bench.one.error = NotAllowed("no")
    bench.persister.close(closing_of(), asyncio.Event())
    await bench.persister.finish(30.0)
    assert paths(bench.two, "") == [CLOSED]


async def test_a_closing_of_a_journal_that_is_gone_or_without_stores_is_not_put(
    bench: Bench,
) -> None:
    bench.persister.close(closing_of("gone/journal"), asyncio.Event())
    bench.spec(stores=())
    bench.persister.close(closing_of(), asyncio.Event())
    await bench.persister.finish(30.0)
    assert paths(bench.one, "") == []


async def test_a_closing_is_not_put_while_its_bytes_are_not_stored(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The store fails until the broker has to end: an operator decides."""
    bench.one.error = Unavailable("the store is down")
    bench.persister.spool_complete(bench.spool(), life=LIFE, tenure=TENURE)
    bench.persister.close(closing_of(), asyncio.Event())
    with pytest.raises(Unavailable):
        await bench.persister.finish(0.2)
    bench.one.error = None
    assert paths(bench.one, "") == []
    logged(caplog, path=CLOSED)
    # Case: the broker has ended.
    bench.persister.close(closing_of(), asyncio.Event())


async def test_a_closing_is_given_up_after_some_attempts(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost without it: the broker does not wait longer for that."""
    bench.one.error = Unavailable("the store is down")
    bench.persister.close(closing_of(), asyncio.Event())
    async with TaskScope("test") as scope:
        finish = scope.spawn(bench.persister.finish(600.0), name="finish")
        while not finish.done():
            await bench.until(lambda: bool(bench.clock.sleepers) or finish.done())
            bench.clock.advance(10.0)
        await finish
    assert bench.one.puts
    assert paths(bench.one, "") == []
    logged(caplog, path=CLOSED)
