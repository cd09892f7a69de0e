"""Conversions between etcd's messages and the values of ``values``."""

from __future__ import annotations

from typing import assert_never

from gazette.cluster.etcd.pb import kv_pb2, rpc_pb2
from gazette.cluster.etcd.values import (
    Compare,
    DeleteOp,
    DeleteResult,
    GetOp,
    KeyValue,
    MemberStatus,
    Operation,
    OpResult,
    PutOp,
    PutResult,
    RangeResult,
    ResponseHeader,
    Target,
    TxnOp,
    TxnResult,
    WatchEvent,
)
from gazette.errors import Broken

_RELATIONS = {
    "=": rpc_pb2.Compare.EQUAL,
    "!=": rpc_pb2.Compare.NOT_EQUAL,
    "<": rpc_pb2.Compare.LESS,
    ">": rpc_pb2.Compare.GREATER,
}
_TARGETS = {
    Target.VERSION: rpc_pb2.Compare.VERSION,
    Target.CREATE_REVISION: rpc_pb2.Compare.CREATE,
    Target.MOD_REVISION: rpc_pb2.Compare.MOD,
    Target.VALUE: rpc_pb2.Compare.VALUE,
    Target.LEASE: rpc_pb2.Compare.LEASE,
}


def header_from_pb(pb: rpc_pb2.ResponseHeader) -> ResponseHeader:
    return ResponseHeader(pb.cluster_id, pb.member_id, pb.revision, pb.raft_term)


def kv_from_pb(pb: kv_pb2.KeyValue) -> KeyValue:
    return KeyValue(pb.key, pb.value, pb.create_revision, pb.mod_revision, pb.version, pb.lease)


def event_from_pb(pb: kv_pb2.Event) -> WatchEvent:
    return WatchEvent(kv_from_pb(pb.kv), deleted=pb.type == kv_pb2.Event.DELETE)


def range_from_pb(pb: rpc_pb2.RangeResponse) -> RangeResult:
    return RangeResult(header_from_pb(pb.header), tuple(map(kv_from_pb, pb.kvs)), pb.count)


def put_from_pb(pb: rpc_pb2.PutResponse) -> PutResult:
    return PutResult(header_from_pb(pb.header))


def delete_from_pb(pb: rpc_pb2.DeleteRangeResponse) -> DeleteResult:
    return DeleteResult(header_from_pb(pb.header), pb.deleted)


def txn_from_pb(pb: rpc_pb2.TxnResponse) -> TxnResult:
    return TxnResult(
        header_from_pb(pb.header), pb.succeeded, tuple(map(_result_from_pb, pb.responses))
    )


def _result_from_pb(pb: rpc_pb2.ResponseOp) -> OpResult:
    match pb.WhichOneof("response"):
        case "response_range":
            return range_from_pb(pb.response_range)
        case "response_put":
            return put_from_pb(pb.response_put)
        case "response_delete_range":
            return delete_from_pb(pb.response_delete_range)
        case "response_txn":
            return txn_from_pb(pb.response_txn)
        case other:
            raise Broken("etcd sent an unknown answer to an operation", response=other)


def status_from_pb(pb: rpc_pb2.StatusResponse) -> MemberStatus:
    return MemberStatus(
        header_from_pb(pb.header), pb.version, pb.leader, pb.dbSize, tuple(pb.errors)
    )


def compare_to_pb(compare: Compare) -> rpc_pb2.Compare:
    pb = rpc_pb2.Compare(
        result=_RELATIONS[compare.relation],
        target=_TARGETS[compare.target],
        key=compare.key,
        range_end=compare.range_end,
    )
    setattr(pb, compare.target.value, compare.operand)
    return pb


def put_to_pb(op: PutOp) -> rpc_pb2.PutRequest:
    return rpc_pb2.PutRequest(
        key=op.key, value=op.value, lease=op.lease, ignore_lease=op.ignore_lease
    )


def delete_to_pb(op: DeleteOp) -> rpc_pb2.DeleteRangeRequest:
    return rpc_pb2.DeleteRangeRequest(key=op.key, range_end=op.range_end)


def txn_to_pb(op: TxnOp) -> rpc_pb2.TxnRequest:
    return rpc_pb2.TxnRequest(
        compare=map(compare_to_pb, op.compares),
        success=map(_operation_to_pb, op.success),
        failure=map(_operation_to_pb, op.failure),
    )


def _operation_to_pb(op: Operation) -> rpc_pb2.RequestOp:
    match op:
        case PutOp():
            return rpc_pb2.RequestOp(request_put=put_to_pb(op))
        case DeleteOp():
            return rpc_pb2.RequestOp(request_delete_range=delete_to_pb(op))
        case GetOp():
            return rpc_pb2.RequestOp(
                request_range=rpc_pb2.RangeRequest(key=op.key, range_end=op.range_end)
            )
        case TxnOp():
            return rpc_pb2.RequestOp(request_txn=txn_to_pb(op))
        case _:
            assert_never(op)
