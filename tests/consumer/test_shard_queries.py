"""Methods and routes that shards answer: ``@shard_rpc`` and ``@shard_route``, at any member."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from starlette.responses import PlainTextResponse

from gazette import ConsumerService, ShardRequest, shard_route, shard_rpc
from gazette.auth import Capability, Claims, KeyedAuth, bearer
from gazette.consumer.query.query_codec import read_through_of
from gazette.consumer.query.shard_route import METHOD
from gazette.errors import Invalid, NotFound
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import consumer_pb2 as pb
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.consumer.apps import SHARD, SOURCE, Counts, Gate, Start, Tally, append, frame
from tests.facts import call_refused, raises
from tests.support.instant_clock import breathe

CLOCK = SystemClock()


class Stub:
    """As protoc makes one, of `/test.Words/Count`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.Count = channel.unary_unary(
            "/test.Words/Count",
            request_serializer=pb.StatRequest.SerializeToString,
            response_deserializer=pb.StatResponse.FromString,
        )


class Api:
    def __init__(self, service: ConsumerService, gate: Callable[[], None] | None) -> None:
        self.service = service
        self.gate = gate
        self.served: list[str] = []

    @shard_rpc(Stub)
    def Count(self, store: Counts, request: pb.StatRequest) -> pb.StatResponse:
        """Count a word."""
        return pb.StatResponse(
            read_through={"count": self.count(store, request.extension.decode())}
        )

    @shard_route()
    def count_of(self, store: Counts, request: ShardRequest) -> Any:
        word = request.query.get("word", "")
        match request.method:
            case "GET" if word == "text":
                return PlainTextResponse("as it is", 202, {"x-own": "yes"})
            case "GET" if word == "cookies":
                reply = PlainTextResponse("two")
                reply.set_cookie("first", "1")
                reply.set_cookie("second", "2")
                return reply
            case "GET" if word == "bytes":
                return object()
            case "POST":
                word = request.json()["word"]
        return {"word": word, "n": self.count(store, word), "route": request.route}

    def count(self, store: Counts, word: str) -> int:
        self.served.append(word)
        if word == "slow" and self.gate is not None:
            self.gate()
        if word == "missing":
            raise NotFound("no such word", hint="Ask for another.")
        return store.read().get(word, 0)


class Words(Tally):
    """Answers what a word's count is."""

    api: Api

    def __init__(self, gate: Callable[[], None] | None = None, views: bool = True) -> None:
        super().__init__()
        self.gate, self.views = gate, views

    async def initialize(self, service: ConsumerService) -> None:
        self.api = Api(service, self.gate)
        method = grpc.unary_unary_rpc_method_handler(
            self.api.Count, pb.StatRequest.FromString, pb.StatResponse.SerializeToString
        )
        service.grpc_server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Words", {"Count": method}),)
        )
        service.add_route("/shards/{shard:path}/count", self.api.count_of, methods=["GET", "POST"])

    def new_view(self, shard: Any, directory: Path) -> Any:
        return (
            Counts.view(dict[str, int], dict) if self.views else super().new_view(shard, directory)
        )


class RocksDBCounts(RocksDBStore):
    """Counts of words, with as much of a dict as `Tally` needs."""

    @property
    def state(self) -> RocksDBCounts:
        return self

    def get(self, key: Any, default: Any = None, **options: Any) -> Any:
        if isinstance(key, bytes):
            return super().get(key, **options)
        value = super().get(key.encode())
        return default if value is None else int(value)

    def __setitem__(self, word: str, n: int) -> None:
        self.put(word.encode(), b"%d" % n)

    def read(self) -> dict[str, int]:
        with self.view() as view:
            return {word.decode(): int(n) for word, n in view.iterate()}


class RocksDBWords(Words):
    """The same, with another store."""

    def new_store(self, shard: Any, recorder: Any) -> Any:
        # So small a table that hardly anything stays in memory.
        return RocksDBCounts(recorder, options=RocksDBOptions(write_buffer_bytes=64 << 10))

    def new_view(self, shard: Any, directory: Path) -> Any:
        return RocksDBCounts.standby_view(directory)


async def members(
    start: Start, broker: BrokerFixture, *applications: Words, **settings: Any
) -> list[ConsumerFixture]:
    """Start members. The first is primary of a shard that has counted one "a", the others its standbys."""
    started: list[ConsumerFixture] = []
    for index, application in enumerate(applications):
        member = await start(application, id=f"consumer-{index}", **settings)
        started.append(member)
        if index == 0:
            await member.create(shard_spec(SHARD, SOURCE, hot_standbys=len(applications) - 1))
            await append(broker, frame("a", 1))
            await member.read_to_heads(SHARD)
        else:
            await member.await_standby(SHARD)
    return started


def question(word: str) -> pb.StatRequest:
    return pb.StatRequest(shard=SHARD, extension=word.encode())


@asynccontextmanager
async def called(member: ConsumerFixture) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(member.endpoint.removeprefix("http://")) as channel:
        yield Stub(channel).Count


async def count(call: Any, word: str, *metadata: tuple[str, str]) -> tuple[int, dict[str, str]]:
    running = call(question(word), metadata=metadata)
    response = await running
    return response.read_through["count"], dict(await running.trailing_metadata())


async def test_an_rpc_is_answered_by_whichever_member_is_asked(
    start: Start, broker: BrokerFixture
) -> None:
    one, two = Words(), Words()
    first, second = await members(start, broker, one, two)
    for member in (first, second):
        async with called(member) as call:
            n, answered = await count(call, "a")
            assert n == 1
            assert answered["gazette-served-by"] == "local#consumer-0"
            assert answered["gazette-staleness"] == "0.000"
            with call_refused(grpc.StatusCode.NOT_FOUND, "no such word") as caught:
                await count(call, "missing")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            with call_refused(grpc.StatusCode.INVALID_ARGUMENT, "shard: ") as caught:
                await call(pb.StatRequest())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert two.api.served == []
    assert Api.Count.__doc__ == "Count a word."


async def test_a_route_is_answered_by_whichever_member_is_asked(
    start: Start, broker: BrokerFixture
) -> None:
    one, two = Words(), Words()
    for member in await members(start, broker, one, two):
        async with httpx.AsyncClient(base_url=f"{member.http}/shards/{SHARD}") as http:
            answer = await http.get("/count", params={"word": "a"})
            assert answer.json() == {"word": "a", "n": 1, "route": "/shards/{shard:path}/count"}
            assert answer.headers["gazette-served-by"] == "local#consumer-0"
            assert (await http.post("/count", json={"word": "a"})).json()["n"] == 1
            # Case: an answer of its own making, and one that cannot be written.
            answer = await http.get("/count", params={"word": "text"})
            assert (answer.status_code, answer.text, answer.headers["x-own"]) == (
                202,
                "as it is",
                "yes",
            )
            # Case: a header twice, of which one would be lost on the way.
            answer = await http.get("/count", params={"word": "cookies"})
            assert answer.status_code == 500
            assert "more than one header set-cookie" in answer.text
            answer = await http.get("/count", params={"word": "bytes"})
            assert (answer.status_code, "not be written as JSON" in answer.text) == (500, True)
            # Case: errors are what they are, with what to do.
            answer = await http.get("/count", params={"word": "missing"})
            assert answer.status_code == 404
            assert answer.json() == {"error": "no such word", "hint": "Ask for another."} or (
                "no such word" in answer.json()["error"]
            )
            assert (await http.post("/count", content=b"{")).status_code == 400
            assert (await http.post("/count", content=b" " * (2 << 20))).status_code == 400
            for header in ({"gazette-max-staleness": "soon"}, {"gazette-read-through": "a=b"}):
                answer = await http.get("/count", headers=header)
                assert (answer.status_code, next(iter(header)) in answer.text) == (400, True)
            answer = await http.get(f"{member.http}/shards/none/count")
            assert (answer.status_code, "does not exist" in answer.text) == (404, True)
    assert two.api.served == []


async def test_own_writes_are_read(start: Start, broker: BrokerFixture) -> None:
    """At any member, and whatever else is allowed."""
    _, second = await members(start, broker, Words(), Words())
    async with httpx.AsyncClient(base_url=f"{second.http}/shards/{SHARD}") as http:
        for n in range(2, 8):
            end = await append(broker, frame("a", n))
            headers = {"gazette-read-through": f"{SOURCE}={end}", "gazette-max-staleness": "60s"}
            answer = await http.get("/count", params={"word": "a"}, headers=headers)
            assert answer.json()["n"] == n


@pytest.mark.parametrize("application", [Words, RocksDBWords])
async def test_a_standby_answers_within_the_staleness_that_is_allowed(
    start: Start, broker: BrokerFixture, application: type[Words]
) -> None:
    if application is RocksDBWords:
        pytest.importorskip("rocksdict")
    first, second = await members(start, broker, application(), application())
    async with called(second) as call:
        n, answered = await count(call, "a", ("gazette-max-staleness", "60"))
        assert (n, answered["gazette-served-by"]) == (1, "local#consumer-1")
        # Case: what was committed since may be missing …
        await append(broker, frame("a", 2))
        await first.read_to_heads(SHARD)
        n, answered = await count(call, "a", ("gazette-max-staleness", "60"))
        assert n == 1
        assert 0 < float(answered["gazette-staleness"]) < 60
        # Case: … but not if the caller wants it.
        n, answered = await count(call, "a", ("gazette-max-staleness", "0.5s"))
        while float(answered["gazette-staleness"]) and n == 1:
            n, answered = await count(call, "a", ("gazette-max-staleness", "0.5s"))
        assert n == 2
        assert (await count(call, "a"))[1]["gazette-served-by"] == "local#consumer-0"
    # Case: the primary's own state is not stale.
    async with called(first) as call:
        _, answered = await count(call, "a", ("gazette-max-staleness", "60"))
        assert answered["gazette-served-by"] == "local#consumer-0"


async def test_standbys_answer_while_there_is_no_primary(
    start: Start, broker: BrokerFixture
) -> None:
    """Also to a member that has no replica itself: it asks them when the primary does not answer."""
    first, _second, third = await members(start, broker, Words(), Words(), Words())
    await third.update(shard_spec(SHARD, SOURCE, hot_standbys=1))
    await third.await_replicas(SHARD, 2)
    without = third if SHARD not in third.service.resolver.local_shards else _second
    await first.crash()
    async with called(without) as call, asyncio.timeout(30):
        n, answered = await count(call, "a", ("gazette-max-staleness", "60"))
    assert n == 1
    assert answered["gazette-served-by"] != "local#consumer-0"


async def test_an_application_without_views_is_asked_at_its_primary(
    start: Start, broker: BrokerFixture
) -> None:
    _, second = await members(start, broker, Words(views=False), Words(views=False))
    async with called(second) as call:
        n, answered = await count(call, "a", ("gazette-max-staleness", "60"))
    assert (n, answered["gazette-served-by"]) == (1, "local#consumer-0")


async def test_a_query_of_a_standby_goes_on_while_it_is_promoted(
    start: Start, broker: BrokerFixture
) -> None:
    gate = Gate()
    first, second = await members(start, broker, Words(), Words(gate))
    async with called(second) as call, TaskScope("test") as scope:
        asked = scope.spawn(count(call, "slow", ("gazette-max-staleness", "60")), name="slow")
        while not gate.entered.is_set():
            await breathe()
        await first.stop()
        await second.await_primary(SHARD)
        assert (await count(call, "a"))[0] == 1
        gate.open()
        _, answered = await asked
        assert float(answered["gazette-staleness"]) > 0
        scratch = second.service.settings.scratch_directory
        assert scratch is not None
        while any(path.name.endswith(".view") for path in scratch.iterdir()):
            await breathe()
    await second.await_primary(SHARD)


async def test_callers_need_a_token_for_the_shard(start: Start, broker: BrokerFixture) -> None:
    keys = KeyedAuth.parse(CLOCK, base64.b64encode(b"k" * 32).decode())
    first, second = await members(start, broker, Words(), Words(), auth=keys)

    def token(capability: int, shard: str = SHARD) -> str:
        return f"Bearer {keys.sign(Claims(capability, LabelSelector.of(id=shard)), 60.0)}"

    for member in (first, second):
        async with called(member) as call, httpx.AsyncClient(base_url=member.http) as http:
            path = f"/shards/{SHARD}/count"
            for value, code, status in (
                (token(Capability.READ), None, 200),
                ("", grpc.StatusCode.UNAUTHENTICATED, 401),
                (token(Capability.LIST), grpc.StatusCode.UNAUTHENTICATED, 401),
                (token(Capability.READ, "another"), grpc.StatusCode.NOT_FOUND, 404),
            ):
                for stale in ((), (("gazette-max-staleness", "60"),)):
                    metadata = (("authorization", value),) if value else ()
                    answer = await http.get(path, headers=dict((*metadata, *stale)))
                    assert answer.status_code == status
                    if code is None:
                        assert (await count(call, "a", *metadata, *stale))[0] == 1
                        continue
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await count(call, "a", *metadata, *stale)
                    assert caught.value.code() is code


async def test_queries_of_this_process(start: Start, broker: BrokerFixture) -> None:
    words = Words()
    (member,) = await members(start, broker, words)
    answer = await words.api.Count.ask(question("a"))
    assert answer.value.read_through["count"] == 1
    assert str(answer.member) == "local#consumer-0"
    with pytest.raises(NotFound):
        await words.api.Count.ask(question("a"), shard="none")
    with pytest.raises(Invalid, match="max_staleness"):
        await words.api.Count.ask(question("a"), max_staleness_s=-1.0)
    words.api.service = None  # type: ignore[assignment]
    with raises(Invalid, says="Api"):
        await words.api.Count.ask(question("a"))
    assert member.service.failure is None


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=-1", "a=1,b", "a=٣"])
def test_read_through_is_checked(text: str) -> None:
    assert read_through_of("a=1, b/c;d=2,a=0,") == {"a": 1, "b/c;d": 2}
    with pytest.raises(Invalid, match="read-through"):
        read_through_of(text)


async def first_line(http: str, head: str) -> bytes:
    """Send the head of a request, and nothing of its body. Return the first line of the answer."""
    address = httpx.URL(http)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(head.encode())
        return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("path", ["/test.Words/Count", METHOD])
@pytest.mark.parametrize("rights", [None, Capability.LIST, Capability.READ])
async def test_a_caller_is_authorized_by_the_head_of_a_call(
    path: str, rights: int | None, start: Start
) -> None:
    """A caller that sends no message waits for nothing if it is a stranger, and else for its message."""
    keys = KeyedAuth.parse(CLOCK, base64.b64encode(b"k" * 32).decode())
    member = await start(Words(), shard_limit=0, auth=keys)
    metadata = () if rights is None else bearer(keys.sign(Claims(rights), 60.0))
    async with grpc.aio.insecure_channel(member.endpoint.removeprefix("http://")) as channel:
        begin: Any = channel.stream_unary  # It may send no message, and does not say so.
        call = begin(path)(metadata=metadata, timeout=20)
        if rights == Capability.READ:
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert caught.value.code() is (
        grpc.StatusCode.INTERNAL if rights == Capability.READ else grpc.StatusCode.UNAUTHENTICATED
    )


@pytest.mark.parametrize("rights", [None, Capability.LIST, Capability.READ])
async def test_a_caller_is_authorized_by_the_head_of_a_request(
    rights: int | None, start: Start
) -> None:
    """The body of a stranger is never read: the answer comes without it."""
    keys = KeyedAuth.parse(CLOCK, base64.b64encode(b"k" * 32).decode())
    member = await start(Words(), shard_limit=0, auth=keys)
    head = f"POST /shards/{SHARD}/count HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4194304\r\n"
    for name, value in () if rights is None else bearer(keys.sign(Claims(rights), 60.0)):
        head += f"{name}: {value}\r\n"
    if rights == Capability.READ:
        head += "Expect: 100-continue\r\n"  # The server asks for the body now.
    line = await first_line(member.http, f"{head}\r\n")
    assert line.split()[1] == (b"100" if rights == Capability.READ else b"401")
