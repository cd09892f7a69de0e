"""List, watch, apply, fragments and store health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial

import pytest

from gazette.auth import Capability, KeyedAuth
from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, JournalChange
from gazette.errors import Broken, Conflict, Invalid, NotAllowed, NotFound, Unavailable
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import EtcdHeader, Header, Route
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from tests.facts import logged, raises
from tests.support.instant_clock import InstantClock
from tests.support.stub_broker import StubBroker

SECOND = 1_000_000_000


def spec(name: str) -> JournalSpec:
    return JournalSpec(
        name,
        1,
        fragment=FragmentSpec(
            length=1 << 20,
            codec=Codec.SNAPPY,
            stores=("file:///",),
            refresh_interval_ns=SECOND,
            retention_ns=0,
            flush_interval_ns=0,
        ),
    )


def header(broker: StubBroker, revision: int = 5) -> Header:
    return Header(broker.id, Route(), EtcdHeader(1, 2, revision, 3))


def page(
    broker: StubBroker, *names: str, revision: int = 5, first: bool = True
) -> broker_pb2.ListResponse:
    return broker_pb2.ListResponse(
        header=header(broker, revision).to_pb() if first else None,
        journals=[
            broker_pb2.ListResponse.Journal(
                spec=spec(name).to_pb(),
                mod_revision=3,
                create_revision=2,
                route=Route((broker.id,), 0, (broker.endpoint,)).to_pb(),
            )
            for name in names
        ],
    )


async def test_all_pages_are_listed_and_their_routes_known(
    client: Client, broker: StubBroker
) -> None:
    broker.answers["List"] = lambda _: [
        page(broker, "a/one", "a/two"),
        page(broker, "a/zzz", first=False),
    ]
    selector = LabelSelector.parse("prefix=a/")
    listed = await client.list_journals(selector)
    assert [journal.spec.name for journal in listed.journals] == ["a/one", "a/two", "a/zzz"]
    assert listed.header.etcd.revision == 5
    assert (listed.journals[0].mod_revision, listed.journals[0].create_revision) == (3, 2)
    ((_, request, _),) = broker.requests
    assert LabelSelector.from_pb(request.selector) == selector
    assert not request.watch
    assert client._routes.get("a/zzz", 0.0) is not None


async def test_an_empty_list_is_a_list(client: Client, broker: StubBroker) -> None:
    broker.answers["List"] = lambda _: [page(broker)]
    assert (await client.list_journals(EVERYTHING)).journals == ()


def answer(
    pages: list[broker_pb2.ListResponse], request: broker_pb2.ListRequest
) -> list[broker_pb2.ListResponse]:
    return pages


async def test_lists_that_cannot_be_right_are_the_brokers_fault(
    client: Client, broker: StubBroker
) -> None:
    wrong: tuple[list[broker_pb2.ListResponse], ...] = (
        [],
        [page(broker, "a/one"), broker_pb2.ListResponse()],
        [page(broker, "a/one", first=False)],
    )
    for pages in wrong:
        broker.answers["List"] = partial(answer, pages)
        with pytest.raises(Broken):
            await client.list_journals()
    with pytest.raises(Invalid, match="trailing"):
        await client.list_journals(LabelSelector.parse("prefix=a"))


async def test_a_journal_that_is_not_understood_does_not_hide_the_others(
    client: Client, broker: StubBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version, or the original, may know what we do not."""
    first = page(broker, "a/one", "a/two", "a/three", "a/four", "no")
    first.journals[0].spec.fragment.path_postfix_template = "{{ .From .Another .Version }}"
    first.journals[1].spec.replication = 77
    first.journals[2].spec.fragment.compression_codec = 99  # type: ignore[assignment]
    first.journals[3].spec.fragment.retention.seconds = 10_000 * 366 * 86_400
    broker.answers["List"] = lambda _: [first]
    listed = await client.list_journals()
    assert [one.spec.name for one in listed.journals] == ["a/one", "a/two", "a/three", "a/four"]
    assert listed.journals[1].spec.replication == 77
    assert listed.journals[3].spec.fragment.retention_ns == (1 << 63) - 1
    for name in ("a/two", "a/three", "a/four"):
        logged(caplog, "problem", journal=name)
    assert logged(caplog, "error")["error"].path == "Spec.Name"


async def test_a_watch_gives_snapshots_and_resumes_where_it_was(
    client: Client, broker: StubBroker, instant: InstantClock
) -> None:
    """Over the end of a stream, a broken one, and a broker that repeats what is known."""

    async def first() -> AsyncIterator[broker_pb2.ListResponse]:
        yield page(broker, "a/one", revision=5)
        yield page(broker, "a/two", first=False)
        yield broker_pb2.ListResponse()
        yield page(broker, revision=6)
        yield broker_pb2.ListResponse()

    async def broken() -> AsyncIterator[broker_pb2.ListResponse]:
        yield page(broker, "a/half", revision=9)
        raise ValueError

    async def repeats() -> AsyncIterator[broker_pb2.ListResponse]:
        yield page(broker, "a/old", revision=6)
        yield broker_pb2.ListResponse()

    async def last() -> AsyncIterator[broker_pb2.ListResponse]:
        yield page(broker, "a/new", revision=7)
        yield broker_pb2.ListResponse()
        await asyncio.Event().wait()

    streams = iter([first(), broken(), repeats(), last()])
    broker.answers["List"] = lambda _: next(streams)
    seen = []
    watch = client.watch_journals(LabelSelector.of(("name:prefix", "a/")))
    async for snapshot in watch:
        names = [journal.spec.name for journal in snapshot.journals]
        seen.append((snapshot.header.etcd.revision, names))
        if snapshot.header.etcd.revision == 7:
            break
    await watch.aclose()  # type: ignore[attr-defined]
    assert seen == [(5, ["a/one", "a/two"]), (6, []), (7, ["a/new"])]
    resumes = [request.watch_resume.etcd.revision for _, request, _ in broker.requests]
    assert resumes == [0, 6, 6, 6]


async def test_a_watch_surfaces_what_retrying_does_not_cure(
    client: Client, broker: StubBroker
) -> None:
    denied = page(broker)
    denied.status = broker_pb2.NOT_ALLOWED
    broker.answers["List"] = lambda _: [denied]
    with pytest.raises(NotAllowed):
        await anext(client.watch_journals())


async def test_a_watch_that_keeps_failing_says_why(
    client: Client, broker: StubBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that repeats a known revision; the first two failures may be those of a broker that left."""
    asked = 0

    def answers(_: object) -> list[broker_pb2.ListResponse]:
        nonlocal asked
        asked += 1
        revision = 5 if asked < 5 else 6
        return [page(broker, "a/one", revision=revision), broker_pb2.ListResponse()]

    broker.answers["List"] = answers
    with caplog.at_level(logging.WARNING, "gazette.client.journals"):
        snapshot = await anext(client.watch_journals(resume=header(broker)))
    assert snapshot.header.etcd.revision == 6
    assert len(caplog.records) == 2
    assert "a revision that is known" in caplog.text


async def test_a_journal_is_found_by_its_name(client: Client, broker: StubBroker) -> None:
    broker.answers["List"] = lambda _: [page(broker, "a/one")]
    assert (await client.get_journal("a/one;meta")).spec == spec("a/one")
    ((_, request, _),) = broker.requests
    assert LabelSelector.from_pb(request.selector) == LabelSelector.of(name="a/one")
    broker.answers["List"] = lambda _: [page(broker)]
    with pytest.raises(NotFound):
        await client.get_journal("a/none")


async def test_changes_are_applied_at_once_or_in_batches(
    client: Client, broker: StubBroker
) -> None:
    revisions = iter(range(10, 20))
    broker.answers["Apply"] = lambda _: broker_pb2.ApplyResponse(
        header=header(broker, next(revisions)).to_pb()
    )
    changes = [
        JournalChange(upsert=spec("a/one")),
        JournalChange(upsert=spec("a/two"), expect_mod_revision=-1),
        JournalChange(delete="a/three", expect_mod_revision=4),
    ]
    assert (await client.apply_journals(changes)).etcd.revision == 10
    assert (await client.apply_journals(changes, batch_size=2)).etcd.revision == 12
    assert (await client.apply_journals([])).etcd.revision == 13
    sizes = [len(request.changes) for _, request, _ in broker.requests]
    assert sizes == [3, 2, 1, 0]
    assert broker.requests[0][1].changes[2] == changes[2].to_pb()


async def test_a_lost_race_is_a_conflict(client: Client, broker: StubBroker) -> None:
    broker.answers["Apply"] = lambda _: broker_pb2.ApplyResponse(
        status=broker_pb2.ETCD_TRANSACTION_FAILED, header=header(broker).to_pb()
    )
    with pytest.raises(Conflict):
        await client.apply_journals([JournalChange(delete="a/one", expect_mod_revision=4)])
    for change in (JournalChange(), JournalChange(upsert=spec("a/one"), delete="a/two")):
        with pytest.raises(Invalid, match=r"Changes\[0\]"):
            await client.apply_journals([change])


async def test_fragments_are_listed_over_pages(client: Client, broker: StubBroker) -> None:
    def answer(request: broker_pb2.FragmentsRequest) -> broker_pb2.FragmentsResponse:
        begin = request.next_page_token
        fragment = Fragment("a/one", begin, begin + 10, bytes(range(20)), Codec.GZIP)
        response = broker_pb2.FragmentsResponse(
            header=broker.header("a/one").to_pb(), next_page_token=begin + 10 if begin < 20 else 0
        )
        response.fragments.add(spec=fragment.to_pb(), signed_url=f"http://store/{begin}")
        return response

    broker.answers["ListFragments"] = answer
    params = FragmentsParams("a/one", begin_mod_time=3, signature_ttl_s=1.5, page_limit=1)
    fragments = await client.list_fragments(params)
    assert [one.fragment.begin for one in fragments] == [0, 10, 20]
    assert fragments[1].signed_url == "http://store/10"
    request = broker.requests[0][1]
    assert (request.begin_mod_time, request.page_limit) == (3, 1)
    assert (request.signatureTTL.seconds, request.signatureTTL.nanos) == (1, 500_000_000)


async def test_fragments_that_are_refused_or_go_in_circles(
    client: Client, broker: StubBroker
) -> None:
    def answer(status: Status, token: int = 0) -> broker_pb2.FragmentsResponse:
        return broker_pb2.FragmentsResponse(
            status=status.name, header=broker.header("a/one").to_pb(), next_page_token=token
        )

    broker.answers["ListFragments"] = lambda _: answer(Status.SUSPENDED)
    with pytest.raises(NotAllowed):
        await client.list_fragments(FragmentsParams("a/one"))
    broker.answers["ListFragments"] = lambda _: answer(Status.OK, 7)
    with pytest.raises(Broken, match="before"):
        await client.list_fragments(FragmentsParams("a/one"))
    with pytest.raises(Invalid):
        await client.list_fragments(FragmentsParams("a/one", page_limit=10_001))


async def test_store_health_is_a_text(client: Client, broker: StubBroker) -> None:
    broker.answers["FragmentStoreHealth"] = lambda _: broker_pb2.FragmentStoreHealthResponse(
        header=header(broker).to_pb()
    )
    assert await client.fragment_store_health("s3://bucket/") == ""
    broker.answers["FragmentStoreHealth"] = lambda _: broker_pb2.FragmentStoreHealthResponse(
        status=broker_pb2.FRAGMENT_STORE_UNHEALTHY,
        header=header(broker).to_pb(),
        store_health_error="no such bucket",
    )
    text = await client.fragment_store_health(
        "s3://bucket/", check_delete=True, check_delete_prefix="a/b/"
    )
    assert text == "no such bucket"
    request = broker.requests[1][1]
    assert (request.check_delete, request.check_delete_prefix) == (True, "a/b/")


async def test_each_call_claims_what_it_needs(broker: StubBroker) -> None:
    auth = KeyedAuth.parse(SystemClock(), "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
    broker.answers["List"] = lambda _: [page(broker)]
    broker.answers["Apply"] = lambda _: broker_pb2.ApplyResponse(header=header(broker).to_pb())
    broker.answers["ListFragments"] = lambda _: broker_pb2.FragmentsResponse(
        header=broker.header("a/one").to_pb()
    )
    broker.answers["FragmentStoreHealth"] = lambda _: broker_pb2.FragmentStoreHealthResponse(
        header=header(broker).to_pb()
    )
    selector = LabelSelector.parse("prefix=a/")
    async with Client(broker.endpoint, signer=auth) as client:
        await client.list_journals(selector)
        await client.apply_journals([])
        await client.list_fragments(FragmentsParams("a/one"))
        await client.fragment_store_health("s3://bucket/")
    claims = [auth.verify(dict(metadata)["authorization"], 0) for _, _, metadata in broker.requests]
    assert [(one.capability, one.selector) for one in claims] == [
        (Capability.LIST, selector),
        (Capability.APPLY, EVERYTHING),
        (Capability.READ, LabelSelector.of(name="a/one")),
        (Capability.READ, EVERYTHING),
    ]
    lifetimes = [one.expires_at - SystemClock().now() for one in claims if one.expires_at]
    assert lifetimes[1] <= 60 < 3500 < lifetimes[0]


async def test_lists_wait_for_a_connection_and_fragments_do_not(broker: StubBroker) -> None:
    broker.answers["List"] = lambda _: [page(broker)]
    async with Client(broker.endpoint) as client:
        await broker.stop()
        with pytest.raises(Unavailable):
            await client.list_fragments(FragmentsParams("a/one"))

        listed, _ = await asyncio.gather(client.list_journals(), broker.start())
        assert listed.journals == ()


async def test_a_call_that_waits_for_a_connection_waits_for_any_of_several_addresses() -> None:
    """It waited for ever for an address whose process had just gone, while another one answered."""
    async with StubBroker() as first, StubBroker() as second:
        for broker in (first, second):
            broker.answers["List"] = partial(answer, [page(broker, "a/journal")])
        async with Client(f"{first.endpoint},{second.endpoint}") as client:
            assert (await client.list_journals()).journals
            await first.stop()
            async with asyncio.timeout(20):
                assert (await client.list_journals()).journals
            assert client.address == second.endpoint


async def test_a_call_moves_on_from_an_address_that_goes_as_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection still looks ready. A call that waited for it would wait for ever."""
    async with StubBroker() as first, StubBroker() as second:
        for broker in (first, second):
            broker.answers["List"] = partial(answer, [page(broker, "a/journal")])
        async with Client(f"{first.endpoint},{second.endpoint}") as client:
            assert (await client.list_journals()).journals
            await first.stop()
            connected = client.addresses.connected

            async def looks_ready() -> str:
                monkeypatch.setattr(client.addresses, "connected", connected)
                return first.endpoint

            monkeypatch.setattr(client.addresses, "connected", looks_ready)
            async with asyncio.timeout(20):
                assert (await client.list_journals()).journals
            # A change is not made twice: its caller decides.
            monkeypatch.setattr(client.addresses, "connected", looks_ready)
            async with asyncio.timeout(20):
                with raises(Unavailable):
                    await client.apply_journals(
                        [JournalChange(delete="a/journal", expect_mod_revision=1)]
                    )
