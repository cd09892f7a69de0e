"""bike-share: cycles as an independent count has them, with both stores, through crashes; and its API."""

from __future__ import annotations

import io
import random
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import httpx
import pytest

from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_TYPE
from gazette.message.envelope_reader import CommittedReader
from gazette.protocol.label_set import LabelSet
from gazette.run.dev.word_count import import_examples
from gazette.runtime.clock import SystemClock
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec

import_examples()

from bike_share.app import BikeShare, BikeShareFlags  # noqa: E402
from bike_share.data import generate, publish, read_csv, write_csv  # noqa: E402
from bike_share.history import WINDOW  # noqa: E402
from bike_share.rides import HEADER, Cycle, Ride  # noqa: E402

from tests.facts import raises  # noqa: E402

RIDES = ("rides/part-000", "rides/part-001")
CYCLES = "cycles/part-000"
STORES = ["sqlite", "sql"]


def generated(rides: int, seed: int = 1, bikes: int = 12) -> list[Ride]:
    rows = generate(random.Random(seed), rides=rides, bikes=bikes, stations_count=30)
    file = io.StringIO()
    write_csv(rows, file)
    return list(read_csv(io.StringIO(file.getvalue())))


def expected_cycles(rides: list[Ride], longer_than: int = 10) -> list[tuple[int, list[str]]]:
    """Find cycles in another way than the application: forwards, with a list of stops for each bike."""
    trails: defaultdict[str, deque[Ride]] = defaultdict(lambda: deque(maxlen=WINDOW))
    found = []
    for ride in rides:
        trail = trails[ride.bike]
        if trail and trail[-1].end.station != ride.start.station:
            trail.clear()  # A truck moved it.
        trail.append(ride)
        for length, earlier in enumerate(reversed(trail), start=1):
            if earlier.start.station == ride.end.station:
                if length > longer_than:
                    last = list(trail)[-length:]
                    steps = [one.start.station for one in last] + [ride.end.station]
                    found.append((int(ride.bike), steps))
                break
    return found


def stations_of(cycle: Cycle) -> tuple[int, list[str]]:
    return cycle.bike, [step.station for step in cycle.steps]


@pytest.fixture(params=STORES)
def flags(request: pytest.FixtureRequest) -> BikeShareFlags:
    if request.param == "sqlite":
        return BikeShareFlags()
    return BikeShareFlags(store="sql", database=request.getfixturevalue("bike_postgres"))


@pytest.fixture
def bike_postgres(postgres_url: str) -> Any:
    from bike_share.sql_history import METADATA

    from gazette.stores.sql.store import shared_engine

    METADATA.create_all(shared_engine(postgres_url, METADATA))
    yield postgres_url
    shared_engine(postgres_url, METADATA).dispose()


def test_generated_files_are_shaped_as_those_of_citi_bike_and_repeatable() -> None:
    rides = generated(300)
    assert rides == generated(300)
    assert rides != generated(300, seed=2)
    assert all(len(ride) == 1 + len(HEADER) for ride in rides)
    assert [ride.end.time for ride in rides] == sorted(ride.end.time for ride in rides)
    assert expected_cycles(generated(2_000)), "there is something to find"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("1,2,3", "16 columns"),
        (",".join("x" * 15), "'x'"),
    ],
)
def test_what_is_no_ride_is_named_by_its_line(line: str, error: str) -> None:
    with raises(Invalid, path="line 2", says=error):
        list(read_csv([",".join(HEADER) + "\n", line + "\n"]))


@pytest.mark.parametrize("store", STORES)
def test_cycles_are_found_exactly_once_through_crashes(store: str, tmp_path: Path) -> None:
    flags = BikeShareFlags(store=store, database=f"sqlite:///{tmp_path}/rides.db")
    rides, rng = generated(500, bikes=5), random.Random(3)
    with AppDriver(
        BikeShare(),
        tmp_path,
        [RIDES[0]],
        content_types={RIDES[0]: CONTENT_CSV},
        journal_labels={CYCLES: {MESSAGE_TYPE: "bike_share.Cycle"}},
        config={"bikeshare": flags},
        log=flags.store == "sqlite",
    ) as driver:
        for ride in rides:
            driver.publish(RIDES[0], ride)
            if rng.random() < 0.05:
                driver.run()
            if rng.random() < 0.02:
                driver.crash()
        driver.run()
        driver.advance(10)
        found = [stations_of(one) for one in driver.committed(CYCLES, Cycle)]
        assert found == expected_cycles(rides)
        assert len(found) > 3
        bike = rides[-1].bike
        kept = [ride for ride in rides if ride.bike == bike][-WINDOW:]
        legs = driver.store.rides_of(int(bike))
        assert [(leg.start, leg.end) for leg in legs] == [(one.start, one.end) for one in kept]


def test_a_row_that_is_no_ride_fails_the_shard(tmp_path: Path) -> None:
    application = BikeShare()
    with AppDriver(
        application, tmp_path, [RIDES[0]], content_types={RIDES[0]: CONTENT_CSV}
    ) as driver:
        driver.feed(RIDES[0], b"00000000-0000-0000-0000-000000000000,1,2,3\n")
        with pytest.raises(Invalid, match="16 columns"):
            driver.run()


async def test_rides_are_published_and_asked_for_on_a_cluster(
    flags: BikeShareFlags, etcd: Etcd, tmp_path: Path
) -> None:
    """Two members, each the primary of one partition; the first one dies in the middle."""
    rides = generated(500, bikes=5)
    clock = SystemClock()

    def labels(kind: str, content: str) -> LabelSet:
        return LabelSet.of((MESSAGE_TYPE, f"bike_share.{kind}"), (CONTENT_TYPE, content))

    members: list[ConsumerFixture] = []
    shards = ("shard-000", "shard-001")
    async with (
        await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker,
        Client(broker.endpoint, clock=clock) as client,
        httpx.AsyncClient(timeout=30) as http,
    ):
        await broker.create(
            *(journal_spec(name, labels=labels("Ride", CONTENT_CSV)) for name in RIDES),
            journal_spec(CYCLES, labels=labels("Cycle", CONTENT_JSON_LINES)),
            *(log_spec(shard) for shard in shards),
        )
        try:
            for name in ("member-one", "member-two"):
                config = {"bikeshare": flags}
                members.append(
                    await ConsumerFixture.start(
                        etcd,
                        broker,
                        BikeShare(),
                        tmp_path,
                        id=name,
                        config=config,
                        lease_ttl_s=60.0,
                    )
                )
            await members[0].create(
                *(
                    shard_spec(shard, journal, log=flags.store == "sqlite", hot_standbys=1)
                    for shard, journal in zip(shards, RIDES, strict=True)
                )
            )
            assert await publish(client, rides[:250]) == 250
            seen = set()
            for shard in shards:
                await members[0].read_to_heads(shard)
            for bike in {ride.bike for ride in rides[:250]}:
                answers = [
                    await http.get(f"{one.http}/api/bikes", params={"id": bike}) for one in members
                ]
                kept = [ride for ride in rides[:250] if ride.bike == bike][-WINDOW:]
                for answer in answers:
                    assert [one["End"]["Station"] for one in answer.json()["rides"]] == [
                        ride.end.station for ride in kept
                    ]
                seen.add(answers[0].json()["shard"])
            assert seen == set(shards), "bikes are spread over the shards"
            assert (await http.get(f"{members[0].http}/api/bikes?id=x")).status_code == 400
            await members[0].die()
            await publish(client, rides[250:])
            for shard in shards:
                await members[1].read_to_heads(shard)
            found = await committed(client)
            assert sorted(found) == sorted(expected_cycles(rides))
            assert len(found) > 3
        finally:
            for member in members:
                await member.crash()


async def committed(client: Client) -> list[tuple[int, list[str]]]:
    reader: CommittedReader[Cycle] = CommittedReader(client, ReadParams(CYCLES), Cycle)
    return [stations_of(one.message) async for batch in reader.batches() for one in batch]
