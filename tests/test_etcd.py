"""Keys and transactions over a real etcd."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.cluster.etcd.client import (
    Compacted,
    Compare,
    Etcd,
    EtcdSettings,
    KeyValue,
    LeaseLost,
    Op,
)
from gazette.cluster.etcd.connection import grpc_target
from gazette.cluster.etcd.values import only_reads, prefix_range
from gazette.errors import Closed, GazetteError, Invalid, NotFound, NotYet, Unavailable
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.testing.etcd import EtcdServer, etcd_for_tests
from tests.facts import is_advised, raises
from tests.support.tcp_proxy import TcpProxy


def settings_of(*endpoints: str, **options: Any) -> EtcdSettings:
    return EtcdSettings(endpoints=endpoints, **options)


async def test_put_get_delete(etcd: Etcd) -> None:
    first = await etcd.put("a", b"1")
    assert await etcd.get("a") == KeyValue(
        b"a", b"1", first.header.revision, first.header.revision, 1
    )
    second = await etcd.put("a", b"2")
    assert second.header.revision == first.header.revision + 1
    assert second.header.cluster_id != 0
    assert second.header.member_id != 0
    assert second.header.raft_term != 0

    # Case: the past is still there.
    old = await etcd.get("a", revision=first.header.revision)
    assert old is not None
    assert old.value == b"1"

    assert (await etcd.delete("a")).deleted == 1
    assert (await etcd.delete("a")).deleted == 0
    assert await etcd.get("a") is None


async def test_a_range_is_read_in_pages_at_one_revision(etcd: Etcd) -> None:
    for i in range(7):
        await etcd.put(f"p/{i}", str(i).encode())
    await etcd.put("p0", b"a neighbour")
    revision = (await etcd.put("p/7", b"7")).header.revision
    await etcd.put("p/8", b"later")

    read = await etcd.range("p/", revision=revision, page=3)
    assert [kv.key for kv in read.kvs] == [f"p/{i}".encode() for i in range(8)]
    assert read.header.revision == revision
    assert read.count == 8

    # Case: no revision given: what the first page was read at.
    read = await etcd.range("p/", page=2)
    assert len(read.kvs) == 9
    assert read.header.revision == revision + 1

    # Case: an explicit end, and keys only.
    read = await etcd.range("p/2", range_end="p/4", keys_only=True)
    assert [(kv.key, kv.value) for kv in read.kvs] == [(b"p/2", b""), (b"p/3", b"")]

    # Case: the empty prefix is everything.
    assert len((await etcd.range("")).kvs) == 10


async def test_pages_shrink_until_they_fit_a_message(etcd_server: EtcdServer, etcd: Etcd) -> None:
    for i in range(9):
        await etcd.put(f"big/{i}", bytes(40_000))
    small = settings_of(etcd_server.endpoint, receive_bytes_max=100_000)
    async with await Etcd.connect(small, SystemClock()) as client:
        read = await client.range("big/")
        assert len(read.kvs) == 9
        # Case: a single value that is too large.
        await client.put("big/x", bytes(200_000))
        with raises(Invalid, operation="Range"):
            await client.range("big/")


@given(st.binary(max_size=4), st.binary(max_size=4))
def test_prefix_range_covers_exactly_what_begins_with_the_prefix(prefix: bytes, key: bytes) -> None:
    begin, end = prefix_range(prefix)
    if not key:
        return  # etcd has no empty key
    inside = begin <= key and (end == b"\0" or key < end)
    assert inside == key.startswith(prefix)


async def test_a_transaction_runs_one_of_its_branches(etcd: Etcd) -> None:
    absent = Compare.version("t", "=", 0)
    done = await etcd.txn([absent], [Op.put("t", b"1")], [Op.get("t")])
    assert done.succeeded
    assert [result.header.revision for result in done.results] == [done.header.revision]

    # Case: the compare no longer holds.
    lost = await etcd.txn([absent], [Op.put("t", b"2")], [Op.get("t")])
    assert not lost.succeeded
    found: Any
    (found,) = lost.results
    assert found.kvs[0].value == b"1"
    assert lost.header.revision == done.header.revision


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare.version("t", "=", 2), True),
        (Compare.version("t", ">", 2), False),
        (Compare.create_revision("t", "<", 1 << 40), True),
        (Compare.mod_revision("t", "!=", 0), True),
        (Compare.mod_revision("t", "=", 0), False),
        (Compare.value("t", "=", b"2"), True),
        (Compare.value("t", "!=", b"2"), False),
        (Compare.lease("t", "=", 0), True),
        (Compare.lease("absent", ">", 0), False),
        (Compare.create_revision("absent", "=", 0), True),
    ],
)
async def test_compares(etcd: Etcd, compare: Compare, holds: bool) -> None:
    await etcd.put("t", b"1")
    await etcd.put("t", b"2")
    assert (await etcd.txn([compare], [])).succeeded == holds


def test_a_relation_that_is_not_valid() -> None:
    with raises(Invalid, path="relation", relation="=="):
        Compare.version("t", "==", 1)  # type: ignore[arg-type]


async def test_transactions_nest(etcd: Etcd) -> None:
    inner = Op.txn((Compare.version("n/a", "=", 0),), (Op.put("n/a", b"1"),), (Op.delete("n/a"),))
    first = await etcd.txn([], [inner, Op.put("n/b", b"2"), Op.get_prefix("n/")])
    nested: Any
    read: Any
    nested, _, read = first.results
    assert nested.succeeded
    assert [kv.key for kv in read.kvs] == [b"n/a", b"n/b"]
    again = await etcd.txn([], [inner, Op.delete_prefix("n/b")])
    deleted: Any
    nested, deleted = again.results
    assert not nested.succeeded
    assert nested.results[0].deleted == 1
    assert deleted.deleted == 1


def test_which_operations_only_read() -> None:
    assert only_reads((Op.get("a"), Op.txn((), (Op.get("b"),))))
    assert not only_reads((Op.get("a"), Op.txn((), (Op.get("b"),), (Op.delete("c"),))))


async def test_what_etcd_rejects_is_invalid_and_says_why(etcd: Etcd) -> None:
    with raises(Invalid, operation="Txn", says="too many operations in txn") as caught:
        await etcd.txn([], [Op.put(f"k{i}", b"") for i in range(129)])
    assert "--max-txn-ops" in caught.value.hint
    with raises(Invalid, operation="Txn", reason="etcdserver: duplicate key given in txn request"):
        await etcd.txn([], [Op.put("k", b""), Op.put("k", b"")])
    with raises(Invalid, operation="Put"):
        await etcd.put("k", bytes(2 << 20))
    with pytest.raises(NotFound, match="lease"):
        await etcd.put("k", b"", lease=12345)
    with raises(Invalid, operation="Put", reason="etcdserver: key not found"):
        await etcd.put("unknown", b"", ignore_lease=True)
    with raises(NotYet, "reason", operation="Range"):
        await etcd.get("k", revision=1 << 40)


async def test_a_compacted_revision_is_a_type_of_its_own(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        async with await Etcd.connect(settings_of(server.endpoint), SystemClock()) as etcd:
            for _ in range(5):
                revision = (await etcd.put("a", b"")).header.revision
            await etcd.compact(revision - 1)
            with pytest.raises(Compacted):
                await etcd.get("a", revision=revision - 2)
            with pytest.raises(Compacted):
                await etcd.range("", revision=revision - 2)
            with pytest.raises(Compacted):
                await etcd.compact(revision - 2)
            assert len((await etcd.range("", revision=revision - 1)).kvs) == 1


async def test_connecting_where_nothing_listens_names_the_endpoints() -> None:
    first, second = free_port(), free_port()
    settings = settings_of(
        f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}", request_timeout_s=0.3
    )
    with raises(
        Unavailable,
        endpoints=f"http://127.0.0.1:{first}, http://127.0.0.1:{second}",
        retrying=False,
    ) as caught:
        await Etcd.connect(settings, SystemClock())
    assert "Connection refused" in caught.value.facts["reason"]


async def test_connecting_waits_for_an_etcd_that_starts_a_little_later(tmp_path: Path) -> None:
    server = etcd_for_tests(tmp_path, listen=f"http://127.0.0.1:{free_port()}")
    settings = settings_of(server.endpoint)
    etcd, _ = await asyncio.gather(
        Etcd.connect(settings, SystemClock()), asyncio.to_thread(server.start)
    )
    async with etcd:
        status = await etcd.status()
    server.stop()
    assert status.leader == status.header.member_id
    assert status.version.startswith("3.")
    assert (status.errors, status.db_bytes > 0) == ((), True)


@pytest.fixture
def dead_end() -> Iterator[str]:
    """Yield an endpoint where connections are accepted (by the kernel) and nothing ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def test_an_endpoint_that_is_dead_is_passed_over(
    etcd_server: EtcdServer, dead_end: str
) -> None:
    refusing = f"http://127.0.0.1:{free_port()}"
    for bad in (refusing, dead_end):
        settings = settings_of(bad, etcd_server.endpoint, request_timeout_s=3.0)
        async with await Etcd.connect(settings, SystemClock()) as etcd:
            assert await etcd.get("a") is None


async def test_a_write_that_was_not_sent_is_not_applied_and_tries_every_endpoint() -> None:
    ports = free_port(), free_port()
    settings = settings_of(*(f"http://127.0.0.1:{p}" for p in ports), request_timeout_s=0.2)
    etcd = await unconnected(settings)
    async with etcd:
        with raises(Unavailable, operation="Put", outcome="not applied") as caught:
            await etcd.put("a", b"1")
        assert "write may have happened" not in caught.value.hint
        # Case: a read has no outcome.
        with pytest.raises(Unavailable) as caught:
            await etcd.get("a")
        assert "outcome" not in caught.value.facts


async def unconnected(settings: EtcdSettings) -> Etcd:
    from gazette.cluster.etcd.connection import Connection

    return Etcd(Connection(settings, SystemClock()))


async def test_a_write_whose_answer_is_lost_is_unknown_and_happens_once(
    etcd_server: EtcdServer, etcd: Etcd
) -> None:
    port = int(etcd_server.endpoint.rsplit(":", 1)[1])
    async with TcpProxy("127.0.0.1", port) as proxy:
        # The second endpoint works: it must not be tried.
        settings = settings_of(f"http://127.0.0.1:{proxy.port}", etcd_server.endpoint)
        async with await Etcd.connect(settings, SystemClock()) as client:
            revision = (await etcd.put("other", b"")).header.revision
            async with asyncio.TaskGroup() as tasks:
                proxy.hold_replies()
                write = tasks.create_task(failure_of(client.txn([], [Op.put("once", b"1")])))
                async for response in etcd.watch("once", start_revision=revision):
                    if response.events:
                        break
                proxy.cut()
            error = write.result()
            assert isinstance(error, Unavailable)
            assert error.facts["outcome"] == "unknown"
            assert is_advised(error)
            kv = await client.get("once")  # by the second endpoint
            assert kv is not None
            assert kv.version == 1

            # Case: reads are repeated instead.
            proxy.release()
            assert (await client.get_each("once"))[0] is not None


async def failure_of(operation: Awaitable[object]) -> GazetteError:
    with pytest.raises(GazetteError) as caught:
        await operation
    return caught.value


async def test_a_write_without_an_answer_is_unknown_after_its_deadline(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        settings = settings_of(server.endpoint, request_timeout_s=0.3)
        async with await Etcd.connect(settings, SystemClock()) as etcd:
            server.pause()
            with pytest.raises(Unavailable, match="outcome=unknown"):
                await etcd.put("a", b"1")
            with pytest.raises(Unavailable, match="operation=Range"):
                await etcd.get("a")
            server.resume()
            assert (await etcd.status()).version


async def test_calls_go_on_over_a_restart(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, durable=True) as server:
        async with await Etcd.connect(settings_of(server.endpoint), SystemClock()) as etcd:
            await etcd.put("a", b"1")
            server.kill()
            reading, _ = await asyncio.gather(etcd.get("a"), asyncio.to_thread(server.start))
            assert reading is not None
            await etcd.put("a", b"2")


async def test_closing_ends_what_is_in_flight(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        etcd = await Etcd.connect(settings_of(server.endpoint), SystemClock())
        server.pause()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(failure_of(etcd.get("a")))
            await asyncio.wait([reading], timeout=0.05)
            await etcd.close()
        assert isinstance(reading.result(), Closed)
        with pytest.raises(Closed):
            await etcd.put("a", b"1")
        with pytest.raises(Closed):
            await etcd.watch("a", start_revision=0).__anext__()


async def test_cancelling_a_call_is_not_closing(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        async with await Etcd.connect(settings_of(server.endpoint), SystemClock()) as etcd:
            server.pause()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await etcd.get("a")
            server.resume()
            assert await etcd.get("a") is None


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("http://localhost:2379", ("localhost:2379", False)),
        ("http://etcd", ("etcd:2379", False)),
        ("https://10.0.0.1:1/", ("10.0.0.1:1", True)),
        ("http://[::1]:2379", ("[::1]:2379", False)),
        ("unix:///run/etcd.sock", ("unix:/run/etcd.sock", False)),
    ],
)
def test_endpoints(endpoint: str, target: tuple[str, bool]) -> None:
    assert grpc_target(endpoint) == target


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:2379", "ftp://x:1", "http://", "http://x:99999", "http://x/v3"]
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with raises(Invalid, "endpoint", path="endpoints"):
        EtcdSettings(endpoints=(endpoint,))


def test_settings_that_cannot_be() -> None:
    with raises(Invalid, path="endpoints"):
        EtcdSettings(endpoints=())
    with raises(Invalid, path="cert_file"):
        EtcdSettings(cert_file="a.pem")
    with raises(Invalid, path="user"):
        EtcdSettings(password="x")
    assert "secret" not in repr(EtcdSettings(user="u", password="secret"))


@pytest.mark.parametrize("error", [Compacted("x", compact_revision=3), LeaseLost("x")])
def test_our_own_errors_have_a_hint(error: GazetteError) -> None:
    assert error.hint
    assert str(error)
