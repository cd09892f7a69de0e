"""Reader of specifications that other processes have stored in etcd, even if our validation refuses them.

An item that one implementation or version refuses must not vanish. Its clients would get "not found", and
brokers would disagree on the items that exist. So an invalid value is replaced by the nearest value that can
be served. Only the identity of the item must be valid.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from gazette.errors import Invalid
from gazette.labels import META_NAME, META_PREFIX, META_SHARD_ID
from gazette.protocol.fragment import Codec, FragmentStoreUrl
from gazette.protocol.ids import META_DELIMITER, validate_journal_name, validate_shard_id
from gazette.protocol.journal import (
    FLUSH_INTERVAL_MIN_NS,
    FRAGMENT_BYTES_MAX,
    FRAGMENT_BYTES_MIN,
    REFRESH_INTERVAL_MAX_NS,
    REFRESH_INTERVAL_MIN_NS,
    REPLICATION_MAX,
    JournalSpec,
    SuspendLevel,
)
from gazette.protocol.label_set import Label, LabelSet
from gazette.protocol.pb import broker_pb2, consumer_pb2
from gazette.protocol.process import JOURNAL_LIMIT_MAX, BrokerSpec, ConsumerSpec
from gazette.protocol.route import EMPTY_ROUTE, Route, validate_endpoint
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSpec
from gazette.protocol.text import duration
from gazette.protocol.text.validation import within

log = logging.getLogger(__name__)

T = TypeVar("T")

_TXN_DURATION_NS: Final = duration.SECOND
"""Longest transaction, in nanoseconds, of a shard whose specification has an invalid longest transaction."""


def stored_journal(pb: broker_pb2.JournalSpec) -> tuple[JournalSpec, str]:
    """Return a specification that can be served, and why the stored value is invalid (empty: valid).

    Raise ``Invalid`` for an invalid name. Do not check stores: they fail when they are used, with the reason.
    """
    try:
        spec = JournalSpec.from_pb(pb)
        spec.validate_stored()
        return spec, ""
    except Invalid as error:
        problem = str(error)
    spec, _ = listed_journal(pb)
    fragment = spec.fragment
    codec = Codec.NONE if fragment.codec is Codec.INVALID else fragment.codec
    if codec is Codec.GZIP_OFFLOAD_DECOMPRESSION and _is_file(fragment.stores[:1]):
        codec = Codec.GZIP
    flush_ns = fragment.flush_interval_ns
    fragment = replace(
        fragment,
        codec=codec,
        length=_between(FRAGMENT_BYTES_MIN, fragment.length, FRAGMENT_BYTES_MAX),
        refresh_interval_ns=_between(
            REFRESH_INTERVAL_MIN_NS, fragment.refresh_interval_ns, REFRESH_INTERVAL_MAX_NS
        ),
        flush_interval_ns=max(FLUSH_INTERVAL_MIN_NS, flush_ns) if flush_ns > 0 else 0,
    )
    suspend = spec.suspend
    if suspend is not None and suspend.offset < 0:
        suspend = replace(suspend, offset=0)
    usable = replace(
        spec,
        replication=_between(1, spec.replication, REPLICATION_MAX),
        labels=_ordered(spec.labels.labels, reserved=(META_NAME, META_PREFIX)),
        fragment=fragment,
        max_append_rate=max(0, spec.max_append_rate),
        suspend=suspend,
    )
    return usable, problem


def listed_journal(pb: broker_pb2.JournalSpec) -> tuple[JournalSpec, str]:
    """Return a specification as it was stored, and why it is invalid (empty: valid).

    Unknown enumerations become zero. Durations beyond 64 bits of nanoseconds become the nearest that fit.
    Raise ``Invalid`` as `stored_journal`.
    """
    with within("Name"):
        validate_journal_name(pb.name)
        if META_DELIMITER in pb.name:
            raise Invalid(f"Name cannot have a metadata path segment ({pb.name})")
    problem = ""
    try:
        JournalSpec.from_pb(pb).validate_stored()
    except Invalid as error:
        problem = str(error)
    readable_pb = broker_pb2.JournalSpec()
    readable_pb.CopyFrom(pb)
    if int(pb.fragment.compression_codec) not in set(Codec):
        readable_pb.fragment.compression_codec = Codec.INVALID.value  # type: ignore[assignment]
    if pb.HasField("suspend") and int(pb.suspend.level) not in set(SuspendLevel):
        readable_pb.suspend.level = SuspendLevel.NONE.value  # type: ignore[assignment]
    fragment = readable_pb.fragment
    duration.clamp_pb(fragment.refresh_interval, fragment.retention, fragment.flush_interval)
    return JournalSpec.from_pb(readable_pb), problem


def stored_shard(pb: consumer_pb2.ShardSpec) -> tuple[ShardSpec, str]:
    """Return a specification that can be assigned, and why the stored value is invalid (empty: valid).

    Raise ``Invalid`` for an invalid id. Keep invalid names of journals and hints: the shard that uses them
    fails when it starts, with the reason.
    """
    spec, problem = listed_shard(pb)
    try:
        spec.validate()
        if not problem:
            return spec, ""
    except Invalid as error:
        problem = problem or str(error)
    with within("Id"):
        validate_shard_id(pb.id)
    # Of repeated sources, keep the first.
    sources = {source.journal: source for source in reversed(spec.sources)}
    usable = replace(
        spec,
        labels=_ordered(spec.labels.labels, reserved=(META_SHARD_ID,)),
        sources=tuple(sources[journal] for journal in sorted(sources)),
        hint_backups=max(0, spec.hint_backups),
        min_txn_duration_ns=max(0, spec.min_txn_duration_ns),
        max_txn_duration_ns=spec.max_txn_duration_ns
        if spec.max_txn_duration_ns > 0
        else _TXN_DURATION_NS,
    )
    return usable, problem


def listed_shard(pb: consumer_pb2.ShardSpec) -> tuple[ShardSpec, str]:
    """Return a specification as it was stored, and why it cannot be read (empty: it can). Durations beyond 64
    bits of nanoseconds become the nearest that fit."""
    try:
        return ShardSpec.from_pb(pb), ""
    except Invalid as error:
        readable_pb = consumer_pb2.ShardSpec()
        readable_pb.CopyFrom(pb)
        duration.clamp_pb(readable_pb.max_txn_duration, readable_pb.min_txn_duration)
        return ShardSpec.from_pb(readable_pb), str(error)


def stored_broker(pb: broker_pb2.BrokerSpec) -> tuple[BrokerSpec, str]:
    """Return a member that items can be assigned to, and why the stored value is invalid (empty: valid)."""
    spec = BrokerSpec.from_pb(pb)
    try:
        spec.validate()
        return spec, ""
    except Invalid as error:
        limit = _between(0, spec.journal_limit, JOURNAL_LIMIT_MAX)
        return replace(spec, journal_limit=limit, endpoint=_reachable(spec.endpoint)), str(error)


def stored_consumer(pb: consumer_pb2.ConsumerSpec) -> tuple[ConsumerSpec, str]:
    """Return a member that items can be assigned to, and why the stored value is invalid (empty: valid)."""
    spec = ConsumerSpec.from_pb(pb)
    try:
        spec.validate()
        return spec, ""
    except Invalid as error:
        return replace(spec, endpoint=_reachable(spec.endpoint)), str(error)


def stored_route(pb: broker_pb2.Route) -> tuple[Route, str]:
    """Return a route, and why the stored value is invalid (empty: valid).

    An invalid route becomes the empty route. The empty route is never consistent, so the primary replaces it.
    """
    try:
        route = Route.from_pb(pb)
        route.validate()
        return route, ""
    except Invalid as error:
        return EMPTY_ROUTE, str(error)


def stored_status(pb: consumer_pb2.ReplicaStatus) -> tuple[ReplicaStatus, str]:
    """Return a status, and why the stored value is invalid (empty: valid). An unknown code becomes the code
    of a replica that cannot take over."""
    errors = tuple(pb.errors)
    if int(pb.code) not in set(ReplicaCode):
        return ReplicaStatus(ReplicaCode.IDLE, errors), f"Code: invalid code ({pb.code})"
    status = ReplicaStatus.from_pb(pb)
    try:
        status.validate()
        return status, ""
    except Invalid as error:
        return status, str(error)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise ``Invalid`` for a value that is not a message of the protocol. ``what`` names the message."""
    try:
        yield
    except DecodeError as error:
        raise Invalid(f"not a {what}: {error}") from error


def noted(what: str, value: T, problem: str) -> T:
    """Return ``value``, and log ``problem``. Each change of etcd is decoded, and so logged, only once."""
    if problem:
        log.warning(
            "%(what)s is not valid here, and is served as far as possible: %(problem)s",
            {"what": what, "problem": problem},
        )
    return value


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def _ordered(labels: Iterable[Label], *, reserved: tuple[str, ...]) -> LabelSet:
    """Return the labels sorted and unique, without the reserved labels that stand for the item itself."""
    unique = {Label(label.name, label.value) for label in labels if label.name not in reserved}
    return LabelSet(tuple(sorted(unique)))


def _is_file(stores: tuple[str, ...]) -> bool:
    try:
        return any(FragmentStoreUrl.parse(store).scheme == "file" for store in stores)
    except Invalid:
        return False


def _reachable(endpoint: str) -> str:
    """Return the endpoint, or "" for an invalid one. A member without an endpoint is not called."""
    try:
        validate_endpoint(endpoint)
    except Invalid:
        return ""
    return endpoint
