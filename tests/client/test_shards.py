"""The client of a consumer's Shard service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.auth import Capability, KeyedAuth
from gazette.client.shards import ShardChange, ShardClient
from gazette.errors import Broken, Conflict, GazetteError, Invalid, Moved, NotFound, Unavailable
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.protocol.pb import consumer_pb2, consumer_pb2_grpc
from gazette.protocol.route import EtcdHeader, Header, Route
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSpec
from gazette.protocol.status import ShardStatus
from gazette.runtime.clock import SystemClock
from tests.facts import logged, raises

SPEC = ShardSpec(
    "shard-one",
    recovery_log_prefix="recovery/logs",
    hint_prefix="/hints",
    max_txn_duration_ns=10**9,
)


class StubConsumer(consumer_pb2_grpc.ShardServicer):
    """Answers as scripted, and records what it was asked."""

    def __init__(self) -> None:
        self.id = ProcessId("zone", "consumer-one")
        self.port = 0
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.requests: list[tuple[str, Any, dict[str, Any]]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def header(self, revision: int = 7) -> Header:
        return Header(
            self.id, Route((self.id,), 0, (self.endpoint,)), EtcdHeader(1, 2, revision, 3)
        )

    async def _answer(self, method: str, request: Any, context: Any) -> Any:
        self.requests.append((method, request, dict(context.invocation_metadata())))
        return self.answers[method](request)

    async def Stat(self, request: Any, context: Any) -> Any:
        return await self._answer("Stat", request, context)

    async def List(self, request: Any, context: Any) -> Any:
        return await self._answer("List", request, context)

    async def Apply(self, request: Any, context: Any) -> Any:
        return await self._answer("Apply", request, context)

    async def GetHints(self, request: Any, context: Any) -> Any:
        return await self._answer("GetHints", request, context)

    async def Unassign(self, request: Any, context: Any) -> Any:
        return await self._answer("Unassign", request, context)


@pytest.fixture
async def consumer() -> AsyncIterator[StubConsumer]:
    stub = StubConsumer()
    server = grpc.aio.server()
    consumer_pb2_grpc.add_ShardServicer_to_server(stub, server)
    stub.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield stub
    await server.stop(None)


@pytest.fixture
async def shards(consumer: StubConsumer) -> AsyncIterator[ShardClient]:
    async with ShardClient(consumer.endpoint) as client:
        yield client


async def test_stat_waits_at_the_primary_and_tells_offsets(
    shards: ShardClient, consumer: StubConsumer
) -> None:
    consumer.answers["Stat"] = lambda request: consumer_pb2.StatResponse(
        header=consumer.header().to_pb(),
        read_through={"a/source": 12},
        publish_at={"a/target": 34},
        extension=request.extension,
    )
    stat = await shards.stat("shard-one", {"a/source": 10}, extension=b"app")
    assert stat.read_through == {"a/source": 12}
    assert stat.publish_at == {"a/target": 34}
    assert stat.extension == b"app"
    assert dict(consumer.requests[0][1].read_through) == {"a/source": 10}
    assert shards._endpoint_of("shard-one") == consumer.endpoint


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (ShardStatus.SHARD_NOT_FOUND, NotFound),
        (ShardStatus.NO_SHARD_PRIMARY, Unavailable),
        (ShardStatus.NOT_SHARD_PRIMARY, Moved),
        (ShardStatus.SHARD_STOPPED, Unavailable),
    ],
)
async def test_refusals_are_errors_of_their_kind(
    shards: ShardClient, consumer: StubConsumer, status: ShardStatus, kind: type[GazetteError]
) -> None:
    consumer.answers["Stat"] = lambda _: consumer_pb2.StatResponse(
        status=status.name, header=consumer.header().to_pb()
    )
    with pytest.raises(kind) as caught:
        await shards.stat("shard-one")
    assert caught.value.facts == {"status": status.name, "shard": "shard-one"}


async def test_shards_are_listed_with_their_replicas(
    shards: ShardClient, consumer: StubConsumer
) -> None:
    status = ReplicaStatus(ReplicaCode.FAILED, ("poison",))
    consumer.answers["List"] = lambda _: consumer_pb2.ListResponse(
        header=consumer.header().to_pb(),
        shards=[
            consumer_pb2.ListResponse.Shard(
                spec=SPEC.to_pb(),
                mod_revision=5,
                create_revision=4,
                route=consumer.header().route.to_pb(),
                status=[status.to_pb()],
            )
        ],
    )
    listed = await shards.list_shards(LabelSelector.of(id="shard-one"))
    (shard,) = listed.shards
    assert (shard.spec, shard.mod_revision, shard.create_revision) == (SPEC, 5, 4)
    assert shard.status == (status,)
    assert shard.route.primary_id == consumer.id


async def test_a_shard_that_is_not_understood_is_listed_among_the_others(
    shards: ShardClient, consumer: StubConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """With the greatest duration that fits, in place of the ten thousand years that a message can hold."""
    answer = consumer_pb2.ListResponse(header=consumer.header().to_pb())
    for shard_id in ("shard-one", "shard-two"):
        shard = answer.shards.add(spec=replace(SPEC, id=shard_id).to_pb(), mod_revision=5)
        shard.create_revision = 4
        shard.route.primary = -1
    answer.shards[0].spec.max_txn_duration.seconds = 10_000 * 366 * 86_400
    consumer.answers["List"] = lambda _: answer
    listed = await shards.list_shards()
    assert [shard.spec for shard in listed.shards] == [
        replace(SPEC, max_txn_duration_ns=(1 << 63) - 1),
        replace(SPEC, id="shard-two"),
    ]
    assert "out of range" in logged(caplog, "problem", shard="shard-one")["problem"]


async def test_changes_are_applied_in_batches(shards: ShardClient, consumer: StubConsumer) -> None:
    consumer.answers["Apply"] = lambda _: consumer_pb2.ApplyResponse(
        header=consumer.header(9).to_pb()
    )
    hints = FSMHints(SPEC.recovery_log, (), ())
    changes = [
        ShardChange(upsert=SPEC, primary_hints=hints),
        ShardChange(delete="shard-two", expect_mod_revision=-1),
    ]
    assert (await shards.apply_shards(changes, batch_size=1)).etcd.revision == 9
    first, second = (request.changes for _, request, _ in consumer.requests)
    assert (first[0], second[0]) == (changes[0].to_pb(), changes[1].to_pb())
    assert first[0].primary_hints.log == "recovery/logs/shard-one"
    consumer.answers["Apply"] = lambda _: consumer_pb2.ApplyResponse(
        status=consumer_pb2.ETCD_TRANSACTION_FAILED, header=consumer.header().to_pb()
    )
    with pytest.raises(Conflict):
        await shards.apply_shards(changes)
    with pytest.raises(Invalid):
        await shards.apply_shards([ShardChange()])


async def test_hints_may_be_absent(shards: ShardClient, consumer: StubConsumer) -> None:
    hints = FSMHints("recovery/logs/shard-one", (), ())
    consumer.answers["GetHints"] = lambda _: consumer_pb2.GetHintsResponse(
        header=consumer.header().to_pb(),
        primary_hints=consumer_pb2.GetHintsResponse.ResponseHints(hints=hints.to_pb()),
        backup_hints=[consumer_pb2.GetHintsResponse.ResponseHints()],
    )
    got = await shards.get_hints("shard-one")
    assert (got.primary, got.backups) == (hints, (None,))


async def test_shards_are_unassigned(shards: ShardClient, consumer: StubConsumer) -> None:
    consumer.answers["Unassign"] = lambda request: consumer_pb2.UnassignResponse(
        shards=request.shards[:1]
    )
    ids = await shards.unassign(["shard-one", "shard-two"], only_failed=True, dry_run=True)
    assert ids == ("shard-one",)
    request = consumer.requests[0][1]
    assert (request.only_failed, request.dry_run) == (True, True)
    consumer.answers["Unassign"] = lambda _: consumer_pb2.UnassignResponse(
        status=consumer_pb2.SHARD_NOT_FOUND
    )
    with pytest.raises(NotFound):
        await shards.unassign(["shard-one"])


async def test_answers_that_cannot_be_right_are_the_consumers_fault(
    shards: ShardClient, consumer: StubConsumer
) -> None:
    consumer.answers["Stat"] = lambda _: consumer_pb2.StatResponse()
    with raises(Broken, says="Header.Route"):
        await shards.stat("shard-one")
    with pytest.raises(Invalid):
        await shards.stat("no")


async def test_each_call_claims_what_it_needs(consumer: StubConsumer) -> None:
    auth = KeyedAuth.parse(SystemClock(), "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
    header = consumer.header().to_pb()
    consumer.answers = {
        "Stat": lambda _: consumer_pb2.StatResponse(header=header),
        "List": lambda _: consumer_pb2.ListResponse(header=header),
        "Apply": lambda _: consumer_pb2.ApplyResponse(header=header),
        "GetHints": lambda _: consumer_pb2.GetHintsResponse(header=header),
        "Unassign": lambda _: consumer_pb2.UnassignResponse(),
    }
    async with ShardClient(consumer.endpoint, signer=auth) as client:
        await client.stat("shard-one")
        await client.list_shards()
        await client.apply_shards([])
        await client.get_hints("shard-one")
        await client.unassign(["shard-one", "shard-two"])
    claims = [auth.verify(metadata["authorization"], 0) for _, _, metadata in consumer.requests]
    one = LabelSelector.of(id="shard-one")
    assert [(claim.capability, claim.selector) for claim in claims] == [
        (Capability.READ, one),
        (Capability.LIST, EVERYTHING),
        (Capability.APPLY, EVERYTHING),
        (Capability.READ, one),
        (Capability.APPLY, LabelSelector.of(("id", "shard-one"), ("id", "shard-two"))),
    ]
    now = SystemClock().now()
    assert all(claim.expires_at is not None and claim.expires_at - now <= 60 for claim in claims)
