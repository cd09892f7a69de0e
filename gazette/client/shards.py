"""The client of consumers: list, apply, stat, hints and unassign of shards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gazette.auth import Capability, Claims
from gazette.client.access import ClusterAccess
from gazette.client.rpc.credentials import (
    SHORT_LIFETIME_S,
    Metadata,
    apply_claims,
    list_claims,
    shard_claims,
)
from gazette.client.rpc.errors import answered, map_errors, shard_status_error
from gazette.client.rpc.problems import PROBLEMS_ASKED, problems_in
from gazette.errors import GazetteError, Unavailable
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import JournalName, Offset, Revision, ShardId
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.pb.consumer_pb2_grpc import ShardStub
from gazette.protocol.route import Header, Route
from gazette.protocol.shard import ReplicaStatus, ShardSpec
from gazette.protocol.shard_checks import (
    validate_get_hints_request,
    validate_get_hints_response,
    validate_shard_apply_request,
    validate_shard_apply_response,
    validate_shard_list_request,
    validate_shard_list_response,
    validate_stat_request,
    validate_stat_response,
    validate_unassign_request,
)
from gazette.protocol.status import ShardStatus
from gazette.protocol.stored import listed_shard, stored_status

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListedShard:
    """A shard as a consumer listed it; ``status`` has an entry for each of ``route.members``, in order."""

    spec: ShardSpec
    mod_revision: Revision
    create_revision: Revision
    route: Route
    status: tuple[ReplicaStatus, ...]


@dataclass(frozen=True, slots=True)
class ShardList:
    """The shards that matched a selector, ordered by id. ``extension`` belongs to the application."""

    header: Header
    shards: tuple[ListedShard, ...]
    extension: bytes = b""


@dataclass(frozen=True, slots=True)
class ShardChange:
    """A change of one shard: put ``upsert``, with ``primary_hints`` if given, or delete shard ``delete``.

    The change is made only if the shard's modification revision is ``expect_mod_revision``: zero for a
    shard that must not exist, -1 for any revision.
    """

    upsert: ShardSpec | None = None
    delete: ShardId = ""
    expect_mod_revision: Revision = 0
    primary_hints: FSMHints | None = None

    def to_pb(self) -> consumer_pb2.ApplyRequest.Change:
        hints = self.primary_hints
        return consumer_pb2.ApplyRequest.Change(
            expect_mod_revision=self.expect_mod_revision,
            upsert=None if self.upsert is None else self.upsert.to_pb(),
            delete=self.delete,
            primary_hints=None if hints is None else hints.to_pb(),
        )


@dataclass(frozen=True, slots=True)
class ShardStat:
    """Progress of a shard: up to which offset it has read each source, and where it has published."""

    header: Header
    read_through: Mapping[JournalName, Offset]
    publish_at: Mapping[JournalName, Offset]
    extension: bytes = b""


@dataclass(frozen=True, slots=True)
class ShardHints:
    """The stored hints of a shard; None for an empty slot."""

    header: Header
    primary: FSMHints | None
    backups: tuple[FSMHints | None, ...] = field(default=())
    extension: bytes = b""


class ShardClient(ClusterAccess):
    """A client of one consumer cluster. Loop-bound. Parameters and errors are those of `Client`."""

    async def stat(
        self,
        shard_id: ShardId,
        read_through: Mapping[JournalName, Offset] | None = None,
        *,
        extension: bytes = b"",
    ) -> ShardStat:
        """Return a shard's progress, once it has recovered and read through the given offsets.

        Raise ``NotFound`` if there is no such shard, ``Unavailable`` if it has no primary, ``Moved`` if
        another member leads it, ``NotAllowed`` for a refused token, and ``Broken`` for any other failure.
        """
        request = consumer_pb2.StatRequest(
            shard=shard_id, read_through=dict(read_through or {}), extension=extension
        )
        validate_stat_request(request)
        endpoint = self._endpoint_of(shard_id)
        try:
            with map_errors("Stat", self.channels, shard=shard_id, endpoint=endpoint):
                response = await self.channels.shard(endpoint).Stat(
                    request, metadata=self._metadata(shard_claims(Capability.READ, shard_id))
                )
        except GazetteError:
            self._routes.forget(shard_id)
            raise
        with answered("Stat"):
            validate_stat_response(response)
            header = Header.from_pb(response.header)
        self._routes.put(shard_id, header.route, self.clock.monotonic())
        _require_ok(response.status, shard=shard_id)
        return ShardStat(
            header, dict(response.read_through), dict(response.publish_at), response.extension
        )

    async def list_shards(
        self, selector: LabelSelector = EVERYTHING, *, extension: bytes = b""
    ) -> ShardList:
        """Return all matching shards that the caller may list. Raise ``Invalid``, ``NotAllowed``,
        ``Unavailable`` or ``Broken``."""
        request = consumer_pb2.ListRequest(selector=selector.to_pb(), extension=extension)
        validate_shard_list_request(request)
        for attempts_left in reversed(range(self.addresses.attempts)):
            try:
                with map_errors("List", self.channels, endpoint=self.address):
                    stub = await self._connected_stub()
                    response = await stub.List(
                        request,
                        metadata=self._metadata(list_claims(selector)),
                        wait_for_ready=self.addresses.wait_for_ready,
                    )
                break
            except Unavailable:
                if not attempts_left:
                    raise
        with answered("List"):
            validate_shard_list_response(response)
        _require_ok(response.status)
        shards = tuple(_listed(shard) for shard in response.shards)
        for shard in shards:
            self._routes.put(shard.spec.id, shard.route, self.clock.monotonic())
        return ShardList(Header.from_pb(response.header), shards, response.extension)

    async def shard_problems(
        self, endpoint: str, selector: LabelSelector = EVERYTHING
    ) -> dict[ShardId, str]:
        """Return, by id, why matching shards of one member wait.

        Of many problems, the answer has only some. Raise ``NotAllowed``, ``Unavailable`` or ``Broken``.
        """
        request = consumer_pb2.ListRequest(selector=selector.to_pb())
        metadata = self._metadata(list_claims(selector))
        with map_errors("List", self.channels, endpoint=endpoint):
            stub: Any = self.channels.shard(endpoint)
            call = stub.List(request, metadata=(*metadata, *PROBLEMS_ASKED))
            await call
            return problems_in(await call.trailing_metadata())

    async def apply_shards(
        self, changes: Sequence[ShardChange], *, batch_size: int = 0, extension: bytes = b""
    ) -> Header:
        """Change specifications: all of them, or none.

        A ``batch_size`` above zero splits the changes into transactions of that many. If a transaction
        fails, the earlier transactions stay. Raise ``Conflict`` if a shard is not at the expected revision.
        After a cancellation the changes may have been applied.
        """
        size = batch_size or max(1, len(changes))
        header: Header | None = None
        for begin in range(0, max(1, len(changes)), size):
            request = consumer_pb2.ApplyRequest(
                changes=[change.to_pb() for change in changes[begin : begin + size]],
                extension=extension,
            )
            validate_shard_apply_request(request)
            with map_errors("Apply", self.channels, endpoint=self.address):
                stub = await self._connected_stub()
                response = await stub.Apply(
                    request,
                    metadata=self._metadata(apply_claims()),
                    wait_for_ready=self.addresses.wait_for_ready,
                )
            with answered("Apply"):
                validate_shard_apply_response(response)
            _require_ok(response.status)
            header = Header.from_pb(response.header)
        assert header is not None
        return header

    async def get_hints(self, shard_id: ShardId, *, extension: bytes = b"") -> ShardHints:
        """Return the stored hints of a shard.

        Raise ``NotFound`` if there is no such shard, ``NotAllowed``, ``Unavailable`` or ``Broken``.
        """
        request = consumer_pb2.GetHintsRequest(shard=shard_id, extension=extension)
        validate_get_hints_request(request)
        with map_errors("GetHints", self.channels, shard=shard_id, endpoint=self.address):
            stub = await self._connected_stub()
            response = await stub.GetHints(
                request,
                metadata=self._metadata(shard_claims(Capability.READ, shard_id)),
                wait_for_ready=self.addresses.wait_for_ready,
            )
        with answered("GetHints"):
            validate_get_hints_response(response)
        _require_ok(response.status, shard=shard_id)
        return ShardHints(
            Header.from_pb(response.header),
            _hints(response.primary_hints),
            tuple(_hints(backup) for backup in response.backup_hints),
            response.extension,
        )

    async def unassign(
        self, shard_ids: Sequence[ShardId], *, only_failed: bool = False, dry_run: bool = False
    ) -> tuple[ShardId, ...]:
        """Take shards, or only FAILED ones, from their primaries, so that they are assigned again.

        Return the ids of the taken shards. With ``dry_run`` change nothing. Raise ``NotFound`` for an unknown
        shard, and ``Conflict`` if assignments changed meanwhile. A cancelled call may have taken effect.
        """
        request = consumer_pb2.UnassignRequest(
            shards=shard_ids, only_failed=only_failed, dry_run=dry_run
        )
        validate_unassign_request(request)
        with map_errors("Unassign", self.channels, endpoint=self.address):
            stub = await self._connected_stub()
            response = await stub.Unassign(
                request,
                metadata=self._metadata(shard_claims(Capability.APPLY, *shard_ids)),
                wait_for_ready=self.addresses.wait_for_ready,
            )
        _require_ok(response.status)
        return tuple(response.shards)

    async def _connected_stub(self) -> ShardStub:
        return self.channels.shard(await self.addresses.connected())

    def _endpoint_of(self, shard_id: ShardId) -> str:
        route = self._routes.get(shard_id, self.clock.monotonic())
        endpoint = None if route is None else self.channels.pick(route, primary=True)
        return self.address if endpoint is None else endpoint

    def _metadata(self, claims: Claims) -> Metadata:
        return self.channels.credentials.metadata(claims, SHORT_LIFETIME_S)


def _listed(shard: consumer_pb2.ListResponse.Shard) -> ListedShard:
    spec, problem = listed_shard(shard.spec)
    if problem:
        log.warning(
            "the specification of shard %(shard)s is not valid here, and is listed all the same: "
            "%(problem)s",
            {"shard": spec.id, "problem": problem},
        )
    return ListedShard(
        spec,
        shard.mod_revision,
        shard.create_revision,
        Route.from_pb(shard.route),
        tuple(stored_status(status)[0] for status in shard.status),
    )


def _hints(slot: consumer_pb2.GetHintsResponse.ResponseHints) -> FSMHints | None:
    return FSMHints.from_pb(slot.hints) if slot.HasField("hints") else None


def _require_ok(value: int, **facts: Any) -> None:
    with answered("Shard"):
        status = ShardStatus.from_pb(value)
    if status is not ShardStatus.OK:
        raise shard_status_error(status, **facts)
