"""List and Apply against a real broker: selection, pages, watches, expectations, authorization."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from starlette.routing import Route

from gazette.auth import Capability, Claims, KeyedAuth, bearer
from gazette.broker.api.list_apply import with_prefix_as_name
from gazette.client.append.appender import AppendParams
from gazette.cluster.allocator.model import item_key
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Op
from gazette.protocol.journal import JournalSpec, Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import call_refused

Change = broker_pb2.ApplyRequest.Change


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        yield broker


def list_call(broker: BrokerFixture, selector: str = "", *, token: str = "", **fields: Any) -> Any:
    parsed = LabelSelector.parse(selector) if selector else LabelSelector()
    request = broker_pb2.ListRequest(selector=parsed.to_pb(), **fields)
    stub = broker.client.channels.journal(broker.endpoint)
    return stub.List(request, metadata=bearer(token))


async def pages(broker: BrokerFixture, selector: str = "", **fields: Any) -> list[Any]:
    return [page async for page in list_call(broker, selector, **fields)]


async def names(broker: BrokerFixture, selector: str = "", **fields: Any) -> list[str]:
    found = await pages(broker, selector, **fields)
    return [journal.spec.name for page in found for journal in page.journals]


async def apply(broker: BrokerFixture, *changes: Change, token: str = "") -> Any:
    stub = broker.client.channels.journal(broker.endpoint)
    request = broker_pb2.ApplyRequest(changes=changes)
    return await stub.Apply(request, metadata=bearer(token))


def upsert(spec: JournalSpec, expect: int = 0) -> Change:
    return Change(upsert=spec.to_pb(), expect_mod_revision=expect)


def labelled(name: str, **labels: str) -> JournalSpec:
    return journal_spec(name, labels=LabelSet.of(*labels.items()))


async def snapshot(stream: Any) -> tuple[int, list[str]]:
    """Return the next snapshot of a watch: its revision and names; its end is an empty message."""
    first = await anext(stream)
    assert first.header.etcd.revision
    found = [journal.spec.name for journal in first.journals]
    while True:
        page = await anext(stream)
        if page == broker_pb2.ListResponse():
            return first.header.etcd.revision, found
        assert not page.HasField("header")
        assert page.journals
        found += [journal.spec.name for journal in page.journals]


# --- List


async def test_selectors_choose_by_labels_and_names(broker: BrokerFixture) -> None:
    await broker.create(
        labelled("a/one", env="prod"),
        labelled("a/two", env="test"),
        labelled("b/three", env="prod"),
    )
    for selector, expected in (
        ("", ["a/one", "a/two", "b/three"]),
        ("env=prod", ["a/one", "b/three"]),
        ("env=prod, name!=b/three", ["a/one"]),
        ("name=a/two", ["a/two"]),
        ("name=a/tw", []),
        ("name:prefix=a/", ["a/one", "a/two"]),
        ("prefix=a/", ["a/one", "a/two"]),
        ("prefix=a/, env=test", ["a/two"]),
        ("prefix != a/", ["b/three"]),
        ("prefix in (a/, b/)", ["a/one", "a/two", "b/three"]),
        ("name in (a/one, b/three)", ["a/one", "b/three"]),
        ("name", ["a/one", "a/two", "b/three"]),
        ("env=none", []),
    ):
        assert await names(broker, selector) == expected, selector


async def test_a_list_has_revisions_routes_and_the_member_that_answered(
    broker: BrokerFixture,
) -> None:
    await broker.create(journal_spec("a/journal"))
    (page,) = await pages(broker)
    (journal,) = page.journals
    assert page.status == Status.OK
    assert page.header.process_id.suffix == "broker-one"
    assert page.header.route.primary == -1
    assert page.header.etcd.revision >= journal.mod_revision == journal.create_revision > 0
    assert journal.route.primary == 0
    assert list(journal.route.endpoints) == [broker.endpoint]
    # Case: nothing matches, and still there is a header.
    (page,) = await pages(broker, "name=nothing")
    assert page.header.etcd.revision
    assert not page.journals


async def test_long_lists_come_in_pages_of_which_the_first_has_the_header(
    broker: BrokerFixture,
) -> None:
    expected = [f"many/{index:03d}" for index in range(60)]
    await apply(broker, *(upsert(journal_spec(name)) for name in expected))
    found = await pages(broker)
    assert [len(page.journals) for page in found] == [25, 25, 10]
    assert [page.HasField("header") for page in found] == [True, False, False]
    assert [journal.spec.name for page in found for journal in page.journals] == expected


async def test_a_watch_sends_a_snapshot_after_every_change_that_concerns_it(
    broker: BrokerFixture,
) -> None:
    call = list_call(broker, "prefix=a/", watch=True)
    stream = aiter(call)
    first, found = await snapshot(stream)
    assert found == []

    await broker.create(journal_spec("a/one"))
    second, found = await snapshot(stream)
    assert found == ["a/one"]
    assert second > first
    # Cases: journals outside of the selector, and assignments, are not news.
    await broker.create(journal_spec("b/other"))
    response = await apply(broker, upsert(journal_spec("a/two", max_append_rate=1)))
    third, found = await snapshot(stream)
    assert (found, third) == (["a/one", "a/two"], response.header.etcd.revision)
    # Case: an edit, and a deletion.
    await apply(broker, upsert(journal_spec("a/one", max_append_rate=2), -1))
    assert (await snapshot(stream))[1] == ["a/one", "a/two"]
    await apply(broker, Change(delete="a/two", expect_mod_revision=-1))
    assert (await snapshot(stream))[1] == ["a/one"]
    call.cancel()


async def test_a_watch_of_many_pages_ends_each_snapshot_with_an_empty_message(
    broker: BrokerFixture,
) -> None:
    expected = [f"many/{index:03d}" for index in range(50)]
    await apply(broker, *(upsert(journal_spec(name)) for name in expected))
    call = list_call(broker, watch=True)
    assert (await snapshot(aiter(call)))[1] == expected
    call.cancel()


async def test_a_resumed_watch_waits_for_something_newer(broker: BrokerFixture) -> None:
    await broker.create(journal_spec("a/one"))
    (page,) = await pages(broker)
    call = list_call(broker, watch=True, watch_resume=page.header)
    stream = aiter(call)
    async with TaskScope("test") as scope:
        waiting = scope.spawn(snapshot(stream), name="snapshot")
        (same,) = await pages(broker)
        assert same.header.etcd.revision == page.header.etcd.revision
        assert not waiting.done()
        await apply(broker, upsert(journal_spec("a/two")))
        revision, found = await waiting
    assert revision > page.header.etcd.revision
    assert found == ["a/one", "a/two"]
    call.cancel()
    # Case: a header of another cluster would wait for ever.
    page.header.etcd.cluster_id += 1
    with call_refused(grpc.StatusCode.UNKNOWN, "WatchResume", str(page.header.etcd.cluster_id)):
        await pages(broker, watch=True, watch_resume=page.header)


async def test_watches_end_cleanly_when_the_broker_stops(etcd: Etcd, tmp_path: Path) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path, graceful_stop_s=30.0, lease_ttl_s=60.0)
    calls = [list_call(broker, watch=True) for _ in range(3)]
    streams = [aiter(call) for call in calls]
    for stream in streams:
        await snapshot(stream)
    await broker.service.stop()
    for call, stream in zip(calls, streams, strict=True):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert await call.code() is grpc.StatusCode.OK
    await broker.crash()


def test_prefixes_are_rewritten_on_both_sides() -> None:
    selector = LabelSelector.parse("prefix in (b/,a/), name=z/z, prefix not in (c/)")
    rewritten = with_prefix_as_name(selector)
    assert str(rewritten) == "name=z/z,name:prefix in (a/,b/),name:prefix!=c/"
    rewritten.validate()
    plain = LabelSelector.parse("env=prod")
    assert with_prefix_as_name(plain) == plain


# --- Apply


async def test_changes_are_made_together_if_every_expectation_holds(
    broker: BrokerFixture,
) -> None:
    created = await apply(broker, upsert(journal_spec("a/one")), upsert(journal_spec("a/two")))
    revision = created.header.etcd.revision
    assert (created.status, revision > 0) == (Status.OK, True)
    # What was applied is seen by a list of the same broker at once, at one revision.
    (page,) = await pages(broker)
    assert {journal.mod_revision for journal in page.journals} == {revision}

    for refused in (
        upsert(journal_spec("a/one"), 0),
        upsert(journal_spec("a/one"), revision + 1),
        Change(delete="a/two", expect_mod_revision=revision + 1),
        upsert(journal_spec("a/three"), revision),
    ):
        failed = await apply(broker, upsert(journal_spec("a/new")), refused)
        assert failed.status == Status.ETCD_TRANSACTION_FAILED
        assert failed.header.etcd.revision >= revision
    assert await names(broker) == ["a/one", "a/two"]

    changed = await apply(
        broker,
        upsert(journal_spec("a/one", max_append_rate=9), revision),
        Change(delete="a/two", expect_mod_revision=revision),
        upsert(journal_spec("a/three"), -1),
    )
    assert changed.status == Status.OK
    (page,) = await pages(broker)
    assert [(j.spec.name, j.spec.max_append_rate) for j in page.journals] == [
        ("a/one", 9),
        ("a/three", 0),
    ]


async def test_fields_of_newer_versions_are_kept(broker: BrokerFixture) -> None:
    """Another broker, or client, may know what we do not."""
    unknown = b"\xfa\x3f\x03new"  # field 1023
    spec = journal_spec("a/journal", suspend=Suspend(SuspendLevel.PARTIAL, 7))
    newer = broker_pb2.JournalSpec.FromString(spec.to_pb().SerializeToString() + unknown)
    key = f"{broker.service.settings.root}/items/a/journal"
    for expect in (0, -1):  # The second time without a suspension: its offset is put back.
        request = broker_pb2.ApplyRequest()
        request.changes.add(expect_mod_revision=expect).upsert.CopyFrom(newer)
        assert (await broker.client.stub().Apply(request)).status == broker_pb2.OK
        stored = await broker.service.context.etcd.get(key)
        assert stored is not None
        assert unknown in stored.value
        assert broker_pb2.JournalSpec.FromString(stored.value).suspend.offset == 7
        newer.ClearField("suspend")


async def test_no_change_at_all_is_fine(broker: BrokerFixture) -> None:
    response = await apply(broker)
    assert response.status == Status.OK
    assert response.header.etcd.revision > 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ([Change()], "Changes[0]: "),
        (
            [upsert(journal_spec("a/one", replication=9))],
            "Changes[0].Upsert: invalid Replication",
        ),
        ([upsert(journal_spec("../a/one"))], "Changes[0].Upsert.Name: "),
        ([Change(delete="a/one")], "Changes[0]"),
        (
            [upsert(journal_spec(f"many/{index}")) for index in range(129)],
            "(129; expected <= 128",
        ),
    ],
)
async def test_what_is_wrong_with_changes_is_said(
    broker: BrokerFixture, changes: list[Change], text: str
) -> None:
    with call_refused(grpc.StatusCode.UNKNOWN, text):
        await apply(broker, *changes)
    assert await names(broker) == []


async def test_as_many_changes_as_etcd_takes_are_applied(broker: BrokerFixture) -> None:
    changes = [upsert(journal_spec(f"many/{index:03d}")) for index in range(128)]
    assert (await apply(broker, *changes)).status == Status.OK
    assert len(await names(broker)) == 128


@pytest.mark.parametrize("expectation", ["any", "exact"])
async def test_resuming_by_leaving_suspend_out_keeps_the_offset(
    broker: BrokerFixture, expectation: str
) -> None:
    """With nothing in the store, only the specification knows where the journal goes on."""
    spec = journal_spec("a/journal", suspend=Suspend(SuspendLevel.FULL, 1234))
    revision = (await apply(broker, upsert(spec))).header.etcd.revision
    expect = -1 if expectation == "any" else revision
    await apply(broker, upsert(replace(spec, suspend=None), expect))
    (page,) = await pages(broker)
    suspend = page.journals[0].spec.suspend
    assert (suspend.level, suspend.offset) == (broker_pb2.JournalSpec.Suspend.NONE, 1234)
    await broker.settled("a/journal")
    result = await broker.client.append(AppendParams("a/journal"), b"on")
    assert result.commit.begin == 1234
    # Case: an explicit suspension, or its end, is taken as it is.
    explicit = replace(spec, suspend=Suspend(SuspendLevel.NONE, 0))
    await apply(broker, upsert(explicit, -1))
    (page,) = await pages(broker)
    assert page.journals[0].spec.suspend.offset == 0


# --- Authorization


async def test_lists_show_and_changes_touch_what_the_token_covers(
    etcd: Etcd, tmp_path: Path
) -> None:
    auth = KeyedAuth.parse(SystemClock(), base64.b64encode(b"k" * 32).decode())

    def token(capability: int, selector: str) -> str:
        return auth.sign(Claims(capability, LabelSelector.parse(selector)), 60)

    async with await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker:
        await broker.create(labelled("a/one", env="prod"), labelled("b/two", env="test"))
        # Case: listing filters, in silence. `prefix` works in claims as in selectors.
        assert await names(broker, token=token(Capability.LIST, "env=prod")) == ["a/one"]
        assert await names(broker, token=token(Capability.LIST, "prefix=b/")) == ["b/two"]
        with call_refused(grpc.StatusCode.UNAUTHENTICATED, "LIST"):
            await names(broker, token=token(Capability.APPLY, "env=prod"))

        # Case: a change outside of the token refuses all of them.
        prod = token(Capability.APPLY, "env=prod")
        for change in (
            upsert(labelled("c/new", env="test")),
            Change(delete="a/one", expect_mod_revision=-1),  # A name is all that a deletion has.
        ):
            with call_refused(grpc.StatusCode.UNAUTHENTICATED, change.delete or change.upsert.name):
                await apply(broker, upsert(labelled("c/ok", env="prod")), change, token=prod)
        assert (await apply(broker, upsert(labelled("c/ok", env="prod")), token=prod)).status == 0
        named = token(Capability.APPLY, "name=a/one")
        deletion = Change(delete="a/one", expect_mod_revision=-1)
        assert (await apply(broker, deletion, token=named)).status == Status.OK

        # Case: a watch ends cleanly when its token expires.
        expiring = auth.sign(Claims(Capability.LIST), -1)
        await asyncio.wait_for(_drained(list_call(broker, watch=True, token=expiring)), 60)


async def _drained(call: Any) -> None:
    async for _ in call:
        pass
    assert await call.code() is grpc.StatusCode.OK


async def test_a_journal_is_not_named_like_a_route(broker: BrokerFixture) -> None:
    """It could not be read over HTTP. One that is there already, as of the original, is kept and changed."""
    fixed = [
        route.path.removeprefix("/")
        for route in broker.service._app().routes
        if isinstance(route, Route) and "{" not in route.path
    ]
    assert {"metrics", "debug/ready", "v1/journals/read"} <= set(fixed)
    for name in (*fixed, "debug/pprof/heap", "v1/orders"):
        for expect in (0, -1):
            with call_refused(grpc.StatusCode.UNKNOWN, "Upsert.Name", name):
                await apply(
                    broker, upsert(journal_spec("a/one")), upsert(journal_spec(name), expect)
                )
    assert await names(broker) == []

    context = broker.service.context
    key = item_key(context.settings.root, "metrics")
    value = journal_spec("metrics").to_pb().SerializeToString()
    put = await context.etcd.txn([], [Op.put(key, value)])
    await context.key_space.wait_for_revision(put.header.revision)
    assert await names(broker) == ["metrics"]
    for expect in (put.header.revision, -1):
        changed = await apply(broker, upsert(journal_spec("metrics", max_append_rate=9), expect))
        assert changed.status == Status.OK
    assert (await apply(broker, upsert(journal_spec("v2/orders")))).status == Status.OK
    deleted = await apply(broker, Change(delete="metrics", expect_mod_revision=-1))
    assert deleted.status == Status.OK
    assert await names(broker) == ["v2/orders"]
