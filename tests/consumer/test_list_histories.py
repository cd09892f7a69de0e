"""Requests that all shards answer, by a seed: the answers are those of plain lists, for any shards."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gazette import ListPage, ShardRequest, gather_route, list_route
from gazette.consumer.query.query import EVERYTHING, QueryResult, ShardQuery
from gazette.consumer.query.query_codec import result_headers
from gazette.consumer.query.shard_route import ShardRoute
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.testing.clock import ManualClock
from tests.fuzzing import seeds

JOURNALS: Final = tuple(f"part-{n}" for n in range(6))
AT_ONCE: Final = 16


@dataclass(frozen=True)
class Edition:
    """A state of a shard: its age, the offsets through which it has read, and its items."""

    age_s: float
    offsets: Mapping[str, int]
    items: Mapping[Any, int]


@dataclass
class Shards:
    """A cluster whose shards have several editions of their state, the newest first."""

    rng: random.Random
    editions: dict[str, list[Edition]]
    specs: Sequence[ShardSpec]
    clock: ManualClock = field(default_factory=ManualClock)
    query_timeout_s: float = 60.0
    running: int = 0
    most: int = 0

    async def all_shards(self, *, timeout_s: float | None = None) -> Sequence[ShardSpec]:
        return self.specs

    async def ask_shard(
        self,
        query: ShardQuery,
        serve: Callable[[Any], Any],
        proxy: object,
        *,
        timeout_s: float | None = None,
    ) -> QueryResult[Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(self.rng.randrange(4)):
            await self.clock.sleep(0)
        self.running -= 1
        edition = self.chosen(query.shard, query.read_through, query.max_staleness_s)
        return QueryResult(serve(edition.items), None, edition.age_s)

    def chosen(
        self, shard: str, read_through: Mapping[str, int], max_staleness_s: float | None
    ) -> Edition:
        """Return the oldest edition that may answer."""
        return next(
            one
            for one in reversed(self.editions[shard])
            if one.age_s <= (max_staleness_s or 0)
            and all(one.offsets.get(journal, 0) >= at for journal, at in read_through.items())
        )


def items_of(self: Any, store: Any, page: ListPage) -> Any:
    found = sorted(one for one in store.items() if page.after is None or one[0] > page.after)
    return found[: page.limit]


class Lists:
    @gather_route(combine=list)
    def gathered(self, store: Any, request: ShardRequest) -> int:
        return sum(store.values())

    texts = list_route(limit=3, limit_max=20)(items_of)
    numbers = list_route(key=int, limit=3, limit_max=20)(items_of)


def cluster(rng: random.Random, *, texts: bool) -> Shards:
    keys: list[Any] = ["", "a", "aa", "b", "é", "\uffff", "\U0001f600", "ab", "z"]
    keys = keys if texts else [-5, 0, 1, 2, 9, 10, 11, 100, 1 << 60]
    specs, editions = [], {}
    for number in range(rng.choice((1, 2, 5, 40))):
        own = rng.sample(JOURNALS, rng.randrange(1, 3))
        specs.append(ShardSpec(f"shard-{number:03}", sources=tuple(map(ShardSource, own))))
        editions[specs[-1].id] = [
            Edition(
                rng.randrange(1, 9) * age,
                dict.fromkeys(own, 100 - 40 * (edition > 0) - 10 * age),
                {key: rng.randrange(99) for key in rng.sample(keys, rng.randrange(len(keys)))},
            )
            # The primary has what comes next, what it has now, and standbys have what is older.
            for edition, age in enumerate((0, 0, 1, 2))
        ]
    return Shards(rng, editions, specs)


def wanted(rng: random.Random, shards: Shards) -> tuple[dict[str, int], float | None]:
    read = sorted({source.journal for spec in shards.specs for source in spec.sources})
    offsets = {one: rng.choice((1, 40, 60, 100)) for one in read if not rng.randrange(3)}
    return offsets, rng.choice((None, 0.0, 3.0, 60.0))


async def ask(shards: Shards, route: ShardRoute, want: Any, **query: str) -> tuple[Any, float]:
    offsets, max_staleness_s = want
    values = {"gazette-read-through": ",".join(f"{one}={at}" for one, at in offsets.items())}
    if max_staleness_s is not None:
        values["gazette-max-staleness"] = f"{max_staleness_s}s"
    request = ShardRequest("/", "GET", {}, query, {}, b"")
    answer = await route.answer(shards, request, values, EVERYTHING)  # type: ignore[arg-type]
    return json.loads(answer.value.body), float(result_headers(answer)["gazette-staleness"])


def expected(shards: Shards, want: Any) -> list[tuple[str, Edition]]:
    offsets, max_staleness_s = want
    found = []
    for spec in shards.specs:
        own = {source.journal for source in spec.sources}
        mine = {one: at for one, at in offsets.items() if one in own}
        found.append((spec.id, shards.chosen(spec.id, mine, max_staleness_s)))
    return found


async def check(seed: int) -> None:
    rng = random.Random(seed)
    texts = bool(rng.randrange(2))
    shards = cluster(rng, texts=texts)
    lists: Any = Lists()
    want = wanted(rng, shards)
    states = expected(shards, want)
    oldest = max(one.age_s for _, one in states)

    found, staleness_s = await ask(shards, lists.gathered, want)
    assert found == [sum(one.items.values()) for _, one in states]
    assert staleness_s == oldest

    items = sorted((key, shard, value) for shard, one in states for key, value in one.items.items())
    limit = rng.choice((1, 2, 3, 7, 20))
    route = lists.texts if texts else lists.numbers
    read: list[tuple[Any, int]] = []
    query = {"limit": str(limit)}
    while True:
        page, staleness_s = await ask(shards, route, want, **query)
        assert staleness_s == oldest
        keys = [one["key"] for one in page["items"]]
        assert len(keys) <= limit or keys[limit - 1] == keys[-1]
        assert len(keys) >= limit or page["next"] is None
        holders = {key: [shard for one, shard, _ in items if one == key] for key in keys}
        assert page["duplicates"] == [
            {"key": key, "shards": ids} for key, ids in holders.items() if len(ids) > 1
        ]
        read += [(one["key"], one["value"]) for one in page["items"]]
        if page["next"] is None:
            break
        query["after"] = str(page["next"])
    assert read == [(key, value) for key, _, value in items]
    assert shards.most <= AT_ONCE


async def test_answers_of_all_shards_equal_plain_lists() -> None:
    """Check values, order, pages, ties of shards, ages, and the offsets that each shard waits for."""
    for seed in seeds(150):
        try:
            await check(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
