"""Answers of queries as JSON: each value has one form, or is refused by its path."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from gazette import Message, ShardRequest, Source, gather_route, list_route, shard_route
from gazette.consumer.query.all_shards import ListPage
from gazette.consumer.query.answer_json import answer_json
from gazette.errors import Invalid, InvalidValue
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import log_spec, shard_spec
from tests.consumer.apps import Start, Tally, source_spec
from tests.facts import raises
from tests.fuzzing import examples

PARTS = ["words/part-000", "words/part-001"]
SHARDS = ["shard-000", "shard-001"]
NAN = math.nan


class Color(Enum):
    RED = 1
    SEVEN = "7"


class Pair(NamedTuple):
    left: int
    right: str


class Blob(msgspec.Struct):
    data: bytes = b"\x01"
    tags: Any = None


@dataclasses.dataclass
class Row:
    at: datetime
    price: Decimal


AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FORMS: list[tuple[Any, Any]] = [
    (None, None),
    (2**70, 2**70),
    (1.5, 1.5),
    ("\x00é", "\x00é"),
    ((1, (2, "x")), [1, [2, "x"]]),
    (Pair(1, "r"), [1, "r"]),
    ({7: 2}, {"7": 2}),
    ({1.5: 1, Decimal("1.10"): 2}, {"1.5": 1, "1.10": 2}),
    ({date(2026, 1, 2): 1, UUID(int=1): 2}, {"2026-01-02": 1, str(UUID(int=1)): 2}),
    ({Color.RED: 1, Color.SEVEN: 2}, {"1": 1, "7": 2}),
    (Color.RED, 1),
    (AT, "2026-01-02T03:04:05Z"),
    (timedelta(seconds=90), "PT90S"),
    (Decimal("1.10"), "1.10"),
    (Row(AT, Decimal(2)), {"at": "2026-01-02T03:04:05Z", "price": "2"}),
    (Blob(), {"data": base64.b64encode(b"\x01").decode(), "tags": None}),
    (Counter("aab"), {"a": 2, "b": 1}),
    (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ([[Blob(), {}]], [[{"data": "AQ==", "tags": None}, {}]]),
]


@pytest.mark.parametrize(("value", "form"), FORMS)
def test_a_value_has_the_form_of_the_page(value: Any, form: Any) -> None:
    found = json.loads(answer_json(value))
    assert found == form
    assert json.dumps(found) == json.dumps(form)  # Of the same types, and in the same order.


def holding_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


REFUSED: list[tuple[Any, str]] = [
    ({7: 1, "7": 2}, 'answer["7"]'),
    ({"7": 1, 7: 2}, "answer[7]"),
    ({1.5: 1, "1.5": 2}, 'answer["1.5"]'),
    ({Color.SEVEN: 1, "7": 2}, 'answer["7"]'),
    ({Color.SEVEN: 1, 7: 2}, "answer[7]"),
    ([{"a": ({1: 1, "1": 1},)}], 'answer[0]["a"][0]["1"]'),
    ({True: 1}, "answer[True]"),
    ({None: 1}, "answer[None]"),
    ({(1, 2): 1}, "answer[(1, 2)]"),
    ({b"x": 1}, "answer[b'x']"),
    ({NAN: 1}, "answer[nan]"),
    (b"x", "answer"),
    ({"a": [b"x"]}, 'answer["a"][0]'),
    ([bytearray(b"x")], "answer[0]"),
    ([memoryview(b"x")], "answer[0]"),
    ({1, 2}, "answer"),
    ({"a": frozenset()}, 'answer["a"]'),
    (Blob(tags={"x"}), "answer.tags"),
    (Blob(tags={1: 0, "1": 0}), 'answer.tags["1"]'),
    (NAN, "answer"),
    ({"a": [1.0, math.inf]}, 'answer["a"][1]'),
    (Blob(tags=[-math.inf]), "answer.tags[0]"),
    (["\ud800"], "answer[0]"),
    ({"\ud800": 1}, 'answer["\\ud800"]'),
    ([object()], "answer[0]"),
    ({"a": 1j}, 'answer["a"]'),
    ([10**5000], "answer[0]"),
    (holding_itself(), "answer"),
]


@pytest.mark.parametrize(("value", "path"), REFUSED)
def test_what_json_cannot_tell_is_refused_by_its_path(value: Any, path: str) -> None:
    with raises(InvalidValue, path=path):
        answer_json(value)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-20, 20)
    | st.sampled_from([1.0, 7.5, NAN, math.inf, "7", "1.5", b"7", Decimal(7), Color.SEVEN, AT])
    | st.text(max_size=3)
)
KEYS = st.sampled_from([7, "7", 1, "1", True, 1.5, "1.5", Color.SEVEN, Color.RED, Decimal(1), b"7"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS | st.text(max_size=2), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Blob, st.binary(max_size=2), inner)
        | st.sets(st.integers(0, 3), max_size=2)
    ),
    max_leaves=12,
)


def parts(value: Any, declared: bool = False) -> Iterable[Any]:
    """Yield a value and its parts, without bytes in a class, which says what they are."""
    if not (declared and isinstance(value, bytes)):
        yield value
    if isinstance(value, Blob):
        value, declared = [value.tags], True
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(inner, list | tuple | set):
        for part in inner:
            yield from parts(part, declared)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


def size(value: Any) -> int:
    if isinstance(value, Blob):
        return 2 + size(value.tags)
    inner = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(size, inner)) if isinstance(inner, list | tuple | type({}.values())) else 1


@given(value=VALUES)
@settings(max_examples=examples(500))
def test_an_accepted_answer_lacks_nothing(value: Any) -> None:
    """No key is lost to another one, and no part to null. What is refused has a part for it."""
    bad = [
        one
        for one in parts(value)
        if isinstance(one, bytes | set) or (isinstance(one, float) and not math.isfinite(one))
    ]
    try:
        body = answer_json(value)
    except InvalidValue:
        assert bad or any(isinstance(one, dict) for one in parts(value))
        return
    assert not bad
    found = json.loads(body, object_pairs_hook=unique)
    assert size(found) == size(value)


# --- Values of several shards


class Word(Message):
    word: str


def merged(answers: list[dict[int, tuple[str, ...]]]) -> Any:
    """Return numbers as text, to see what `combine` got."""
    return [repr(one) for one in answers]


class Answering(Tally):
    words = Source("words", Word, partitions=2)

    def consume_message(self, *_: Any) -> None:
        return None

    @gather_route("/typed", combine=merged, answer=dict[int, tuple[str, ...]])
    def typed(self, store: Any, request: ShardRequest) -> Any:
        return {7: ("a", "b")}

    @gather_route("/plain", combine=merged)
    def plain(self, store: Any, request: ShardRequest) -> Any:
        return {7: 1} if "7" in request.query else {"7": [1]}

    @gather_route("/collides", combine=lambda answers: {7: answers, "7": 1})
    def collides(self, store: Any, request: ShardRequest) -> Any:
        return 1

    @gather_route("/response", combine=merged)
    def response(self, store: Any, request: ShardRequest) -> Any:
        return Response(b"x")

    @list_route("/listed", key=int)
    def listed(self, store: Any, page: ListPage) -> Any:
        return [(7, (1, b"x"))] if "x" in page.request.query else [(7, (1, {3: "x"}))]

    @shard_route("/shards/{shard}/text")
    def text(self, store: Any, request: ShardRequest) -> Any:
        return {7: 1, "7": 2}


async def test_values_of_shards_are_equal_at_the_member_that_combines_them(
    start: Start, broker: BrokerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.create(*map(source_spec, PARTS), *map(log_spec, SHARDS))
    first = await start(Answering(), id="consumer-0")
    second = await start(Answering(), id="consumer-1")
    await first.create(*map(shard_spec, SHARDS, PARTS))
    for member in (first, second):
        async with httpx.AsyncClient(base_url=member.http) as http:
            assert (await http.get("/typed")).json() == ["{7: ('a', 'b')}"] * 2
            assert (await http.get("/plain")).json() == ["{'7': [1]}"] * 2
            listed = (await http.get("/listed")).json()["items"]
            assert listed == [{"key": 7, "value": [1, {"3": "x"}]}] * 2
            for path, says in (
                ("/plain?7=", ("answer[7]", "dict[int, int]")),
                ("/collides", ('answer["7"]',)),
                ("/listed?x=", ("answer[0][1][1]",)),
                ("/shards/shard-001/text", ('answer["7"]',)),
                ("/response", ("Response",)),
            ):
                caplog.clear()
                answer = await http.get(path)
                assert answer.status_code == 500, path
                shown = " ".join(answer.json().values())
                route = path.partition("?")[0].replace("shard-001", "{shard}")
                errors = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
                # The other member may log its part of the last route after this one has answered.
                logged = [text for text in errors if route in text]
                for text in (shown, *logged):
                    assert [one for one in (*says[:1], route) if one not in text] == [], path
                assert logged, path
                # The other member keeps its hint, and this one says that its log has it.
                if "the log of the peer" not in shown:
                    assert [one for one in says if one not in shown] == [], path


def test_a_type_that_json_cannot_be_read_as_is_refused() -> None:
    with raises(Invalid, path="gather_route.answer"):
        gather_route("/a", combine=len, answer=str | bytes)
