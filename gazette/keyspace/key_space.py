"""A live, decoded mirror of everything under one root in etcd.

The mirror changes in steps. One step applies what etcd reported within a short delay, and calls every
observer, without ever yielding to the loop: whoever reads the mirror and what observers derive from it
sees both as of the same revision.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NoReturn

from gazette.errors import Broken, Bug, Closed, Invalid, Unavailable
from gazette.etcd import Etcd
from gazette.etcd_values import Compacted, RangeResult, ResponseHeader, WatchResponse
from gazette.keyspace import fold
from gazette.keyspace.key_values import DecodedKeyValue, Decoder, find, prefixed
from gazette.tasks import TaskScope

log = logging.getLogger(__name__)

_APPLY_DELAY_S = 0.030
_PENDING_RESPONSES_MAX = 256
_BACKOFFS_S = (0.0, 0.0, 0.005, 2.0, 3.0, 4.0)
_BACKOFF_MAX_S = 5.0


def backoff_s(attempt: int) -> float:
    """How long to wait before the watch is attempted the n-th time (from 0) without any event."""
    return _BACKOFFS_S[attempt] if attempt < len(_BACKOFFS_S) else _BACKOFF_MAX_S


class KeySpace:
    """The keys under ``root + "/"``, decoded.

    ``key_values`` is ascending, and replaced by every step, never changed: holding on to it is holding
    on to a snapshot. ``header`` is that of the last response applied, with ``revision`` being the
    greatest ModRevision seen under the root (right after a load: the revision of the load). It is not
    comparable with revisions of writes elsewhere in etcd: these may be greater for ever.

    A value that does not decode is logged and left out; if an older one is known, that stays in force.
    So a process that starts later may know less of that key than one that runs.

    Invariant: keys of ``key_values`` are strictly ascending, none with a ModRevision above
    ``header.revision``.
    """

    def __init__(
        self, root: str, decoder: Decoder, *, apply_delay_s: float = _APPLY_DELAY_S
    ) -> None:
        """Raises ``Invalid`` if ``root`` is not a clean path, such as ``/gazette/cluster``."""
        if root in ("", ".") or root.startswith("//") or posixpath.normpath(root) != root:
            raise Invalid("not a clean path", path="root", root=root)
        self.root = root
        self.header = ResponseHeader()
        self.key_values: Sequence[DecodedKeyValue] = []
        self.observers: list[Callable[[], None]] = []
        self.apply_delay_s = apply_delay_s
        # Ending the root with its separator keeps the neighbour `<root>2/` out.
        self._prefix = root + "/"
        self._decoder = decoder
        self._resume_revision = 0
        self._loaded_revision = 0
        """The mirror has all changes up to here, though the last of them may be older."""
        self._attempt = 0
        self._steps = 0
        self._changed = asyncio.Event()
        self._end: BaseException | None = None

    def get(self, key: str) -> DecodedKeyValue | None:
        """The entry of exactly that key (which includes the root)."""
        return find(self.key_values, key)

    def prefixed(self, prefix: str) -> Sequence[DecodedKeyValue]:
        """Entries whose key begins with ``prefix`` (which includes the root)."""
        return prefixed(self.key_values, prefix)

    async def load(self, etcd: Etcd, revision: int = 0) -> None:
        """Replace the mirror by what etcd has at ``revision`` (0: now), and call the observers.

        Raises what `Etcd.range` raises. Cancellation: the mirror is as it was.
        """
        loaded = await etcd.range(self._prefix, revision=revision)
        header = self._check_cluster(loaded.header)
        self._replace(loaded, header, header)

    async def watch(self, etcd: Etcd) -> NoReturn:
        """Follow etcd from where the mirror is, for as long as this runs.

        Interruptions are resumed, over all endpoints, with a growing pause that ends at 5 s. If the
        revision to resume from was compacted away meanwhile, the mirror is loaded anew: observers then
        see one step, as if everything missed had arrived in one batch.

        Raises whatever ends the mirror: ``Broken`` if etcd is another cluster or its revision went
        back, errors of observers, ``NotAllowed`` and other refusals. Those who wait for revisions then
        raise ``Broken`` too. Cancellation: the mirror is as of the last step, and they raise ``Closed``.
        """
        if self.header.revision == 0:
            raise Bug("a key space is loaded before it is watched", root=self.root)
        self._end, self._attempt = None, 0
        try:
            while True:
                pause_s = backoff_s(self._attempt)
                self._attempt += 1
                if pause_s > 0:
                    await etcd.clock.sleep(pause_s)
                try:
                    await self._watch_once(etcd)
                except Compacted as error:
                    log.warning(
                        "the watch of %(prefix)s fell behind, loading anew: %(error)s",
                        {"prefix": self.root, "error": error},
                    )
                    await self._reload(etcd)
                except Unavailable as error:
                    log.warning(
                        "the watch of %(prefix)s is resumed at revision %(revision)d: %(error)s",
                        {"prefix": self.root, "revision": self._resume_revision, "error": error},
                    )
        except BaseException as error:
            self._end = error
            self._wake()
            raise

    async def wait_for_revision(self, revision: int) -> None:
        """Return once the mirror is at ``revision`` or later; bound it with ``asyncio.timeout``.

        Only changes under the root count: a revision of a write elsewhere is reached with the next
        change here. Raises ``Closed`` or ``Broken`` if ``watch`` has ended.
        """
        while max(self.header.revision, self._loaded_revision) < revision:
            await self.next_change()

    async def next_change(self) -> None:
        """Return after the next step. Raises ``Closed`` or ``Broken`` if ``watch`` has ended."""
        self._raise_if_ended()
        steps = self._steps
        await self._changed.wait()
        if self._steps == steps:
            self._raise_if_ended()

    def apply(self, responses: Sequence[WatchResponse]) -> None:
        """Take one step: apply the events of ``responses``, in their order, and call the observers.

        Raises ``Broken`` (and changes nothing) if a response cannot follow what was applied so far.
        """
        header, resume = self.header, self._resume_revision
        for response in responses:
            header = self._next_header(header, response)
            resume = max(response.resume_revision or 0, resume)
        folded = fold.fold(
            self.key_values, [response.events for response in responses], self._decoder
        )
        self._resume_revision = resume
        if not all(response.created for response in responses):
            self._attempt = 0  # the stream does more than begin
        if any(response.events for response in responses):
            self._step(folded, header)
        else:
            self.header = header

    async def _watch_once(self, etcd: Etcd) -> NoReturn:
        # The queue is bounded: behind it, gRPC holds etcd back.
        arrived: asyncio.Queue[WatchResponse] = asyncio.Queue(_PENDING_RESPONSES_MAX)
        batch: list[WatchResponse] = []

        async def receive() -> None:
            stream = etcd.watch(self._prefix, start_revision=self._resume_revision)
            async with aclosing(stream):
                async for response in stream:
                    await arrived.put(response)

        async def apply() -> None:
            while True:
                batch.append(await arrived.get())
                if self.apply_delay_s > 0:
                    # Events come in bursts, and a step costs the same for one as for all of them.
                    await etcd.clock.sleep(self.apply_delay_s)
                step()

        def step() -> None:
            while not arrived.empty():
                batch.append(arrived.get_nowait())
            responses = batch.copy()
            batch.clear()
            self.apply(responses)

        try:
            async with TaskScope(f"watch of {self.root}") as scope:
                scope.daemon(receive(), name="receive")
                scope.daemon(apply(), name="apply")
        except Unavailable:
            step()  # what did arrive holds, whatever happened to the stream
            raise
        raise AssertionError  # a daemon never returns, and the scope raises what it raised

    async def _reload(self, etcd: Etcd) -> None:
        try:
            loaded = await etcd.range(self._prefix)
        except (Unavailable, Compacted) as error:
            log.warning(
                "loading %(prefix)s anew is tried again: %(error)s",
                {"prefix": self.root, "error": error},
            )
            return  # the watch finds itself compacted again, after a pause
        header = self._check_cluster(loaded.header)
        if header.revision < self.header.revision:
            raise self._went_back(header.revision, self.header.revision)
        # What we tell others that we know, they wait for: it must be a change that they see, too, and
        # not a write elsewhere, after which nothing may change here for hours.
        last = max((kv.mod_revision for kv in loaded.kvs), default=0)
        left = {kv.key.decode() for kv in loaded.kvs}
        gone = any(kv.key not in left for kv in self.key_values)
        # Something was deleted, nobody knows when: but after what we had seen.
        shown = replace(header, revision=max(last, self.header.revision + gone))
        self._replace(loaded, header, shown)

    def _replace(self, loaded: RangeResult, at: ResponseHeader, shown: ResponseHeader) -> None:
        folded = fold.load(loaded.kvs, self._decoder, self.key_values)
        self._loaded_revision = at.revision
        self._resume_revision = at.revision + 1
        self._step(folded, shown)

    def _step(self, folded: fold.Folded, header: ResponseHeader) -> None:
        for anomaly in folded.anomalies:
            log.warning(
                "unexpected at %(key)s: %(reason)s (revision %(revision)d, %(outcome)s)",
                {
                    "key": anomaly.key,
                    "reason": anomaly.problem,
                    "revision": anomaly.mod_revision,
                    "outcome": "applied" if anomaly.applied else "ignored",
                },
            )
        self.key_values, self.header = folded.key_values, header
        for observer in self.observers:
            observer()
        self._steps += 1
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _next_header(self, last: ResponseHeader, response: WatchResponse) -> ResponseHeader:
        header = self._check_cluster(response.header)
        if not response.events:
            # It says who speaks, but not that anything changed under the root.
            return replace(header, revision=last.revision)
        if header.revision < last.revision:
            raise self._went_back(header.revision, last.revision)
        revisions = [event.kv.mod_revision for event in response.events]
        if revisions[0] <= last.revision:
            raise self._went_back(revisions[0], last.revision)
        return replace(header, revision=max(revisions))

    def _check_cluster(self, header: ResponseHeader) -> ResponseHeader:
        if self.header.cluster_id not in (0, header.cluster_id):
            raise Broken(
                "etcd is another cluster than the one that was loaded",
                hint="All etcd endpoints must be members of one cluster; restart after restoring it.",
                root=self.root,
                cluster_id=header.cluster_id,
                loaded=self.header.cluster_id,
            )
        return header

    def _went_back(self, revision: int, last: int) -> Broken:
        return Broken(
            "etcd's revision went back",
            hint="etcd has lost writes, or was restored from a backup: restart this process.",
            root=self.root,
            revision=revision,
            last=last,
        )

    def _raise_if_ended(self) -> None:
        if self._end is None:
            return
        if isinstance(self._end, asyncio.CancelledError):
            raise Closed("the key space is no longer watched", root=self.root)
        raise Broken("the watch of the key space has failed", root=self.root) from self._end
