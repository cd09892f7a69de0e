"""Who serves a journal or shard, and at which state of etcd that was so."""

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
from gazette.protocol.validation import within

_NO_PRIMARY: Final = -1
_PORT = re.compile(r":[0-9]+\Z")


_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def validate_endpoint(endpoint: str) -> None:
    """Require an absolute URL that has a host, such as ``http://host:8080``."""
    _parse_endpoint(endpoint)


def grpc_target(endpoint: str) -> tuple[str, bool]:
    """The target of a gRPC channel to ``endpoint``, and whether it is spoken to over TLS.

    ``unix://host/path`` names the host for people only: its target is ``unix:///path``.
    Raises :class:`Invalid` for what :func:`validate_endpoint` refuses.
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
    """Members that serve an item, in ascending order, and which of them is primary.

    ``primary`` indexes ``members`` and is ``None`` where there is none (-1 on the wire, which must
    be sent: an absent field would name the first member). ``endpoints`` is empty, or parallel to
    ``members`` with ``""`` for a member whose endpoint is not known.
    """

    members: tuple[ProcessId, ...] = ()
    primary: int | None = None
    endpoints: tuple[str, ...] = ()

    @property
    def primary_id(self) -> ProcessId | None:
        return None if self.primary is None else self.members[self.primary]

    @property
    def primary_endpoint(self) -> str:
        """The primary's endpoint, or ``""`` when either is not known."""
        if self.primary is None or not self.endpoints:
            return ""
        return self.endpoints[self.primary]

    def equivalent(self, other: Route) -> bool:
        """Whether members and primary are the same. Endpoints do not matter."""
        return self.members == other.members and self.primary == other.primary

    def without_endpoints(self) -> Route:
        """The form that is stored in etcd."""
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
"""Nobody serves it."""


@dataclass(frozen=True, slots=True)
class EtcdHeader:
    """The state of etcd at which something was decided.

    ``revision`` is the greatest modification under the cluster's own prefix, and so may be lower
    than that of etcd itself.
    """

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
    """How a request was routed, on it or on its response.

    ``process_id`` is who answered or should answer, and ``None`` where any member may.
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
    # Every response has a header, and nearly all of them have the same few: to parse and check each
    # anew was a quarter of what a small append cost its client.
    pb = broker_pb2.Header.FromString(data)
    process_id = ProcessId.from_pb(pb.process_id)
    return Header(
        process_id=None if process_id == _NOBODY else process_id,
        route=Route.from_pb(pb.route),
        etcd=EtcdHeader.from_pb(pb.etcd),
    )


@lru_cache(maxsize=_HEADERS)
def _valid_header_of(data: bytes) -> Header:
    header = _header_of(data)
    header.validate()
    return header


def valid_header(pb: broker_pb2.Header) -> Header:
    """The header, checked. Raises ``Invalid``."""
    return _valid_header_of(pb.SerializeToString())


def _shown(member: ProcessId) -> str:
    return f"{{Zone:{member.zone} Suffix:{member.suffix}}}"
