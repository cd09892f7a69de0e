"""What changes the meaning of a request to a member is honoured or refused: a table over its routes."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gazette import ListPage, Message, ShardRequest, Source, gather_route, list_route, shard_route
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import log_spec, shard_spec
from tests.consumer.apps import Start, Tally, source_spec

PART = "words/part-000"
SHARD = "shard-000"


class Word(Message):
    word: str


class Echo(Tally):
    """Answers what the application got of a request."""

    words = Source("words", Word, key="word")

    def consume_message(self, *_: Any) -> None:
        return None

    @shard_route("/keys/{word}", key="word", methods=["GET", "POST"])
    def of_key(self, store: Any, request: ShardRequest) -> Any:
        return seen(request)

    @shard_route("/shards/{shard}/x", methods=["GET", "POST"])
    def of_shard(self, store: Any, request: ShardRequest) -> Any:
        return seen(request)

    @gather_route("/all", combine=lambda answers: answers[0], methods=["GET", "POST"])
    def of_all(self, store: Any, request: ShardRequest) -> Any:
        return seen(request)

    @list_route("/listed", key=int)
    def listed(self, store: Any, page: ListPage) -> Any:
        return [(1, {"limit": page.limit, **seen(page.request)})]


def seen(request: ShardRequest) -> dict[str, Any]:
    own = {name: text for name, text in request.headers.items() if name.startswith("x-")}
    return {"query": dict(request.query), "headers": own, "body": request.body.decode()}


@pytest.fixture
async def member(start: Start, broker: BrokerFixture) -> AsyncIterator[httpx.AsyncClient]:
    await broker.create(source_spec(PART), log_spec(SHARD))
    found = await start(Echo())
    await found.create(shard_spec(SHARD, PART))
    await found.read_to_heads(SHARD)
    async with httpx.AsyncClient(base_url=found.http) as client:
        yield client


Headers = list[tuple[str, str]]
ROUTES = ["/keys/a", f"/shards/{SHARD}/x", "/all", "/listed"]
REFUSED: list[tuple[str, Headers, int]] = [
    ("?a=1&a=2", [], 400),
    ("?a=1&b=2&a=1", [], 400),
    ("", [("Authorization", "Bearer x"), ("Authorization", "Bearer y")], 400),
    ("", [("X-HTTP-Method-Override", "DELETE")], 400),
    ("", [("Expect", "202-accepted")], 417),
    ("", [("Content-Encoding", "gzip")], 415),
    ("", [("Content-Encoding", "br")], 415),
    ("", [("Content-Encoding", "identity"), ("Content-Encoding", "gzip")], 415),
    ("", [("gazette-max-staleness", "1"), ("gazette-max-staleness", "2")], 400),
    ("", [("gazette-max-staleness", "soon")], 400),
    ("", [("gazette-read-through", "words")], 400),
]
OF_ONE_ROUTE = [
    ("/keys/a?word=b", 400),
    (f"/shards/{SHARD}/x?shard=other", 400),
    ("/listed?limit=0", 400),
    ("/listed?limit=1&limit=2", 400),
    ("/listed?limit=", 400),
    ("/listed?limit=1001", 400),
    ("/listed?after=", 400),
    ("/listed?after=1&after=2", 400),
    ("/listed?after=1.5", 400),
]


async def test_what_no_route_can_honour_is_refused(member: httpx.AsyncClient) -> None:
    """By name, at each kind of route."""
    for route in ROUTES:
        for query, headers, code in REFUSED:
            answer = await member.get(f"{route}{query}", headers=headers)
            assert answer.status_code == code, (route, query, headers, answer.text)
            assert set(answer.json()) == {"error", "hint"}
    for path, code in OF_ONE_ROUTE:
        answer = await member.get(path)
        assert answer.status_code == code, (path, answer.text)
    answer = await member.post(
        "/keys/a", content=gzip.compress(b"x"), headers={"Content-Encoding": "gzip"}
    )
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")


async def test_what_is_honoured_reaches_the_application(member: httpx.AsyncClient) -> None:
    """Parameters of any name are the application's. Lines of a header are one list."""
    headers = [
        ("X-A", "1"),
        ("X-A", "2"),
        ("Content-Encoding", "identity"),
        ("Expect", "100-continue"),
    ]
    expected = {"query": {"a": "", "b": "1"}, "headers": {"x-a": "1, 2"}, "body": ""}
    for route in ROUTES:
        found = (await member.get(f"{route}?a=&b=1", headers=headers)).json()
        if route == "/listed":
            found = found["items"][0]["value"]
            assert found.pop("limit") == 100
        assert found == expected, route
    for route in ROUTES[:3]:
        assert (await member.post(route, content=b"text")).json()["body"] == "text"
    heads = [("gazette-read-through", f"{PART}=0"), ("gazette-read-through", f"{PART}=0")]
    assert (await member.get("/all", headers=heads)).status_code == 200
    for method in ("PUT", "DELETE"):
        assert (await member.request(method, "/keys/a")).status_code == 405


CALLS = {
    "member": ["/v1/shards/list", "/v1/shards/stat"],
    "broker": ["/v1/journals/list", "/v1/journals/read"],
}
REFUSED_CALLS: list[tuple[str, Headers, bytes, int]] = [
    ("?selector=x", [], b"{}", 400),
    ("?", [], b"{", 400),
    ("", [("Content-Encoding", "gzip")], gzip.compress(b"{}"), 415),
    ("", [("Content-Type", "text/plain")], b"{}", 415),
    ("", [("Content-Type", "application/json"), ("Content-Type", "text/plain")], b"{}", 415),
    ("", [("Expect", "202-accepted")], b"{}", 417),
    ("", [("X-Method-Override", "GET")], b"{}", 400),
    ("", [("Authorization", "Bearer x"), ("Authorization", "Bearer y")], b"{}", 400),
    ("", [], b'{"selector": {}, "selector": {}}', 400),
    *(("", [], body, 400) for body in (b"[]", b"null", b'""', b"0", b"false", b"[{}]")),
]


@pytest.mark.parametrize("side", CALLS)
async def test_a_call_as_json_honours_or_refuses_all_that_it_says(
    member: httpx.AsyncClient, broker: BrokerFixture, side: str
) -> None:
    async with httpx.AsyncClient(base_url=broker.http) as of_broker:
        http = member if side == "member" else of_broker
        for path in CALLS[side]:
            for query, headers, body, code in REFUSED_CALLS:
                given = headers
                if not any(name == "Content-Type" for name, _ in headers):
                    given = [*headers, ("Content-Type", "application/json")]
                answer = await http.post(f"{path}{query}", headers=given, content=body)
                assert answer.status_code == code, (path, query, headers, body, answer.text)
                assert answer.json()["error"]["httpCode"] == code
        assert (await http.post(CALLS[side][0], json={})).status_code == 200
        assert (await http.get(CALLS[side][0])).status_code in (405, 501)
