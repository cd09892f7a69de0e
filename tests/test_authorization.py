"""Every call and every route, with every kind of token that is not good enough, and with a right one.

Calls come from the service descriptors and routes from the running applications: one that is new, and
has no row here, is a failure.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import httpx
import jwt
import pytest
from starlette.routing import Route as HttpRoute

from gazette.auth import Capability, Claims, KeyedAuth, StaticToken, bearer
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.message.publishing.service import CommitFailed
from gazette.protocol.label_set import EVERYTHING, LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2, consumer_pb2
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.pb.consumer_pb2_grpc import ShardStub
from gazette.protocol.status import ShardStatus, Status
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import STORE, BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.consumer.apps import SHARD, SOURCE, Tally, source_spec
from tests.facts import raises
from tools.simulation.remote_store import RemoteDatabase

JOURNAL: Final = "a/journal"
KEY: Final = b"k" * 32
AUTH: Final = KeyedAuth.parse(SystemClock(), base64.b64encode(KEY).decode())
OTHER: Final = KeyedAuth.parse(SystemClock(), base64.b64encode(b"o" * 32).decode())
ALL: Final = int(Capability.ALL)

UNAUTHENTICATED: Final = "unauthenticated"
"""What a token gets whose selector does not match, where that is an error of its own."""


def token(capability: int, **claims: Any) -> str:
    """Return a token of any claims, signed as it should be."""
    payload = {"cap": capability, "iat": int(SystemClock().now()), **claims}
    return jwt.encode(payload, KEY, algorithm="HS256")


def unsigned(capability: int) -> str:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    expires = int(SystemClock().now()) + 60
    return f"{part({'alg': 'none', 'typ': 'JWT'})}.{part({'cap': capability, 'exp': expires})}."


def bad_headers(required: int) -> dict[str, str | None]:
    """Return ``Authorization`` headers that are refused, by what is wrong with them."""
    now = int(SystemClock().now())
    good = AUTH.sign(Claims(ALL), 60)
    head, payload, signature = good.split(".")
    tampered = jwt.encode({"cap": ALL, "exp": now + 3600}, b"x" * 32).split(".")[1]
    return {
        "no token": None,
        "empty": "",
        "no scheme": good,
        "another scheme": f"Basic {good}",
        "nonsense": "Bearer nonsense",
        "wrong capability": f"Bearer {AUTH.sign(Claims(ALL & ~required), 60)}",
        "no capability": f"Bearer {token(0, exp=now + 60)}",
        "expired": f"Bearer {AUTH.sign(Claims(ALL), -10)}",
        "not valid yet": f"Bearer {token(ALL, exp=now + 3600, nbf=now + 1800)}",
        "of the future": f"Bearer {jwt.encode({'cap': ALL, 'iat': now + 1800, 'exp': now + 3600}, KEY)}",
        "without an end": f"Bearer {token(ALL)}",
        "alg=none": f"Bearer {unsigned(ALL)}",
        "another algorithm": f"Bearer {jwt.encode({'cap': ALL, 'exp': now + 60}, KEY * 2, 'HS512')}",
        "another key": f"Bearer {OTHER.sign(Claims(ALL), 60)}",
        "tampered payload": f"Bearer {head}.{tampered}.{signature}",
        "cut signature": f"Bearer {head}.{payload}.",
        "selector that is no selector": f"Bearer {token(ALL, exp=now + 60, sel='everything')}",
    }


def narrowed(capability: int, **labels: str) -> str:
    return AUTH.sign(Claims(capability, LabelSelector.of(**labels)), 60)


@dataclass(frozen=True)
class Row:
    """A call: what it requires, what to ask, and what a token for something else gets."""

    capability: int
    request: Callable[[], Any]
    elsewhere: Any
    """A status of the response, ``UNAUTHENTICATED``, or ``[]``: none of what there is."""
    right: LabelSelector = EVERYTHING
    """The selector of a token that suffices."""


def _spec() -> broker_pb2.JournalSpec:
    return journal_spec(JOURNAL).to_pb()


def _apply() -> broker_pb2.ApplyRequest:
    change = broker_pb2.ApplyRequest.Change(upsert=_spec(), expect_mod_revision=-1)
    return broker_pb2.ApplyRequest(changes=[change])


def _append() -> list[broker_pb2.AppendRequest]:
    return [
        broker_pb2.AppendRequest(journal=JOURNAL),
        broker_pb2.AppendRequest(content=b"!"),
        broker_pb2.AppendRequest(),
    ]


def _shard_apply() -> consumer_pb2.ApplyRequest:
    spec = shard_spec(SHARD, SOURCE, log=False).to_pb()
    change = consumer_pb2.ApplyRequest.Change(upsert=spec, expect_mod_revision=-1)
    return consumer_pb2.ApplyRequest(changes=[change])


THE_JOURNAL: Final = LabelSelector.of(name=JOURNAL)
THE_SHARD: Final = LabelSelector.of(id=SHARD)
JOURNAL_CALLS: Final = {
    "List": Row(Capability.LIST, broker_pb2.ListRequest, [], THE_JOURNAL),
    "Apply": Row(Capability.APPLY, _apply, UNAUTHENTICATED, THE_JOURNAL),
    "Read": Row(
        Capability.READ,
        lambda: broker_pb2.ReadRequest(journal=JOURNAL),
        Status.JOURNAL_NOT_FOUND,
        THE_JOURNAL,
    ),
    "Append": Row(Capability.APPEND, _append, Status.JOURNAL_NOT_FOUND, THE_JOURNAL),
    # Its one message is made by the test: it has to have a header.
    "Replicate": Row(Capability.REPLICATE, list, Status.JOURNAL_NOT_FOUND, THE_JOURNAL),
    "ListFragments": Row(
        Capability.READ,
        lambda: broker_pb2.FragmentsRequest(journal=JOURNAL),
        Status.JOURNAL_NOT_FOUND,
        THE_JOURNAL,
    ),
    "FragmentStoreHealth": Row(
        Capability.READ,
        lambda: broker_pb2.FragmentStoreHealthRequest(fragment_store=STORE),
        UNAUTHENTICATED,
    ),
}
JSON: Final = {"Content-Type": "application/json"}
CORE_ERROR: Final = "Internal error from Core"
SHARD_CALLS: Final = {
    "Stat": Row(
        Capability.READ,
        lambda: consumer_pb2.StatRequest(shard=SHARD),
        ShardStatus.SHARD_NOT_FOUND,
        THE_SHARD,
    ),
    "List": Row(Capability.LIST, consumer_pb2.ListRequest, [], THE_SHARD),
    "Apply": Row(Capability.APPLY, _shard_apply, UNAUTHENTICATED, THE_SHARD),
    "GetHints": Row(
        Capability.READ,
        lambda: consumer_pb2.GetHintsRequest(shard=SHARD),
        ShardStatus.SHARD_NOT_FOUND,
        THE_SHARD,
    ),
    "Unassign": Row(
        Capability.APPLY,
        lambda: consumer_pb2.UnassignRequest(shards=[SHARD], dry_run=True),
        UNAUTHENTICATED,
        THE_SHARD,
    ),
}


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, auth=AUTH, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(JOURNAL))
        yield broker


@pytest.fixture
async def member(etcd: Etcd, tmp_path: Path) -> AsyncIterator[ConsumerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(source_spec())
        application = Tally(RemoteDatabase())
        async with await ConsumerFixture.start(
            etcd, broker, application, tmp_path, auth=AUTH, lease_ttl_s=60.0
        ) as member:
            await member.create(shard_spec(SHARD, SOURCE, log=False))
            yield member


def replicate_opening(broker: BrokerFixture) -> list[broker_pb2.ReplicateRequest]:
    resolver = broker.service.context.resolver
    found = resolver._find(JOURNAL)
    assert found is not None
    header = broker_pb2.Header(
        process_id=broker.service.process_id.to_pb(),
        route=found.route.to_pb(),
        etcd=resolver.etcd_header().to_pb(),
    )
    proposal = broker_pb2.Fragment(journal=JOURNAL, compression_codec=broker_pb2.NONE)
    return [broker_pb2.ReplicateRequest(header=header, proposal=proposal, acknowledge=True)]


async def outcome(stub: Any, method: Any, request: Any, header: str | None) -> Any:
    """Return the last response of a call; for a code that is not OK, the error.

    A call that the server ends while its first message is being written may lose its code: gRPC's client says
    INTERNAL then, whatever the server had said. It is asked again, as our own clients do.
    """
    while True:
        answer = await outcome_once(stub, method, request, header)
        if not (isinstance(answer, grpc.aio.AioRpcError) and answer.details() == CORE_ERROR):
            return answer


async def outcome_once(stub: Any, method: Any, request: Any, header: str | None) -> Any:
    metadata = () if header is None else (("authorization", header),)
    asked = iter(request) if method.client_streaming else request
    call = getattr(stub, method.name)(asked, metadata=metadata, timeout=20)
    try:
        if not method.server_streaming:
            return await call
        responses = [response async for response in call]
        return responses[-1] if responses else None
    except grpc.aio.AioRpcError as error:
        return error


REFUSED: Final = Counter[str]()
"""How many bad tokens were refused by the running test, for `make hostile`."""


@pytest.fixture(autouse=True)
def _counted(request: pytest.FixtureRequest, record_property: Any) -> Iterator[None]:
    REFUSED.clear()
    yield
    if REFUSED:
        kind = "bad tokens x routes" if "routes" in request.node.name else "bad tokens x calls"
        record_property("hostile", [kind, {**REFUSED, "accepted": 0}])


def assert_refused(answer: Any, why: str) -> None:
    assert isinstance(answer, grpc.aio.AioRpcError), f"{why}: {answer}"
    assert answer.code() is grpc.StatusCode.UNAUTHENTICATED, f"{why}: {answer.details()}"
    REFUSED["refused"] += 1


async def check_call(stub: Any, method: Any, row: Row, request: Callable[[], Any]) -> None:
    for why, header in bad_headers(row.capability).items():
        assert_refused(await outcome(stub, method, request(), header), why)
    # Only the first header counts: a good one behind it changes nothing.
    for labels in ({"name": "b/other", "id": "another"}, {"app": "another"}):
        header = f"Bearer {narrowed(row.capability, **labels)}"
        answer = await outcome(stub, method, request(), header)
        if row.elsewhere is UNAUTHENTICATED:
            assert_refused(answer, "another selector")
        elif row.elsewhere == []:
            assert not list(getattr(answer, "journals", getattr(answer, "shards", ())))
        else:
            assert answer.status == row.elsewhere.value, answer
    right = AUTH.sign(Claims(row.capability, row.right), 60)
    answer = await outcome(stub, method, request(), f"bearer {right}")
    assert not isinstance(answer, grpc.aio.AioRpcError), answer
    assert answer is None or answer.status in (0, Status.OFFSET_NOT_YET_AVAILABLE.value), answer


def methods(descriptor: Any, service: str) -> pytest.MarkDecorator:
    found = descriptor.services_by_name[service].methods
    return pytest.mark.parametrize("method", [pytest.param(one, id=one.name) for one in found])


@methods(broker_pb2.DESCRIPTOR, "Journal")
async def test_calls_of_brokers(broker: BrokerFixture, method: Any) -> None:
    row = JOURNAL_CALLS[method.name]
    async with grpc.aio.insecure_channel(broker.endpoint.removeprefix("http://")) as channel:
        replicates = method.name == "Replicate"

        def request() -> Any:
            return replicate_opening(broker) if replicates else row.request()

        if not replicates:
            await check_call(JournalStub(channel), method, row, request)
            return
        stub = JournalStub(channel)
        for why, header in bad_headers(row.capability).items():
            assert_refused(await outcome(stub, method, request(), header), why)
        header = f"Bearer {narrowed(row.capability, name='b/other')}"
        answer = await outcome(stub, method, request(), header)
        assert answer.status == Status.JOURNAL_NOT_FOUND.value
        # Case: with the right one it learns that its route is of the past.
        (opening,) = request()
        opening.header.route.CopyFrom(broker_pb2.Route(primary=-1))
        header = f"Bearer {narrowed(row.capability, name=JOURNAL)}"
        answer = await outcome(stub, method, [opening], header)
        assert answer.status == Status.WRONG_ROUTE.value


@methods(consumer_pb2.DESCRIPTOR, "Shard")
async def test_calls_of_consumers(member: ConsumerFixture, method: Any) -> None:
    row = SHARD_CALLS[method.name]
    async with grpc.aio.insecure_channel(member.endpoint.removeprefix("http://")) as channel:
        await check_call(ShardStub(channel), method, row, row.request)


# --- Routes

OPEN: Final = frozenset(
    {
        "/debug/ready",
        "/debug/metrics",
        "/metrics",
        "/debug/stacks",
        "/debug/shards",
        "/debug/shards/{shard:path}",
    }
)
"""Diagnostics: for everyone with access to the port (``--debug.private`` takes them off it)."""


@dataclass(frozen=True)
class HttpRow:
    capability: int
    path: str
    content: bytes | None
    right: LabelSelector
    codes: tuple[int, ...]
    """What the right token gets."""
    elsewhere: int
    """What a token for something else gets; 200 has nothing in it."""


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


BROKER_ROUTES: Final = {
    ("/v1/journals/list", "POST"): HttpRow(
        Capability.LIST, "/v1/journals/list", _json(), THE_JOURNAL, (200,), 200
    ),
    ("/v1/journals/read", "POST"): HttpRow(
        Capability.READ, "/v1/journals/read", _json(journal=JOURNAL), THE_JOURNAL, (200,), 200
    ),
    ("/{journal:path}", "GET"): HttpRow(
        Capability.READ, f"/{JOURNAL}", None, THE_JOURNAL, (206, 416), 404
    ),
    ("/{journal:path}", "HEAD"): HttpRow(
        Capability.READ, f"/{JOURNAL}", None, THE_JOURNAL, (206, 416), 404
    ),
    ("/{journal:path}", "PUT"): HttpRow(
        Capability.APPEND, f"/{JOURNAL}", b"!", THE_JOURNAL, (204,), 404
    ),
}
CONSUMER_ROUTES: Final = {
    ("/v1/shards/list", "POST"): HttpRow(
        Capability.LIST, "/v1/shards/list", _json(), THE_SHARD, (200,), 200
    ),
    ("/v1/shards/stat", "POST"): HttpRow(
        Capability.READ, "/v1/shards/stat", _json(shard=SHARD), THE_SHARD, (200,), 200
    ),
}
REFUSED_WHOEVER_ASKS: Final = frozenset({"POST", "DELETE", "PATCH", "OPTIONS"})


async def check_routes(url: str, routes: Any, rows: dict[tuple[str, str], HttpRow]) -> None:
    seen: set[tuple[str, str]] = set()
    async with httpx.AsyncClient(base_url=url) as http:
        for route in routes:
            assert isinstance(route, HttpRoute)
            for verb in sorted(route.methods or ()):
                if route.path in OPEN:
                    assert verb in ("GET", "HEAD")
                    path = route.path.replace("{shard:path}", SHARD)
                    assert (await http.request(verb, path)).status_code == 200
                elif (route.path, verb) in rows:
                    seen.add((route.path, verb))
                    await check_route(http, verb, rows[route.path, verb])
                elif route.path == "/v1/{path:path}" and verb != "OPTIONS":  # No route serves it.
                    assert (await http.request(verb, "/v1/none")).status_code in (404, 501)
                elif verb == "OPTIONS" and route.path.startswith("/v1/"):
                    assert (await http.request(verb, route.path)).content == b""
                else:
                    assert verb in REFUSED_WHOEVER_ASKS, (route.path, verb)
                    response = await http.request(verb, f"/{JOURNAL}")
                    assert response.status_code == 405
    assert seen == set(rows)


async def check_route(http: httpx.AsyncClient, verb: str, row: HttpRow) -> None:
    async def ask(header: str | None) -> httpx.Response:
        headers = {} if header is None else {"Authorization": header}
        return await http.request(verb, row.path, content=row.content, headers=JSON | headers)

    for why, header in bad_headers(row.capability).items():
        response = await ask(header)
        assert response.status_code == 401, f"{why}: {response.status_code} {response.text}"
        REFUSED["refused"] += 1
    raw: Any = {"Authorization": b"Bearer \x80", **JSON}
    response = await http.request(verb, row.path, content=row.content, headers=raw)
    assert response.status_code == 401
    response = await ask(f"Bearer {narrowed(row.capability, name='b/other', id='another')}")
    assert response.status_code == row.elsewhere
    assert '"OK"' not in response.text or '"modRevision"' not in response.text
    response = await ask(f"Bearer {AUTH.sign(Claims(row.capability, row.right), 60)}")
    assert response.status_code in row.codes, response.text


async def test_routes_of_brokers(broker: BrokerFixture) -> None:
    await check_routes(broker.http, broker.service._app().routes, BROKER_ROUTES)


async def test_routes_of_consumers(member: ConsumerFixture) -> None:
    await check_routes(member.http, member.service._all_routes(), CONSUMER_ROUTES)


async def test_private_diagnostics_are_not_on_the_port(etcd: Etcd, tmp_path: Path) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        environment = replace(broker.service.environment, private_diagnostics=True)
        broker.service.environment = environment
        assert not OPEN & {route.path for route in broker.service._app().routes}  # type: ignore[attr-defined]


async def test_the_first_header_is_the_one_that_counts(broker: BrokerFixture) -> None:
    good = AUTH.sign(Claims(Capability.LIST), 60)
    async with grpc.aio.insecure_channel(broker.endpoint.removeprefix("http://")) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="verifying Authorization"):
            metadata = (*bearer("nonsense"), *bearer(good))
            await JournalStub(channel).List(broker_pb2.ListRequest(), metadata=metadata).read()


@pytest.mark.parametrize("keys", ["old", "old,new", "new,old", "new"])
async def test_keys_rotate_while_a_broker_serves(etcd: Etcd, tmp_path: Path, keys: str) -> None:
    """Each step of a rotation takes the tokens of the step before."""
    names = {"old": base64.b64encode(b"o" * 32).decode(), "new": base64.b64encode(KEY).decode()}
    order = ["old", "old,new", "new,old", "new"]

    def auth_of(step: str) -> KeyedAuth:
        return KeyedAuth.parse(SystemClock(), ",".join(names[one] for one in step.split(",")))

    before = order[max(0, order.index(keys) - 1)]
    after = order[min(len(order) - 1, order.index(keys) + 1)]
    async with await BrokerFixture.start(
        etcd, tmp_path, auth=auth_of(keys), lease_ttl_s=60.0
    ) as broker:
        await broker.create(journal_spec(JOURNAL))
        for step in (before, keys, after):
            header = f"Bearer {auth_of(step).sign(Claims(Capability.READ), 60)}"
            async with httpx.AsyncClient(base_url=broker.http) as http:
                response = await http.get(f"/{JOURNAL}", headers={"Authorization": header})
            assert response.status_code in (206, 416), (keys, step)


async def test_a_publisher_without_the_right_to_append_fails_at_once(broker: BrokerFixture) -> None:
    """It does not repeat what is refused until its time is up."""
    labels = LabelSet.of(("content-type", "application/x-ndjson"))
    await broker.create(journal_spec("a/lines", labels=labels))
    reader = StaticToken(AUTH.sign(Claims(Capability.LIST | Capability.READ), 60))
    async with (
        Client(broker.endpoint, signer=reader) as client,
        ClientPublisher(client, timeout_s=3600.0) as publisher,
    ):
        with raises(CommitFailed, says="APPEND"):
            await publisher.publish("a/lines", {"n": 1})


@pytest.mark.parametrize("replication", [1, 2])
async def test_a_broker_whose_token_another_one_refuses_fails_no_append_for_good(
    etcd: Etcd, tmp_path: Path, replication: int
) -> None:
    """As in a rotation of keys that not all brokers have got: the caller's token is right."""
    old, new = base64.b64encode(b"o" * 32).decode(), base64.b64encode(KEY).decode()
    # Both take the client's token of the new key, and only one of them takes those of the old key.
    auths = [KeyedAuth.parse(SystemClock(), text) for text in (f"{old},{new}", new)]
    async with (
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-one", zone="a", auth=auths[0], lease_ttl_s=60.0
        ) as one,
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-two", zone="b", auth=auths[1], lease_ttl_s=60.0
        ),
        Client(one.endpoint, signer=auths[1]) as client,
    ):
        names = [f"a/journal-{number}" for number in range(6)]
        for name in names:
            spec = journal_spec(name, replication=replication)
            await client.apply_journals([JournalChange(upsert=spec)])
        stub = client.channels.journal(one.endpoint)
        codes = set()
        for name in names:
            claims = Claims.of_journal(Capability.APPEND, name)
            metadata = bearer(auths[1].sign(claims, 60))
            status = Status.NO_JOURNAL_PRIMARY_BROKER
            while status is not Status.OK:
                call: Any = stub.Append(metadata=metadata, timeout=20.0)
                for part in (broker_pb2.AppendRequest(journal=name), broker_pb2.AppendRequest()):
                    await call.write(part)
                await call.done_writing()
                try:
                    status = Status.from_pb((await call).status)
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
                    break
        assert codes == {grpc.StatusCode.UNAVAILABLE}
