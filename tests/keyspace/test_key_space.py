"""The mirror: against a scripted etcd for order and time, against a real one for everything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from gazette.cluster.etcd.client import Compacted, Compare, Etcd, EtcdSettings, KeyValue, Op
from gazette.cluster.etcd.values import RangeResult, ResponseHeader, WatchEvent, WatchResponse
from gazette.cluster.keyspace.key_space import KeySpace, backoff_s
from gazette.errors import Broken, Bug, Closed, Invalid, NotAllowed, Unavailable
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from gazette.testing.etcd import etcd_for_tests
from tests.facts import logged, raises
from tests.support.instant_clock import breathe

ROOT = "/gazette/cluster"


def decode(kv: KeyValue) -> int:
    return int(kv.value)


def contents(ks: KeySpace) -> dict[str, object]:
    return {kv.key.removeprefix(ROOT): kv.decoded for kv in ks.key_values}


# --- a scripted etcd


class Script:
    """Stands in for `Etcd` where order and time matter: each watch plays the next part.

    A part is a list of responses. An exception in it is raised, and an event is awaited. After its end the
    watch is silent.
    """

    def __init__(
        self, *parts: Sequence[WatchResponse | Exception | asyncio.Event], loads: Sequence[Any] = ()
    ) -> None:
        self.clock = ManualClock()
        self.parts = list(parts)
        self.loads = list(loads)
        self.started: list[int] = []
        self.silent = asyncio.Event()

    async def range(self, prefix: str, *, revision: int = 0) -> RangeResult:
        loaded = self.loads.pop(0)
        if isinstance(loaded, Exception):
            raise loaded
        assert isinstance(loaded, RangeResult)
        return loaded

    async def watch(self, prefix: str, *, start_revision: int) -> AsyncIterator[WatchResponse]:
        self.started.append(start_revision)
        for step in self.parts.pop(0):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            yield step
        self.silent.set()
        await asyncio.Event().wait()


def header(revision: int, **fields: int) -> ResponseHeader:
    return ResponseHeader(
        **{"cluster_id": 1, "member_id": 2, "raft_term": 3, **fields}, revision=revision
    )


def loaded(revision: int, **kvs: int) -> RangeResult:
    raw = tuple(KeyValue(f"{ROOT}/{k}".encode(), b"%d" % v, 1, 1, 1) for k, v in kvs.items())
    return RangeResult(header(revision), raw, len(raw))


def put(
    key: str, value: int, revision: int, *, at: int | None = None, **fields: int
) -> WatchResponse:
    kv = KeyValue(f"{ROOT}/{key}".encode(), b"%d" % value, revision, revision, 1)
    return WatchResponse(header(at or revision, **fields), (WatchEvent(kv),))


def progress(revision: int) -> WatchResponse:
    return WatchResponse(header(revision))


CREATED = WatchResponse(header(50), created=True)
LOST = Unavailable("lost")


async def started(script: Script, *, delay: float = 0.0, **kvs: int) -> KeySpace:
    ks = KeySpace(ROOT, decode, apply_delay_s=delay)
    script.loads.insert(0, loaded(10, **kvs))
    await ks.load(cast("Etcd", script))
    return ks


async def test_other_tasks_run_during_a_load_and_see_the_mirror_before_it() -> None:
    script = Script(loads=[loaded(20, **{f"{number:04}": number for number in range(1_200)})])
    ks = await started(script, b=2)
    seen: list[dict[str, object]] = []
    async with TaskScope("test") as scope:
        load = scope.spawn(ks.load(cast("Etcd", script)), name="load")
        while not load.done():
            seen.append(contents(ks))
            await breathe()
    assert len(seen) >= 3
    assert all(keys == {"/b": 2} for keys in seen)
    assert contents(ks) == {f"/{number:04}": number for number in range(1_200)}


async def test_responses_within_the_delay_are_one_step() -> None:
    script = Script([CREATED, put("a", 1, 11), put("b", 2, 12), put("c", 3, 13, at=20)])
    ks = await started(script, delay=0.03)
    steps: list[dict[str, object]] = []
    ks.observers.append(lambda: steps.append(contents(ks)))
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        await script.silent.wait()
        while not script.clock.sleepers:
            await yielded(scope)
        assert (steps, ks.header.revision) == ([], 10)
        script.clock.advance(0.03)
        await ks.wait_for_revision(11)
        assert steps == [{"/a": 1, "/b": 2, "/c": 3}]
        # Case: the revision is that of the last event, not the one etcd is at.
        assert ks.header == header(13)
        scope.cancel()


@pytest.mark.parametrize(
    ("keys", "took_s", "waits_s"),
    [(898, 0.001, 0.03), (898, 0.05, 0.225), (898, 7.0, 1.0), (0, 0.2, 0.03)],
)
async def test_a_step_whose_visits_take_long_is_followed_by_a_longer_delay(
    keys: int, took_s: float, waits_s: float
) -> None:
    """So the visits of a large cluster's keys take a fifth of the loop's time. Changes take their time."""
    more = asyncio.Event()
    script = Script([CREATED, put("a", 1, 11), more, put("b", 2, 12)])
    ks = await started(script, delay=0.03, **{f"key-{n:03}": n for n in range(keys)})
    ks.observers.append(lambda: script.clock.advance(took_s))
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        while not script.clock.sleepers:
            await yielded(scope)
        script.clock.advance(0.03)
        await ks.wait_for_revision(11)
        more.set()
        while not script.clock.sleepers:
            await yielded(scope)
        script.clock.advance(waits_s - 0.001)
        await yielded(scope)
        assert ks.header.revision == 11
        script.clock.advance(0.002)
        await ks.wait_for_revision(12)
        scope.cancel()


@pytest.mark.parametrize(("took_s", "waits_s"), [(0.0, 0.0), (0.05, 0.09), (7.0, 1.0)])
async def test_a_step_comes_early_for_a_caller_that_waits_for_its_change(
    took_s: float, waits_s: float
) -> None:
    """But visits of keys still leave half of the loop's time. A wait that is not early changes nothing."""
    more = asyncio.Event()
    script = Script([CREATED, put("a", 1, 11), more, put("b", 2, 12), put("c", 3, 13)])
    ks = await started(script, delay=0.03, **{f"key-{n:03}": n for n in range(898)})
    ks.observers.append(lambda: script.clock.advance(took_s))
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        await ks.wait_for_revision(11, early=True)
        more.set()
        late = scope.spawn(ks.wait_for_revision(13), name="late")
        while not script.clock.sleepers:
            await yielded(scope)
        await yielded(scope)
        assert not late.done()
        early = scope.spawn(ks.wait_for_revision(12, early=True), name="early")
        await yielded(scope)
        if waits_s:
            script.clock.advance(waits_s - 0.001)
            await yielded(scope)
            assert not early.done()
            script.clock.advance(0.002)
        await early
        await late
        scope.cancel()


async def test_a_burst_larger_than_the_queue_takes_more_steps_and_loses_nothing() -> None:
    burst = [put(f"{i:04}", i, 11 + i) for i in range(1000)]
    script = Script([CREATED, *burst])
    ks = await started(script, delay=0.03)
    steps: list[int] = []
    ks.observers.append(lambda: steps.append(len(ks.key_values)))
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        while ks.header.revision < 1010:
            if script.clock.sleepers:
                script.clock.advance(0.03)
            await yielded(scope)
        scope.cancel()
    assert 1 < len(steps) < 20
    assert steps[-1] == 1000


async def test_observers_run_in_order_and_before_any_waiter() -> None:
    script = Script([put("a", 1, 11)])
    ks = await started(script)
    seen: list[str] = []
    ks.observers += [lambda: seen.append("first"), lambda: seen.append("second")]

    async def waiter() -> None:
        await ks.wait_for_revision(11)
        seen.append("waiter")

    async with TaskScope("test") as scope:
        waiting = scope.spawn(waiter(), name="waiter")
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        await waiting
        scope.cancel()
    assert seen == ["first", "second", "waiter"]


async def test_a_step_replaces_the_key_values_and_never_changes_them() -> None:
    ks = await started(Script())
    before = ks.key_values
    ks.apply([put("a", 1, 11)])
    assert list(before) == []
    assert contents(ks) == {"/a": 1}


async def test_progress_moves_where_to_resume_and_not_the_revision() -> None:
    script = Script([CREATED, progress(30), LOST], [CREATED, put("a", 1, 40), LOST], [])
    ks = await started(script)
    steps: list[int] = []
    ks.observers.append(lambda: steps.append(ks.header.revision))
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        await script.silent.wait()
        scope.cancel()
    assert script.started == [11, 31, 41]
    assert steps == [40]


async def test_what_arrived_before_a_watch_fails_is_applied_at_once() -> None:
    script = Script([CREATED, put("a", 1, 11), LOST], [])
    ks = await started(script, delay=0.03)
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        await script.silent.wait()
        assert script.started == [11, 12]
        assert contents(ks) == {"/a": 1}
        scope.cancel()


def test_pauses_between_attempts() -> None:
    assert [backoff_s(n) for n in range(8)] == [0, 0, 0.005, 2, 3, 4, 5, 5]


async def test_attempts_pause_ever_longer_until_there_are_events() -> None:
    nothing: list[WatchResponse | Exception] = [CREATED, LOST]
    something: list[WatchResponse | Exception] = [CREATED, put("a", 1, 11), LOST]
    script = Script(*[nothing] * 4, something, *[nothing] * 3, [])
    ks = await started(script)
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        for pause, attempts in ((0.005, 2), (2.0, 3), (3.0, 4), (0.005, 7), (2.0, 8)):
            while not script.clock.sleepers:
                await yielded(scope)
            assert len(script.started) == attempts
            script.clock.advance(pause * 0.99)
            assert script.clock.sleepers == 1
            script.clock.advance(pause * 0.02)
        await script.silent.wait()
        scope.cancel()


async def yielded(scope: TaskScope) -> None:
    """Let everybody else on the loop run once."""

    async def nothing() -> None: ...

    await asyncio.wait([scope.spawn(nothing(), name="yield")])


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (put("a", 1, 11, cluster_id=9), "another cluster"),
        (WatchResponse(header(50, cluster_id=9), created=True), "another cluster"),
        (put("a", 1, 10), "went back"),
        (put("a", 1, 11, at=9), "went back"),
    ],
)
async def test_an_etcd_that_cannot_be_the_same_ends_the_mirror(
    response: WatchResponse, problem: str
) -> None:
    script = Script([response])
    ks = await started(script)
    with pytest.raises(Broken, match=problem) as caught:
        await ks.watch(cast("Etcd", script))
    assert contents(ks) == {}
    assert ks.header == header(10)
    # Case: so does waiting, then and later.
    with raises(Broken, root="/gazette/cluster") as waited:
        await ks.wait_for_revision(11)
    assert waited.value.__cause__ is caught.value
    await ks.wait_for_revision(10)


async def test_a_refusal_ends_the_mirror() -> None:
    ks = await started(script := Script([NotAllowed("no")]))
    with pytest.raises(NotAllowed):
        await ks.watch(cast("Etcd", script))


async def test_a_failing_observer_ends_the_mirror() -> None:
    ks = await started(script := Script([put("a", 1, 11)]))

    def fail() -> None:
        raise ZeroDivisionError

    ks.observers.append(fail)
    with pytest.raises(ZeroDivisionError):
        await ks.watch(cast("Etcd", script))


async def test_waiting_ends_when_the_watch_is_cancelled_and_works_again_after_it() -> None:
    script = Script([], [put("a", 1, 11)])
    ks = await started(script)
    async with TaskScope("test") as scope:
        watching = scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        waiting = asyncio.gather(ks.wait_for_revision(11), ks.next_change(), return_exceptions=True)
        await script.silent.wait()
        watching.cancel()
        assert [type(error) for error in await waiting] == [Closed, Closed]
        with pytest.raises(Closed):
            await ks.next_change()
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch again")
        while ks.header.revision < 11:
            await yielded(scope)
        scope.cancel()


async def test_waiting_is_bounded_by_the_caller() -> None:
    ks = await started(Script())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await ks.wait_for_revision(11)


async def test_a_mirror_is_loaded_before_it_is_watched() -> None:
    with raises(Bug, "root"):
        await KeySpace(ROOT, decode).watch(cast("Etcd", Script()))


async def test_compaction_loads_again_in_one_step() -> None:
    reloaded = loaded(90, b=2, c=3)
    script = Script(
        [Compacted("gone")],
        [Compacted("gone")],
        [put("d", 4, 91)],
        [],
        loads=[Unavailable("not now"), reloaded],
    )
    ks = await started(script)
    ks.apply([put("a", 1, 11), put("b", 1, 12)])
    steps: list[tuple[int, dict[str, object]]] = []
    ks.observers.append(lambda: steps.append((ks.header.revision, contents(ks))))
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(cast("Etcd", script)), name="watch")
        while not script.clock.sleepers:
            await yielded(scope)
        script.clock.advance(0.01)
        await ks.wait_for_revision(91)
        scope.cancel()
    assert steps == [(13, {"/b": 2, "/c": 3}), (91, {"/b": 2, "/c": 3, "/d": 4})]
    assert script.started == [13, 13, 91]


async def test_a_load_that_is_older_than_the_mirror_ends_it() -> None:
    script = Script([Compacted("gone")], loads=[loaded(9)])
    ks = await started(script)
    with raises(Broken, revision=9, last=10):
        await ks.watch(cast("Etcd", script))


@pytest.mark.parametrize("root", ["", ".", "/a/", "a//b", "//a", "/a/../b", "/a/."])
def test_a_root_must_be_clean(root: str) -> None:
    with raises(Invalid, path="root", root=root):
        KeySpace(root, decode)


# --- a real etcd


async def mirrored(etcd: Etcd, revision: int = 0) -> KeySpace:
    ks = KeySpace(ROOT, decode, apply_delay_s=0)
    await ks.load(etcd, revision)
    return ks


async def test_it_follows_etcd(etcd: Etcd) -> None:
    await etcd.put(f"{ROOT}/a", b"1")
    revision = (await etcd.put(f"{ROOT}/b", b"2")).header.revision
    await etcd.put(f"{ROOT}/b", b"3")
    ks = await mirrored(etcd, revision)
    assert contents(ks) == {"/a": 1, "/b": 2}
    assert ks.header.revision == revision
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(etcd), name="watch")
        await ks.wait_for_revision(revision + 1)
        assert contents(ks) == {"/a": 1, "/b": 3}
        done = await etcd.txn(
            [Compare.mod_revision(f"{ROOT}/b", "=", revision + 1)],
            [Op.delete(f"{ROOT}/a"), Op.put(f"{ROOT}/c/d", b"4")],
        )
        await ks.wait_for_revision(done.header.revision)
        assert contents(ks) == {"/b": 3, "/c/d": 4}
        assert ks.header == done.header
        found = ks.get(f"{ROOT}/c/d")
        assert found is not None
        assert found.raw.create_revision == done.header.revision
        assert [kv.key for kv in ks.prefixed(f"{ROOT}/c/")] == [f"{ROOT}/c/d"]
        assert ks.get(f"{ROOT}/a") is None
        scope.cancel()


async def test_a_neighbour_whose_name_begins_the_same_is_not_seen(etcd: Etcd) -> None:
    await etcd.put(f"{ROOT}2/a", b"1")
    await etcd.put(f"{ROOT}/a", b"1")
    ks = await mirrored(etcd)
    assert contents(ks) == {"/a": 1}
    steps: list[int] = []
    ks.observers.append(lambda: steps.append(ks.header.revision))
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(etcd), name="watch")
        await etcd.put(f"{ROOT}2/b", b"x")
        await etcd.put(ROOT, b"x")
        last = (await etcd.put(f"{ROOT}/b", b"2")).header.revision
        await ks.wait_for_revision(last)
        assert steps == [last]
        assert contents(ks) == {"/a": 1, "/b": 2}
        scope.cancel()


async def test_a_bad_value_keeps_the_good_one_and_is_logged(
    etcd: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    await etcd.put(f"{ROOT}/a", b"1")
    ks = await mirrored(etcd)
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(etcd), name="watch")
        revision = (await etcd.put(f"{ROOT}/a", b"nonsense")).header.revision
        await ks.wait_for_revision(revision)
        assert contents(ks) == {"/a": 1}
        logged(caplog, key=f"{ROOT}/a", revision=revision)
        scope.cancel()
    # Case: a process that starts now never knew the good one.
    assert contents(await mirrored(etcd)) == {}


async def test_it_goes_on_over_a_restart_of_etcd(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, durable=True) as server:
        settings = EtcdSettings((server.endpoint,))
        async with await Etcd.connect(settings, SystemClock()) as etcd:
            ks = await mirrored(etcd)
            async with TaskScope("test") as scope:
                scope.daemon(ks.watch(etcd), name="watch")
                revision = (await etcd.put(f"{ROOT}/a", b"1")).header.revision
                await ks.wait_for_revision(revision)
                await asyncio.to_thread(server.restart)
                revision = (await etcd.put(f"{ROOT}/a", b"2")).header.revision
                await ks.wait_for_revision(revision)
                assert contents(ks) == {"/a": 2}
                scope.cancel()


async def test_it_loads_again_when_compaction_outran_it(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, durable=True) as server:
        settings = EtcdSettings((server.endpoint,))
        async with (
            await Etcd.connect(settings, SystemClock()) as etcd,
            await Etcd.connect(settings, SystemClock()) as writer,
        ):
            await writer.put(f"{ROOT}/gone", b"1")
            ks = await mirrored(etcd)
            steps: list[dict[str, object]] = []
            ks.observers.append(lambda: steps.append(contents(ks)))
            # Writes that the mirror does not see, and their history is forgotten.
            await writer.delete(f"{ROOT}/gone")
            for i in range(10):
                revision = (await writer.put(f"{ROOT}/a", b"%d" % i)).header.revision
            await writer.compact(revision)
            async with TaskScope("test") as scope:
                scope.daemon(ks.watch(etcd), name="watch")
                await ks.wait_for_revision(revision)
                assert steps == [{"/a": 9}]
                last = (await writer.put(f"{ROOT}/b", b"2")).header.revision
                await ks.wait_for_revision(last)
                assert contents(ks) == {"/a": 9, "/b": 2}
                scope.cancel()


async def test_it_loads_again_beside_a_key_that_is_no_text(tmp_path: Path) -> None:
    """Any client can write such a key, which the mirror leaves out."""
    with etcd_for_tests(tmp_path, durable=True) as server:
        async with await Etcd.connect(EtcdSettings((server.endpoint,)), SystemClock()) as etcd:
            ks = await mirrored(etcd)
            await etcd.put(f"{ROOT}/".encode() + b"\xff", b"1")
            revision = (await etcd.put(f"{ROOT}/a", b"1")).header.revision
            await etcd.compact(revision)
            async with TaskScope("test") as scope:
                scope.daemon(ks.watch(etcd), name="watch")
                await ks.wait_for_revision(revision)
                assert contents(ks) == {"/a": 1}
                scope.cancel()


async def test_what_it_tells_others_after_loading_again_they_will_see_too(tmp_path: Path) -> None:
    """A peer waits for the revision that a caller names. Nothing but changes under the root gets it there."""
    with etcd_for_tests(tmp_path, durable=True) as server:
        settings = EtcdSettings((server.endpoint,))
        async with (
            await Etcd.connect(settings, SystemClock()) as etcd,
            await Etcd.connect(settings, SystemClock()) as writer,
        ):
            ks, peer = await mirrored(etcd), await mirrored(writer)
            async with TaskScope("test") as scope:
                scope.daemon(peer.watch(writer), name="watch of the peer")
                changed = (await writer.put(f"{ROOT}/a", b"1")).header.revision
                elsewhere = (await writer.put("/elsewhere", b"1")).header.revision
                await writer.compact(elsewhere)
                scope.daemon(ks.watch(etcd), name="watch")
                # Case: itself, it knows that it has missed nothing up to the write elsewhere.
                await ks.wait_for_revision(elsewhere)
                # Case: its peer gets there, too.
                assert ks.header.revision == changed
                async with asyncio.timeout(30.0):
                    await peer.wait_for_revision(ks.header.revision)
                # Case: both go on.
                last = (await writer.put(f"{ROOT}/b", b"2")).header.revision
                await ks.wait_for_revision(last)
                await peer.wait_for_revision(last)
                assert contents(ks) == contents(peer) == {"/a": 1, "/b": 2}
                scope.cancel()


async def test_compaction_during_a_watch_that_keeps_up_is_not_noticed(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        settings = EtcdSettings((server.endpoint,))
        async with await Etcd.connect(settings, SystemClock()) as etcd:
            ks = await mirrored(etcd)
            async with TaskScope("test") as scope:
                scope.daemon(ks.watch(etcd), name="watch")
                for i in range(5):
                    revision = (await etcd.put(f"{ROOT}/a", b"%d" % i)).header.revision
                    await etcd.compact(revision)
                    await ks.wait_for_revision(revision)
                assert contents(ks) == {"/a": 4}
                scope.cancel()


async def test_keys_of_a_lost_lease_go_away(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        settings = EtcdSettings((server.endpoint,))
        async with await Etcd.connect(settings, SystemClock()) as etcd:
            lease = await etcd.grant(1)
            await etcd.put(f"{ROOT}/m", b"1", lease=lease.id)
            ks = await mirrored(etcd)
            async with TaskScope("test") as scope:
                scope.daemon(ks.watch(etcd), name="watch")
                await ks.next_change()
                assert contents(ks) == {}
                scope.cancel()
