"""Routes that find their shard by a key, and routes that all shards answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import msgspec
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from gazette import (
    Application,
    ListPage,
    Message,
    ShardRequest,
    Source,
    gather_route,
    list_route,
    shard_route,
    shard_rpc,
)
from gazette.auth import Capability, Claims, KeyedAuth
from gazette.client.append.appender import AppendParams
from gazette.consumer.query.all_shards import _Page
from gazette.errors import Invalid
from gazette.message.key_hash import fnv32a
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import consumer_pb2 as pb
from gazette.runtime.clock import SystemClock
from gazette.stores.json_file import JSONFileStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import Start, source_spec
from tests.facts import call_refused, raises

COUNT = 3
WORDS = [f"word-{n:02d}" for n in range(12)]
ODD = ["", "/", "a/b", "%2F", "a%2Fb/", "two\nlines", "\n", "ü/?#", "+ &", "..%2f"]
"""Keys that a path holds only if it is decoded once."""
PARTS = [f"words/part-{n:03d}" for n in range(COUNT)]
SHARDS = [f"shard-{n:03d}" for n in range(COUNT)]


class Word(Message):
    word: str


class Stub:
    """As protoc makes one."""

    def __init__(self, channel: Any) -> None:
        self.Count = channel.unary_unary(
            "/test.Words/Count", pb.StatRequest.SerializeToString, pb.StatResponse.FromString
        )


class Totals(JSONFileStore[dict[str, int]]):
    pass


class Words(Application[Totals]):
    words = Source("words", Word, partitions=COUNT, key="word")

    def __init__(self) -> None:
        self.answered: list[str] = []

    async def initialize(self, service: Any) -> None:
        self.service = service
        method = grpc.unary_unary_rpc_method_handler(
            self.Count, pb.StatRequest.FromString, pb.StatResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler("test.Words", {"Count": method})
        service.grpc_server.add_generic_rpc_handlers((handlers,))

    def new_store(self, shard: Any, recorder: Any) -> Totals:
        return Totals(recorder, dict[str, int], dict)

    def consume_message(self, shard: Any, store: Totals, envelope: Any, publisher: Any) -> None:
        word = envelope.message.word
        store.state[word] = store.state.get(word, 0) + 1

    @shard_route("/counts/{word}", key="word")
    def count(self, store: Totals, request: ShardRequest) -> dict[str, int]:
        self.answered.append(request.path["word"])
        return {"n": store.read().get(request.path["word"], 0)}

    @shard_route("/count", key=lambda request: request.query["w"].lower())
    def count_of(self, store: Totals, request: ShardRequest) -> int:
        return store.read().get(request.query["w"].lower(), 0)

    @shard_route("/counts/{word}", key="word", methods=["DELETE"])
    def no_count(self, store: Totals, request: ShardRequest) -> str:
        return f"{request.method} is not GET"

    @gather_route("/total", combine=sum)
    def total(self, store: Totals, request: ShardRequest) -> Any:
        if request.query.get("as") == "text":
            return PlainTextResponse("1")
        return sum(store.read().values())

    @list_route("/counts", limit=5, limit_max=7)
    def counts(self, store: Totals, page: ListPage) -> Iterable[tuple[str, int]]:
        found = sorted(store.read().items())
        if page.request.query.get("wrong") == "order":
            return found[::-1]
        after = "" if page.after is None else page.after
        return [item for item in found if item[0] > after][: page.limit]

    @list_route("/lengths", key=int)
    def lengths(self, store: Totals, page: ListPage) -> Iterable[tuple[int, str]]:
        found = {len(word): word for word in store.read()}
        after = -1 if page.after is None else page.after
        return [item for item in sorted(found.items()) if item[0] > after][: page.limit]

    @shard_rpc(Stub, key=lambda request: request.extension)
    def Count(self, store: Totals, request: pb.StatRequest) -> pb.StatResponse:
        return pb.StatResponse(read_through={"n": store.read().get(request.extension.decode(), 0)})


async def two_members(
    start: Start, broker: BrokerFixture, odd: Sequence[str] = ()
) -> tuple[ConsumerFixture, ConsumerFixture]:
    """Start members that share the shards of three partitions, which have one of each word."""
    await broker.create(*map(source_spec, PARTS), *map(log_spec, SHARDS))
    for word in (*WORDS, *odd):
        # As every publisher maps it.
        part = PARTS[fnv32a(word.encode()) % COUNT]
        content = json.dumps({"uuid": "", "word": word}).encode() + b"\n"
        await broker.client.append(AppendParams(part), content)
    first = await start(Words(), id="consumer-0")
    second = await start(Words(), id="consumer-1")
    await first.create(*map(shard_spec, SHARDS, PARTS))
    for shard in SHARDS:
        await first.read_to_heads(shard)
    return first, second


async def test_a_key_finds_the_shard_of_its_messages(start: Start, broker: BrokerFixture) -> None:
    members = await two_members(start, broker)
    for member in members:
        async with httpx.AsyncClient(base_url=member.http) as http:
            for word in WORDS:
                assert (await http.get(f"/counts/{word}")).json() == {"n": 1}
                assert (await http.head(f"/counts/{word}")).status_code == 200
                assert (await http.delete(f"/counts/{word}")).json() == "DELETE is not GET"
            assert (await http.get("/count", params={"w": "WORD-03"})).json() == 1
            assert (await http.get("/counts/unknown")).json() == {"n": 0}
        application: Any = member.service.application
        for word in WORDS:
            answer = await application.Count.ask(pb.StatRequest(extension=word.encode()))
            assert answer.value.read_through["n"] == 1
    applications: list[Any] = [member.service.application for member in members]
    answered = [set(one.answered) for one in applications]
    assert all(answered), "each member has answered for some shard"
    assert not answered[0] & answered[1] - {"unknown"}


async def test_a_path_may_hold_any_key(start: Start, broker: BrokerFixture) -> None:
    for member in await two_members(start, broker, ODD):
        async with httpx.AsyncClient(base_url=member.http) as http:
            for word in ODD:
                answer = await http.get(f"/counts/{quote(word, safe='')}")
                assert (answer.status_code, answer.json()) == (200, {"n": 1}), word
            for wrong in ("/counts/%FF", "/counts/a%ED%A0%80"):
                answer = await http.get(wrong)
                assert (answer.status_code, "word" in answer.text) == (400, True)
            assert (await http.get("/counts/a/b")).status_code == 404


async def test_keys_do_not_name_shards_that_a_token_does_not_cover(
    start: Start, broker: BrokerFixture
) -> None:
    """A caller with a token for one shard does not learn which other shards, or partitions, there are."""
    await broker.create(*map(source_spec, PARTS), *map(log_spec, SHARDS))
    keys = KeyedAuth.parse(SystemClock(), base64.b64encode(b"k" * 32).decode())
    member = await start(Words(), auth=keys)
    await member.create(*map(shard_spec, SHARDS, PARTS))
    # A second reader of the last partition: no caller whose token covers both gets an answer.
    await broker.create(log_spec("shard-twin"))
    await member.create(shard_spec("shard-twin", PARTS[2]))
    for shard in SHARDS:
        await member.read_to_heads(shard)

    def asking(selector: LabelSelector) -> dict[str, str]:
        token = keys.sign(Claims(Capability.READ, selector), 60.0)
        return {"authorization": f"Bearer {token}"}

    of_part = {fnv32a(word.encode()) % COUNT: word for word in WORDS}
    metadata = [*asking(LabelSelector.of(id=SHARDS[0])).items()]
    async with (
        httpx.AsyncClient(base_url=member.http) as http,
        grpc.aio.insecure_channel(member.endpoint.removeprefix("http://")) as channel,
    ):
        for at, status in enumerate((200, 404, 404)):
            answer = await http.get(f"/counts/{of_part[at]}", headers=dict(metadata))
            assert answer.status_code == status
            if status == 200:
                continue
            assert "shard-" not in answer.text
            assert "words/" not in answer.text
            question = pb.StatRequest(extension=of_part[at].encode())
            with call_refused(grpc.StatusCode.NOT_FOUND) as caught:
                await Stub(channel).Count(question, metadata=metadata)
            assert "shard-" not in str(caught.value.details())
        # Case: the token covers one of two readers. To this caller there is no other.
        twin = asking(LabelSelector.of(id="shard-twin"))
        assert (await http.get(f"/counts/{of_part[2]}", headers=twin)).status_code == 200
        both = await http.get(f"/counts/{of_part[2]}", headers=asking(LabelSelector()))
        assert (both.status_code, "shard-twin" in both.text) == (400, True)


class Number(Message):
    number: float


class Numbers(Words):
    words: Source[Any] = Source("words", Number, partitions=COUNT, key="number")

    def consume_message(self, shard: Any, store: Totals, envelope: Any, publisher: Any) -> None:
        word = str(envelope.message.number)
        store.state[word] = store.state.get(word, 0) + 1

    @shard_route("/numbers/{number}", key="number")
    def number(self, store: Totals, request: ShardRequest) -> int:
        return store.read().get(str(float(request.path["number"])), 0)


async def test_a_text_of_a_path_is_read_as_the_declared_type(
    start: Start, broker: BrokerFixture
) -> None:
    """A number finds the messages of all texts of this number."""
    await broker.create(*map(source_spec, PARTS), *map(log_spec, SHARDS))
    to_numbers = Numbers.words.mapping()
    for number in range(12):
        part = to_numbers(Number(number=number)).journal
        content = json.dumps({"uuid": "", "number": number}).encode() + b"\n"
        await broker.client.append(AppendParams(part), content)
    member = await start(Numbers())
    await member.create(*map(shard_spec, SHARDS, PARTS))
    for shard in SHARDS:
        await member.read_to_heads(shard)
    async with httpx.AsyncClient(base_url=member.http) as http:
        for number in range(12):
            for text in (str(number), f"{number}.0", f"0{number}", f"{number}e0"):
                assert (await http.get(f"/numbers/{text}")).json() == 1, text
        for text in ("x", "NaN", ""):
            assert (await http.get(f"/numbers/{text}")).status_code == 400


async def test_all_shards_answer_together(start: Start, broker: BrokerFixture) -> None:
    for member in await two_members(start, broker):
        async with httpx.AsyncClient(base_url=member.http) as http:
            answer = await http.get("/total")
            assert (answer.json(), answer.headers["gazette-staleness"]) == (len(WORDS), "0.000")
            heads = [f"{part}={await end_of(broker, part)}" for part in PARTS]
            headers = {"gazette-read-through": ",".join(heads)}
            assert (await http.get("/total", headers=headers)).json() == len(WORDS)
            # Case: what cannot be answered is named.
            answer = await http.get("/total", headers={"gazette-read-through": "other=1"})
            assert (answer.status_code, "no shard reads other" in answer.text) == (400, True)
            answer = await http.get("/total?as=text")
            assert (answer.status_code, "PlainTextResponse" in answer.text) == (500, True)


async def test_a_list_has_pages_of_all_shards(start: Start, broker: BrokerFixture) -> None:
    for member in await two_members(start, broker):
        async with httpx.AsyncClient(base_url=member.http) as http:
            found, after, pages = [], None, 0
            while pages == 0 or after is not None:
                parameters: dict[str, str] = {} if after is None else {"after": after}
                page = (await http.get("/counts", params=parameters)).json()
                found += [(item["key"], item["value"]) for item in page["items"]]
                after, pages = page["next"], pages + 1
            assert found == [(word, 1) for word in WORDS]
            assert pages == 3
            page = (await http.get("/counts", params={"limit": 7, "after": WORDS[6]})).json()
            assert [item["key"] for item in page["items"]] == WORDS[7:]
            assert page["next"] is None
            # Case: equal keys of several shards are on one page.
            page = (await http.get("/lengths?limit=1")).json()
            assert [item["key"] for item in page["items"]] == [len(WORDS[0])] * COUNT
            assert page["duplicates"] == [{"key": len(WORDS[0]), "shards": SHARDS}]
            page = (await http.get(f"/lengths?after={page['next']}")).json()
            assert page == {"items": [], "next": None, "duplicates": []}
            # Case: what cannot be answered is named.
            for query, status, says in (
                ("/counts?limit=8", 400, "limit"),
                ("/counts?limit=x", 400, "limit"),
                ("/lengths?after=x", 400, "after"),
                ("/counts?wrong=order", 500, "is not above"),
            ):
                answer = await http.get(query)
                assert (answer.status_code, says in answer.text) == (status, True), answer.text


async def test_a_part_of_an_answer_is_none(start: Start, broker: BrokerFixture) -> None:
    """A shard that is disabled, or missing, is an error by name."""
    first, _second = await two_members(start, broker)
    word = next(word for word in WORDS if fnv32a(word.encode()) % COUNT == 0)
    disabled = shard_spec(SHARDS[0], PARTS[0], disable=True)
    await first.update(disabled)
    async with httpx.AsyncClient(base_url=first.http) as http:
        for path, status in (("/total", 503), ("/counts", 503), (f"/counts/{word}", 404)):
            answer = await http.get(path)
            assert answer.status_code == status
            assert (SHARDS[0] if status == 503 else PARTS[0]) in answer.text
        # Case: another shard has taken its place. The first one is disabled still.
        await broker.create(log_spec("other"), log_spec("third"))
        await first.create(shard_spec("other", PARTS[0]))
        await first.read_to_heads("other")
        assert (await http.get(f"/counts/{word}")).json() == {"n": 1}
        await first.create(shard_spec("third", PARTS[0]))
        answer = await http.get(f"/counts/{word}")
        assert (answer.status_code, "other, third" in answer.text) == (400, True)


async def end_of(broker: BrokerFixture, journal: str) -> int:
    return (await broker.client.append(AppendParams(journal), b"")).commit.end


class Keyless(Words):
    words = Source("words", Word, partitions=COUNT)


class Twice(Words):
    @shard_route("/total", key="word")
    def another(self, store: Totals, request: ShardRequest) -> int:
        return 0


async def test_two_routes_at_one_place_are_refused(start: Start, broker: BrokerFixture) -> None:
    with raises(Invalid, says="two routes are served at GET /total"):
        await start(Twice())


async def test_a_key_needs_a_source_with_a_key(start: Start, broker: BrokerFixture) -> None:
    with raises(Invalid, path="Keyless", says="no source has a key"):
        await start(Keyless())


def test_decorators_refuse_what_does_not_fit_together() -> None:
    with raises(Invalid, says="key or shard"):
        shard_route("/a", key="a", shard=lambda request: "a")
    with raises(Invalid, says="key or shard"):
        shard_rpc(Stub, key="a", shard=lambda request: "a")
    with raises(Invalid, says="'a'"):
        shard_route("a")
    with raises(Invalid, says="function"):
        shard_route(lambda self, store, request: 1)  # type: ignore[arg-type]
    with raises(Invalid, path="list_route.key"):
        list_route("/a", key=float)  # type: ignore[arg-type]
    with raises(Invalid, path="list_route.limit"):
        list_route("/a", limit=0)


def test_a_driver_knows_the_routes_of_an_application(tmp_path: Any) -> None:
    application = Words()
    with AppDriver(application, tmp_path, [PARTS[0]]) as driver:
        driver.run()
        paths = [path for path, *_ in application.service.routes]
    expected = ["/counts/{word}", "/count", "/counts", "/lengths", "/counts/{word}", "/total"]
    assert paths == expected


# --- Pages


@given(
    shards=st.lists(st.sets(st.integers(0, 30), max_size=20), min_size=1, max_size=4),
    limit=st.integers(1, 6),
    order=st.randoms(use_true_random=False),
)
def test_pages_have_every_item_once(shards: list[set[int]], limit: int, order: Any) -> None:
    """In order, whichever shard answers first, and with equal keys on one page."""
    found: list[tuple[int, int]] = []
    after, following = -1, 0
    while following is not None:
        page = _Page(int, limit)
        answers = list(enumerate(shards))
        order.shuffle(answers)
        for number, keys in answers:
            items = [(key, number) for key in sorted(keys) if key > after][:limit]
            page.add(number, msgspec.json.encode(items))
        result = msgspec.json.decode(page.result([str(n) for n in range(len(shards))]).body)
        items = [(item["key"], item["value"]) for item in result["items"]]
        assert {key for key, _ in items}.isdisjoint(key for key, _ in found)
        found += items
        following = result["next"]
        after = following if following is not None else after
    assert found == sorted((key, number) for number, keys in enumerate(shards) for key in keys)
