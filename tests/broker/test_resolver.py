"""Resolution of journals, and the life of replicas, over a key space that the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from gazette.auth import Capability, Claims
from gazette.broker.append.events import AppendTerms, Ending
from gazette.broker.commit.driver import AppendCall, AppendDriver
from gazette.broker.context import BrokerContext
from gazette.broker.key_space import MISSING_ID, broker_decoder, is_consistent
from gazette.broker.pulse import NoContent
from gazette.broker.resolver import Resolver
from gazette.broker.settings import BrokerSettings
from gazette.cluster.allocator.model import assignment_key, item_key, member_key
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.values import (
    KeyValue,
    RangeResult,
    ResponseHeader,
    WatchEvent,
    WatchResponse,
)
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Closed, Invalid, Unavailable
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import JournalSpec, Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.process import BrokerSpec
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header, Route
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import journal_spec
from tests.facts import raises
from tests.support.instant_clock import breathe

ROOT = "/root"
US, THEM = ProcessId("a", "us-broker"), ProcessId("b", "them-broker")
JOURNAL = "a/journal"
ALL = Claims(Capability.ALL)


@dataclass
class StubReplica:
    """Records its life. ``may_end`` holds its teardown."""

    journal: str
    life: int
    started: bool = False
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    listings: int = 0
    """Number of requests to list again."""

    def start(self) -> None:
        self.started = True

    def route_changed(self) -> None:
        pass

    def list_now(self) -> None:
        self.listings += 1

    async def shut_down(self) -> None:
        await self.may_end.wait()
        self.ended = True


class World:
    """A key space that only this test writes, and the resolver of broker ``US`` on it."""

    def __init__(self, scope: TaskScope, assignment_wait_s: float = 0.0) -> None:
        self.scope = scope
        self.key_space = KeySpace(ROOT, broker_decoder(ROOT, 3))
        self.key_space.header = ResponseHeader(7, 8, 1, 9)
        self.state = State(self.key_space, member_key(ROOT, US.zone, US.suffix), is_consistent)
        self.replicas: list[StubReplica] = []
        self.opened: list[str] = []
        self.resolver = Resolver(
            self.key_space,
            self.state,
            scope,
            self._new_replica,
            self.opened.append,
            assignment_wait_s=assignment_wait_s,
        )
        self.key_space.observers += [self.state.observe, self.resolver.update]
        self.kvs: dict[str, KeyValue] = {}

    def _new_replica(self, journal: str, life: int) -> Any:
        self.replicas.append(StubReplica(journal, life))
        return self.replicas[-1]

    def write(self, *changes: tuple[str, bytes | None]) -> int:
        """Put or delete keys at one new revision, and take the step. Gives the revision."""
        revision = self.key_space.header.revision + 1
        responses = [self._response(revision, [change]) for change in changes]
        merged = replace(responses[0], events=tuple(e for r in responses for e in r.events))
        self.key_space.apply([merged])
        return revision

    def write_each(self, *changes: tuple[str, bytes | None]) -> None:
        """Write as ``write`` does, at one revision each, and still in a single step."""
        first = self.key_space.header.revision + 1
        self.key_space.apply(
            [self._response(first + at, [change]) for at, change in enumerate(changes)]
        )

    def _response(self, revision: int, changes: list[tuple[str, bytes | None]]) -> WatchResponse:
        events = []
        for key, value in changes:
            old = self.kvs.pop(key, None)
            if value is None:
                events.append(WatchEvent(KeyValue(key.encode(), b"", 0, revision, 0), deleted=True))
                continue
            created = revision if old is None else old.create_revision
            version = 1 if old is None else old.version + 1
            kv = self.kvs[key] = KeyValue(key.encode(), value, created, revision, version)
            events.append(WatchEvent(kv))
        return WatchResponse(ResponseHeader(7, 8, revision, 9), tuple(events))

    async def resolve(self, journal: str = JOURNAL, claims: Claims = ALL, **options: Any) -> Any:
        options = {"may_proxy": True, "require_primary": False, **options}
        return await self.resolver.resolve(journal, claims=claims, **options)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with TaskScope("test") as scope:
        world = World(scope)
        world.write(member(US), member(THEM))
        yield world
        for replica in world.replicas:
            replica.may_end.set()
        scope.cancel()


@pytest.fixture
async def patient() -> AsyncIterator[World]:
    """Yield a world where calls wait for the brokers of a journal that has no brokers."""
    async with TaskScope("test") as scope:
        world = World(scope, assignment_wait_s=60)
        world.write(member(US), member(THEM))
        yield world
        scope.cancel()


def member(process: ProcessId, endpoint: str = "") -> tuple[str, bytes]:
    endpoint = endpoint or f"http://{process.suffix}:80"
    spec = BrokerSpec(process, endpoint, 10)
    return member_key(ROOT, process.zone, process.suffix), spec.to_pb().SerializeToString()


def item(spec: JournalSpec) -> tuple[str, bytes]:
    return item_key(ROOT, spec.name), spec.to_pb().SerializeToString()


def assigned(
    process: ProcessId, slot: int, journal: str = JOURNAL, route: Route | None = None
) -> tuple[str, bytes]:
    key = assignment_key(ROOT, journal, process.zone, process.suffix, slot)
    return key, b"" if route is None else route.to_pb().SerializeToString()


def gone(change: tuple[str, bytes | None]) -> tuple[str, None]:
    return change[0], None


SPEC = journal_spec(JOURNAL, replication=2)
BOTH = Route((US, THEM), 0, ("http://us-broker:80", "http://them-broker:80"))


# --- Statuses


async def test_a_missing_journal_is_not_found(world: World) -> None:
    at = await world.resolve("no/journal")
    assert (at.status, at.spec, at.item_kv, at.replica) == (
        Status.JOURNAL_NOT_FOUND,
        None,
        None,
        None,
    )
    assert at.header == Header(US, EMPTY_ROUTE, EtcdHeader(7, 8, 2, 9))


async def test_a_journal_outside_of_the_claims_looks_like_a_missing_one(
    world: World,
) -> None:
    labelled = replace(SPEC, labels=LabelSet.of(("env", "prod")))
    world.write(item(labelled), assigned(US, 0))
    missing = await world.resolve("no/journal")
    for selector, found in (
        (LabelSelector.of(env="prod"), True),
        (LabelSelector.of(name=JOURNAL), True),
        (LabelSelector.of(env="test"), False),
        (LabelSelector.of(name="another"), False),
    ):
        at = await world.resolve(claims=Claims(Capability.READ, selector))
        assert (at.status is Status.OK) is found
        if not found:
            other = replace(
                missing,
                journal=JOURNAL,
                invalidated=at.invalidated,
                reassigned=at.reassigned,
            )
            assert at == replace(other, header=at.header)
            assert at.header.route == EMPTY_ROUTE


async def test_a_call_for_the_primary_waits_for_the_brokers_of_a_fresh_journal(
    patient: World,
) -> None:
    world = patient
    world.write(item(SPEC))
    resolving = world.scope.spawn(world.resolve(require_primary=True), name="resolve")
    await breathe()
    world.write(member(THEM))
    await breathe()
    assert not resolving.done()
    world.write(assigned(THEM, 0))
    assert (await resolving).header.process_id == THEM
    # Case: brokers that have no primary now, which takes as long as it takes.
    world.write(gone(assigned(THEM, 0)), assigned(THEM, 1))
    assert (await world.resolve(require_primary=True)).status is Status.NO_JOURNAL_PRIMARY_BROKER


@pytest.mark.parametrize(
    ("assignments", "options", "status", "process_id"),
    [
        # No broker serves it.
        ([], {}, Status.INSUFFICIENT_JOURNAL_BROKERS, US),
        ([], {"require_primary": True}, Status.NO_JOURNAL_PRIMARY_BROKER, US),
        # There is no primary.
        ([(US, 1), (THEM, 2)], {"require_primary": True}, Status.NO_JOURNAL_PRIMARY_BROKER, US),
        ([(US, 1), (THEM, 2)], {}, Status.OK, US),
        # We are the primary.
        ([(US, 0), (THEM, 1)], {"require_primary": True, "may_proxy": False}, Status.OK, US),
        ([(US, 0), (THEM, 1)], {"may_proxy": False}, Status.OK, US),
        # We are a replica: good for reads.
        ([(US, 1), (THEM, 0)], {"require_primary": True}, Status.OK, THEM),
        (
            [(US, 1), (THEM, 0)],
            {"require_primary": True, "may_proxy": False},
            Status.NOT_JOURNAL_PRIMARY_BROKER,
            US,
        ),
        ([(US, 1), (THEM, 0)], {"may_proxy": False}, Status.OK, US),
        # Others have it: any of them may serve a read.
        ([(THEM, 0)], {}, Status.OK, None),
        ([(THEM, 0)], {"may_proxy": False}, Status.NOT_JOURNAL_BROKER, US),
    ],
)
async def test_statuses_of_routes(
    world: World,
    assignments: list[tuple[ProcessId, int]],
    options: dict[str, Any],
    status: Status,
    process_id: ProcessId | None,
) -> None:
    world.write(item(SPEC), *(assigned(process, slot) for process, slot in assignments))
    at = await world.resolve(**options)
    assert (at.status, at.header.process_id) == (status, process_id)
    assert at.is_local == (process_id == US)
    assert at.spec == SPEC
    assert len(at.assignments) == len(assignments)
    assert at.desired_replication == 2
    assert (at.replica is not None) == any(process == US for process, _ in assignments)


async def test_a_fully_suspended_journal_is_suspended_before_anything_else(world: World) -> None:
    suspended = replace(SPEC, suspend=Suspend(SuspendLevel.FULL, 123))
    world.write(item(suspended))
    for require_primary in (True, False):
        at = await world.resolve(require_primary=require_primary)
        assert at.status is Status.SUSPENDED
        assert at.spec is not None
        assert at.spec.suspend == Suspend(SuspendLevel.FULL, 123)
        assert at.desired_replication == 0
    # Case: partial suspension is not a status.
    world.write(item(replace(SPEC, suspend=Suspend(SuspendLevel.PARTIAL, 1))), assigned(US, 0))
    assert (await world.resolve()).status is Status.OK


async def test_routes_carry_endpoints_and_an_empty_one_for_a_member_that_is_gone(
    world: World,
) -> None:
    world.write(item(SPEC), assigned(US, 0), assigned(THEM, 1))
    assert (await world.resolve()).header.route == BOTH
    world.write(gone(member(THEM)))
    assert (await world.resolve()).header.route.endpoints == ("http://us-broker:80", "")


async def test_replication_is_bounded_by_the_broker_s_own_bound(world: World) -> None:
    world.write(item(replace(SPEC, replication=5)))
    assert (await world.resolve()).desired_replication == 3


async def test_a_metadata_segment_is_ignored(world: World) -> None:
    world.write(item(SPEC), assigned(US, 0))
    at = await world.resolve(f"{JOURNAL};meta/data")
    assert (at.status, at.journal) == (Status.OK, JOURNAL)


async def test_journals_whose_names_are_prefixes_of_one_another_are_kept_apart(
    world: World,
) -> None:
    longer = replace(SPEC, name=f"{JOURNAL}/more")
    world.write(item(SPEC), item(longer), assigned(THEM, 0), assigned(US, 0, longer.name))
    assert (await world.resolve()).header.route.members == (THEM,)
    assert (await world.resolve(longer.name)).header.route.members == (US,)


async def test_a_broker_whose_key_is_gone_can_still_proxy(world: World) -> None:
    world.write(item(SPEC), assigned(THEM, 0), gone(member(US)))
    at = await world.resolve()
    assert (at.status, at.header.process_id, at.local_id) == (Status.OK, None, MISSING_ID)
    assert (await world.resolve(may_proxy=False)).header.process_id == MISSING_ID
    assert world.resolver.unrouted_header().process_id is None


# --- Headers of proxied requests, and revisions


def proxied(process_id: ProcessId | None = US, cluster_id: int = 7, revision: int = 1) -> Header:
    return Header(process_id, EMPTY_ROUTE, EtcdHeader(cluster_id, 8, revision, 9))


async def test_a_request_for_another_cluster_or_broker_is_refused(world: World) -> None:
    world.write(item(SPEC), assigned(US, 0))
    assert (await world.resolve(proxy_header=proxied())).status is Status.OK
    assert (await world.resolve(proxy_header=proxied(None))).status is Status.OK
    with raises(Invalid, says="(6 vs 7)"):
        await world.resolve(proxy_header=proxied(cluster_id=6))
    with raises(Invalid, says="(b#them-broker vs a#us-broker)"):
        await world.resolve(proxy_header=proxied(THEM))


@pytest.mark.parametrize("by_header", [True, False])
async def test_a_future_revision_is_waited_for(world: World, by_header: bool) -> None:
    wanted = world.key_space.header.revision + 1
    options: dict[str, Any] = {"min_etcd_revision": wanted}
    if by_header:
        options = {"proxy_header": proxied(revision=wanted)}
    async with TaskScope("waiting") as scope:
        waiting = scope.spawn(world.resolve(**options), name="resolve")
        await SystemClock().sleep(0)
        assert not waiting.done()
        world.write(item(SPEC), assigned(US, 0))
        at = await waiting
    assert at.status is Status.OK
    assert at.header.etcd.revision == wanted


class Etcd:
    """Answers the load of a mirror whose watch fell behind: at ``revision``, long after its last change."""

    def __init__(self, world: World, revision: int) -> None:
        kvs = tuple(sorted(world.kvs.values(), key=lambda kv: kv.key))
        self._loaded = RangeResult(ResponseHeader(7, 8, revision, 9), kvs, len(kvs))

    async def range(self, prefix: str) -> RangeResult:
        return self._loaded


@dataclass
class Context:
    """Counts how often an append resolves its journal."""

    world: World
    resolutions: int = 0
    settings: BrokerSettings = field(default_factory=BrokerSettings)

    @property
    def resolver(self) -> Any:
        return self

    def resolve_now(self, *args: Any, **options: Any) -> Any:
        found = self.world.resolver.resolve_now(*args, **options)
        if found is not None:
            self._count()
        return found

    async def resolve(self, *args: Any, **options: Any) -> Any:
        self._count()
        return await self.world.resolver.resolve(*args, **options)

    def _count(self) -> None:
        self.resolutions += 1
        assert self.resolutions < 10, "the append resolves its journal without waiting"


async def test_an_append_waits_for_the_next_change_behind_a_load_of_the_mirror(
    world: World,
) -> None:
    world.write(item(journal_spec(JOURNAL, replication=1)), assigned(THEM, 0), assigned(US, 1))
    await world.key_space._reload(cast("Any", Etcd(world, world.key_space.header.revision + 20)))
    at = await world.resolve()
    assert at.seen_revision == at.header.etcd.revision + 20
    call = AppendCall(terms=AppendTerms(JOURNAL), claims=ALL)
    context = Context(world)
    driver = AppendDriver(cast("BrokerContext", context), call, NoContent())
    async with TaskScope("append") as scope:
        appending = scope.spawn(driver.run(), name="append")
        await breathe()
        assert not appending.done()
        assert context.resolutions == 2
        world.key_space.header = replace(world.key_space.header, revision=at.seen_revision)
        world.write(gone(assigned(US, 1)))
        outcome = await appending
    assert outcome.ending is Ending.PROXY
    assert context.resolutions == 2


# --- Replicas


async def test_a_replica_lives_from_assignment_to_removal(world: World) -> None:
    world.write(item(SPEC))
    assert world.replicas == []
    world.write(assigned(US, 1))
    (replica,) = world.replicas
    assert (replica.journal, replica.started) == (JOURNAL, True)
    assert (await world.resolve()).replica is replica
    assert world.opened == list(SPEC.fragment.stores)
    assert world.resolver.journals == (JOURNAL,)

    invalidated = (await world.resolve()).invalidated
    world.write(gone(assigned(US, 1)))
    assert invalidated.is_set
    assert (await world.resolve()).replica is None
    with pytest.raises(Unavailable, match=f"journals={JOURNAL}"):
        await world.resolver.wait_torn_down(0.0)
    replica.may_end.set()
    await world.resolver.wait_torn_down(5.0)
    assert replica.ended


async def test_a_promoted_replica_stays_and_a_demoted_primary_is_replaced(world: World) -> None:
    world.write(item(SPEC), assigned(US, 2, route=BOTH))
    # Case: moved to another slot, and promoted. Both carry the value over.
    world.write(gone(assigned(US, 2)), assigned(US, 1, route=BOTH))
    world.write(gone(assigned(US, 1)), assigned(US, 0, route=BOTH))
    assert len(world.replicas) == 1
    world.write(gone(assigned(US, 0)), assigned(US, 2))
    first, second = world.replicas
    assert (await world.resolve()).replica is second
    first.may_end.set()
    await world.resolver.wait_torn_down(5.0)
    assert (first.ended, second.ended) == (True, False)


async def test_a_journal_that_is_deleted_and_made_again_gets_a_new_replica(world: World) -> None:
    """Even if both reach us in one batch: the old spool must not leak into the new journal."""
    world.write(item(SPEC), assigned(US, 0))
    world.write_each(gone(item(SPEC)), item(SPEC))
    first, second = world.replicas
    assert (await world.resolve()).replica is second
    first.may_end.set()


@pytest.mark.parametrize(
    ("before", "steps"),
    [
        # Case: demoted and promoted, in one step of the key space.
        (0, [gone(assigned(US, 0)), assigned(US, 1), gone(assigned(US, 1)), assigned(US, 0)]),
        # Case: removed and added again, to the same slot and to another.
        (0, [gone(assigned(US, 0)), assigned(US, 0)]),
        (1, [gone(assigned(US, 1)), assigned(US, 1)]),
        (1, [gone(assigned(US, 1)), assigned(US, 0)]),
        # Case: and in step with the others since.
        (1, [gone(assigned(US, 1)), assigned(US, 1), assigned(US, 1, route=BOTH)]),
    ],
)
async def test_a_replica_serves_one_assignment(world: World, before: int, steps: Any) -> None:
    """A lagging watch, or a reload after a compaction, shows several changes as one."""
    world.write(item(SPEC), assigned(US, before, route=BOTH))
    world.write_each(*steps)
    first, second = world.replicas
    assert (await world.resolve()).replica is second
    first.may_end.set()


async def test_a_resolution_is_invalidated_by_assignments_and_stores_and_by_nothing_else(
    world: World,
) -> None:
    world.write(item(SPEC), assigned(US, 0))
    changed_stores = replace(SPEC, fragment=replace(SPEC.fragment, stores=("file:///other/",)))
    for change, invalidates in (
        (item(replace(SPEC, max_append_rate=5)), False),
        (member(THEM, "http://moved:80"), False),
        (assigned(THEM, 1), True),
        (assigned(US, 0, route=Route((US, THEM), 0)), True),
        (item(changed_stores), True),
        (gone(assigned(THEM, 1)), True),
        (assigned(THEM, 0, "another/journal"), False),
    ):
        before = (await world.resolve()).invalidated
        world.write(change)
        assert before.is_set is invalidates
        assert ((await world.resolve()).invalidated is before) is not invalidates
    (replica,) = world.replicas
    assert replica.listings == 1
    assert world.opened == [*SPEC.fragment.stores, "file:///other/"]


async def test_who_holds_what_was_in_step_changes_with_members_and_primary_only(
    world: World,
) -> None:
    world.write(item(SPEC), assigned(US, 1), assigned(THEM, 0))
    at = await world.resolve()
    # Case: the primary stores its route, the specification changes.
    world.write(assigned(US, 1, route=BOTH), assigned(THEM, 0, route=BOTH))
    world.write(item(replace(SPEC, replication=3)))
    assert not at.reassigned.is_set
    # Case: the primary has died, and is back within one step of the key space.
    world.write_each(gone(assigned(THEM, 0)), assigned(THEM, 0))
    assert at.reassigned.is_set
    # Case: a member is gone.
    at = await world.resolve()
    assert not at.reassigned.is_set
    world.write(gone(assigned(THEM, 0)))
    assert at.reassigned.is_set
    # Case: we are.
    at = await world.resolve()
    world.write(gone(assigned(US, 1)))
    assert at.reassigned.is_set


async def test_a_changed_specification_is_seen_at_once(world: World) -> None:
    world.write(item(SPEC), assigned(US, 0))
    assert (await world.resolve()).spec == SPEC
    world.write(item(replace(SPEC, max_append_rate=5)))
    assert (await world.resolve()).spec == replace(SPEC, max_append_rate=5)


async def test_after_stop_serving_local_journals_are_refused_and_others_proxied(
    world: World,
) -> None:
    other = replace(SPEC, name="other/journal")
    world.write(item(SPEC), item(other), assigned(US, 0), assigned(THEM, 0, other.name))
    before = (await world.resolve()).invalidated
    world.resolver.stop_serving()
    assert before.is_set
    assert world.resolver.stopped.is_set()
    with raises(Closed, journal="a/journal"):
        await world.resolve()
    assert (await world.resolve(other.name)).status is Status.OK
    # Case: assignments that come later make no replica.
    world.write(assigned(US, 1, other.name))
    assert len(world.replicas) == 1
    world.replicas[0].may_end.set()
    await world.resolver.wait_torn_down(5.0)


# --- Decoding


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ((item_key(ROOT, JOURNAL), b"\xff"), "not a JournalSpec"),
        ((item_key(ROOT, "other/name"), item(SPEC)[1]), "does not match its key"),
        ((member_key(ROOT, "a", "other-suffix"), member(US)[1]), "does not match its key"),
        ((member_key(ROOT, "a", "other-suffix"), b"\xff"), "not a BrokerSpec"),
    ],
)
async def test_values_that_do_not_fit_their_key_are_left_out(
    world: World, change: tuple[str, bytes], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.write(change)
    assert world.key_space.get(change[0]) is None
    assert text in caplog.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"\xff", "Error parsing message"),
        (Route((THEM, US)).to_pb().SerializeToString(), "sorted order"),
    ],
)
async def test_an_assignment_whose_route_is_damaged_stays_and_is_not_consistent(
    world: World, value: bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.write(item(SPEC), (assigned(US, 0)[0], value))
    (assignment,) = world.state.assignments_of(JOURNAL)
    assert assignment.decoded.value == EMPTY_ROUTE
    listed = world.state.item(JOURNAL)
    assert listed is not None
    assert not is_consistent(listed, assignment, [assignment])
    assert text in caplog.text


@pytest.mark.parametrize(
    ("assignments", "consistent"),
    [
        (
            [
                assigned(US, 0, route=Route((US, THEM), 0)),
                assigned(THEM, 1, route=Route((US, THEM), 0)),
            ],
            True,
        ),
        ([assigned(US, 0, route=Route((US, THEM), 0)), assigned(THEM, 1)], False),
        ([assigned(US, 0), assigned(THEM, 1)], False),
        ([assigned(US, 0, route=Route((US,), 0))], True),
        # A promotion, an addition and a removal each make all of them inconsistent.
        ([assigned(US, 0, route=Route((US,), None))], False),
        ([assigned(US, 1, route=Route((US,), None))], True),
        ([assigned(US, 0, route=Route((US, THEM), 0))], False),
    ],
)
async def test_a_journal_is_consistent_if_every_assignment_advertises_what_the_keys_say(
    world: World, assignments: list[tuple[str, bytes]], consistent: bool
) -> None:
    world.write(item(SPEC), *assignments)
    kvs = world.state.assignments_of(JOURNAL)
    (journal,) = world.state.items
    assert [is_consistent(journal, one, kvs) for one in kvs] == [consistent] * len(kvs)
