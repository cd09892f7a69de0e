"""Calls whose caller has gone when their status is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
import pytest

from gazette.broker.api.fragments import FragmentsApi
from gazette.broker.api.health import HealthApi
from gazette.broker.api.list_apply import ListApplyApi
from gazette.protocol.pb import broker_pb2
from gazette.testing.fixed_cluster import FixedCluster


class GoneCaller:
    """A call to which gRPC can send no status any more."""

    aborted = 0

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, *status: object) -> NoReturn:
        self.aborted += 1
        raise grpc.aio.InternalError("the connection has ended")


INVALID: dict[str, tuple[Any, Any]] = {
    "Apply": (
        ListApplyApi,
        broker_pb2.ApplyRequest(changes=[broker_pb2.ApplyRequest.Change()]),
    ),
    "ListFragments": (FragmentsApi, broker_pb2.FragmentsRequest(journal="not a name!")),
    "FragmentStoreHealth": (
        HealthApi,
        broker_pb2.FragmentStoreHealthRequest(fragment_store="nothing"),
    ),
}


@pytest.mark.parametrize("method", INVALID)
async def test_an_invalid_request_of_a_caller_that_is_gone_is_no_defect(
    method: str, tmp_path: Path
) -> None:
    kind, request = INVALID[method]
    caller = GoneCaller()
    async with await FixedCluster.start(1, tmp_path) as cluster:
        api = kind(cluster["a"].context)
        handlers = {
            name: getattr(api, name)
            for name in ("apply", "list_fragments", "check")
            if hasattr(api, name)
        }
        (handler,) = handlers.values()
        await handler(request, caller)
    assert caller.aborted == 1
