"""stream-sum: what it publishes, with every store, through crashes; and what its verifier finds."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gazette.client.client import Client
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Corrupt
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.run.dev.word_count import import_examples
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec

import_examples()

from stream_sum.app import StreamSumFlags, Summer  # noqa: E402
from stream_sum.load import Load, LoadSettings  # noqa: E402
from stream_sum.messages import Chunk, Receipt, Sum, crc64  # noqa: E402
from stream_sum.state import STORE_LABEL, STORES, Totals  # noqa: E402
from stream_sum.verifier import Verifier  # noqa: E402

from tests.facts import raises  # noqa: E402

CHUNKS = "chunks/part-000"
SUMS = ("sums/part-000", "sums/part-001")
RECEIPTS = "receipts/part-000"


def needs(store: str) -> None:
    """Skip where the package of a store is not installed."""
    if store in ("rocksdb", "sql"):
        pytest.importorskip({"rocksdb": "rocksdict", "sql": "sqlalchemy"}[store])


def driver_of(store: str, tmp_path: Path) -> AppDriver[Any]:
    needs(store)
    types = dict.fromkeys(SUMS, "stream_sum.Sum") | {RECEIPTS: "stream_sum.Receipt"}
    return AppDriver(
        Summer(),
        tmp_path,
        [CHUNKS],
        log=store != "sql",
        labels=LabelSet.of((STORE_LABEL, store)),
        journal_labels={name: {MESSAGE_TYPE: kind} for name, kind in types.items()},
        config={"streamsum": StreamSumFlags(database=f"sqlite:///{tmp_path}/state.db")},
    )


def stream(rng: random.Random, verifier: Verifier, chunks: int) -> list[Chunk]:
    """Return a whole stream, of which the verifier knows."""
    key, value = rng.randbytes(16), 0
    result = []
    for seq_no in range(1, chunks + 2):
        data = rng.randbytes(20) if seq_no <= chunks else b""
        value = crc64(data, value)
        result.append(Chunk(id=tuple(key), seq_no=seq_no, data=data))
    verifier.expect(key, chunks + 1, value)
    return result


def read(driver: AppDriver[Any], verifier: Verifier) -> Verifier:
    for journal in SUMS:
        for one in driver.committed(journal, Sum):
            verifier.on_sum(journal, one)
    for receipt in driver.committed(RECEIPTS, Receipt):
        verifier.on_receipt(receipt)
    verifier.finish()
    verifier.check_totals(driver.spec.id, driver.store.totals())
    return verifier


def test_the_sum_is_the_checksum_of_the_original() -> None:
    assert crc64(b"battery horse") == 0xAE763109C1192ED6
    assert crc64(b" horse", crc64(b"battery")) == 0xAE763109C1192ED6


@pytest.mark.parametrize("store", STORES)
def test_sums_and_receipts_are_exact_through_crashes(store: str, tmp_path: Path) -> None:
    """Crashes at every point of interleaved streams: each sum once, each receipt, and the right state."""
    verifier, rng = Verifier(), random.Random(7)
    streams = [stream(rng, verifier, rng.randint(0, 6)) for _ in range(12)]
    interleaved: list[Chunk] = []
    while streams := [one for one in streams if one]:
        interleaved.append(rng.choice(streams).pop(0))
    with driver_of(store, tmp_path) as driver:
        for chunk in interleaved:
            driver.publish(CHUNKS, chunk)
            if rng.random() < 0.3:
                driver.run()
            if rng.random() < 0.1:
                # Output that is on its way is lost with the process, or written twice.
                driver.journals.holds = lambda journal, _: journal in (RECEIPTS, SUMS[0])
            if rng.random() < 0.2:
                driver.journals.doubles = lambda journal, _: rng.random() < 0.5
            if rng.random() < 0.2:
                driver.crash()
                driver.journals.release()
        driver.journals.release()
        driver.crash()
        driver.run()
        driver.advance(10)
        read(driver, verifier)
    assert verifier.violations == []
    assert verifier.verified == 12


@pytest.mark.parametrize("seq_no", [2, 4])
def test_a_chunk_out_of_order_fails_the_shard(seq_no: int, tmp_path: Path) -> None:
    """What a broken store or sequencer would show: a chunk that was summed already, or one left out."""
    with driver_of("json", tmp_path) as driver:
        one, two, *_ = stream(random.Random(1), Verifier(), 3)
        driver.publish(CHUNKS, one, two)
        driver.run()
        driver.publish(CHUNKS, Chunk(id=two.id, seq_no=seq_no, data=two.data))
        with raises(Corrupt, "offset", journal=CHUNKS, says=f"chunk {seq_no}"):
            driver.run()
        driver.crash()
        with pytest.raises(Corrupt):
            driver.run()  # It stays in the journal: this is for people to look at.


class Output:
    """What two transactions of a shard publish, for tests that damage it."""

    def __init__(self, tmp_path: Path) -> None:
        self.verifier = Verifier()
        rng = random.Random(3)
        with driver_of("json", tmp_path) as driver:
            for _ in range(2):
                for _ in range(6):
                    driver.publish(CHUNKS, *stream(rng, self.verifier, 2))
                driver.run()
                driver.advance(10)
            self.sums = [(name, one) for name in SUMS for one in driver.committed(name, Sum)]
            self.receipts = driver.committed(RECEIPTS, Receipt)
            self.totals: Totals = driver.store.totals()
        assert len(self.receipts) >= 2
        assert {name for name, _ in self.sums} == set(SUMS)

    def kinds(self) -> set[str]:
        for journal, one in self.sums:
            self.verifier.on_sum(journal, one)
        for receipt in self.receipts:
            self.verifier.on_receipt(receipt)
        self.verifier.finish()
        self.verifier.check_totals("driven-shard", self.totals)
        return {violation.kind for violation in self.verifier.violations}


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path)


def test_nothing_is_found_where_nothing_is_wrong(output: Output) -> None:
    assert output.kinds() == set()
    assert output.verifier.verified == 12


def test_output_that_comes_twice_is_found(output: Output) -> None:
    """The original's verifier passes over it."""
    output.sums.append(output.sums[0])
    assert output.kinds() == {"duplicate", "torn", "state"}


def test_a_sum_that_is_missing_is_found(output: Output) -> None:
    del output.sums[3]
    assert output.kinds() == {"missing", "torn", "state"}


def test_a_transaction_that_shows_in_one_journal_only_is_found(output: Output) -> None:
    output.sums = [(name, one) for name, one in output.sums if name != SUMS[1]]
    assert "torn" in output.kinds()


def test_a_receipt_that_is_missing_is_found(output: Output) -> None:
    del output.receipts[0]
    assert output.kinds() == {"lost", "torn"}


def test_the_last_receipt_missing_is_found(output: Output) -> None:
    output.receipts.pop()
    assert output.kinds() == {"torn", "state"}


def test_a_receipt_that_comes_twice_is_found(output: Output) -> None:
    output.receipts.append(output.receipts[0])
    assert output.kinds() == {"repeated"}


def test_a_wrong_sum_is_found(output: Output) -> None:
    output.sums[0][1].value ^= 1
    assert output.kinds() == {"wrong", "torn"}


def test_a_sum_of_no_stream_is_found(output: Output) -> None:
    journal, one = output.sums[0]
    output.sums.append((journal, Sum(id=(1,) * 16, seq_no=2, value=3, shard=one.shard)))
    assert output.kinds() == {"unknown", "state"}


def test_an_old_state_is_found(output: Output) -> None:
    output.totals = replace(output.totals, transactions=output.totals.transactions - 1)
    assert output.kinds() == {"state"}


def test_streams_without_a_sum_are_late_in_time() -> None:
    verifier = Verifier()
    verifier.expect(b"k" * 16, 2, 3)
    assert verifier.overdue(1e9, 40.0) == []  # It has not ended yet.
    verifier.ended(b"k" * 16, 100.0)
    assert verifier.overdue(139.0, 40.0) == []
    assert [one.kind for one in verifier.overdue(141.0, 40.0)] == ["late"]


async def test_streams_are_summed_on_a_cluster_through_a_fail_over(
    etcd: Etcd, tmp_path: Path
) -> None:
    """Four shards on four stores, two members, one of which dies in the middle."""
    needs("rocksdb")
    needs("sql")
    types = {
        "Chunk": [f"chunks/part-{n:03d}" for n in range(4)],
        "Sum": SUMS,
        "Receipt": [RECEIPTS],
    }
    config = {"streamsum": StreamSumFlags(database=f"sqlite:///{tmp_path}/state.db")}
    clock = SystemClock()
    verifier = Verifier()
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        for kind, names in types.items():
            labels = LabelSet.of(
                (MESSAGE_TYPE, f"stream_sum.{kind}"), (CONTENT_TYPE, CONTENT_JSON_LINES)
            )
            await broker.create(*(journal_spec(name, labels=labels) for name in names))
        ids = [f"shard-{store}" for store in STORES]
        await broker.create(*(log_spec(one) for one in ids[:3]))
        members = [
            await ConsumerFixture.start(
                etcd, broker, Summer(), tmp_path, id=name, config=config, lease_ttl_s=60.0
            )
            for name in ("member-one", "member-two")
        ]
        try:
            specs = [
                shard_spec(
                    one,
                    source,
                    log=store != "sql",
                    hot_standbys=1,
                    max_txn_duration_ns=100_000_000,
                    labels=LabelSet.of((STORE_LABEL, store)),
                )
                for one, source, store in zip(ids, types["Chunk"], STORES, strict=True)
            ]
            await members[0].create(*specs)
            async with Client(broker.endpoint, clock=clock) as client:
                settings = LoadSettings(workers=8, chunks=5, pause_s=0.01, streams=80, offset=0)
                finished: list[Any] = []

                def on_finished(one: Any) -> None:
                    finished.append(one)

                load = Load(client, verifier, clock, random.Random(5), settings, on_finished)
                async with TaskScope("test") as scope:
                    scope.spawn(load.run(), name="load")
                    while len(finished) < 30:
                        await clock.sleep(0.02)
                    await members[0].die()
            verifier.finish()
            assert verifier.violations == []
            assert verifier.verified == 80
            async with httpx.AsyncClient(timeout=30.0) as http:
                for one in ids:
                    answer = await http.get(f"{members[1].http}/shards/{one}/totals")
                    verifier.check_totals(one, Totals(**answer.json()))
            assert verifier.violations == []
        finally:
            for member in members:
                await member.crash()
