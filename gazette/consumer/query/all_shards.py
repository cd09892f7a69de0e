"""``@gather_route`` and ``@list_route``: HTTP routes of an application that all shards answer together.

    class WordCount(Application[CountStore]):
        @gather_route("/total", combine=sum)
        def total(self, store: CountStore, request: ShardRequest) -> int:
            return store.total()

        @list_route("/counts")
        def counts(self, store: CountStore, page: ListPage) -> list[tuple[str, int]]:
            return store.counts_after(page.after, page.limit)

An answer has parts from all shards; if one is missing, the request fails. The answer is no snapshot: shards
answer at different moments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, TypeAlias

import msgspec
from starlette.responses import Response

from gazette.auth import Capability
from gazette.consumer.query.query import QueryResult
from gazette.consumer.query.query_method import answering
from gazette.consumer.query.shard_caller import Question
from gazette.consumer.query.shard_route import (
    AskShards,
    HttpAnswer,
    ShardRequest,
    ShardRoute,
    checked_path,
    encoded,
    json_answer,
)
from gazette.errors import Broken, Invalid, NotFound, Unavailable
from gazette.message.values import ValueEncoding
from gazette.protocol.shard import ShardSpec
from gazette.runtime.decoders import json_decoder
from gazette.runtime.numbers import parse_integer
from gazette.runtime.tasks import TaskScope

LIMIT: Final = 100
"""Default number of items on a page."""
LIMIT_MAX: Final = 1000
"""Default of ``limit_max``: the greatest number of items that a request may ask for."""
_AT_ONCE: Final = 16
"""Number of shards that one request asks at the same time. It bounds the memory of a long list."""

ItemKey: TypeAlias = str | int


class ListPage(msgspec.Struct, frozen=True):
    """The part of a list that a shard must return."""

    after: Any
    """The key before the page, of the route's type of keys; None for the first page."""
    limit: int
    """Greatest number of items to return."""
    request: ShardRequest


def gather_route(
    path: str = "",
    *,
    combine: Callable[[list[Any]], Any],
    answer: Any = Any,
    methods: Iterable[str] = ("GET",),
    capability: int = Capability.READ,
    timeout_s: float | None = None,
) -> Callable[[Callable[[Any, Any, ShardRequest], Any]], ShardRoute]:
    """Decorate a method that answers for one shard. ``combine`` makes one answer from the values of all.

    ``combine`` gets the values that the method returned, in order of the shards' ids, and returns the answer.
    It runs on the event loop. Members send values as JSON: ``answer`` is the type of the values, such as
    ``dict[int, int]``. Without ``answer``, a value that JSON does not have is refused, with its path. See
    `shard_route` for the other parameters and for errors. A request fails with ``Unavailable`` if a shard is
    disabled, and with ``NotFound`` if there are no shards.
    """
    encoding: ValueEncoding[Any] = ValueEncoding(answer, path="gather_route.answer")

    def reply(method: Callable[..., Any], store: Any, request: ShardRequest) -> HttpAnswer:
        value = method(store, request)
        with answering(request.route):
            if isinstance(value, Response):
                raise Invalid(
                    f"a {type(value).__name__} cannot be combined with those of other shards",
                    hint="Return a value that can be written as JSON.",
                )
            return json_answer(encoding.encode(value, "answer"))

    def collect(request: ShardRequest) -> _Values:
        return _Values(request.route, combine, encoding)

    path = checked_path(path)
    route = ShardRoute(path, methods, capability, timeout_s, _all_shards(collect), reply)
    return route.decorate("request")


def list_route(
    path: str = "",
    *,
    key: type[ItemKey] = str,
    limit: int = LIMIT,
    limit_max: int = LIMIT_MAX,
    capability: int = Capability.READ,
    timeout_s: float | None = None,
) -> Callable[[Callable[[Any, Any, ListPage], Any]], ShardRoute]:
    """Decorate a method that lists items of one shard. The route lists the items of all shards, in pages.

    The method gets ``(self, store, page)``. It returns at most ``page.limit`` pairs of key and value
    whose keys are above ``page.after``, in ascending order. ``key`` is the type of the keys, str or int.
    Texts are ordered by code points, as by SQLite without a collation.

    The answer is ``{"items": [{"key": …, "value": …}, …], "next": KEY, "duplicates": […]}``. For the next
    page, repeat the request with ``?after=KEY``. On the last page, which may be empty, ``next`` is null.
    ``?limit=N`` may ask for up to ``limit_max`` items. Items of several shards with the same key are together
    on one page, which may then be longer. ``duplicates`` names such a key and its shards. For keys of
    messages, a duplicate shows that some messages were published to a wrong partition. Requests fail as in
    `gather_route`. Raise ``Invalid`` for another ``key``, or unless 1 <= ``limit`` <= ``limit_max``.
    """
    if key not in (str, int):
        raise Invalid(f"keys of a list are str or int, not {key!r}", path="list_route.key")
    if not 1 <= limit <= limit_max:
        raise Invalid(
            f"{limit} items of at most {limit_max} (expected >= 1)", path="list_route.limit"
        )

    def page_of(request: ShardRequest) -> ListPage:
        return _page_of(request, key, limit, limit_max)

    def reply(method: Callable[..., Any], store: Any, request: ShardRequest) -> HttpAnswer:
        page = page_of(request)
        # Take one item more than the limit, to see whether the method ignores the limit.
        items = [
            [item_key, value] for item_key, value in islice(method(store, page), page.limit + 1)
        ]
        _check_order(items, page, key)
        return encoded(items, request.route)

    def collect(request: ShardRequest) -> _Page:
        return _Page(key, page_of(request).limit)

    path = checked_path(path)
    route = ShardRoute(path, ("GET",), capability, timeout_s, _all_shards(collect), reply)
    return route.decorate("page")


def _all_shards(collect: Callable[[ShardRequest], _Values | _Page]) -> AskShards:
    """Return the function that asks all shards and combines their answers.

    ``collect`` makes an empty collection for the answers to one request, or raises ``Invalid``.
    """

    async def answer(asked: Question[HttpAnswer]) -> QueryResult[HttpAnswer]:
        collected = collect(asked.request)
        shards = await asked.service.all_shards(timeout_s=asked.left_s)
        read_through = asked.query.read_through
        _require_answerable(shards, read_through)
        gate = asyncio.Semaphore(_AT_ONCE)
        staleness_s = 0.0

        async def ask_one(number: int, spec: ShardSpec) -> None:
            nonlocal staleness_s
            async with gate:
                # Send only the offsets of this shard's own sources.
                own = {source.journal for source in spec.sources}
                offsets = {name: offset for name, offset in read_through.items() if name in own}
                query = replace(asked.query, shard=spec.id, read_through=offsets)
                answered = await asked.ask(query)
                staleness_s = max(staleness_s, answered.staleness_s)
                collected.add(number, answered.value.body)

        async with TaskScope("all shards") as scope:
            for number, spec in enumerate(shards):
                scope.spawn(ask_one(number, spec), name=spec.id)
        result = collected.result([spec.id for spec in shards])
        return QueryResult(result, None, staleness_s)

    return answer


class _Values:
    """The values of the shards that have answered, and the function that combines all of them."""

    def __init__(
        self, route: str, combine: Callable[[list[Any]], Any], encoding: ValueEncoding[Any]
    ) -> None:
        self._route = route
        self._combine = combine
        self._encoding = encoding
        self._values: dict[int, Any] = {}

    def add(self, number: int, body: bytes) -> None:
        self._values[number] = self._encoding.decode(body, "answer")

    def result(self, shards: Sequence[str]) -> HttpAnswer:
        combined = self._combine([self._values[number] for number in sorted(self._values)])
        return encoded(combined, self._route)


def _check_order(items: Sequence[Sequence[Any]], page: ListPage, kind: type[ItemKey]) -> None:
    """Raise ``Broken`` if a later page would miss or repeat an item, because of the order of these items."""
    problem = ""
    if len(items) > page.limit:
        problem = f"more than the {page.limit} items that were asked for"
    former_key = page.after
    for key, _ in items:
        if type(key) is not kind:
            problem = f"the key {key!r} is of another type than {kind.__name__}"
            break
        if former_key is not None and not former_key < key:
            problem = f"the key {key!r} is not above {former_key!r}"
            break
        former_key = key
    if problem:
        raise Broken(
            f"the list of {page.request.route} cannot be continued: {problem}",
            hint="Return pairs in ascending order of keys: those above page.after, and at most "
            "page.limit.",
        )


def _page_of(request: ShardRequest, kind: type[ItemKey], limit: int, limit_max: int) -> ListPage:
    """Return the page that a request asks for, by default with ``limit`` items. Raise ``Invalid`` for a key
    that is not of the type ``kind``, and unless the request asks for 1 to ``limit_max`` items."""
    text = request.query.get("after")
    try:
        after = text if text is None or kind is str else parse_integer(text)
    except ValueError as error:
        raise Invalid(f"invalid key {text!r} (expected an integer)", path="after") from error
    try:
        limit = parse_integer(request.query.get("limit", str(limit)))
    except ValueError:
        limit = 0  # The check below refuses it.
    if not 1 <= limit <= limit_max:
        raise Invalid(f"invalid limit (expected 1 to {limit_max})", path="limit")
    return ListPage(after, limit, request)


class _Page:
    """The items with the smallest keys, of all shards that have answered."""

    def __init__(self, key: type[ItemKey], limit: int) -> None:
        items: Any = list[tuple[str, msgspec.Raw]] if key is str else list[tuple[int, msgspec.Raw]]
        self._decoder = json_decoder(items)
        self._limit = limit
        self._items: list[tuple[Any, int, msgspec.Raw]] = []
        """Key, number of the shard, and value of each item, in order."""
        self._is_cut = False
        """True if shards may have more items after the items of this page."""

    def add(self, number: int, body: bytes) -> None:
        """Add the items of one shard. Keep the first ``limit`` items, and all items with the last key."""
        pairs = self._decoder.decode(body)
        # A shard that has returned as many items as the limit may have more.
        self._is_cut = self._is_cut or len(pairs) >= self._limit
        items = [*self._items, *((key, number, value) for key, value in pairs)]
        items.sort(key=lambda item: item[:2])  # By key and shard: values may have no order.
        if len(items) > self._limit:
            # Keep all items of the last key, so that the next page can begin after that key.
            last = items[self._limit - 1][0]
            kept = [item for item in items if item[0] <= last]
            self._is_cut = self._is_cut or len(kept) < len(items)
            items = kept
        self._items = items

    def result(self, shards: Sequence[str]) -> HttpAnswer:
        next_key = self._items[-1][0] if self._is_cut and self._items else None
        items = [{"key": key, "value": value} for key, _, value in self._items]
        page = {"items": items, "next": next_key, "duplicates": self._duplicates(shards)}
        return json_answer(msgspec.json.encode(page))  # Shards have checked the values.

    def _duplicates(self, shards: Sequence[str]) -> list[dict[str, Any]]:
        """Return the keys that several shards have."""
        holders: dict[Any, list[str]] = {}
        for key, number, _ in self._items:
            holders.setdefault(key, []).append(shards[number])
        return [{"key": key, "shards": ids} for key, ids in holders.items() if len(ids) > 1]


def _require_answerable(shards: Sequence[ShardSpec], offsets: Iterable[str]) -> None:
    """Raise ``NotFound`` if there are no shards. Raise ``Unavailable`` if one of them is disabled.

    Raise ``Invalid`` if no shard reads a journal of ``offsets``.
    """
    if not shards:
        raise NotFound("no shard exists", hint="Apply specifications of shards.")
    for spec in shards:
        if spec.disable:
            raise Unavailable(
                f"shard {spec.id} is disabled: the answer would lack what it has",
                hint="Enable it, or delete it if other shards have its state.",
                shard=spec.id,
            )
    read = {source.journal for spec in shards for source in spec.sources}
    for journal in offsets:
        if journal not in read:
            raise Invalid(f"no shard reads {journal}", path="gazette-read-through")
