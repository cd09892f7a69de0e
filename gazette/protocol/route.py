"""Routes: the members that serve a journal or shard, with the etcd revision at which they hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, unquote

from gazette.errors import Invalid
from gazette.protocol.fragment import parse_url
from gazette.protocol.ids import ProcessId, Revision
from gazette.protocol.pb import broker_pb2
from gazette.protocol.text.validation import within

_NO_PRIMARY: Final = -1
_PORT = re.compile(r":[0-9]+\Z")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def validate_endpoint(endpoint: str) -> None:
    """Require an absolute URL with a host, such as ``http://host:8080``."""
    _parse_endpoint(endpoint)


def grpc_target(endpoint: str) -> tuple[str, bool]:
    """Return the target of a gRPC channel to ``endpoint``, and True if the channel uses TLS.

    The host of ``unix://host/path`` is only for people: the target is ``unix:///path``. Raise
    ``Invalid`` for an endpoint that ``validate_endpoint`` refuses.
    """
    url, host = _parse_endpoint(endpoint)
    if url.scheme == "unix":
        return f"unix://{unquote(url.path)}", False
    port = _DEFAULT_PORTS.get(url.scheme)
    if port is not None and not _PORT.search(host):
        host = f"{host.removesuffix(':')}:{port}"
    return host, url.scheme == "https"


def _parse_endpoint(endpoint: str) -> tuple[SplitResult, str]:
    url, host = parse_url(endpoint)
    if not url.scheme:
        raise Invalid(f"not absolute: {endpoint}")
    if not host:
        raise Invalid(f"missing host: {endpoint}")
    return url, host


@dataclass(frozen=True, slots=True)
class Route:
    """Members that serve an item, in ascending order, and the primary among them.

    ``primary`` is an index into ``members``, or ``None`` for no primary. On the wire, ``None``
    is -1, which must be sent: an absent field would name the first member. ``endpoints`` is empty,
    or parallel to ``members``, with ``""`` for an unknown endpoint.
    """

    members: tuple[ProcessId, ...] = ()
    primary: int | None = None
    endpoints: tuple[str, ...] = ()

    @property
    def primary_id(self) -> ProcessId | None:
        return None if self.primary is None else self.members[self.primary]

    @property
    def primary_endpoint(self) -> str:
        """Endpoint of the primary, or ``""`` if the primary or the endpoints are unknown."""
        if self.primary is None or not self.endpoints:
            return ""
        return self.endpoints[self.primary]

    def equivalent(self, other: Route) -> bool:
        """Return True if members and primary are equal. Endpoints do not matter."""
        return self.members == other.members and self.primary == other.primary

    def without_endpoints(self) -> Route:
        """Return the form that is stored in etcd."""
        return Route(self.members, self.primary)

    def validate(self) -> None:
        for index, member in enumerate(self.members):
            with within(f"Members[{index}]"):
                member.validate()
            if index and self.members[index - 1] >= member:
                raise Invalid(
                    f"Members not in unique, sorted order (index {index}; "
                    f"{_shown(self.members[index - 1])} <= {_shown(member)})"
                )
        primary = _NO_PRIMARY if self.primary is None else self.primary
        if not _NO_PRIMARY <= primary < len(self.members):
            raise Invalid(
                f"invalid Primary ({primary}; expected -1 <= Primary < {len(self.members)})"
            )
        if self.endpoints and len(self.endpoints) != len(self.members):
            raise Invalid(
                "len(Endpoints) != 0, and != len(Members) "
                f"({len(self.endpoints)} vs {len(self.members)})"
            )
        for index, endpoint in enumerate(self.endpoints):
            if endpoint:
                with within(f"Endpoints[{index}]"):
                    validate_endpoint(endpoint)

    def to_pb(self) -> broker_pb2.Route:
        return broker_pb2.Route(
            members=[member.to_pb() for member in self.members],
            primary=_NO_PRIMARY if self.primary is None else self.primary,
            endpoints=self.endpoints,
        )

    @classmethod
    def from_pb(cls, pb: broker_pb2.Route) -> Route:
        return cls(
            members=tuple(ProcessId(member.zone, member.suffix) for member in pb.members),
            primary=None if pb.primary == _NO_PRIMARY else pb.primary,
            endpoints=tuple(pb.endpoints),
        )


EMPTY_ROUTE: Final = Route()
"""Route of an item without members."""


@dataclass(frozen=True, slots=True)
class EtcdHeader:
    """State of etcd at which a decision holds. ``revision`` is the greatest modification under the cluster's
    own prefix, at most etcd's revision."""

    cluster_id: int
    member_id: int
    revision: Revision
    raft_term: int

    def validate(self) -> None:
        if self.cluster_id == 0:
            raise Invalid("invalid ClusterId (expected != 0)")
        if self.member_id == 0:
            raise Invalid("invalid MemberId (expected != 0)")
        if self.revision <= 0:
            raise Invalid(f"invalid Revision ({self.revision}; expected 0 < revision)")
        if self.raft_term == 0:
            raise Invalid("invalid RaftTerm (expected != 0)")

    def to_pb(self) -> broker_pb2.Header.Etcd:
        return broker_pb2.Header.Etcd(
            cluster_id=self.cluster_id,
            member_id=self.member_id,
            revision=self.revision,
            raft_term=self.raft_term,
        )

    @classmethod
    def from_pb(cls, pb: broker_pb2.Header.Etcd) -> EtcdHeader:
        return cls(pb.cluster_id, pb.member_id, pb.revision, pb.raft_term)


@dataclass(frozen=True, slots=True)
class Header:
    """Routing of a request, sent with the request or its response.

    ``process_id`` is the process that answered or should answer, or ``None`` for any member.
    """

    process_id: ProcessId | None
    route: Route
    etcd: EtcdHeader

    def validate(self) -> None:
        if self.process_id is not None:
            with within("ProcessId"):
                self.process_id.validate()
        with within("Route"):
            self.route.validate()
        with within("Etcd"):
            self.etcd.validate()

    def to_pb(self) -> broker_pb2.Header:
        return broker_pb2.Header(
            process_id=(self.process_id or _NOBODY).to_pb(),
            route=self.route.to_pb(),
            etcd=self.etcd.to_pb(),
        )

    @classmethod
    def from_pb(cls, pb: broker_pb2.Header) -> Header:
        return _header_of(pb.SerializeToString())


_NOBODY: Final = ProcessId("", "")
_HEADERS: Final = 1024


@lru_cache(maxsize=_HEADERS)
def _header_of(data: bytes) -> Header:
    # The first response of each call has a header, and most of these share a few headers. To decode and check
    # each header took a quarter of a client's time for a small append.
    pb = broker_pb2.Header.FromString(data)
    process_id = ProcessId.from_pb(pb.process_id)
    return Header(
        process_id=None if process_id == _NOBODY else process_id,
        route=Route.from_pb(pb.route),
        etcd=EtcdHeader.from_pb(pb.etcd),
    )


@lru_cache(maxsize=_HEADERS)
def valid_header_of(data: bytes) -> Header:
    """Return a header from its encoded form. Raise ``Invalid`` for a wrong process, route, or etcd part."""
    header = _header_of(data)
    with within("Header"):
        header.validate()
    return header


def valid_header(pb: broker_pb2.Header) -> Header:
    """Return the checked header of a request or response. Raise ``Invalid`` if it is invalid."""
    return valid_header_of(pb.SerializeToString())


def _shown(member: ProcessId) -> str:
    return f"{{Zone:{member.zone} Suffix:{member.suffix}}}"
