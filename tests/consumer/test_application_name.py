"""Several applications on one etcd prefix, or on one state: refused by name, and never in silence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.consumer.application_name import Owner, name_of
from gazette.consumer.prefix_owner import claim_prefix, decode_owner, owner_key
from gazette.errors import Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.process import ConsumerSpec
from gazette.testing.app_driver import AppDriver, MemoryJournals
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import SHARD, SOURCE, Start, Tally, append, frame
from tests.facts import raises
from tests.support.instant_clock import eventually

ROOT = "/gazette/consumers/test"


class One(Tally):
    application_name = "one"


class Two(Tally):
    application_name = "two"


# --- Names


def test_a_name_is_that_of_the_class_or_its_own() -> None:
    assert name_of(Tally()) == "tests.consumer.apps.Tally"
    assert name_of(One()) == "one"
    for bad in ("a\nb", "  ", "x" * 600):
        with pytest.raises(Invalid, match="application"):
            name_of(type("Bad", (Tally,), {"application_name": bad})())


SCRIPT = """
from gazette.consumer.application_name import name_of
from tests.consumer.apps import Tally

class Counter(Tally):
    pass

if __name__ == "__main__":
    print(name_of(Counter()))
"""


def test_a_script_is_named_after_its_file(tmp_path: Path) -> None:
    """However it is started, `__main__` is no name: every script has it."""
    package = tmp_path / "shop"
    package.mkdir()
    for file in ("counter.py", "__init__.py", "__main__.py"):
        (package / file).write_text(SCRIPT)
    root = Path(__file__).parents[2]
    names = []
    for how in (("shop/counter.py",), ("-m", "shop.counter"), ("-m", "shop")):
        done = subprocess.run(
            [sys.executable, *how],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}:{root}"},
            capture_output=True,
            text=True,
            check=True,
        )
        names.append(done.stdout.strip())
    assert names == ["counter.Counter", "shop.counter.Counter", "shop.Counter"]


# --- One prefix


async def test_a_member_of_another_application_does_not_start(
    start: Start, broker: BrokerFixture, etcd: Etcd
) -> None:
    first = await start(One())
    await first.create(shard_spec(SHARD, SOURCE, hot_standbys=1))
    with raises(Invalid, path="etcd.prefix", says="application one") as no:
        await start(Two(), id="consumer-two")
    assert "--consumer.adopt-from=one" in str(no.value.hint)
    assert len((await etcd.range(f"{ROOT}/members/")).kvs) == 1
    # Another member of the same one does, and the name is in its specification.
    second = await start(One(), id="consumer-two")
    await second.await_standby(SHARD)
    for kv in (await etcd.range(f"{ROOT}/members/")).kvs:
        spec = ConsumerSpec.from_pb(consumer_pb2.ConsumerSpec.FromString(kv.value))
        assert spec.application == "one"
    # The prefix stays its own when no member is left.
    await second.stop()
    await first.stop()
    with raises(Invalid, path="etcd.prefix", says="application one"):
        await start(Two(), id="consumer-three")


async def test_of_two_applications_that_start_at_once_one_is_refused(start: Start) -> None:
    results = await asyncio.gather(
        start(One(), id="consumer-one"),
        start(Two(), id="consumer-two"),
        return_exceptions=True,
    )
    refused = [one for one in results if isinstance(one, BaseException)]
    assert len(refused) == 1
    assert "application one" in str(refused[0])
    assert "application two" in str(refused[0])


async def test_an_application_is_renamed_when_its_members_are_gone(
    start: Start, broker: BrokerFixture, etcd: Etcd
) -> None:
    first = await start(One())
    await first.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    with raises(Invalid, path="etcd.prefix", says="members of application one"):
        await start(Two(), id="consumer-two", adopt_from="one")
    await first.stop()
    second = await start(Two(), id="consumer-two", adopt_from="one")
    await second.await_primary(SHARD)
    assert second.store(SHARD).read() == {"a": 1}
    await second.stop()
    # Once is enough, also for states that have not changed since.
    third = await start(Two(), id="consumer-three")
    await third.await_primary(SHARD)
    with raises(Invalid, path="etcd.prefix", says="application two"):
        await start(One(), id="consumer-one")
    assert (await claim_prefix(etcd, ROOT, "two", "")) == Owner("two", ("one",))


async def test_a_prefix_that_is_given_away_ends_its_members(start: Start, etcd: Etcd) -> None:
    member = await start(One())
    await etcd.put(owner_key(ROOT), b'{"name": "two"}')
    await eventually(lambda: member.service.failure is not None)
    assert "belongs to application two" in str(member.service.failure)


async def test_members_are_found_where_the_owner_was_deleted(start: Start, etcd: Etcd) -> None:
    await start(One())
    await etcd.delete_prefix(owner_key(ROOT))
    with raises(Invalid, path="etcd.prefix", says="members of application one"):
        await start(Two(), id="consumer-two")


async def test_what_is_no_owner_is_an_error(etcd: Etcd) -> None:
    await etcd.put(owner_key(ROOT), b"not JSON")
    with raises(Invalid, says="byte 4"):
        await claim_prefix(etcd, ROOT, "one", "")
    with pytest.raises(Invalid):
        decode_owner(b"{}")


# --- One state


def test_a_state_belongs_to_the_application_that_committed_it(tmp_path: Path) -> None:
    journals = MemoryJournals()
    with AppDriver(One(), tmp_path / "one", [SOURCE], journals=journals) as driver:
        driver.feed(SOURCE, frame("a", 1))
        driver.run()
    with (
        AppDriver(Two(), tmp_path / "two", [SOURCE], journals=journals) as driver,
        raises(NotAllowed, shard="driven-shard", says="application one"),
    ):
        driver.run()
    with AppDriver(One(), tmp_path / "again", [SOURCE], journals=journals) as driver:
        driver.feed(SOURCE, frame("a", 2))
        driver.run()
        assert driver.store.read() == {"a": 2}


async def test_a_shard_with_the_state_of_another_application_fails(
    start: Start, broker: BrokerFixture
) -> None:
    """On another prefix, with the same recovery log."""
    spec = shard_spec(SHARD, SOURCE)
    first = await start(One())
    await first.create(spec)
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    await first.stop()
    second = await start(Two(), id="consumer-two", root="/gazette/consumers/other")
    await second.shards.apply_shards([ShardChange(upsert=spec)])
    text = await second.await_failed(SHARD)
    assert "belongs to application one, and this is application two" in text
    assert "--consumer.adopt-from=one" in text


def test_a_state_without_a_name_is_adopted(tmp_path: Path) -> None:
    """Of an earlier version, or of the original: both skip what they do not know."""
    named = Checkpoint(application="one")
    assert Checkpoint.from_bytes(named.to_bytes()).application == "one"
    assert Checkpoint.from_json(named.to_json()).application == "one"
    assert Checkpoint.from_json(b'{"sources":{}}').application == ""
    assert Checkpoint().to_bytes() == b""
    assert b"application" not in Checkpoint().to_json()
    assert Owner("one").may_open("")
    assert not Owner("one").may_open("two")


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb", "json"])
def test_every_store_keeps_the_name(tmp_path: Path, kind: str) -> None:
    class Mine(One):
        def new_store(self, shard: Any, recorder: Any) -> Any:
            if kind == "sqlite":
                from gazette.stores.sqlite.store import SQLiteStore

                return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS counts (word)")
            if kind == "rocksdb":
                pytest.importorskip("rocksdict")
                from gazette.stores.rocksdb.store import RocksDBStore

                return RocksDBStore(recorder)
            return super().new_store(shard, recorder)

        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            return None

    class Other(Mine):
        application_name = "two"

    journals = MemoryJournals()
    with AppDriver(Mine(), tmp_path / "one", [SOURCE], journals=journals) as driver:
        driver.feed(SOURCE, frame("a", 1))
        driver.run()
    with (
        AppDriver(Other(), tmp_path / "two", [SOURCE], journals=journals) as driver,
        raises(NotAllowed, shard="driven-shard", says="application one"),
    ):
        driver.run()
