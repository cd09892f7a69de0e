"""Players and recorders against a broker: tailing, hand-off, races, fences, lost bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gazette.client import AppendService, Client
from gazette.client.append.appender import AppendParams, SuspendControl
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Broken, Closed, Corrupt, Fenced, GazetteError, Unavailable
from gazette.protocol.hints import FSMHints
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.status import Status
from gazette.recoverylog.log.broker_logs import REPEATS_MAX, append_repeatable
from gazette.recoverylog.log.ops import Create, RecordedOp, encode_op
from gazette.recoverylog.log.recorder import Recorder, fence
from gazette.recoverylog.playback import player as player_module
from gazette.recoverylog.playback.playback import BeyondTheEnd, OpenNode, PrunedLog
from gazette.recoverylog.playback.player import Player, PlayerState, RecoveredState
from gazette.recoverylog.playback.staged_files import PlayedFiles, StagedFiles
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import BlockingPool, TaskScope, await_future
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import is_advised, raises
from tests.support.instant_clock import InstantClock, breathe, eventually
from tests.support.stub_broker import Fail, LoseReply, Reply, StubBroker

LOG = "recovery/log"
FORK = "recovery/fork"


class World:
    """A broker with a recovery log, and owners of it."""

    def __init__(self, broker: BrokerFixture, directory: Path, pool: BlockingPool) -> None:
        self.broker = broker
        self.directory = directory
        self.pool = pool
        self.services: list[AppendService] = []
        self.count = 0

    def player(
        self, hints: FSMHints | None = None, *, client: Any = None, **options: Any
    ) -> Player:
        self.count += 1
        return Player(
            hints or FSMHints(log=LOG),
            self.directory / f"player-{self.count}",
            client or self.broker.client,
            SystemClock(),
            self.pool,
            **options,
        )

    async def recorder(self, state: RecoveredState, log: str = LOG) -> Recorder:
        service = AppendService(self.broker.client)
        self.services.append(service)
        assert state.author is not None
        return await asyncio.to_thread(
            Recorder.open, log, state.fsm, state.author, state.directory, service
        )

    async def owner(self, author: int, hints: FSMHints | None = None) -> Recorder:
        player = self.player(hints)
        player.hand_off(author)
        return await self.recorder(await player.play())

    async def files(self, hints: FSMHints | None = None) -> dict[str, bytes]:
        """Return what a reader finds that changes nothing."""
        player = self.player(hints)
        player.finish()
        state = await player.play()
        assert state.author is None
        return tree(state.directory)

    async def head(self) -> int:
        return (await self.broker.client.append(AppendParams(LOG))).commit.end


def tree(directory: Path) -> dict[str, bytes]:
    return {
        "/" + str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def state_of(player: Player) -> PlayerState:
    return player.state


async def put(recorder: Recorder, path: str, data: bytes) -> None:
    with recorder.group() as group:
        group.write(group.create(path), 0, data)
    await await_future(group.future)


@pytest.fixture
async def world(etcd: Etcd, tmp_path: Path) -> AsyncIterator[World]:
    pool = BlockingPool("player", 2)
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(LOG), journal_spec(FORK))
        world = World(broker, tmp_path, pool)
        yield world
        for service in world.services:
            await service.close()
    pool.close()


async def test_a_standby_tails_and_takes_over(world: World) -> None:
    """It follows the owner, says how far it is, and goes on where the owner was."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    player = world.player()
    async with TaskScope("standby") as scope:
        task = scope.spawn(player.play(), name="play")
        await player.tailing.wait()
        assert state_of(player) is PlayerState.TAILING
        for number in range(20):
            await put(first, f"/{number}", os.urandom(200_000))
        head = await world.head()
        await eventually(lambda: player.progress.offset == head)
        assert player.progress.lag_bytes == 0
        assert "tailing" in str(player.progress)
        assert not task.done()
        player.hand_off(22)
        state = await task
    assert state.author == 22
    assert player.state is PlayerState.LIVE
    assert tree(state.directory) == await world.files()
    second = await world.recorder(state)
    await put(second, "/a", b"two")
    assert (await world.files())["/a"] == b"two"


async def test_an_old_owner_is_fenced_promptly(world: World) -> None:
    """By the hand-off alone: his next append fails, and he records nothing more."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    second = await world.owner(22)
    with first.group() as group:
        group.create("/zombie")
    with pytest.raises(Fenced):
        await await_future(group.future)
    with pytest.raises(Fenced):
        first.barrier()
    await put(second, "/b", b"two")
    assert await world.files() == {"/a": b"one", "/b": b"two"}


async def test_the_end_is_the_write_head(world: World) -> None:
    """The end of a play-back includes all that was in the log at the request, also of a tail that lags."""
    first = await world.owner(11)
    world.pool = BlockingPool("slow disk", 1)
    player = world.player()
    slow = threading.Event()
    async with TaskScope("standby") as scope:
        task = scope.spawn(player.play(), name="play")
        await player.tailing.wait()
        world.pool.submit(slow.wait)
        for number in range(10):
            await put(first, f"/{number}", bytes(300))
        player.finish()
        slow.set()
        state = await task
    assert len(tree(state.directory)) == 10
    world.pool.close()


class LosingClient:
    """A client that lets another one append right before some appends of its own."""

    def __init__(self, client: Client, before_append: Any) -> None:
        self._client = client
        self._before_append = before_append

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, params: AppendParams, content: Any = b"") -> Any:
        if content:
            await self._before_append(params, content)
        return await self._client.append(params, content)


class Race:
    """The owner's last operation is faster than the first try of a hand-off."""

    def __init__(self, owner: Recorder) -> None:
        self.owner = owner
        self.contents: list[bytes] = []
        """Of each try."""

    async def __call__(self, params: AppendParams, content: bytes) -> None:
        if not self.contents:
            await put(self.owner, "/a", b"two")
        self.contents.append(content)


async def test_a_lost_race_is_run_again(world: World) -> None:
    """The owner's last operation was faster: the fence stands all the same, the next try wins."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    race = Race(first)
    player = world.player(client=LosingClient(world.broker.client, race))
    player.hand_off(22)
    state = await player.play()
    assert len(race.contents) == 2
    assert tree(state.directory) == {"/a": b"two"}
    with pytest.raises(Fenced):
        await put(first, "/a", b"three")


async def test_each_try_of_a_hand_off_asks_whether_it_may(world: World) -> None:
    """A player that may not any more ends, and has not fenced the log again."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    asked: list[int] = []
    race = Race(first)

    async def permit() -> None:
        asked.append(len(race.contents))
        if len(asked) == 2:
            raise Closed("assigned to another member")

    player = world.player(client=LosingClient(world.broker.client, race))
    player.hand_off(22, permit=permit)
    with pytest.raises(Closed, match="another member"):
        await player.play()
    assert asked == [0, 1]
    assert len(race.contents) == 1
    # Case: one that may not from the beginning leaves the owner alone.
    owner = await world.owner(33)
    player = world.player()
    player.hand_off(44, permit=permit)
    asked.append(0)
    del asked[1:]
    with pytest.raises(Closed, match="another member"):
        await player.play()
    await put(owner, "/b", b"two")


async def test_a_standby_takes_over_without_asking_where_the_log_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor after it lost the race, which its fence has ended. What it recovers says where the log ends."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    race = Race(first)

    async def asked(client: object, log: str) -> int:
        raise AssertionError("asked for the head of the log")

    player = world.player(client=LosingClient(world.broker.client, race))
    async with TaskScope("standby") as scope:
        task = scope.spawn(player.play(), name="play")
        head = await world.head()
        await eventually(lambda: player.tailing.is_set() and player.progress.offset == head)
        monkeypatch.setattr(player_module, "write_head", asked)
        player.hand_off(22)
        state = await task
    assert len(race.contents) == 2
    assert tree(state.directory) == {"/a": b"two"}
    assert state.write_head == await world.head()
    service = AppendService(world.broker.client)
    world.services.append(service)
    second = Recorder.open(
        LOG, state.fsm, 22, state.directory, service, write_head=state.write_head
    )
    assert service.backlog_bytes == 0
    assert not service.pending_except(""), "it appended something to learn the head"
    await put(second, "/b", b"three")
    assert await await_future(second.barrier()) is not None
    assert second.horizon_bytes > 0


async def test_a_repeated_hand_off_is_no_other(world: World) -> None:
    """Its append may arrive twice, having lost a race or not."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    race = Race(first)

    async def twice(params: AppendParams, content: bytes) -> None:
        await race(params, content)
        await world.broker.client.append(params, content)

    player = world.player(client=LosingClient(world.broker.client, twice))
    player.hand_off(22)
    second = await world.recorder(await player.play())
    # The first try once more, long after it lost: a repetition that was under way for long.
    await world.broker.client.append(AppendParams(LOG), race.contents[0])
    await put(second, "/b", b"three")
    assert await world.files() == {"/a": b"two", "/b": b"three"}
    third = await world.owner(33)
    assert third.fsm.links.keys() == {"/a", "/b"}


async def test_two_take_over_at_once(world: World) -> None:
    """Both get the log, one after the other; the former of them is fenced."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    players = [world.player(), world.player()]
    async with TaskScope("standbys") as scope:
        tasks = [scope.spawn(player.play(), name="play") for player in players]
        await asyncio.gather(*(player.tailing.wait() for player in players))
        for author, player in enumerate(players, 100):
            player.hand_off(author)
        owners = [await world.recorder(await task) for task in tasks]
    results = await asyncio.gather(
        *(put(owner, "/a", b"%d" % owner.author) for owner in owners), return_exceptions=True
    )
    (winner,) = [owner for owner, result in zip(owners, results, strict=True) if result is None]
    assert sum(isinstance(result, Fenced) for result in results) == 1
    assert await world.files() == {"/a": b"%d" % winner.author}


async def test_an_owner_that_never_pauses_is_stopped(world: World) -> None:
    """A hand-off does not wait for the moment in which the log does not grow."""
    first = await world.owner(11)
    stop = asyncio.Event()

    async def write() -> None:
        for number in range(1_000_000):
            await put(first, f"/{number % 5}", b"%d" % number)
            if stop.is_set():
                return

    async with TaskScope("writer") as scope:

        async def fenced() -> None:
            with pytest.raises(Fenced):
                await write()

        scope.spawn(fenced(), name="write")
        await world.owner(22)
        stop.set()


async def test_hints_skip_what_was_pruned(world: World, tmp_path: Path) -> None:
    """After stored fragments were removed: from new hints the files, from no or old hints an error."""
    spec = journal_spec(LOG, length=1 << 14)
    revision = (await world.broker.client.get_journal(LOG)).mod_revision
    await world.broker.client.apply_journals([JournalChange(spec, expect_mod_revision=revision)])
    first = await world.owner(11)
    await put(first, "/kept", b"kept")
    state = world.player()
    state.finish()
    old = (await state.play()).fsm.build_hints(LOG)
    for _ in range(20):
        await put(first, "/kept", os.urandom(8_000))
    second = await world.owner(22)
    await put(second, "/last", b"last")
    expected = await world.files()
    finished = world.player()
    finished.finish()
    hints = (await finished.play()).fsm.build_hints(LOG)
    begin = min(node.segments[0].first_offset for node in hints.live_nodes)
    head = await world.head()
    await world.broker.stop()

    fragments = sorted((tmp_path / "root" / "fragments" / LOG).rglob("*-*-*"))
    removed = [path for path in fragments if int(path.name.split("-")[1], 16) <= begin]
    assert len(removed) > 3
    for path in removed:
        path.unlink()
    # Readers jump to a first fragment only if it was stored a while ago, as those of a pruned log are.
    for path in set(fragments) - set(removed):
        os.utime(path, (0, path.stat().st_mtime - 3600))
    async with await BrokerFixture.start(
        world.broker.service.context.etcd, tmp_path, id="broker-two", lease_ttl_s=60.0
    ) as broker:
        await broker.settled(LOG)
        # All brokers were replaced: an operator confirms where the log goes on.
        await broker.client.append(AppendParams(LOG, offset=head))
        world.broker = broker
        assert await world.files(hints) == expected
        with raises(PrunedLog, "jumped_to", "segment_end", offset=15):
            await world.files(old)
        with raises(PrunedLog, "jumped_to", offset=0):
            await world.files()
        # A player with several hints goes through them. What was asked of it before is still done.
        player = world.player(old, older_hints=[FSMHints(LOG), hints])
        player.hand_off(33)
        recovered = await player.play()
        assert player.hints == hints
        assert recovered.author == 33
        assert tree(recovered.directory) == expected


async def test_hints_beyond_the_log_are_refused(world: World) -> None:
    """A log that lost its end is not played to where it ends now."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    hints = await asyncio.to_thread(first.build_hints)
    player = world.player()
    player.finish()
    exact = (await player.play()).fsm.build_hints(LOG)
    for hint in (hints, exact):
        elsewhere = FSMHints(log=FORK, live_nodes=hint.live_nodes)
        with raises(BeyondTheEnd, "segment", "write_head", log=FORK):
            await world.files(elsewhere)
    await world.broker.client.append(AppendParams(FORK), bytes(10_000))
    with raises(Corrupt, "segment", "offset", log="recovery/fork"):
        await world.files(FSMHints(log=FORK, live_nodes=exact.live_nodes))


async def test_looking_leaves_a_suspended_log_suspended(world: World) -> None:
    """Neither a recovery nor a standby resumes it. A hand-off does."""

    async def level() -> SuspendLevel:
        return (await world.broker.client.get_journal(LOG)).spec.suspend_level

    async def suspend() -> None:
        with contextlib.suppress(GazetteError):
            await world.broker.client.append(AppendParams(LOG, suspend=SuspendControl.NOW))

    await suspend()
    assert await level() is SuspendLevel.FULL, "there is nothing in it yet"
    assert await world.files() == {}
    standby = world.player()
    async with TaskScope("standby") as scope:
        playing = scope.spawn(standby.play(), name="play")
        await eventually(standby.tailing.is_set)
        assert await level() is SuspendLevel.FULL
        standby.hand_off(11)
        first = await world.recorder(await playing)
    assert await level() is SuspendLevel.NONE
    await put(first, "/a", b"one")
    await suspend()
    assert await level() is SuspendLevel.PARTIAL
    assert await world.files() == {"/a": b"one"}
    assert await level() is SuspendLevel.PARTIAL


async def test_a_log_forks(world: World) -> None:
    """The owner of a new log goes on from the files of the old one, and fences the new one."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    player = world.player()
    player.hand_off(22)
    second = await world.recorder(await player.play(), FORK)
    await put(second, "/b", b"two")
    hints = await asyncio.to_thread(second.build_hints)
    assert hints.log == FORK
    assert await world.files(hints) == {"/a": b"one", "/b": b"two"}
    assert (await world.broker.client.append(AppendParams(FORK))).registers == fence(22)


@pytest.mark.parametrize("junk", [b"\x66", b"junk", b"\x66\x33\x93\x36\x01\x02", bytes(1000)])
async def test_junk_at_the_end_is_in_no_ones_way(world: World, junk: bytes) -> None:
    """Less than a header of it, what begins like one, and more."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    await world.broker.client.append(AppendParams(LOG), junk)
    assert await world.files() == {"/a": b"one"}
    second = await world.owner(22)
    await put(second, "/b", b"two")
    assert await world.files() == {"/a": b"one", "/b": b"two"}


async def test_a_log_that_ends_within_an_operation_is_an_error(world: World) -> None:
    """And not a wait for ever: what is appended would be taken for the rest of it."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    frame, _ = encode_op(RecordedOp(1, 0, 99, Create("/x" * 100)))
    await world.broker.client.append(AppendParams(LOG), frame[:-10])
    with raises(Corrupt, log=LOG, offset=70):
        await world.owner(22)
    with raises(Corrupt, log=LOG, offset=70):
        await world.files()


async def test_a_hand_off_that_is_swallowed_is_an_error(world: World) -> None:
    """By the rest of an operation that another owner began right before it."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    frame, _ = encode_op(RecordedOp(1, 0, 99, Create("/x" * 100)))

    async def race(params: AppendParams, content: bytes) -> None:
        await world.broker.client.append(AppendParams(LOG), frame[:-100])

    player = world.player(client=LosingClient(world.broker.client, race))
    player.hand_off(22)
    with raises(Corrupt, log=LOG, offset=70):
        await player.play()


async def test_an_owner_whose_operations_do_not_apply_is_an_error(world: World) -> None:
    """Bytes of the log are missing: what follows is not dropped in silence."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    frame, _ = encode_op(RecordedOp(99, 5, 11, Create("/x")))
    await world.broker.client.append(AppendParams(LOG), frame)
    with raises(Corrupt, offset=70, seq_no=99, expected_seq_no=4):
        await world.files()


async def test_a_log_that_stalls_is_an_error(world: World) -> None:
    """It says that it holds more, and yields no bytes."""
    first = await world.owner(11)
    await put(first, "/a", b"one")
    hints = await asyncio.to_thread(first.build_hints)

    class DeafClient:
        """Knows the head, and has no broker to read from."""

        def __init__(self, client: Client) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            if name == "byte_path":
                raise Unavailable("no broker serves this journal")
            return getattr(self._client, name)

    player = world.player(hints, client=DeafClient(world.broker.client), stall_timeout_s=0.05)
    with raises(Unavailable, log=LOG, offset=15, write_head=70):
        await player.play()
    await eventually(lambda: not player.directory.exists())
    assert player.state is PlayerState.FAILED


async def test_cancelling_leaves_neither_files_nor_descriptors(world: World) -> None:
    """At any moment of a play-back."""
    first = await world.owner(11)
    for number in range(30):
        await put(first, f"/{number}", os.urandom(20_000))
    rng = random.Random(5)
    for _ in range(15):
        player = world.player()
        steps = rng.randrange(300)
        async with TaskScope("play") as scope:
            task = scope.spawn(player.play(), name="play")
            for _ in range(steps):
                await breathe()
            task.cancel()
        directory = player.directory
        await eventually(lambda: not directory.exists())  # noqa: B023
        await world.pool.run(lambda: None)
    await eventually(lambda: not open_below(world.directory / "player-"))


def open_below(prefix: Path) -> list[str]:
    """Return files of our process that are open below a path."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(prefix)):
            found.append(target)
    return found


def test_calls_that_come_after_giving_up_do_nothing(tmp_path: Path) -> None:
    """A cancelled play may leave a call in the queue of its pool."""
    files = StagedFiles(tmp_path / "files")
    files.prepare()
    files.perform([OpenNode(1)])
    files.abandon()
    for call in (files.prepare, lambda: files.perform([OpenNode(2)])):
        with raises(Closed, "directory"):
            call()
    assert not (tmp_path / "files").exists()
    assert not open_below(tmp_path)


async def test_a_disk_that_is_full_is_an_error_that_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind."""
    first = await world.owner(11)
    await put(first, "/a", os.urandom(100_000))

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    player = world.player()
    player.finish()
    with raises(GazetteError, "directory", errno=28) as caught:
        await player.play()
    assert is_advised(caught.value)
    monkeypatch.undo()
    await eventually(lambda: not player.directory.exists())
    assert not open_below(world.directory / "player-")


async def test_the_horizon_follows_the_oldest_file(world: World) -> None:
    """Bytes from where its first operation stands; what was replaced does not count."""
    first = await world.owner(11)
    for _ in range(3):
        await put(first, "/a", bytes(50_000))
        first.barrier()
    await asyncio.to_thread(first.flush)
    first.barrier()
    assert 50_000 < first.horizon_bytes < 101_000
    assert first.live_paths() == ["/a"]
    assert first.write_head == await world.head()


AHEAD = 50
"""Appends by which an owner may be ahead of what its standby's views have seen."""


async def test_views_see_whole_appends_and_everything_that_was_acknowledged(world: World) -> None:
    """The owner is some appends ahead of its standby. An error of a view stays with that view."""
    owner = await world.owner(11)
    await put(owner, "/a", b"0")
    await put(owner, "/b", b"0")
    player = world.player()
    acknowledged = seen = 0

    def may_write() -> bool:
        return acknowledged < seen + AHEAD

    async def write() -> None:
        nonlocal acknowledged
        for number in range(1, 1_000_000):
            # A busy machine may let the standby play more slowly than the owner writes.
            await eventually(may_write, timeout_s=100.0)
            with owner.group() as group:
                for name in ("a", "b"):
                    data = f"{number}".encode() + b"x" * 200_000
                    group.write(group.create(f"/next-{name}"), 0, data)
                    group.rename(f"/next-{name}", f"/{name}")
            try:
                await await_future(group.future)
            except Fenced:
                return
            acknowledged = number

    def read(files: PlayedFiles) -> tuple[int, int]:
        nonlocal seen
        one, two = (int(files.paths[name].read_bytes().rstrip(b"x")) for name in ("a", "b"))
        seen = one
        return one, two

    def fail(files: PlayedFiles) -> None:
        raise SystemExit(1)

    async with TaskScope("standby") as scope:
        playing = scope.spawn(player.play(), name="play")
        scope.spawn(write(), name="write")
        for _ in range(8):
            before = acknowledged
            one, two = await player.view(read)
            assert one == two >= before
            with raises(Broken, says="SystemExit"):
                await player.view(fail)
        waiting = scope.spawn(_closed(player.view(read)), name="late")
        player.hand_off(22)
        await playing
        assert await waiting is None or await waiting
        with pytest.raises(Closed):
            await player.view(read)
        scope.cancel()


async def test_a_hand_off_in_the_middle_of_a_view_is_not_forgotten(world: World) -> None:
    """The log of a dead owner gains nothing more: what the player waits for is the hand-off itself."""
    await put(await world.owner(11), "/a", b"one")
    player = world.player()
    loop = asyncio.get_running_loop()

    def take_over(files: PlayedFiles) -> bytes:
        asyncio.run_coroutine_threadsafe(_hand_off(player), loop).result(10.0)
        return files.paths["a"].read_bytes()

    async with TaskScope("standby") as scope:
        playing = scope.spawn(player.play(), name="play")
        assert await player.view(take_over) == b"one"
        async with asyncio.timeout(20.0):
            state = await playing
    assert state.author == 22


async def _hand_off(player: Player) -> None:
    player.hand_off(22)


async def test_a_hand_off_before_a_view_was_reached_reads_on(world: World) -> None:
    """A view is to be taken at the end of an append; the player is handed off while it reads up to there."""
    owner = await world.owner(11)

    class HandedOff(Player):
        async def _write_head(self, name: str) -> int:
            if self._views and self._author is None:
                await put(owner, "/b", b"two")
                self.hand_off(22)
            return await super()._write_head(name)

    await put(owner, "/a", b"one")
    player = HandedOff(
        FSMHints(log=LOG),
        world.directory / "player",
        world.broker.client,
        SystemClock(),
        world.pool,
    )
    async with TaskScope("standby") as scope:
        playing = scope.spawn(player.play(), name="play")
        await player.tailing.wait()
        with pytest.raises(Closed):
            await player.view(lambda files: None)
        async with asyncio.timeout(20.0):
            state = await playing
    assert tree(state.directory) == {"/a": b"one", "/b": b"two"}


async def _closed(view: Any) -> Any:
    try:
        return await view
    except Closed:
        return None


async def test_a_standby_that_gets_no_bytes_fails(world: World) -> None:
    """Its log is known to have more than it was given."""
    await put(await world.owner(11), "/a", b"one")
    player = world.player(stall_timeout_s=0.2)
    async with TaskScope("standby") as scope:
        playing = scope.spawn(_failed(player.play()), name="play")
        await player.tailing.wait()
        player.note_head(await world.head() + 1)
        error = await playing
    assert isinstance(error, Unavailable)
    assert "stalled" in str(error)


async def _failed(work: Any) -> Any:
    try:
        return await work
    except GazetteError as error:
        return error


async def test_appends_with_an_open_outcome_are_repeated(tmp_path: Path) -> None:
    """A broker that loses a replica, or stops, leaves it open whether an append took place."""
    permits: list[int] = []
    pool = BlockingPool("player", 1)
    async with StubBroker() as broker, Client(broker.endpoint, clock=InstantClock()) as client:
        player = Player(FSMHints(log=LOG), tmp_path / "files", client, SystemClock(), pool)

        async def permit() -> None:
            if not permits:
                broker.on_append(LoseReply(grpc.StatusCode.UNKNOWN), Fail(grpc.StatusCode.UNKNOWN))
            permits.append(len(broker.appends))

        broker.on_append(Fail(grpc.StatusCode.UNKNOWN))  # The first look at the head.
        player.hand_off(7, permit=permit)
        async with asyncio.timeout(10):
            recovered = await player.play()
        assert recovered.author == 7
        assert len(permits) == 3  # Each attempt sets the fence.
        assert recovered.write_head < len(broker.content_of(LOG))  # The repetition is behind it.

        # The next owner passes over the repetition.
        other = Player(FSMHints(log=LOG), tmp_path / "other", client, SystemClock(), pool)
        other.hand_off(8)
        async with asyncio.timeout(10):
            assert (await other.play()).author == 8

        # Case: the answer stays the same.
        broker.on_append(*[Fail(grpc.StatusCode.UNKNOWN)] * (REPEATS_MAX + 1))
        with pytest.raises(Broken):
            await append_repeatable(client, AppendParams(LOG), b"")
    pool.close()


@pytest.mark.parametrize(
    "status", [Status.INDEX_HAS_GREATER_OFFSET, Status.FRAGMENT_STORE_UNHEALTHY]
)
async def test_a_promotion_waits_with_the_reason_while_appends_are_refused(
    tmp_path: Path, status: Status
) -> None:
    """An operator confirms the head, or the store comes back. Nothing else would start the shard again."""
    pool = BlockingPool("player", 1)
    reasons: list[str] = []
    async with StubBroker() as broker, Client(broker.endpoint, clock=InstantClock()) as client:

        async def permit() -> None:
            reasons.append(client.waits.reason(LOG))
            if len(reasons) == 1:
                broker.on_append(*[Reply(status)] * (REPEATS_MAX + 1))

        player = Player(FSMHints(log=LOG), tmp_path / "files", client, SystemClock(), pool)
        broker.on_append(*[Reply(status)] * (REPEATS_MAX + 1))  # Looks at the head.
        player.hand_off(7, permit=permit)
        async with asyncio.timeout(10):
            assert (await player.play()).author == 7
        assert len(reasons) == REPEATS_MAX + 2
        assert status.name in reasons[-1]
    pool.close()


async def test_a_view_waits_while_appends_are_refused(tmp_path: Path) -> None:
    """A query of a standby asks where the log ends. A refusal must not end the standby."""
    pool = BlockingPool("player", 1)
    async with StubBroker() as broker, Client(broker.endpoint, clock=InstantClock()) as client:
        player = Player(FSMHints(log=LOG), tmp_path / "files", client, SystemClock(), pool)
        async with TaskScope("standby") as scope:
            scope.spawn(player.play(), name="play")
            await player.tailing.wait()
            broker.on_append(Reply(Status.FRAGMENT_STORE_UNHEALTHY))
            async with asyncio.timeout(10):
                assert await player.view(lambda files: dict(files.paths)) == {}
            scope.cancel()
    pool.close()
