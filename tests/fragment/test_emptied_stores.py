"""A store that suddenly lists none of its fragments is not believed for some hours."""

from __future__ import annotations

import pytest

from gazette.fragment.conflicts import FragmentCover
from gazette.fragment.emptied_stores import EmptiedStore, EmptiedStores
from gazette.fragment.index import JUMP_AGE_S
from gazette.protocol.fragment import Codec, Fragment
from gazette.testing.clock import ManualClock

ONE, TWO = "file:///one/", "file:///two/"
HOUR_NS = 3600 * 10**9


@pytest.fixture
def emptied(clock: ManualClock) -> EmptiedStores:
    return EmptiedStores(clock)


def fragment(begin: int, end: int, store: str = ONE, mod_time: int = 0) -> Fragment:
    return Fragment("a/journal", begin, end, bytes(20), Codec.NONE, store, mod_time or 1)


def restored(
    emptied: EmptiedStores,
    *listed: Fragment,
    stores: tuple[str, ...] = (ONE,),
    retention_ns: int = 0,
    refuted: tuple[Fragment, ...] = (),
) -> tuple[list[int], list[EmptiedStore]]:
    """Return the begins of the fragments of a listing after the check, and the emptied stores."""
    cover = FragmentCover(listed)
    found = emptied.restore(cover, stores, retention_ns, refuted)
    return [one.begin for one in cover], found


def test_an_empty_directory_is_not_believed_until_it_stays_so(
    emptied: EmptiedStores, clock: ManualClock
) -> None:
    assert restored(emptied) == ([], [])
    assert restored(emptied, fragment(0, 10), fragment(10, 20)) == ([0, 10], [])
    # Case: brokers store there what is appended in the meantime.
    for _ in range(2):
        emptied.note(fragment(20, 30))
        assert restored(emptied, fragment(20, 30)) == ([0, 10, 20], [EmptiedStore(ONE, 2)])
    clock.advance(JUMP_AGE_S - 1)
    assert restored(emptied, fragment(20, 30), fragment(30, 40))[0] == [0, 10, 20, 30]
    clock.advance(1)
    assert restored(emptied, fragment(20, 30)) == ([20], [])
    assert restored(emptied, fragment(20, 30)) == ([20], [])


def test_a_store_that_is_back_is_believed_at_once(
    emptied: EmptiedStores, clock: ManualClock
) -> None:
    restored(emptied, fragment(0, 10), fragment(10, 20))
    assert restored(emptied, fragment(20, 30))[1]
    # Case: what was stored elsewhere in the meantime is not there. That hole is the index's matter.
    assert restored(emptied, fragment(0, 10), fragment(10, 20)) == ([0, 10], [])
    # Case: the time begins again when the store is emptied again.
    clock.advance(JUMP_AGE_S)
    assert restored(emptied) == ([0, 10], [EmptiedStore(ONE, 2)])


def test_pruning_is_believed(emptied: EmptiedStores, clock: ManualClock) -> None:
    now = int(clock.now())
    old = [fragment(0, 10, mod_time=now - 3601), fragment(10, 20, mod_time=now - 1800)]
    restored(emptied, *old, retention_ns=HOUR_NS)
    assert restored(emptied, old[1], retention_ns=HOUR_NS) == ([10], [])
    # Case: all that is older than the retention.
    clock.advance(1801)
    assert restored(emptied, retention_ns=HOUR_NS) == ([], [])


def test_some_that_are_missing_were_deleted(emptied: EmptiedStores) -> None:
    restored(emptied, fragment(0, 10), fragment(10, 20), fragment(20, 30))
    assert restored(emptied, fragment(20, 30)) == ([20], [])


def test_each_store_is_checked(emptied: EmptiedStores) -> None:
    both = (ONE, TWO)
    restored(emptied, fragment(0, 10), fragment(10, 20, TWO), stores=both)
    assert restored(emptied, fragment(10, 20, TWO), stores=both) == (
        [0, 10],
        [EmptiedStore(ONE, 1)],
    )
    # Case: another store has the same offsets.
    assert restored(emptied, fragment(0, 20, TWO), stores=both) == ([0], [])
    # Case: the journal has the store no longer.
    assert restored(emptied, fragment(50, 60), stores=(ONE,)) == ([50], [])


def test_what_this_broker_stored_is_expected(emptied: EmptiedStores) -> None:
    restored(emptied)
    emptied.note(fragment(0, 10))
    # Case: the listing had begun before the upload.
    assert restored(emptied) == ([0], [EmptiedStore(ONE, 1)])
    assert restored(emptied, fragment(0, 10)) == ([0], [])


def test_a_refuted_fragment_is_not_missed(emptied: EmptiedStores) -> None:
    """It would hide what a later primary appended at its offsets."""
    wrong = fragment(0, 20)
    restored(emptied, wrong)
    assert restored(emptied, fragment(0, 10), refuted=(wrong,)) == ([0], [])
    restored(emptied, wrong)
    assert restored(emptied, fragment(0, 10)) == ([0], [EmptiedStore(ONE, 1)])
