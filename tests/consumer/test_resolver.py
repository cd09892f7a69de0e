"""The members that serve a shard: statuses, headers, claims, and waiting for a store and its offsets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gazette.auth import Claims
from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.consumer.resolver import MISSING_ID, Resolution
from gazette.errors import Closed, Invalid
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.route import EtcdHeader, Header
from gazette.protocol.status import ShardStatus
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.consumer.apps import OTHER, SHARD, SOURCE, Gate, Start, Tally, append, frame
from tests.facts import raises
from tests.support.instant_clock import breathe, eventually
from tools.simulation.remote_store import RemoteDatabase

ALL = Claims(0)


async def resolve(member: ConsumerFixture, shard_id: str = SHARD, **options: Any) -> Resolution:
    options = {"claims": ALL, "may_proxy": True, **options}
    async with asyncio.timeout(30):
        return await member.service.resolver.resolve(shard_id, **options)


def remote(**kwargs: Any) -> Tally:
    return Tally(RemoteDatabase(), **kwargs)


async def test_a_local_primary_is_resolved_with_its_store(start: Start) -> None:
    member = await start(remote())
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    resolution = await resolve(member, may_proxy=False)
    assert resolution.status is ShardStatus.OK
    assert resolution.is_local
    assert resolution.store is member.store(SHARD)
    assert resolution.header.process_id == member.service.process_id
    assert resolution.header.route.endpoints == (member.endpoint,)
    assert resolution.header.etcd.revision > 0


async def test_whoever_looks_while_shards_change_sees_all_of_them(
    start: Start, broker: BrokerFixture
) -> None:
    """Metrics are collected by another thread: never of a half, nor of a dictionary that changes."""
    member = await start(remote())
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    resolver = member.service.resolver
    seen: list[set[str]] = []
    real = resolver._new_shard

    def new_shard(item: Any, assignment: Any) -> Any:
        seen.append(set(resolver.local_shards))
        return real(item, assignment)

    resolver._new_shard = new_shard
    held = resolver._local
    before = "shard-before"  # It comes first as the resolver goes through them.
    await member.create(shard_spec(before, SOURCE, log=False))
    assert seen == [{SHARD}]
    assert set(held) == {SHARD}, "what others look at was changed under their eyes"
    assert set(resolver.local_shards) == {SHARD, before}


async def test_a_shard_that_does_not_exist(start: Start) -> None:
    member = await start()
    resolution = await resolve(member)
    assert resolution.status is ShardStatus.SHARD_NOT_FOUND
    assert resolution.header.process_id == member.service.process_id
    assert resolution.header.route.members == ()


@pytest.mark.parametrize(
    ("selector", "status"),
    [
        ("id = shard-one", ShardStatus.OK),
        ("team = red", ShardStatus.OK),
        ("id = shard-two", ShardStatus.SHARD_NOT_FOUND),
        ("team = blue", ShardStatus.SHARD_NOT_FOUND),
    ],
)
async def test_claims_that_do_not_cover_a_shard_hide_it(
    start: Start, selector: str, status: ShardStatus
) -> None:
    member = await start(remote())
    await member.create(shard_spec(SHARD, SOURCE, log=False, labels=LabelSet.of(("team", "red"))))
    resolution = await resolve(member, claims=Claims(0, LabelSelector.parse(selector)))
    assert resolution.status is status
    if status is ShardStatus.SHARD_NOT_FOUND:
        assert resolution.spec is None
        assert resolution.header.route.members == (), "assignments of a hidden shard were shown"


async def test_a_shard_without_a_primary(start: Start) -> None:
    member = await start(shard_limit=0)
    await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
    assert (await resolve(member)).status is ShardStatus.NO_SHARD_PRIMARY


async def test_another_member_is_named_or_refused(start: Start) -> None:
    first = await start(remote())
    await first.create(shard_spec(SHARD, SOURCE, log=False))
    second = await start(remote(), id="consumer-two")
    await second.await_primary(SHARD)
    resolution = await resolve(second)
    assert resolution.status is ShardStatus.OK
    assert resolution.header.process_id == first.service.process_id
    assert not resolution.is_local
    refused = await resolve(second, may_proxy=False)
    assert refused.status is ShardStatus.NOT_SHARD_PRIMARY
    assert refused.header.process_id == second.service.process_id


async def test_what_is_passed_on_must_be_meant_for_this_member(start: Start) -> None:
    member = await start(remote())
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    header = (await resolve(member)).header
    assert (await resolve(member, proxy_header=header)).status is ShardStatus.OK
    other_cluster = replace(header, etcd=replace(header.etcd, cluster_id=1))
    with raises(Invalid, says="(1 vs "):
        await resolve(member, proxy_header=other_cluster)
    other = replace(member.service.process_id, suffix="stranger")
    with raises(Invalid, says="local#stranger"):
        await resolve(member, proxy_header=replace(header, process_id=other))


async def test_a_header_of_a_later_revision_is_waited_for(start: Start, etcd: Etcd) -> None:
    member = await start(remote())
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    header = (await resolve(member)).header
    ahead: Header = replace(
        header,
        etcd=EtcdHeader(header.etcd.cluster_id, 1, header.etcd.revision + 1, 1),
    )
    async with TaskScope("test") as scope:
        waiting = scope.spawn(resolve(member, proxy_header=ahead), name="resolve")
        await breathe()
        assert not waiting.done()
        await member.update(shard_spec(SHARD, SOURCE, log=False, hot_standbys=1))
        assert (await waiting).status is ShardStatus.OK


async def test_resolving_waits_for_the_store_and_for_offsets(
    start: Start, broker: BrokerFixture
) -> None:
    gate = Gate()
    application = remote()
    new_store = application.new_store

    def held(shard: Any, recorder: Any) -> Any:
        gate()
        return new_store(shard, recorder)

    application.new_store = held  # type: ignore[method-assign]
    member = await start(application)
    spec = shard_spec(SHARD, SOURCE, log=False)
    await member.shards.apply_shards([ShardChange(upsert=spec)])
    await eventually(gate.entered.is_set)
    end = await append(broker, frame("a"))
    async with TaskScope("test") as scope:
        offsets = {SOURCE: end + 10, "not/a-source": 1 << 40}
        opened = scope.spawn(resolve(member), name="opened")
        read = scope.spawn(resolve(member, read_through=offsets), name="read")
        await breathe()
        assert not opened.done()
        gate.open()
        assert (await opened).store is not None
        assert not read.done()
        await append(broker, frame("b"))
        assert (await read).status is ShardStatus.OK
    assert member.store(SHARD).read() == {"a": 1, "b": 1}


async def test_a_wait_ends_with_the_shard(start: Start) -> None:
    member = await start(remote())
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    async with TaskScope("test") as scope:
        read = scope.spawn(resolve(member, read_through={SOURCE: 1 << 40}), name="read")
        await breathe()
        await member.delete(SHARD)
        assert (await read).status is ShardStatus.SHARD_STOPPED


async def test_a_member_that_stopped_serving_says_so(start: Start) -> None:
    member = await start(remote())
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    member.service.resolver.stop_serving()
    with raises(Closed, shard=SHARD):
        await resolve(member)


async def test_a_member_whose_key_is_gone_has_a_name_all_the_same(start: Start, etcd: Etcd) -> None:
    member = await start()
    state = member.service.key_space
    kv = state.get(f"{state.root}/members/local#consumer-one")
    assert kv is not None
    await etcd.delete(kv.key)
    await member.until(lambda: state.get(kv.key) is None)
    assert member.service.resolver.local_id == MISSING_ID
    assert (await resolve(member)).status is ShardStatus.SHARD_NOT_FOUND


async def test_shards_are_found_by_their_source(start: Start) -> None:
    member = await start(remote())
    await member.create(shard_spec(SHARD, SOURCE, log=False), shard_spec(OTHER, SOURCE, log=False))
    resolver = member.service.resolver
    assert [one.id for one in resolver.shards_with_source(SOURCE)] == [SHARD, OTHER]
    await member.delete(SHARD)
    assert [one.id for one in resolver.shards_with_source(SOURCE)] == [OTHER]
    assert resolver.shards_with_source("no/such") == ()
    assert [one.id for one in resolver.shards(LabelSelector.of(id=OTHER))] == [OTHER]
