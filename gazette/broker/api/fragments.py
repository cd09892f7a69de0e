"""The ListFragments call: the fragments of a journal, and URLs to read them from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc.aio

from gazette.auth import Capability, Claims
from gazette.broker.api.call_guard import authorize, counted, ending_on_error, passed_on
from gazette.broker.api.read import reachable
from gazette.broker.context import BrokerContext
from gazette.broker.resolver import Resolution
from gazette.client.journals import CONFLICT_KEY
from gazette.client.rpc.credentials import journal_claims
from gazette.client.rpc.errors import open_channel
from gazette.fragment.conflicts import FragmentConflict
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_fragments_request
from gazette.protocol.status import Status
from gazette.protocol.text import duration

_CONFLICTS_MAX: Final = 20
"""Greatest number of conflicts that one answer names: gRPC peers limit the size of metadata."""


class FragmentsApi:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    async def list_fragments(
        self, request: broker_pb2.FragmentsRequest, call: Any
    ) -> broker_pb2.FragmentsResponse:
        """Return one page of a journal's fragments, in order.

        Wait a limited time for the first listing of the stores. After that time, the call fails as
        UNAVAILABLE, with the reason. The call also fails as UNAVAILABLE while it is not known whether some
        fragments belong to the journal. Trailing metadata name fragments in conflict.
        """
        context = self._context
        with counted("ListFragments") as outcome:
            claims = await authorize(call, context.verifier, Capability.READ)
            async with ending_on_error(call):
                validate_fragments_request(request)
                response = await self._list(request, claims, call)
                outcome.status = Status(response.status)
                return response
        raise AssertionError("unreachable: the call was aborted")

    async def _list(
        self, request: broker_pb2.FragmentsRequest, claims: Claims, call: Any
    ) -> broker_pb2.FragmentsResponse:
        """Answer from the local replica, or let another broker of the journal answer."""
        resolution = await self._context.resolver.resolve(
            request.journal,
            claims=claims,
            may_proxy=not request.do_not_proxy,
            require_primary=False,
            proxy_header=Header.from_pb(request.header) if request.HasField("header") else None,
        )
        status = resolution.status
        if status is Status.OK and resolution.spec is not None and not resolution.spec.may_read:
            status = Status.NOT_ALLOWED
        if status is Status.OK and not resolution.is_local:
            return await self._proxy(request, resolution, call)
        response = broker_pb2.FragmentsResponse(
            status=status.value,  # type: ignore[arg-type]
            header=resolution.header.to_pb(),
        )
        if status is not Status.OK:
            return response
        assert resolution.replica is not None
        index = resolution.replica.index
        await resolution.replica.wait_listed(self._context.settings.listing_timeout_s)
        index.require_explained()
        limit = request.page_limit or self._context.settings.fragments_page_default
        page, next_token = select_page(index.fragments(request.next_page_token), request, limit)
        urls = await self._signed(page, request)
        for fragment, url in zip(page, urls, strict=True):
            response.fragments.add(spec=fragment.to_pb(), signed_url=url)
        response.next_page_token = next_token
        call.set_trailing_metadata(_conflicts_metadata(index.conflicts))
        return response

    async def _signed(
        self, page: Sequence[Fragment], request: broker_pb2.FragmentsRequest
    ) -> list[str]:
        """Return a URL for each fragment: empty if no store has it, or if the request asks for no URLs."""
        if not request.HasField("signatureTTL"):
            return [""] * len(page)
        ttl_s = duration.from_pb(request.signatureTTL) / duration.SECOND
        urls = [""] * len(page)
        for store in sorted(
            {fragment.backing_store for fragment in page if fragment.backing_store}
        ):
            positions = [i for i, fragment in enumerate(page) if fragment.backing_store == store]
            paths = [page[position].content_path() for position in positions]
            signed = await self._context.blob_stores.get(store).sign(paths, ttl_s)
            for position, url in zip(positions, signed, strict=True):
                urls[position] = url
        return urls

    async def _proxy(
        self, request: broker_pb2.FragmentsRequest, resolution: Resolution, call: Any
    ) -> broker_pb2.FragmentsResponse:
        peers = self._context.peers
        forwarded = broker_pb2.FragmentsRequest()
        forwarded.CopyFrom(request)
        forwarded.journal = resolution.journal  # Peers need no metadata segment.
        endpoint, header = reachable(self._context, resolution)
        forwarded.header.CopyFrom(header.to_pb())
        stub = peers.journal(endpoint)
        metadata = peers.credentials.metadata(journal_claims(Capability.READ, resolution.journal))
        try:
            upstream = stub.ListFragments(forwarded, metadata=metadata)
            with open_channel("ListFragments"):
                response: broker_pb2.FragmentsResponse = await upstream
            call.set_trailing_metadata(
                tuple(
                    (key, value)
                    for key, value in await upstream.trailing_metadata()
                    if key == CONFLICT_KEY
                )
            )
        except grpc.aio.AioRpcError as error:
            await call.abort(*passed_on(error))
            raise AssertionError from error  # abort raises
        return response


def _conflicts_metadata(conflicts: Sequence[FragmentConflict]) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata that names the fragments of conflicts: a response has no field for them."""
    return tuple(
        (CONFLICT_KEY, f"{conflict.kept.content_name()} {conflict.hidden.content_name()}")
        for conflict in conflicts[:_CONFLICTS_MAX]
    )


def select_page(
    fragments: Sequence[Fragment], request: broker_pb2.FragmentsRequest, limit: int
) -> tuple[list[Fragment], Offset]:
    """Return the fragments of a page, and the offset at which the next page starts (0: no next page).

    ``begin_mod_time`` and ``end_mod_time`` are both inclusive. A fragment that is in no store yet counts as
    newer than any begin. It is listed only if the request has no ``end_mod_time``.
    """
    page: list[Fragment] = []
    for fragment in fragments:
        if len(page) == limit:
            return page, fragment.begin
        persisted = fragment.mod_time != 0
        if persisted and fragment.mod_time < request.begin_mod_time:
            continue
        if request.end_mod_time and (not persisted or fragment.mod_time > request.end_mod_time):
            continue
        page.append(fragment)
    return page, 0
