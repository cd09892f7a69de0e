"""Routes and headers, of which the absent values are easy to get wrong on the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import (
    EMPTY_ROUTE,
    EtcdHeader,
    Header,
    Route,
    grpc_target,
    validate_endpoint,
)

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

A, B, C = (ProcessId("zone", f"member-{suffix}") for suffix in "abc")
ROUTE = Route((A, B), 1, ("http://a:80", "http://b:80"))
ETCD = EtcdHeader(12, 34, 56, 78)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    members = tuple(sorted(draw(st.sets(st.sampled_from([A, B, C])))))
    primary = draw(st.none() | st.integers(0, len(members) - 1)) if members else None
    endpoints = draw(st.booleans())
    return Route(members, primary, tuple("http://h:1" for _ in members) if endpoints else ())


@PROPERTY
@given(routes(), st.none() | st.sampled_from([A, B]))
def test_routes_and_headers_round_trip_and_are_valid(
    route: Route, process_id: ProcessId | None
) -> None:
    header = Header(process_id, route, ETCD)
    header.validate()
    wire = header.to_pb().SerializeToString()
    assert Header.from_pb(broker_pb2.Header.FromString(wire)) == header


def test_no_primary_is_minus_one_on_the_wire() -> None:
    assert EMPTY_ROUTE.to_pb().SerializeToString() == bytes.fromhex("10ffffffffffffffffff01")
    assert Route.from_pb(broker_pb2.Route(primary=-1)) == EMPTY_ROUTE


def test_an_absent_primary_is_the_first_member() -> None:
    assert Route.from_pb(broker_pb2.Route(members=[A.to_pb()])).primary_id == A
    with pytest.raises(Invalid, match=r"^invalid Primary \(0; expected -1 <= Primary < 0\)$"):
        Route.from_pb(broker_pb2.Route()).validate()


def test_sub_messages_of_a_header_are_on_the_wire_even_when_empty() -> None:
    pb = Header(None, EMPTY_ROUTE, EtcdHeader(0, 0, 0, 0)).to_pb()
    assert pb.SerializeToString() == bytes.fromhex("0a00120b10ffffffffffffffffff011a00")


def test_routes_are_equivalent_whatever_their_endpoints() -> None:
    assert ROUTE.equivalent(ROUTE.without_endpoints())
    assert not ROUTE.equivalent(replace(ROUTE, primary=0))
    assert not ROUTE.equivalent(replace(ROUTE, members=(A, C)))
    assert not EMPTY_ROUTE.equivalent(ROUTE)


def test_the_primary_of_a_route() -> None:
    assert (ROUTE.primary_id, ROUTE.primary_endpoint) == (B, "http://b:80")
    assert (EMPTY_ROUTE.primary_id, EMPTY_ROUTE.primary_endpoint) == (None, "")
    assert ROUTE.without_endpoints().primary_endpoint == ""


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        (
            Route((B, A), 0),
            (
                "Members not in unique, sorted order (index 1; "
                "{Zone:zone Suffix:member-b} <= {Zone:zone Suffix:member-a})"
            ),
        ),
        (
            Route((A, A), 0),
            (
                "Members not in unique, sorted order (index 1; "
                "{Zone:zone Suffix:member-a} <= {Zone:zone Suffix:member-a})"
            ),
        ),
        (
            Route((A, ProcessId("", "member")), 0),
            "Members[1].Zone: invalid length (0; expected 1 <= length <= 32)",
        ),
        (Route((A, B), 2), "invalid Primary (2; expected -1 <= Primary < 2)"),
        (Route((A, B), -2), "invalid Primary (-2; expected -1 <= Primary < 2)"),
        (
            Route((A, B), 0, ("http://a",)),
            "len(Endpoints) != 0, and != len(Members) (1 vs 2)",
        ),
        (Route((A, B), 0, ("", "path")), "Endpoints[1]: not absolute: path"),
    ],
)
def test_routes_that_are_refused(route: Route, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        route.validate()
    assert str(caught.value) == problem
    with pytest.raises(Invalid) as caught:
        Header(A, route, ETCD).validate()
    assert caught.value.path.split(".")[0] == "Route"


def test_an_endpoint_may_be_unknown() -> None:
    Route((A, B), None, ("", "http://b:80")).validate()


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (
            Header(ProcessId("zone", "x"), ROUTE, ETCD),
            "ProcessId.Suffix: invalid length (1; expected 4 <= length <= 128)",
        ),
        (Header(A, ROUTE, replace(ETCD, cluster_id=0)), "Etcd: invalid ClusterId (expected != 0)"),
        (Header(A, ROUTE, replace(ETCD, member_id=0)), "Etcd: invalid MemberId (expected != 0)"),
        (
            Header(A, ROUTE, replace(ETCD, revision=0)),
            "Etcd: invalid Revision (0; expected 0 < revision)",
        ),
        (Header(A, ROUTE, replace(ETCD, raft_term=0)), "Etcd: invalid RaftTerm (expected != 0)"),
    ],
)
def test_headers_that_are_refused(header: Header, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        header.validate()
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("http://host:8080", ("host:8080", False)),
        ("http://host:8080/path?query", ("host:8080", False)),
        ("http://host", ("host:80", False)),
        ("https://host", ("host:443", True)),
        ("https://host:8443", ("host:8443", True)),
        ("https://host:", ("host:443", True)),
        ("http://[::1]", ("[::1]:80", False)),
        ("http://[::1]:8080", ("[::1]:8080", False)),
        ("http://user@host", ("host:80", False)),
        ("unix://host/run/gazette%20dev.sock", ("unix:///run/gazette dev.sock", False)),
    ],
)
def test_endpoints_and_their_targets(endpoint: str, target: tuple[str, bool]) -> None:
    assert grpc_target(endpoint) == target


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("", "not absolute: "),
        ("host/path", "not absolute: host/path"),
        ("host:8080", "missing host: host:8080"),
        ("http:///path", "missing host: http:///path"),
        ("unix:///run/socket", "missing host: unix:///run/socket"),
        ("http://host:port", "invalid host or port (http://host:port)"),
        ("http://ho st", "invalid control character in URL ('http://ho st')"),
        ("http://host/%zz", "invalid URL escape (http://host/%zz)"),
    ],
)
def test_endpoints_that_are_refused(endpoint: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        validate_endpoint(endpoint)
    assert str(caught.value) == problem
