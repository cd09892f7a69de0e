"""Checks of requests and responses of the Shard service. `rpc` has the checks of the Journal service.

Brokers do not load this module: only consumers need hints and specifications of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gazette.errors import Invalid
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import validate_offsets, validate_shard_id
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.route import valid_header
from gazette.protocol.rpc import (
    check_delete_revision,
    check_listed,
    check_optional_header,
    check_selector,
    check_upsert_revision,
)
from gazette.protocol.shard import ShardSpec
from gazette.protocol.status import ShardStatus
from gazette.protocol.text.validation import within


def validate_stat_request(pb: consumer_pb2.StatRequest) -> None:
    check_optional_header(pb)
    _shard(pb.shard)
    _offsets("ReadThrough", pb.read_through)


def validate_stat_response(pb: consumer_pb2.StatResponse) -> None:
    _shard_status(pb.status)
    valid_header(pb.header)
    _offsets("ReadThrough", pb.read_through)
    _offsets("PublishAt", pb.publish_at)


def validate_shard_list_request(pb: consumer_pb2.ListRequest) -> None:
    check_selector(pb.selector)


def validate_shard_list_response(pb: consumer_pb2.ListResponse) -> None:
    _shard_status(pb.status)
    valid_header(pb.header)
    for index, shard in enumerate(pb.shards):
        with within(f"Shards[{index}]"):
            validate_list_response_shard(shard)


def validate_list_response_shard(pb: consumer_pb2.ListResponse.Shard) -> None:
    """Raise ``Invalid`` for a wrong revision or route of a listed shard, or if not each member has a status.
    The specification is not checked: any process may have applied it."""
    check_listed(pb.mod_revision, pb.route)
    if len(pb.route.members) != len(pb.status):
        raise Invalid(
            "length of Route.Members and Status are not equal "
            f"({len(pb.route.members)} vs {len(pb.status)})"
        )


def validate_shard_apply_request(pb: consumer_pb2.ApplyRequest) -> None:
    for index, change in enumerate(pb.changes):
        with within(f"Changes[{index}]"):
            _shard_change(change)


def _shard_change(pb: consumer_pb2.ApplyRequest.Change) -> None:
    if pb.HasField("upsert"):
        if pb.delete:
            raise Invalid("both Upsert and Delete are set (expected exactly one)")
        with within("Upsert"):
            ShardSpec.from_pb(pb.upsert).validate()
        check_upsert_revision(pb.expect_mod_revision)
        if pb.HasField("primary_hints"):
            with within("PrimaryHints"):
                FSMHints.from_pb(pb.primary_hints).validate()
    elif pb.delete:
        with within("Delete"):
            validate_shard_id(pb.delete)
        check_delete_revision(pb.expect_mod_revision)
        if pb.HasField("primary_hints"):
            raise Invalid("hints may be set only with an upsert, not a delete")
    else:
        raise Invalid("neither Upsert nor Delete are set (expected exactly one)")


def validate_shard_apply_response(pb: consumer_pb2.ApplyResponse) -> None:
    _shard_status(pb.status)
    valid_header(pb.header)


def validate_get_hints_request(pb: consumer_pb2.GetHintsRequest) -> None:
    _shard(pb.shard)


def validate_get_hints_response(pb: consumer_pb2.GetHintsResponse) -> None:
    _shard_status(pb.status)
    if pb.primary_hints.HasField("hints"):
        with within("primary hints"):
            FSMHints.from_pb(pb.primary_hints.hints).validate()
    for backup in pb.backup_hints:
        if backup.HasField("hints"):
            with within("backup hints"):
                FSMHints.from_pb(backup.hints).validate()


def validate_unassign_request(pb: consumer_pb2.UnassignRequest) -> None:
    _shards(pb.shards)


def _shard_status(value: int) -> ShardStatus:
    with within("Status"):
        return ShardStatus.from_pb(value)


def _shard(shard_id: str) -> None:
    with within("Shard"):
        validate_shard_id(shard_id)


def _shards(shard_ids: Iterable[str]) -> None:
    for index, shard_id in enumerate(shard_ids):
        with within(f"Shards[{index}]"):
            validate_shard_id(shard_id)


def _offsets(context: str, offsets: Mapping[str, int]) -> None:
    with within(context):
        validate_offsets(offsets)
