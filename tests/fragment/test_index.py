from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Closed, Unavailable
from gazette.fragment.cover_set import CoverSet
from gazette.fragment.index import AT_WRITE_HEAD, JUMP_AGE_S, SETTLED_S, Index, IndexResult
from gazette.fragment.kept_files import KeptFiles
from gazette.fragment.local_file import LocalFile, LocalFragment
from gazette.fragment.unexplained import Unexplained
from gazette.protocol.fragment import Fragment
from gazette.protocol.status import Status
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from tests.facts import raises

JOURNAL = "a/journal"


@pytest.fixture
async def index(clock: ManualClock) -> Index:
    return Index(JOURNAL, clock)


@pytest.fixture
def file(tmp_path: Path) -> LocalFile:
    return LocalFile(tmp_path)


def remote(*bounds: tuple[int, int], mod_time: int = 1_600_000_000) -> CoverSet[Fragment]:
    return CoverSet(
        Fragment(JOURNAL, begin, end, backing_store="s3://b/", mod_time=mod_time)
        for begin, end in bounds
    )


def local(begin: int, end: int, file: LocalFile) -> LocalFragment:
    return LocalFragment.of(Fragment(JOURNAL, begin, end), file)


async def ask(index: Index, offset: int, **arguments: Any) -> tuple[int, int | None, int | None]:
    """Return offset, begin and end of the fragment; None if the index has no such fragment now."""
    result = await index.query(offset, block=False, **arguments)
    assert (result.status is Status.OK) == (result.fragment is not None)
    assert result.write_head == index.end_offset
    fragment = result.fragment
    return (
        result.offset,
        None if fragment is None else fragment.begin,
        None if fragment is None else fragment.end,
    )


async def test_offsets_that_only_unexplained_fragments_have_are_not_passed_over(
    index: Index, file: LocalFile
) -> None:
    """Readers there get the reason, also those that wait at the head. All else is served."""
    unexplained = Unexplained.of(remote((0, 5), (12, 14), (22, 30)))
    index.replace_remote(remote((5, 10), (20, 25)), unexplained=unexplained)
    assert await ask(index, 5) == (5, 5, 10)
    assert await ask(index, 21) == (21, 20, 25)
    for offset in (0, 4, 10, 12, 13, 25, 29, AT_WRITE_HEAD):
        for block in (False, True):
            with raises(Unavailable, "store", journal=JOURNAL):
                await index.query(offset, block=block)
    assert await ask(index, 15) == (20, 20, 25)
    assert [one.begin for one in index.undecided()] == [0, 12, 22]
    # Case: the spool of this broker has them. Behind them, there is nothing to decide.
    index.spool_commit(local(25, 31, file))
    assert await ask(index, 31) == (31, None, None)
    with raises(Unavailable, journal=JOURNAL, begin=0, end=14):
        index.require_explained()
    # Case: they are explained.
    index.replace_remote(remote((0, 10), (10, 25)))
    index.require_explained()
    assert await ask(index, 0) == (0, 0, 10)


async def test_an_empty_index(index: Index) -> None:
    """Nothing can be read, and the head is zero."""
    assert await ask(index, 0) == (0, None, None)
    assert await ask(index, AT_WRITE_HEAD) == (0, None, None)
    assert await ask(index, 100) == (100, None, None)
    assert (index.begin_offset, index.end_offset, index.last_mod_time) == (0, 0, 0)
    assert not index.first_refresh.is_set
    assert index.fragments() == []


async def test_local_and_remote(index: Index, file: LocalFile) -> None:
    """Local files serve what stores do not cover yet; what they cover is let go."""
    index.spool_commit(local(0, 10, file))
    index.spool_commit(local(0, 15, file))
    index.spool_commit(local(15, 30, file))
    result = await index.query(12, block=False)
    assert result == IndexResult(Status.OK, 12, 30, Fragment(JOURNAL, 0, 15), local(0, 15, file))
    assert index.last_mod_time == 0

    # Case: the first was persisted, the second only in part.
    index.replace_remote(remote((0, 15), (15, 20)))
    result = await index.query(12, block=False)
    assert result.local is None
    assert result.fragment is not None
    assert result.fragment.backing_store == "s3://b/"
    assert (await index.query(17, block=False)).local == local(15, 30, file)
    assert index.fragments() == [*remote((0, 15)), Fragment(JOURNAL, 15, 30)]
    assert index.fragments(begin=1) == [Fragment(JOURNAL, 15, 30)]

    # Case: many small ones cover it, without a hole.
    index.replace_remote(remote((0, 15), (15, 20), (18, 29)))
    assert (await index.query(29, block=False)).local is not None
    index.replace_remote(remote((0, 15), (15, 20), (18, 31)))
    assert index.last_mod_time == 1_600_000_000
    assert (await index.query(29, block=False)).local is None

    # Case: the spool goes on nevertheless, and stores forget.
    index.spool_commit(local(15, 40, file))
    assert await ask(index, 35) == (35, 15, 40)
    index.replace_remote(remote())
    assert (index.begin_offset, index.end_offset) == (15, 40)


async def test_jumps(index: Index, file: LocalFile, clock: ManualClock) -> None:
    """At the beginning soon, in the middle only over old holes, and only to what is persisted."""
    now = int(clock.now())
    index.replace_remote(remote((100, 200)))
    assert await ask(index, 0) == (100, 100, 200)
    assert await ask(index, 200) == (200, None, None)

    # Case: what follows a hole in the middle was persisted lately, and later is old.
    fresh = remote((300, 400), mod_time=now - JUMP_AGE_S)
    index.replace_remote(CoverSet([*remote((100, 200)), *fresh]))
    assert await ask(index, 200) == (200, None, None)
    clock.advance(1)
    assert await ask(index, 200) == (300, 300, 400)

    # Case: at the beginning, a minute is enough for what is stored out of order to be listed.
    young = remote((300, 400), mod_time=int(clock.now()))
    index.replace_remote(young)
    assert await ask(index, 200) == (200, None, None)
    assert index.has_hole
    clock.advance(SETTLED_S)
    assert await ask(index, 200) == (200, None, None)
    index.replace_remote(young, listed_at=clock.now() - 1)
    assert await ask(index, 200) == (200, None, None)
    index.replace_remote(young)
    assert await ask(index, 200) == (300, 300, 400)
    assert not index.has_hole

    # Case: what follows is local only, even at the beginning.
    index.replace_remote(remote())
    index.spool_commit(local(500, 600, file))
    assert await ask(index, 0) == (0, None, None)
    assert await ask(index, 550) == (550, 500, 600)


async def test_what_an_operator_has_confirmed_as_lost_is_jumped_at_once(
    index: Index, file: LocalFile, clock: ManualClock
) -> None:
    now = int(clock.now())
    index.replace_remote(CoverSet([*remote((0, 100)), *remote((200, 300), mod_time=now)]))
    assert index.holes(400) == [(100, 200), (300, 400)]
    assert (index.holes(100), index.holes(150), index.holes(250)) == (
        [],
        [(100, 150)],
        [(100, 200)],
    )
    noted: list[int] = []
    index.on_hole = lambda: noted.append(1)
    async with TaskScope("readers") as scope:
        waits = [scope.spawn(index.query(at, block=True), name="reader") for at in (100, 150, 300)]
        while index.waiting < len(waits):
            await clock.sleep(0)
        index.adopt_head(400, tuple(index.holes(400)))
        assert [(await one).offset for one in waits[:2]] == [200, 200]
        index.spool_commit(local(400, 410, file))
        assert (await waits[2]).offset == 400
    assert (index.has_hole, noted) == (False, [])
    # Case: a hole that is in no span of these, or in a part of it only.
    index.spool_commit(local(500, 510, file))
    assert (index.has_hole, noted) == (True, [1])
    assert await ask(index, 410) == (410, None, None)
    index.adopt_head(510, ((410, 499), (420, 500)))
    assert await ask(index, 410) == (410, None, None)
    assert await ask(index, 430) == (500, 500, 510)
    # Case: the store has the missing bytes after all.
    index.replace_remote(remote((0, 100), (100, 200), (200, 300)))
    assert await ask(index, 100) == (100, 100, 200)


async def test_old_fragments_are_skipped(index: Index, file: LocalFile) -> None:
    """By the time they were persisted; local ones are never too old."""
    index.replace_remote(CoverSet([*remote((0, 10), mod_time=50), *remote((10, 20), mod_time=60)]))
    index.spool_commit(local(20, 30, file))
    assert await ask(index, 5) == (5, 0, 10)
    assert await ask(index, 5, begin_mod_time=51) == (10, 10, 20)
    assert await ask(index, 5, begin_mod_time=61) == (20, 20, 30)
    assert await ask(index, 25, begin_mod_time=999) == (25, 20, 30)
    # Case: everything is too old; the reader is left at the end.
    index.close()


async def test_skipping_may_end_at_the_head(index: Index) -> None:
    """Then the answer names the offset to go on from."""
    index.replace_remote(remote((0, 10), (10, 20)))
    assert await ask(index, 3, begin_mod_time=2_000_000_000) == (20, None, None)


async def test_waiting_at_the_head(index: Index, file: LocalFile, clock: ManualClock) -> None:
    """A blocking query returns once there is content, and skips as others do."""
    async with TaskScope("test") as scope:
        at_head = scope.spawn(index.query(AT_WRITE_HEAD, block=True), name="head")
        beyond = scope.spawn(index.query(25, block=True), name="beyond")
        await clock.sleep(0)
        assert index.waiting == 2
        index.spool_commit(local(0, 10, file))
        assert (await at_head).offset == 0
        index.spool_commit(local(0, 25, file))
        await clock.sleep(0)
        assert not beyond.done()
        index.spool_commit(local(25, 26, file))
        assert (await beyond).local == local(25, 26, file)
        assert index.waiting == 0

        # Case: a reader that skips all there is waits at the end of it.
        index.replace_remote(remote((0, 26)))
        skipping = scope.spawn(
            index.query(0, block=True, begin_mod_time=2_000_000_000), name="skipping"
        )
        await clock.sleep(0)
        index.spool_commit(local(26, 30, file))
        assert (await skipping).offset == 26


async def test_waiting_in_a_hole(index: Index, file: LocalFile, clock: ManualClock) -> None:
    """Until it is filled, or old enough to be jumped at the next refresh."""
    now = int(clock.now())
    young = [*remote((0, 10)), *remote((20, 30), mod_time=now)]
    index.replace_remote(CoverSet(young))
    async with TaskScope("test") as scope:
        filled = scope.spawn(index.query(12, block=True), name="filled")
        await clock.sleep(0)
        index.spool_commit(local(30, 40, file))
        index.replace_remote(CoverSet(young))
        await clock.sleep(0)
        assert not filled.done()
        index.replace_remote(CoverSet([*young, *remote((10, 20))]))
        assert await filled == IndexResult(Status.OK, 12, 40, remote((10, 20))[0])

        index.replace_remote(CoverSet(young))
        jumps = scope.spawn(index.query(12, block=True), name="jumps")
        await clock.sleep(0)
        clock.advance(JUMP_AGE_S + 1)
        index.replace_remote(CoverSet(young))
        assert (await jumps).offset == 20

        # Case: a local fragment may fill it, too.
        index.replace_remote(CoverSet([*remote((0, 10)), *remote((50, 60), mod_time=now + 99999)]))
        local_fill = scope.spawn(index.query(45, block=True), name="local")
        await clock.sleep(0)
        index.spool_commit(local(40, 48, file))
        assert (await local_fill).local == local(40, 48, file)


async def test_a_hole_opens_under_a_waiter(
    index: Index, file: LocalFile, clock: ManualClock
) -> None:
    """A spool that was rolled forward leaves the readers behind that waited at the old head."""
    index.spool_commit(local(0, 10, file))
    async with TaskScope("test") as scope:
        waiting = scope.spawn(index.query(10, block=True), name="waiting")
        await clock.sleep(0)
        index.spool_commit(local(500, 510, file))
        await clock.sleep(0)
        assert not waiting.done()
        index.replace_remote(remote((10, 500)))
        assert (await waiting).offset == 10


async def test_first_refresh(index: Index, clock: ManualClock) -> None:
    """An empty listing counts: it says that there is nothing."""
    async with TaskScope("test") as scope:
        waiting = scope.spawn(index.wait_first_refresh(), name="waiting")
        await clock.sleep(0)
        assert not waiting.done()
        index.replace_remote(remote())
        await waiting
    assert index.first_refresh.is_set
    await index.wait_first_refresh()


async def test_readers_get_a_commit_once_it_is_shown(
    index: Index, file: LocalFile, clock: ManualClock
) -> None:
    """Before that, they wait at the end of what was shown. Others know of the commit."""
    index.spool_commit(local(0, 10, file))
    index.show(10)
    async with TaskScope("test") as scope:
        waiting = scope.spawn(index.query(AT_WRITE_HEAD, block=True), name="waiting")
        at = scope.spawn(index.query(20, block=True), name="at")
        await clock.sleep(0)
        index.spool_commit(local(0, 20, file))
        index.spool_commit(local(0, 30, file))
        index.spool_commit(local(30, 40, file))
        await clock.sleep(0)
        assert not waiting.done()
        assert (index.begin_offset, index.end_offset, index.write_head) == (0, 40, 10)
        assert index.last_mod_time == 0
        assert [index.has(one.fragment) for one in (local(0, 20, file), local(0, 25, file))] == [
            True,
            False,
        ]
        result = await index.query(3)
        assert (result.local, result.write_head) == (local(0, 10, file), 10)
        assert (await index.query(10)).status is Status.OFFSET_NOT_YET_AVAILABLE
        # Case: stores are listed meanwhile.
        index.replace_remote(remote((0, 10)))
        assert (await index.query(10)).status is Status.OFFSET_NOT_YET_AVAILABLE
        # Case: earlier ends change nothing. A part of the commits is shown, then all.
        index.show(5)
        index.show(25)
        assert (await waiting).local == local(0, 20, file)
        assert not at.done()
        index.show(40)
        assert (await at).local == local(0, 30, file)
        assert index.fragments() == [Fragment(JOURNAL, 0, 30), Fragment(JOURNAL, 30, 40)]
        assert index.write_head == 40


async def test_the_begin_of_a_journal_whose_first_commit_is_not_shown(
    index: Index, file: LocalFile
) -> None:
    index.show(100)
    index.spool_commit(local(100, 110, file))
    assert (index.begin_offset, index.end_offset, index.write_head) == (100, 110, 0)
    assert index.fragments() == []


async def test_closing_ends_all_waits(index: Index, file: LocalFile, clock: ManualClock) -> None:
    """At the head, in holes, and for the first refresh."""
    index.spool_commit(local(0, 10, file))
    index.spool_commit(local(20, 30, file))

    async def closes(wait: Awaitable[object]) -> None:
        with pytest.raises(Closed):
            await wait

    async with TaskScope("test") as scope:
        scope.spawn(closes(index.query(30, block=True)), name="head")
        scope.spawn(closes(index.query(15, block=True)), name="hole")
        scope.spawn(closes(index.wait_first_refresh()), name="refresh")
        await clock.sleep(0)
        assert index.waiting == 2
        index.close()
    assert index.waiting == 0
    with pytest.raises(Closed):
        await index.query(0, block=False)
    with pytest.raises(Closed):
        await index.wait_first_refresh()


class CountingHeap(list[Any]):
    """Counts how often an entry is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self.looks += len(self)
        return super().__iter__()


async def test_thousands_of_waiters(index: Index, file: LocalFile, clock: ManualClock) -> None:
    """A commit wakes the readers that it serves, and does not look at the others."""
    async with TaskScope("test") as scope:
        far = [scope.spawn(index.query(10**9 + n, block=True), name="far") for n in range(20_000)]
        near = [scope.spawn(index.query(AT_WRITE_HEAD, block=True), name="near") for _ in range(50)]
        await clock.sleep(0)
        assert index.waiting == 20_050
        index.spool_commit(local(0, 1, file))
        await asyncio.wait(near)
        assert index.waiting == 20_000

        index._at_head = heap = CountingHeap(index._at_head)
        for end in range(2, 1002):
            index.spool_commit(local(0, end, file))
        assert heap.looks == 1000

        # Case: waiters that give up leave nothing behind.
        for task in far[:19_000]:
            task.cancel()
        await asyncio.wait(far[:19_000])
        assert index.waiting == 1000
        assert len(index._at_head) < 3000
        index.spool_commit(local(0, 2 * 10**9, file))
        await asyncio.wait(far)
        assert index.waiting == 0


async def test_a_waiter_that_is_cancelled_as_it_is_woken(
    index: Index, file: LocalFile, clock: ManualClock
) -> None:
    """Its entry is gone already, and is not counted again."""
    async with TaskScope("test") as scope:
        one = scope.spawn(index.query(0, block=True), name="one")
        two = scope.spawn(index.query(0, block=True), name="two")
        await clock.sleep(0)
        one.cancel()
        index.spool_commit(local(0, 1, file))
        two.cancel()
        await asyncio.wait({one, two})
        assert index.waiting == 0
        assert index._at_head == []


async def test_a_stored_fragment_lets_its_file_go_before_the_next_listing(
    index: Index, file: LocalFile
) -> None:
    """It is then read from its store. Another one of the same offsets is not meant."""
    for begin in (0, 10, 20):
        index.spool_commit(local(begin, begin + 10, file))
    index.stored(Fragment(JOURNAL, 10, 20, b"o" * 20, backing_store="s3://b/", mod_time=9))
    index.stored(Fragment(JOURNAL, 5, 20, backing_store="s3://b/", mod_time=9))
    assert (await index.query(12)).local is not None
    stored = Fragment(JOURNAL, 10, 20, backing_store="s3://b/", mod_time=9)
    index.stored(stored)
    assert await index.query(12) == IndexResult(Status.OK, 12, 30, stored)
    assert [(await index.query(at)).local is None for at in (2, 22)] == [False, False]
    # Case: a listing that began before it was stored; then one that began later.
    index.replace_remote(remote((0, 10)))
    assert await ask(index, 12) == (12, 10, 20)
    index.replace_remote(remote((0, 10)))
    assert await ask(index, 12) == (12, None, None)
    # Case: its file was let go before.
    index.stored(stored)
    assert await ask(index, 12) == (12, None, None)


def test_files_that_are_kept_are_few() -> None:
    released: list[int] = []
    kept = KeptFiles(3)
    for number in range(5):
        kept.keep(partial(released.append, number))
    assert released == [0, 1]
