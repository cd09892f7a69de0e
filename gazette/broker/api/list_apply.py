"""The List and Apply calls: they list journals and change their specifications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import grpc

from gazette.auth import Capability, Claims
from gazette.blobs.path_limits import longest_path
from gazette.broker.api.call_guard import Expired, Expiry, authorize, counted, ending_on_error
from gazette.broker.api.problems import problems_of
from gazette.broker.context import BrokerContext
from gazette.broker.deleted_journals import note_deletions
from gazette.broker.key_space import decode_journal
from gazette.broker.known_head import head_key
from gazette.broker.left_overs import left_overs
from gazette.broker.reserved_names import is_reserved
from gazette.broker.settings import MAX_TXN_OPS
from gazette.client.rpc.problems import BROKERS_KEY, asks_for_problems
from gazette.cluster.allocator.model import ITEMS, DecodedKV, item_key
from gazette.cluster.allocator.routes import route_of
from gazette.cluster.etcd.client import Compare, Op, Operation
from gazette.errors import GazetteError, Invalid
from gazette.labels import META_NAME, META_PREFIX
from gazette.protocol.fragment_owner import keep_explanations
from gazette.protocol.ids import JournalName
from gazette.protocol.journal import JournalSpec, Suspend, SuspendLevel
from gazette.protocol.label_set import Label, LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_apply_request, validate_list_request
from gazette.protocol.status import Status
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

_MATCHES_PER_SLICE: Final = 500
"""Journals to match before other tasks get the event loop: this takes a few milliseconds."""
_KEPT_MAX: Final = 8
"""Greatest number of selectors whose matches are kept."""


def with_prefix_as_name(selector: LabelSelector) -> LabelSelector:
    """Return the selector with its ``prefix`` labels as prefixes of the label ``name``,
    which journals have."""

    def rewritten(labels: LabelSet) -> LabelSet:
        if not labels.values_of(META_PREFIX):
            return labels
        return LabelSet(
            tuple(
                sorted(
                    Label(META_NAME, label.value, prefix=True)
                    if label.name == META_PREFIX
                    else label
                    for label in labels.labels
                )
            )
        )

    return LabelSelector(rewritten(selector.include), rewritten(selector.exclude))


@dataclass(frozen=True, slots=True)
class _Matched:
    """Journals that match a selector, as of one revision. Two such snapshots with equal ``version`` have the
    same specifications; routes may differ. ``items_version`` covers all journals of the cluster."""

    journals: list[broker_pb2.ListResponse.Journal]
    version: tuple[int, int]
    items_version: tuple[int, int]
    header: Header


_NewJournals: TypeAlias = "list[tuple[JournalName, Sequence[str]]]"
"""Pairs of name and stores."""


class ListApplyApi:
    """Serves List and Apply. Register ``updated`` as an observer of the key space, after the resolver's."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._changed = asyncio.Event()
        self._stopped = False
        self._version_at = -1  # Revision of etcd for which `_version` was computed.
        self._version = (0, 0)
        self._kept: dict[tuple[LabelSelector, LabelSelector], _Matched] = {}
        """Matches at the present revision, by selector. Lists with equal selectors share them."""

    def updated(self) -> None:
        """Wake the watches: the key space has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        self._kept.clear()
        changed.set()

    def stop(self) -> None:
        """End every watch, cleanly."""
        self._stopped = True
        self.updated()

    async def list(self, request: broker_pb2.ListRequest, call: Any) -> None:
        """Send one snapshot of the journals that match. With ``watch``, send another one after changes.

        Only changes of specifications count, not those of routes. One snapshot may show several changes.
        With ``watch_resume``, first wait for a revision later than that of this header. A snapshot consists
        of pages of journals, in order of their names; the first page has the header. In a watch, an empty
        message ends each snapshot. The stream ends cleanly when the caller's claims expire.
        """
        context = self._context
        with counted("List") as outcome:
            claims = await authorize(call, context.verifier, Capability.LIST)
            async with ending_on_error(call):
                validate_list_request(request)
                with suppress(Expired):
                    await self._list(request, claims, call)
            outcome.status = Status.OK

    async def _list(self, request: broker_pb2.ListRequest, claims: Claims, call: Any) -> None:
        selector = with_prefix_as_name(LabelSelector.from_pb(request.selector))
        allowed = with_prefix_as_name(claims.selector)
        expiry = Expiry(claims, self._context.clock)
        if asks_for_problems(call):
            await self._send_problems(selector, allowed, call)
            return
        if request.HasField("watch_resume"):
            await expiry.bound(self._await_revision(Header.from_pb(request.watch_resume)))
        matched = await self._match(selector, allowed)
        await self._send(matched, call, watch=request.watch)
        sent = matched.version
        while request.watch:
            await expiry.bound(self._next_item_change(matched))
            if self._stopped:
                return
            matched = await self._match(selector, allowed)
            if matched.version != sent:
                await self._send(matched, call, watch=True)
                sent = matched.version

    async def _send_problems(
        self, selector: LabelSelector, allowed: LabelSelector, call: Any
    ) -> None:
        """Send a list without journals. Trailing metadata have the problems of journals that this broker
        serves, and the number of brokers."""
        resolver, clock = self._context.resolver, self._context.clock
        problems = await problems_of(list(resolver.replicas), selector, allowed, clock)
        count = len(self._context.state.members)
        call.set_trailing_metadata((*problems, (BROKERS_KEY, str(count))))
        await call.write(broker_pb2.ListResponse(header=resolver.unrouted_header().to_pb()))

    async def _await_revision(self, resume: Header) -> None:
        """Wait for a revision that the holder of ``resume`` has not seen, or until the watches end. Raise
        ``Invalid`` if ``resume`` is of another etcd cluster."""
        own_id = self._context.key_space.header.cluster_id
        if resume.etcd.cluster_id != own_id:
            raise Invalid(
                "watch_resume is of another etcd cluster "
                f"({resume.etcd.cluster_id}; ours is {own_id})",
                path="WatchResume",
            )
        await self._next_change(resume.etcd.revision)

    async def _next_change(self, seen: int) -> None:
        while self._context.key_space.header.revision <= seen and not self._stopped:
            await self._changed.wait()

    async def _next_item_change(self, since: _Matched) -> None:
        """Wait until a journal is written or deleted, or the watches end. Changes of assignments do not
        count."""
        while self._items_version() == since.items_version and not self._stopped:
            await self._next_change(self._context.key_space.header.revision)

    def _items_version(self) -> tuple[int, int]:
        """Return a version that changes when any journal is written or deleted. Compute the version once for
        each revision of etcd: all watches ask for it."""
        revision = self._context.key_space.header.revision
        if self._version_at != revision:
            items = self._context.state.items
            self._version_at = revision
            self._version = (len(items), max((kv.raw.mod_revision for kv in items), default=0))
        return self._version

    async def _match(self, selector: LabelSelector, allowed: LabelSelector) -> _Matched:
        """Match the journals as of now. Lists with equal selectors share the result of one revision."""
        cached = self._kept.get((selector, allowed))
        if cached is not None:
            return cached
        changed = self._changed
        matched = await self._match_now(selector, allowed)
        if changed is self._changed:  # Nothing has changed meanwhile.
            if len(self._kept) >= _KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[selector, allowed] = matched
        return matched

    async def _match_now(self, selector: LabelSelector, allowed: LabelSelector) -> _Matched:
        """Match the journals as of now. Other tasks run meanwhile; their changes are not in the snapshot."""
        context = self._context
        state, resolver = context.state, context.resolver
        items = self._candidates(selector)
        assigned = state.assigned
        header, items_version = resolver.unrouted_header(), self._items_version()
        journals: list[broker_pb2.ListResponse.Journal] = []
        newest = 0
        for index, item in enumerate(items):
            if index % _MATCHES_PER_SLICE == _MATCHES_PER_SLICE - 1:
                await context.clock.sleep(0)
            spec: JournalSpec = item.decoded.value.spec
            labels = item.decoded.value.labels
            if not (selector.matches(labels) and allowed.matches(labels)):
                continue
            newest = max(newest, item.raw.mod_revision)
            route = resolver.with_endpoints(route_of(assigned.get(spec.name, ())))
            journals.append(
                broker_pb2.ListResponse.Journal(
                    spec=broker_pb2.JournalSpec.FromString(item.raw.value),
                    mod_revision=item.raw.mod_revision,
                    route=route.to_pb(),
                    create_revision=item.raw.create_revision,
                )
            )
        return _Matched(journals, (len(journals), newest), items_version, header)

    def _candidates(self, selector: LabelSelector) -> Sequence[DecodedKV]:
        """Return the journals that can match by name: all, unless the selector has one name or prefix."""
        name_labels = [label for label in selector.include.labels if label.name == META_NAME]
        if len(name_labels) != 1 or not name_labels[0].value:
            return self._context.state.items
        if not name_labels[0].prefix:
            item = self._context.state.item(name_labels[0].value)
            return () if item is None else (item,)
        root = self._context.settings.root
        return self._context.key_space.prefixed(f"{root}{ITEMS}{name_labels[0].value}")

    async def _send(self, matched: _Matched, call: Any, *, watch: bool) -> None:
        size = self._context.settings.list_page_journals
        pages = [
            matched.journals[start : start + size]
            for start in range(0, len(matched.journals), size)
        ] or [[]]  # The header needs a message even without journals.
        for index, page in enumerate(pages):
            response = broker_pb2.ListResponse(journals=page)
            if index == 0:
                response.header.CopyFrom(matched.header.to_pb())
            await call.write(response)
        if watch:
            await call.write(broker_pb2.ListResponse())

    async def apply(self, request: broker_pb2.ApplyRequest, call: Any) -> broker_pb2.ApplyResponse:
        """Make all changes, at one revision of etcd, or none.

        Cancellation: the changes may have been made. A second call that expects the same revisions then
        fails, unless it expects -1 (any revision). Raise the errors of ``_apply``.
        """
        context = self._context
        with counted("Apply") as outcome:
            claims = await authorize(call, context.verifier, Capability.APPLY)
            async with ending_on_error(call):
                validate_apply_request(request)
                for change in request.changes:
                    if (name := _refused(change, claims)) is not None:
                        await call.abort(
                            grpc.StatusCode.UNAUTHENTICATED, f"not authorized to {name}"
                        )
                new = self._new_journals(request)
                async with TaskScope("apply") as scope:
                    # Look for left-over objects during the transaction: stores may be slow.
                    looking = scope.spawn(left_overs(self._context.blob_stores, new), name="look")
                    response = await self._apply(request)
                    outcome.status = Status(response.status)
                    if outcome.status is Status.OK:
                        call.set_trailing_metadata(await looking)
                    else:
                        scope.cancel()
                return response
        raise AssertionError("unreachable: the call was aborted")

    async def _apply(self, request: broker_pb2.ApplyRequest) -> broker_pb2.ApplyResponse:
        """Make the changes in one transaction. If any key has another revision than its change expects, make
        no change: the response has the status ETCD_TRANSACTION_FAILED.

        Raise ``Invalid`` for too many changes, a reserved name, or a path that is too long for a store.
        """
        context, changes = self._context, request.changes
        if len(changes) > MAX_TXN_OPS:
            raise Invalid(
                f"too many changes for one transaction of etcd ({len(changes)}; expected <= {MAX_TXN_OPS})",
                path="Changes",
                hint="Apply in several calls, as `gazctl journals apply --max-txn-size=128` does.",
            )
        compares: list[Compare] = []
        operations: list[Operation] = []
        for change in changes:
            name = change.upsert.name if change.HasField("upsert") else change.delete
            key = item_key(context.settings.root, name)
            if change.expect_mod_revision != -1:
                compares.append(Compare.mod_revision(key, "=", change.expect_mod_revision))
            if change.HasField("upsert"):
                await self._check_name(key, change)
                self._check_paths(change.upsert)
                spec = await self._keeping(key, change)
                operations.append(Op.put(key, spec.SerializeToString()))
            else:
                operations.append(Op.delete(key))
        deleted = [change.delete for change in changes if change.delete]
        await note_deletions(context.etcd, context.state, deleted)
        result = await context.etcd.txn(compares, operations)
        if result.succeeded:
            await self._forget_heads(deleted)
        if result.succeeded and changes:
            await context.key_space.wait_for_revision(result.header.revision, early=True)
        header = context.resolver.unrouted_header()
        if result.succeeded:
            header = replace(header, etcd=replace(header.etcd, revision=result.header.revision))
        # A failed transaction has written nothing at its revision, and the key space may never reach this
        # revision. A caller that waited for the revision would hang.
        status = Status.OK if result.succeeded else Status.ETCD_TRANSACTION_FAILED
        return broker_pb2.ApplyResponse(status=status.value, header=header.to_pb())  # type: ignore[arg-type]

    def _new_journals(self, request: broker_pb2.ApplyRequest) -> _NewJournals:
        """Return the journals that a request creates, with their stores."""
        upserts = [change.upsert for change in request.changes if change.HasField("upsert")]
        item = self._context.state.item
        return [(spec.name, spec.fragment.stores) for spec in upserts if item(spec.name) is None]

    async def _check_name(self, key: str, change: broker_pb2.ApplyRequest.Change) -> None:
        """Raise ``Invalid`` for a new journal with a reserved name. An existing journal may be changed."""
        name = change.upsert.name
        if not is_reserved(name) or change.expect_mod_revision > 0:
            return
        if change.expect_mod_revision == 0 or await self._context.etcd.get(key) is None:
            raise Invalid(
                f"the journal name {name} is reserved: brokers serve HTTP routes there",
                path="Upsert.Name",
                hint="Choose a name that is not `metrics` and does not begin with `debug/` or `v1/`.",
            )

    async def _forget_heads(self, journals: Sequence[str]) -> None:
        """Remove the known heads of deleted journals.

        A head that stays has no effect on a later life: each head names its life. Keep a later life's head.
        """
        context = self._context
        for journal in journals:
            key = head_key(context.settings.root, journal)
            item = item_key(context.settings.root, journal)
            try:
                await context.etcd.txn([Compare.create_revision(item, "=", 0)], [Op.delete(key)])
            except GazetteError as error:
                log.warning(
                    "the known head of deleted journal %(journal)s stays in etcd, without effect: %(error)s",
                    {"journal": journal, "error": error},
                )

    def _check_paths(self, spec: broker_pb2.JournalSpec) -> None:
        """Raise ``Invalid`` if the path of a fragment of the journal would be too long for one of its
        stores."""
        for url in spec.fragment.stores:
            self._context.blob_stores.check_path(url, longest_path(spec.name))

    async def _keeping(
        self, key: str, change: broker_pb2.ApplyRequest.Change
    ) -> broker_pb2.JournalSpec:
        """Return the specification to store: that of the change, with its unknown fields.

        Add two parts of the former specification: the labels that explain fragments, and the resume offset.
        The resume offset is added only if the change names no suspension.
        """
        spec = change.upsert
        if change.expect_mod_revision == 0:
            return spec
        former = await self._former(key, change)
        if former is None:
            return spec
        _keep_resume_offset(spec, former)
        labels = LabelSet.from_pb(spec.labels)
        template = spec.fragment.path_postfix_template
        kept_labels = keep_explanations(labels, former, template)
        if kept_labels != labels:
            spec.labels.CopyFrom(kept_labels.to_pb())
        return spec

    async def _former(self, key: str, change: broker_pb2.ApplyRequest.Change) -> JournalSpec | None:
        """Return the specification that a change replaces; None if it is absent or cannot be read."""
        context, name = self._context, change.upsert.name
        item = context.state.item(name)
        if item is not None and change.expect_mod_revision in (-1, item.raw.mod_revision):
            former: JournalSpec = item.decoded.value.spec
            return former
        # The key space does not have the value that the change expects. Ask etcd, which may have a newer
        # value. Damaged values may be replaced.
        raw = await context.etcd.get(key)
        if raw is not None:
            with suppress(Invalid):
                return decode_journal(name, raw.value)
        return None


def _keep_resume_offset(spec: broker_pb2.JournalSpec, former: JournalSpec) -> None:
    """Keep the former resume offset in a specification that names no suspension.

    A specification without ``suspend`` resumes a suspended journal. The resume offset must survive this
    change. With an empty blob store, the offset is known nowhere else: offsets would be given out twice.
    """
    if not spec.HasField("suspend") and former.suspend is not None and former.suspend.offset:
        spec.suspend.CopyFrom(Suspend(SuspendLevel.NONE, former.suspend.offset).to_pb())


def _refused(change: broker_pb2.ApplyRequest.Change, claims: Claims) -> str | None:
    """Return the journal of a change that the claims do not cover; None if they cover it."""
    if change.HasField("upsert"):
        spec = JournalSpec.from_pb(change.upsert)
        return None if claims.selector.matches(spec.labels_with_name()) else spec.name
    labels = LabelSet.of((META_NAME, change.delete))
    return None if claims.selector.matches(labels) else change.delete
