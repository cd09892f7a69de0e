"""The Journal service as gRPC sees it: one handler for each call, with its encodings."""

from __future__ import annotations

from typing import Any, Final

import grpc

from gazette.auth import Capability
from gazette.broker.api.append import AppendApi
from gazette.broker.api.fragments import FragmentsApi
from gazette.broker.api.health import HealthApi
from gazette.broker.api.list_apply import ListApplyApi
from gazette.broker.api.read import ReadApi
from gazette.broker.api.replicate import ReplicateApi
from gazette.protocol.content import decode_append, decode_replicate, encode_read
from gazette.protocol.pb import broker_pb2

SERVICE: Final = "protocol.Journal"
APPEND: Final = f"/{SERVICE}/Append"
CAPABILITIES: Final = {
    "List": Capability.LIST,
    "Apply": Capability.APPLY,
    "Read": Capability.READ,
    "Append": Capability.APPEND,
    "Replicate": Capability.REPLICATE,
    "ListFragments": Capability.READ,
    "FragmentStoreHealth": Capability.READ,
}
"""The capability that each call requires of its caller."""


def journal_handler(
    list_apply: ListApplyApi,
    read: ReadApi,
    append: AppendApi,
    replicate: ReplicateApi,
    fragments: FragmentsApi,
    health: HealthApi,
) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the handler to add to a server.

    The handler takes content, and sends it to readers, as bytes: generated messages would copy the content.
    """
    handlers: dict[str, Any] = {
        "List": grpc.unary_stream_rpc_method_handler(
            list_apply.list,
            broker_pb2.ListRequest.FromString,
            broker_pb2.ListResponse.SerializeToString,
        ),
        "Apply": grpc.unary_unary_rpc_method_handler(
            list_apply.apply,
            broker_pb2.ApplyRequest.FromString,
            broker_pb2.ApplyResponse.SerializeToString,
        ),
        "Read": grpc.unary_stream_rpc_method_handler(
            read.read, broker_pb2.ReadRequest.FromString, encode_read
        ),
        "Append": grpc.stream_unary_rpc_method_handler(
            append.append, decode_append, broker_pb2.AppendResponse.SerializeToString
        ),
        "Replicate": grpc.stream_stream_rpc_method_handler(
            replicate.replicate, decode_replicate, broker_pb2.ReplicateResponse.SerializeToString
        ),
        "ListFragments": grpc.unary_unary_rpc_method_handler(
            fragments.list_fragments,
            broker_pb2.FragmentsRequest.FromString,
            broker_pb2.FragmentsResponse.SerializeToString,
        ),
        "FragmentStoreHealth": grpc.unary_unary_rpc_method_handler(
            health.check,
            broker_pb2.FragmentStoreHealthRequest.FromString,
            broker_pb2.FragmentStoreHealthResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)
