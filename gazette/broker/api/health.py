"""The FragmentStoreHealth call: checks that this broker can use a blob store."""

from __future__ import annotations

from typing import Any

import grpc

from gazette.auth import Capability
from gazette.blobs import health
from gazette.blobs.registry import ActiveStore
from gazette.broker.api.call_guard import authorize, counted, ending_on_error
from gazette.broker.context import BrokerContext
from gazette.errors import GazetteError
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.pb import broker_pb2
from gazette.protocol.rpc import validate_health_request
from gazette.protocol.status import Status
from gazette.runtime.timeouts import timeout


class HealthApi:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    async def check(
        self, request: broker_pb2.FragmentStoreHealthRequest, call: Any
    ) -> broker_pb2.FragmentStoreHealthResponse:
        """Return whether this broker can use a store, by the latest check of the store.

        Wait for the first check of a store. A store that no journal here uses is checked for this call
        alone. A store that refuses the fragments of a journal is unhealthy, too. With ``check_delete``, an
        object is also written and removed below ``check_delete_prefix``, if the store is healthy.
        Only callers that may see all journals may call.
        """
        context = self._context
        with counted("FragmentStoreHealth") as outcome:
            claims = await authorize(call, context.verifier, Capability.READ)
            if claims.selector != EVERYTHING:
                # Otherwise, a caller that may see only some journals could make this broker reach out to any
                # URL, with the broker's credentials.
                await call.abort(
                    grpc.StatusCode.UNAUTHENTICATED, "not authorized to all journals of a store"
                )
            async with ending_on_error(call):
                validate_health_request(request)
                error = await self._check(request)
                outcome.status = Status.FRAGMENT_STORE_UNHEALTHY if error else Status.OK
                return broker_pb2.FragmentStoreHealthResponse(
                    status=outcome.status.value,  # type: ignore[arg-type]
                    header=context.resolver.unrouted_header().to_pb(),
                    store_health_error=error,
                )
        raise AssertionError("unreachable: the call was aborted")

    async def _check(self, request: broker_pb2.FragmentStoreHealthRequest) -> str:
        """Return the error of the store; empty if the store is healthy."""
        stores, url = self._context.blob_stores, request.fragment_store
        active = stores.in_use(url)
        if active is None:
            prefix = request.check_delete_prefix if request.check_delete else None
            return await stores.check_unused(
                url, prefix, self._context.settings.store_check_timeout_s
            )
        status = active.health
        if not status.checks:
            status = await active.wait_health_change(status)
        if status.error:
            return status.error
        for (journal, _), reason in active.refusals.items():
            return f"it refuses to store fragments of {journal}: {reason}"
        return (
            await self._probe(active, request.check_delete_prefix) if request.check_delete else ""
        )

    async def _probe(self, active: ActiveStore, prefix: str) -> str:
        """Write and remove an object below ``prefix``. Return the error, or an empty text."""
        timeout_s = self._context.settings.store_check_timeout_s
        try:
            async with timeout(timeout_s):
                await active.calls.run(health.probe_delete, active.store, prefix)
        except TimeoutError:
            return f"delete-probe failed: no outcome within {timeout_s:.0f} s"
        except GazetteError as error:
            return str(error)
        return ""
