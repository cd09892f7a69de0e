"""The refusals of etcd, with the gRPC codes and texts of etcd 3.5."""

from __future__ import annotations

from typing import Final

import grpc

Code = grpc.StatusCode


class EtcdRefusal(Exception):
    """A request that etcd refuses. It changed nothing."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code: Final = code
        self.details: Final = details


def empty_key() -> EtcdRefusal:
    return EtcdRefusal(Code.INVALID_ARGUMENT, "etcdserver: key is not provided")


def key_not_found() -> EtcdRefusal:
    return EtcdRefusal(Code.INVALID_ARGUMENT, "etcdserver: key not found")


def value_provided() -> EtcdRefusal:
    return EtcdRefusal(Code.INVALID_ARGUMENT, "etcdserver: value is provided")


def lease_provided() -> EtcdRefusal:
    return EtcdRefusal(Code.INVALID_ARGUMENT, "etcdserver: lease is provided")


def too_many_operations() -> EtcdRefusal:
    return EtcdRefusal(Code.INVALID_ARGUMENT, "etcdserver: too many operations in txn request")


def duplicate_key() -> EtcdRefusal:
    return EtcdRefusal(Code.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")


def invalid_sort_option() -> EtcdRefusal:
    return EtcdRefusal(Code.INVALID_ARGUMENT, "etcdserver: invalid sort option")


def request_too_large() -> EtcdRefusal:
    return EtcdRefusal(Code.INVALID_ARGUMENT, "etcdserver: request is too large")


def compacted() -> EtcdRefusal:
    return EtcdRefusal(Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")


def future_revision() -> EtcdRefusal:
    return EtcdRefusal(
        Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision"
    )


def lease_not_found() -> EtcdRefusal:
    return EtcdRefusal(Code.NOT_FOUND, "etcdserver: requested lease not found")


def lease_exists() -> EtcdRefusal:
    return EtcdRefusal(Code.FAILED_PRECONDITION, "etcdserver: lease already exists")


def lease_ttl_too_large() -> EtcdRefusal:
    return EtcdRefusal(Code.OUT_OF_RANGE, "etcdserver: too large lease TTL")


def auth_not_enabled() -> EtcdRefusal:
    return EtcdRefusal(Code.FAILED_PRECONDITION, "etcdserver: authentication is not enabled")


def unimplemented(what: str) -> EtcdRefusal:
    return EtcdRefusal(Code.UNIMPLEMENTED, f"the fake of etcd does not implement {what}")
