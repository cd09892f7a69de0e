"""Hints are written below prefixes that the operator has named, whatever a specification says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.consumer.settings import ConsumerSettings
from gazette.errors import GazetteError, Invalid
from gazette.protocol.hints import FSMHints, decode_hints
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import SHARD, SOURCE, Start, append, frame
from tests.facts import logged, raises

CLOCK = SystemClock()
ELSEWHERE = "/elsewhere/hints"


@pytest.mark.parametrize(
    "prefix",
    ["/", "/gazette", "/gazette/hints-of-others", "/gazette/cluster/items", ELSEWHERE, "/gazette/hintsx"],
)  # fmt: skip
async def test_hints_of_a_call_are_not_written_elsewhere(
    start: Start, etcd: Etcd, prefix: str
) -> None:
    """A token for a shard does not open the keys of others: its hints are at ``{hint_prefix}/{shard}``."""
    member = await start(shard_limit=0)
    spec = shard_spec(SHARD, SOURCE, hint_prefix=prefix)
    change = ShardChange(upsert=spec, primary_hints=FSMHints(log=spec.recovery_log))
    for one in (change, ShardChange(upsert=spec)):
        with raises(GazetteError, code="UNKNOWN", says="--consumer.hint-prefix"):
            await member.shards.apply_shards([one])
    assert await etcd.get(spec.hint_primary_key) is None
    assert (await member.shards.list_shards()).shards == ()


async def test_a_shard_with_hints_elsewhere_is_served_and_they_are_left_alone(
    start: Start, broker: BrokerFixture, etcd: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    """It was applied through a member of the original, or of a former version: what is there is read."""
    spec = shard_spec(SHARD, SOURCE, hint_prefix=ELSEWHERE)
    first = await start(hints_interval_s=0.05, hint_prefixes=(ELSEWHERE,))
    await first.create(spec)
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    while (kv := await etcd.get(spec.hint_primary_key)) is None or not decode_hints(
        kv.value
    ).live_nodes:
        await CLOCK.sleep(0.02)
    await first.stop()

    keys = (spec.hint_primary_key, *spec.hint_backup_keys)
    before = [await etcd.get(key) for key in keys]
    second = await start(id="consumer-two", hints_interval_s=0.02)
    await second.await_primary(SHARD)
    await append(broker, frame("a", 2))
    await second.read_to_heads(SHARD)
    while "hints of shard" not in caplog.text:
        await CLOCK.sleep(0.02)
    logged(caplog, "error", "hint", shard=SHARD)
    assert "--consumer.hint-prefix" in caplog.text
    assert [await etcd.get(key) for key in keys] == before
    got = await second.shards.get_hints(SHARD)
    assert got.primary is not None

    # It can be changed otherwise; hints that come with it are refused.
    changed = replace(spec, hot_standbys=1)
    await second.shards.apply_shards([ShardChange(upsert=changed, expect_mod_revision=-1)])
    hints = FSMHints(log=spec.recovery_log)
    with pytest.raises(GazetteError, match="HintPrefix"):
        await second.shards.apply_shards(
            [ShardChange(upsert=spec, primary_hints=hints, expect_mod_revision=-1)]
        )
    assert [await etcd.get(key) for key in keys] == before
    await second.stop()
    assert [await etcd.get(key) for key in keys] == before


def test_prefixes_of_hints() -> None:
    default = ConsumerSettings(root="/gazette/consumers/app").hint_keys
    assert default.allows("/gazette/hints")
    assert default.allows("/gazette/hints/app")
    assert default.allows("/gazette/consumers/app/hints")
    for other in ("/gazette/hint", "/gazette/hints2", "/gazette/consumers/app/items", "/", ""):
        assert not default.allows(other)
    given = ConsumerSettings(hint_prefixes=("/mine",)).hint_keys
    assert given.allows("/mine/own")
    assert not given.allows("/gazette/hints")


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "/", "hints", "/a/", "/a//b", "/a/../b", "//a", "/gazette", "/gazette/c"),
        *("/gazette/c/items", "/gazette/c/assign/x", "/gazette/c/members"),
    ],
)
def test_prefixes_that_hold_other_keys_are_refused(prefix: str) -> None:
    with pytest.raises(Invalid, match=r"consumer\.hint-prefix"):
        ConsumerSettings(root="/gazette/c", hint_prefixes=(prefix,))
