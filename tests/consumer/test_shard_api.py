"""The RPCs of the Shard service, over gRPC and JSON: what they do, refuse and answer."""

from __future__ import annotations

import base64
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from gazette.auth import Capability, Claims, KeyedAuth
from gazette.client.shards import ShardChange, ShardClient
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Conflict, GazetteError, NotAllowed, NotFound
from gazette.protocol.hints import FSMHints
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import consumer_pb2 as pb
from gazette.protocol.shard import ReplicaCode
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.consumer.apps import OTHER, SHARD, SOURCE, Echo, Start, Tally, append, frame, source_spec
from tools.simulation.remote_store import RemoteDatabase


def auth() -> KeyedAuth:
    return KeyedAuth.parse(
        SystemClock(), base64.b64encode(b"a secret key of as many as 32 bytes").decode()
    )


def remote() -> Tally:
    return Tally(RemoteDatabase())


def stub(member: ConsumerFixture) -> Any:
    return member.shards.channels.shard(member.endpoint)


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.details() or ""


# --- Stat


async def test_stat_tells_offsets_read_and_published(start: Start, broker: BrokerFixture) -> None:
    await broker.create(source_spec("b/target"))
    member = await start(Echo("b/target", database=RemoteDatabase()))
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    end = await append(broker, frame("a", 1))
    stat = await member.shards.stat(SHARD, {SOURCE: end})
    assert stat.read_through == {SOURCE: end}
    assert stat.publish_at == {"b/target": await append(broker, journal="b/target")}
    assert stat.header.process_id == member.service.process_id


@pytest.mark.parametrize("signed", [False, True])
async def test_stat_is_passed_on_to_the_primary(
    start: Start, broker: BrokerFixture, signed: bool
) -> None:
    """With authentication too: the member that passes it on signs for itself."""
    keys = auth() if signed else None
    first = await start(remote(), auth=keys)
    await first.create(shard_spec(SHARD, SOURCE, log=False))
    second = await start(remote(), id="consumer-two", auth=keys)
    await second.await_primary(SHARD)
    end = await append(broker, frame("a"))
    async with ShardClient(second.endpoint, signer=keys) as client:
        stat = await client.stat(SHARD, {SOURCE: end})
    assert stat.read_through == {SOURCE: end}
    assert stat.header.process_id == first.service.process_id


async def test_stat_with_a_header_is_not_passed_on(start: Start) -> None:
    first = await start(remote())
    await first.create(shard_spec(SHARD, SOURCE, log=False))
    second = await start(remote(), id="consumer-two")
    await second.await_primary(SHARD)
    header = second.service.resolver.unrouted_header().to_pb()
    response = await stub(second).Stat(pb.StatRequest(shard=SHARD, header=header))
    assert response.status == pb.NOT_SHARD_PRIMARY


async def test_stat_of_nothing(start: Start) -> None:
    member = await start()
    with pytest.raises(NotFound):
        await member.shards.stat(SHARD)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.StatRequest(shard="x"), "Shard"),
        (pb.StatRequest(shard=SHARD, read_through={SOURCE: -1}), "-1"),
        (pb.StatRequest(shard=SHARD, read_through={"/no": 1}), "/no"),
    ],
)
async def test_stat_refuses(start: Start, request_: Any, text: str) -> None:
    member = await start()
    assert text in await refused(stub(member).Stat(request_))


# --- List


async def test_list_joins_specifications_assignments_and_status(start: Start) -> None:
    member = await start(remote())
    await member.create(
        shard_spec(SHARD, SOURCE, log=False, labels=LabelSet.of(("team", "red"))),
        shard_spec(OTHER, SOURCE, log=False),
    )
    listed = (await member.shards.list_shards()).shards
    assert [one.spec.id for one in listed] == [SHARD, OTHER]
    assert all(one.status[0].code is ReplicaCode.PRIMARY for one in listed)
    assert listed[0].route.members == (member.service.process_id,)
    assert listed[0].route.endpoints == (member.endpoint,)
    for selector, ids in (
        ("team = red", [SHARD]),
        ("id = shard-two", [OTHER]),
        ("id = shard-two, team = red", []),
        ("id = no-such", []),
        (f"id in ({SHARD}, {OTHER})", [SHARD, OTHER]),
        ("no = such", []),
    ):
        found = await member.shards.list_shards(LabelSelector.parse(selector))
        assert [one.spec.id for one in found.shards] == ids


# --- Apply


async def test_apply_compares_revisions(start: Start) -> None:
    member = await start(shard_limit=0)
    spec = shard_spec(SHARD, SOURCE)
    header = await member.shards.apply_shards([ShardChange(upsert=spec)])
    (listed,) = (await member.shards.list_shards()).shards
    assert listed.mod_revision == header.etcd.revision
    with pytest.raises(Conflict):
        await member.shards.apply_shards([ShardChange(upsert=spec)])
    with pytest.raises(Conflict):
        await member.shards.apply_shards([ShardChange(delete=SHARD, expect_mod_revision=1)])
    # All or nothing.
    with pytest.raises(Conflict):
        await member.shards.apply_shards(
            [
                ShardChange(delete=SHARD, expect_mod_revision=listed.mod_revision),
                ShardChange(upsert=shard_spec(OTHER, SOURCE), expect_mod_revision=7),
            ]
        )
    assert len((await member.shards.list_shards()).shards) == 1
    await member.shards.apply_shards(
        [ShardChange(delete=SHARD, expect_mod_revision=listed.mod_revision)]
    )
    assert (await member.shards.list_shards()).shards == ()


async def test_apply_stores_hints_with_a_shard(start: Start, etcd: Etcd) -> None:
    member = await start(shard_limit=0)
    spec = shard_spec(SHARD, SOURCE)
    hints = FSMHints(log=spec.recovery_log)
    await member.shards.apply_shards([ShardChange(upsert=spec, primary_hints=hints)])
    got = await member.shards.get_hints(SHARD)
    assert got.primary == hints
    assert got.backups == (None, None)
    assert await etcd.get(spec.hint_primary_key) is not None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (pb.ApplyRequest.Change(), "expected"),
        (pb.ApplyRequest.Change(upsert=shard_spec(SHARD).to_pb(), delete=SHARD), "expected"),
        (pb.ApplyRequest.Change(upsert=pb.ShardSpec(id=SHARD)), "MaxTxnDuration"),
        (pb.ApplyRequest.Change(delete=SHARD, expect_mod_revision=0), "ExpectModRevision"),
        (
            pb.ApplyRequest.Change(
                delete=SHARD, expect_mod_revision=-1, primary_hints=FSMHints(log="a/log").to_pb()
            ),
            "hints may be set only with an upsert",
        ),
    ],
)
async def test_apply_refuses(start: Start, change: Any, text: str) -> None:
    member = await start()
    details = await refused(stub(member).Apply(pb.ApplyRequest(changes=[change])))
    assert text.lower() in details.lower()


# --- GetHints


async def test_damaged_hints_are_an_error_that_names_the_key(start: Start, etcd: Etcd) -> None:
    member = await start(shard_limit=0)
    spec = shard_spec(SHARD, SOURCE)
    await member.shards.apply_shards([ShardChange(upsert=spec)])
    await etcd.put(spec.hint_backup_keys[1], b"{")
    with pytest.raises(GazetteError, match=spec.hint_backup_keys[1]):
        await member.shards.get_hints(SHARD)
    with pytest.raises(NotFound):
        await member.shards.get_hints(OTHER)


# --- Unassign


async def test_unassign_removes_failed_replicas_and_primaries(
    start: Start, broker: BrokerFixture
) -> None:
    def on_word(word: str) -> None:
        raise ValueError(word)

    member = await start(Tally(RemoteDatabase(), on_word))
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    shard = member.shard(SHARD)
    assert await member.shards.unassign([SHARD], only_failed=True) == ()
    assert await member.shards.unassign([SHARD], dry_run=True) == (SHARD,)
    assert member.shard(SHARD) is shard
    await append(broker, frame("bad"))
    await member.await_failed(SHARD)
    assert await member.shards.unassign([SHARD, OTHER], only_failed=True) == (SHARD,)
    await member.until(lambda: member.service.resolver.local_shards.get(SHARD) not in (None, shard))
    again = member.shard(SHARD)
    await member.await_failed(SHARD)
    assert await member.shards.unassign([SHARD]) == (SHARD,)
    await member.until(lambda: member.service.resolver.local_shards.get(SHARD) not in (None, again))


# --- Authorization


async def test_tokens_bound_what_may_be_seen_and_done(start: Start) -> None:
    keys = auth()
    member = await start(shard_limit=0, auth=keys)
    await member.shards.apply_shards(
        [ShardChange(upsert=shard_spec(SHARD)), ShardChange(upsert=shard_spec(OTHER))]
    )
    only = LabelSelector.of(id=SHARD)

    def bearer(capability: int, selector: LabelSelector = only) -> Any:
        token = keys.sign(Claims(capability, selector), 60.0)
        return (("authorization", f"Bearer {token}"),)

    api = stub(member)
    assert "authorization" in (await refused(api.List(pb.ListRequest()))).lower()
    await refused(api.List(pb.ListRequest(), metadata=bearer(Capability.READ)))
    listed = await api.List(pb.ListRequest(), metadata=bearer(Capability.LIST))
    assert [one.spec.id for one in listed.shards] == [SHARD]
    change = pb.ApplyRequest.Change(delete=OTHER, expect_mod_revision=-1)
    details = await refused(
        api.Apply(pb.ApplyRequest(changes=[change]), metadata=bearer(Capability.APPLY))
    )
    assert details == f"not authorized to {OTHER}"
    hints = await api.GetHints(pb.GetHintsRequest(shard=OTHER), metadata=bearer(Capability.READ))
    assert hints.status == pb.SHARD_NOT_FOUND
    stat = await api.Stat(pb.StatRequest(shard=OTHER), metadata=bearer(Capability.READ))
    assert stat.status == pb.SHARD_NOT_FOUND
    details = await refused(
        api.Unassign(pb.UnassignRequest(shards=[OTHER]), metadata=bearer(Capability.APPLY))
    )
    assert details == f"not authorized to {OTHER}"
    async with ShardClient(member.endpoint) as unsigned:
        with pytest.raises(NotAllowed):
            await unsigned.list_shards()


# --- JSON


async def test_list_and_stat_answer_json(start: Start, broker: BrokerFixture) -> None:
    member = await start(remote(), allow_origins=("https://console",))
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    end = await append(broker, frame("a"))
    async with httpx.AsyncClient(base_url=member.http) as http:
        listed = await http.post("/v1/shards/list", json={}, headers={"origin": "https://console"})
        assert listed.json()["shards"][0]["spec"]["id"] == SHARD
        assert listed.headers["access-control-allow-origin"] == "https://console"
        stat = await http.post(
            "/v1/shards/stat", json={"shard": SHARD, "readThrough": {SOURCE: str(end)}}
        )
        assert stat.json()["readThrough"] == {SOURCE: str(end)}
        bad = await http.post(
            "/v1/shards/stat", content=b"{", headers={"Content-Type": "application/json"}
        )
        assert bad.status_code == 400
        other = await http.post("/v1/shards/list", json={}, headers={"origin": "https://other"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("method", ["Stat", "List", "Apply", "GetHints", "Unassign"])
async def test_strangers_are_refused_by_the_head_of_their_call(method: str, start: Start) -> None:
    """Nothing of their messages is waited for, kept or inflated."""
    member = await start(shard_limit=0, auth=auth())
    target = member.endpoint.removeprefix("http://")
    async with grpc.aio.insecure_channel(target) as channel:
        begin: Any = channel.stream_unary  # The stubs demand what may be left out.
        call = begin(f"/consumer.Shard/{method}")(timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
