"""The Shard service: Stat, List, Apply, GetHints, Unassign."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import grpc

from gazette.auth import Capability, Claims, Verifier, authorization_of
from gazette.client.rpc.channel import Channels
from gazette.client.rpc.errors import open_channel
from gazette.client.rpc.problems import asks_for_problems, problems_metadata
from gazette.cluster.allocator.model import DecodedKV, item_key
from gazette.cluster.allocator.routes import route_of
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compare, Op, Operation
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.consumer.hint_keys import HintKeys
from gazette.consumer.resolver import Resolver
from gazette.consumer.shard.hints_store import read_hints
from gazette.errors import Corrupt, GazetteError, Invalid, NotAllowed, Unavailable
from gazette.labels import META_SHARD_ID
from gazette.protocol.error_codes import protocol_code_of
from gazette.protocol.hints import FSMHints, encode_hints
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import consumer_pb2 as pb
from gazette.protocol.route import Header
from gazette.protocol.shard import ReplicaCode, ShardSpec
from gazette.protocol.shard_checks import (
    validate_get_hints_request,
    validate_shard_apply_request,
    validate_shard_list_request,
    validate_stat_request,
    validate_unassign_request,
)
from gazette.protocol.status import ShardStatus

MAX_TXN_OPS: Final = 128
_MATCHES_PER_SLICE: Final = 500
"""Number of shards to match before other tasks get the loop. It takes some milliseconds."""


CAPABILITIES: Final = {
    "Stat": Capability.READ,
    "List": Capability.LIST,
    "Apply": Capability.APPLY,
    "GetHints": Capability.READ,
    "Unassign": Capability.APPLY,
}
"""The capability that each call requires of its caller."""


class ShardApi:
    """The RPCs of ``consumer.Shard``, answered from this member's view of its cluster.

    Applications may wrap ``stat``, ``list``, ``apply``, ``get_hints`` and ``unassign``: replace
    these attributes before the server starts. Wrappers may use the ``extension`` bytes of requests.
    """

    def __init__(
        self,
        root: str,
        etcd: Etcd,
        key_space: KeySpace,
        state: State,
        resolver: Resolver,
        peers: Channels,
        verifier: Verifier,
        hint_keys: HintKeys,
    ) -> None:
        self._root = root
        self._etcd = etcd
        self._ks = key_space
        self._state = state
        self._resolver = resolver
        self._peers = peers
        self._verifier = verifier
        self._hint_keys = hint_keys
        self.stat: Callable[[pb.StatRequest, Claims], Awaitable[pb.StatResponse]] = self._stat
        self.list: Callable[[pb.ListRequest, Claims], Awaitable[pb.ListResponse]] = self._list
        self.apply: Callable[[pb.ApplyRequest, Claims], Awaitable[pb.ApplyResponse]] = self._apply
        self.get_hints: Callable[[pb.GetHintsRequest, Claims], Awaitable[pb.GetHintsResponse]]
        self.get_hints = self._get_hints
        self.unassign: Callable[[pb.UnassignRequest, Claims], Awaitable[pb.UnassignResponse]]
        self.unassign = self._unassign

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handler to add to a gRPC server."""

        def unary(method: str, name: str, request: Any, response: Any) -> Any:
            async def call(message: Any, context: Any) -> Any:
                return await self._authorize_and_call(name, CAPABILITIES[method], message, context)

            return grpc.unary_unary_rpc_method_handler(
                call, request.FromString, response.SerializeToString
            )

        methods = (
            ("Stat", "stat", pb.StatRequest, pb.StatResponse),
            ("List", "list", pb.ListRequest, pb.ListResponse),
            ("Apply", "apply", pb.ApplyRequest, pb.ApplyResponse),
            ("GetHints", "get_hints", pb.GetHintsRequest, pb.GetHintsResponse),
            ("Unassign", "unassign", pb.UnassignRequest, pb.UnassignResponse),
        )
        return grpc.method_handlers_generic_handler(
            "consumer.Shard", {rpc[0]: unary(*rpc) for rpc in methods}
        )

    async def _authorize_and_call(
        self, name: str, capability: int, message: Any, context: Any
    ) -> Any:
        """Authorize and make one call. A `GazetteError` ends the call with its own status and text."""
        try:
            claims = self._verifier.verify(
                authorization_of(context.invocation_metadata()), capability
            )
            if name == "list" and asks_for_problems(context):
                return self._problems(message, claims, context)
            return await getattr(self, name)(message, claims)
        except NotAllowed as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        except GazetteError as error:
            await context.abort(protocol_code_of(error), str(error))

    async def _stat(self, request: pb.StatRequest, claims: Claims) -> pb.StatResponse:
        """Return the offsets of a shard, once it has read through the requested offsets.

        The primary answers; any other member forwards the request. The caller's deadline bounds the wait.
        """
        validate_stat_request(request)
        header = Header.from_pb(request.header) if request.HasField("header") else None
        resolution = await self._resolver.resolve(
            request.shard,
            claims=claims,
            may_proxy=header is None,  # A header shows that another member forwarded the call.
            proxy_header=header,
            read_through=dict(request.read_through),
        )
        response = pb.StatResponse(status=resolution.status.value)  # type: ignore[arg-type]
        if resolution.status is ShardStatus.OK and resolution.shard is None:
            return await self._proxy_stat(request, resolution.header)
        response.header.CopyFrom(resolution.header.to_pb())
        if resolution.shard is not None:
            response.read_through.update(resolution.shard.progress.read_through)
            response.publish_at.update(resolution.shard.progress.publish_at)
        return response

    async def _proxy_stat(self, request: pb.StatRequest, header: Header) -> pb.StatResponse:
        """Return the answer of the shard's primary. Raise ``Unavailable`` if the primary does not answer."""
        forwarded = pb.StatRequest()
        forwarded.CopyFrom(request)
        forwarded.header.CopyFrom(header.to_pb())
        endpoint = self._peers.pick(header.route, process_id=header.process_id)
        if endpoint is None:
            raise Unavailable("the shard's primary has no endpoint", shard=request.shard)
        # Send the peer a token of this member: the caller's token must not be passed on.
        own_claims = Claims(Capability.READ, LabelSelector.of(id=request.shard))
        metadata = self._peers.credentials.metadata(own_claims)
        try:
            with open_channel("Stat", shard=request.shard):
                response: pb.StatResponse = await self._peers.shard(endpoint).Stat(
                    forwarded, metadata=metadata
                )
        except grpc.aio.AioRpcError as error:
            raise Unavailable(
                f"the shard's primary did not answer: {error.details()}",
                shard=request.shard,
                endpoint=endpoint,
            ) from error
        return response

    async def _list(self, request: pb.ListRequest, claims: Claims) -> pb.ListResponse:
        """Return the shards that the request selects and the claims cover, with their replicas."""
        validate_shard_list_request(request)
        selector = LabelSelector.from_pb(request.selector)
        response = pb.ListResponse()
        response.header.CopyFrom(self._resolver.unrouted_header().to_pb())
        assigned = self._state.assigned
        for index, item in enumerate(self._candidates(selector)):
            if index % _MATCHES_PER_SLICE == _MATCHES_PER_SLICE - 1:
                await self._etcd.clock.sleep(0)
            spec: ShardSpec = item.decoded.value.spec
            labels = spec.labels_with_id()
            if not (selector.matches(labels) and claims.selector.matches(labels)):
                continue
            assignments = assigned.get(spec.id, ())
            route = self._resolver.with_endpoints(route_of(assignments))
            shard = response.shards.add(
                spec=pb.ShardSpec.FromString(item.raw.value),
                mod_revision=item.raw.mod_revision,
                create_revision=item.raw.create_revision,
                route=route.to_pb(),
            )
            shard.status.extend(kv.decoded.value.to_pb() for kv in assignments)
        return response

    def _candidates(self, selector: LabelSelector) -> Sequence[DecodedKV]:
        """Return the shards that can match: only one if the selector names an id."""
        ids = [label for label in selector.include.labels if label.name == META_SHARD_ID]
        if len(ids) != 1 or ids[0].prefix or not ids[0].value:
            return self._state.items
        item = self._state.item(ids[0].value)
        return () if item is None else (item,)

    def _problems(self, request: pb.ListRequest, claims: Claims, context: Any) -> pb.ListResponse:
        """Return no shards. Say in the trailing metadata why each matching shard of this member waits."""
        validate_shard_list_request(request)
        selector = LabelSelector.from_pb(request.selector)
        problems = []
        for shard in self._resolver.local_shards.values():
            labels = shard.spec.labels_with_id()
            if not (selector.matches(labels) and claims.selector.matches(labels)):
                continue
            if reason := shard.waits_for:
                problems.append((shard.id, f"waits for {reason}"))
        context.set_trailing_metadata(problems_metadata(problems))
        return pb.ListResponse(header=self._resolver.unrouted_header().to_pb())

    async def _apply(self, request: pb.ApplyRequest, claims: Claims) -> pb.ApplyResponse:
        """Make all changes at one revision of etcd, or none.

        A cancelled call may have made the changes. If so, the same call fails on its expected revisions,
        unless they are -1. Raise ``NotAllowed`` if the claims do not cover a shard. Raise ``Invalid`` for a
        prefix of hints that is not permitted, and for more changes than one transaction of etcd takes.
        """
        validate_shard_apply_request(request)
        compares: list[Compare] = []
        operations: list[Operation] = []
        for change in request.changes:
            shard_id = change.upsert.id if change.HasField("upsert") else change.delete
            self._check_authorized(change, claims, shard_id)
            self._check_hint_prefix(change)
            key = item_key(self._root, shard_id)
            if change.expect_mod_revision != -1:
                compares.append(Compare.mod_revision(key, "=", change.expect_mod_revision))
            operations += _operations(key, change)
        if max(len(operations), len(compares)) > MAX_TXN_OPS:
            raise Invalid(
                f"too many changes ({len(request.changes)}; etcd accepts {MAX_TXN_OPS} "
                "operations in one transaction)",
                path="Changes",
                hint="Apply in batches, as `gazctl shards apply --max-txn-size=64` does.",
            )
        result = await self._etcd.txn(tuple(compares), tuple(operations))
        if result.succeeded and operations:
            await self._ks.wait_for_revision(result.header.revision, early=True)
        status = ShardStatus.OK if result.succeeded else ShardStatus.ETCD_TRANSACTION_FAILED
        header = self._resolver.unrouted_header()
        header = replace(header, etcd=replace(header.etcd, revision=result.header.revision))
        return pb.ApplyResponse(status=status.value, header=header.to_pb())  # type: ignore[arg-type]

    def _check_authorized(
        self, change: pb.ApplyRequest.Change, claims: Claims, shard_id: str
    ) -> None:
        labels = LabelSet.of((META_SHARD_ID, shard_id))
        if change.HasField("upsert"):
            labels = ShardSpec.from_pb(change.upsert).labels_with_id()
        if not claims.selector.matches(labels):
            raise NotAllowed(f"not authorized to {shard_id}")

    def _check_hint_prefix(self, change: pb.ApplyRequest.Change) -> None:
        """Raise ``Invalid`` if the hints would be written to a prefix that is not allowed.

        A shard may keep a prefix that it has already: an operator must be able to disable the shard.
        """
        if not change.HasField("upsert"):
            return
        spec = ShardSpec.from_pb(change.upsert)
        item = self._state.item(spec.id)
        former_prefix = "" if item is None else item.decoded.value.spec.hint_prefix
        if change.HasField("primary_hints") or spec.hint_prefix != former_prefix:
            self._hint_keys.require(spec)

    async def _get_hints(self, request: pb.GetHintsRequest, claims: Claims) -> pb.GetHintsResponse:
        """Return the stored hints. Raise ``Corrupt``, with the key in etcd, for damaged hints."""
        validate_get_hints_request(request)
        response = pb.GetHintsResponse(header=self._resolver.unrouted_header().to_pb())
        item = self._state.item(request.shard)
        spec: ShardSpec | None = None if item is None else item.decoded.value.spec
        if spec is None or not claims.selector.matches(spec.labels_with_id()):
            response.status = pb.SHARD_NOT_FOUND
            return response
        slots = await read_hints(self._etcd, spec)
        for slot in slots:
            if slot.error:
                raise Corrupt(f"hints are damaged: {slot.error}", key=slot.key)
        response.primary_hints.SetInParent()  # Callers check that the field is present.
        if slots[0].hints is not None:
            response.primary_hints.hints.CopyFrom(slots[0].hints.to_pb())
        for slot in slots[1:]:
            backup = response.backup_hints.add()
            if slot.hints is not None:
                backup.hints.CopyFrom(slot.hints.to_pb())
        return response

    async def _unassign(self, request: pb.UnassignRequest, claims: Claims) -> pb.UnassignResponse:
        """Delete assignments, so that the allocator makes new ones.

        Delete the assignments of failed replicas and, unless ``only_failed``, of the primary. Healthy
        standbys stay. Return the shards; with ``dry_run``, change nothing. If an assignment has changed
        meanwhile, delete none, and return the status ETCD_TRANSACTION_FAILED. Raise ``NotAllowed`` if the
        claims do not cover a shard, and ``Invalid`` for too many assignments.
        """
        validate_unassign_request(request)
        response = pb.UnassignResponse()
        compares: list[Compare] = []
        operations: list[Operation] = []
        for shard_id in request.shards:
            if not claims.selector.matches(LabelSet.of((META_SHARD_ID, shard_id))):
                raise NotAllowed(f"not authorized to {shard_id}")
            unassigned = [
                kv
                for kv in self._state.assignments_of(shard_id)
                if _is_unassigned(kv, only_failed=request.only_failed)
            ]
            if unassigned:
                response.shards.append(shard_id)
            for kv in unassigned:
                compares.append(Compare.mod_revision(kv.key, "=", kv.raw.mod_revision))
                operations.append(Op.delete(kv.key))
        if request.dry_run or not operations:
            return response
        if len(operations) > MAX_TXN_OPS:
            raise Invalid(
                f"too many assignments ({len(operations)}; expected <= {MAX_TXN_OPS})",
                path="Shards",
                hint="Name fewer shards per call.",
            )
        result = await self._etcd.txn(tuple(compares), tuple(operations))
        if not result.succeeded:
            return pb.UnassignResponse(status=pb.ETCD_TRANSACTION_FAILED)
        await self._ks.wait_for_revision(result.header.revision, early=True)
        return response


def _operations(key: str, change: pb.ApplyRequest.Change) -> list[Operation]:
    if not change.HasField("upsert"):
        return [Op.delete(key)]
    spec = ShardSpec.from_pb(change.upsert)
    # Store the message with its unknown fields, which a newer version may have sent.
    operations: list[Operation] = [Op.put(key, change.upsert.SerializeToString())]
    if change.HasField("primary_hints"):
        hints = FSMHints.from_pb(change.primary_hints)
        operations.append(Op.put(spec.hint_primary_key, encode_hints(hints)[1]))
    return operations


def _is_unassigned(kv: DecodedKV, *, only_failed: bool) -> bool:
    """Return True for an assignment that an Unassign call deletes."""
    if kv.decoded.value.code is ReplicaCode.FAILED:
        return True
    return not only_failed and kv.decoded.slot == 0
