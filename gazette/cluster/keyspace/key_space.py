"""A live, decoded mirror of all keys under one root in etcd.

The mirror changes in steps. One step applies all events that arrived within a short time, and calls every
observer, without yielding to the event loop. So readers see the mirror, and the state of its observers, at
the same revision.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NoReturn

from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compacted, RangeResult, ResponseHeader, WatchResponse
from gazette.cluster.keyspace import fold
from gazette.cluster.keyspace.key_values import DecodedKeyValue, Decoder, find, prefixed
from gazette.errors import Broken, Bug, Closed, Invalid, Unavailable
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope, sleep_unless

log = logging.getLogger(__name__)

_APPLY_DELAY_S = 0.030
_VISIT_SHARE = 0.2
"""Greatest share of the event loop's time for visits of all keys. To keep this share, a step waits at most
`_APPLY_DELAY_MAX_S`."""
_EARLY_VISIT_SHARE = 0.5
"""The same share while a caller waits for its own change."""
_VISITS_PER_CHANGE = 100
"""Keys that observers visit in the time of one change, for which they may have to build a replica."""
_APPLY_DELAY_MAX_S = 1.0
_PENDING_RESPONSES_MAX = 256
_KEYS_PER_SLICE = 500
"""Keys of a load that are decoded before other tasks get the loop: some milliseconds."""
_BACKOFFS_S = (0.0, 0.0, 0.005, 2.0, 3.0, 4.0)
_BACKOFF_MAX_S = 5.0


def backoff_s(attempt: int) -> float:
    """Return the seconds to wait before the n-th attempt (from 0) of a watch that has had no event."""
    return _BACKOFFS_S[attempt] if attempt < len(_BACKOFFS_S) else _BACKOFF_MAX_S


class KeySpace:
    """The keys under ``root + "/"``, decoded.

    ``key_values`` ascends. Every step replaces it and never changes it, so a reference to it is a snapshot.
    ``header`` is the header of the last applied response. Its ``revision`` is the greatest ModRevision seen
    under the root; right after ``load``, the revision of the load. Revisions of writes elsewhere in etcd may
    stay greater for ever.

    A value that cannot be decoded is logged and left out. A known older value stays in force. So a process
    that starts later may know less of that key than a process that runs.

    Invariant: keys of ``key_values`` strictly ascend, and no ModRevision is above ``header.revision``.
    """

    def __init__(
        self, root: str, decoder: Decoder, *, apply_delay_s: float = _APPLY_DELAY_S
    ) -> None:
        """Make an empty mirror. Raise ``Invalid`` unless ``root`` is a clean path (``/gazette/cluster``)."""
        if root in ("", ".") or root.startswith("//") or posixpath.normpath(root) != root:
            raise Invalid("not a clean path", path="root", root=root)
        self.root = root
        self.header = ResponseHeader()
        self.key_values: Sequence[DecodedKeyValue] = []
        self.observers: list[Callable[[], None]] = []
        self.apply_delay_s = apply_delay_s
        # The prefix ends with a separator, which excludes the neighbour `<root>2/`.
        self._prefix = root + "/"
        self._decoder = decoder
        self._resume_revision = 0  # The first revision that is not applied.
        self.seen_revision = 0
        """Revision up to which the mirror has all changes. The next change has a greater revision. If the
        watch fell behind and the mirror was loaded again, this may exceed the revision in ``header``."""
        self._attempt = 0  # Attempts to watch since the last event.
        self._steps = 0
        self._pending = 0
        """Number of waiting responses with changes, for the next step."""
        self._changed = asyncio.Event()
        self._wanted_early = 0
        """The greatest revision that a caller waits for early."""
        self._early = asyncio.Event()
        """Set once a caller waits for a revision early."""
        self._end: BaseException | None = None  # Why `watch` has ended; None: it has not.

    @property
    def has_pending(self) -> bool:
        """True if changes of etcd have arrived that the next step will apply."""
        return self._pending > 0

    def get(self, key: str) -> DecodedKeyValue | None:
        """Return the entry of exactly that key (which includes the root), or None."""
        return find(self.key_values, key)

    def prefixed(self, prefix: str) -> Sequence[DecodedKeyValue]:
        """Return the entries whose key begins with ``prefix`` (which includes the root)."""
        return prefixed(self.key_values, prefix)

    async def load(self, etcd: Etcd, revision: int = 0) -> None:
        """Replace the mirror by the keys of etcd at ``revision`` (0: now), and call the observers.

        Raise ``Unavailable`` if etcd does not answer, ``Compacted`` or ``NotYet`` if etcd does not have
        ``revision``. After an error or a cancellation the mirror is as it was.
        """
        loaded = await etcd.range(self._prefix, revision=revision)
        header = self._check_cluster(loaded.header)
        self._replace(await self._decoded(loaded, etcd), header, header)

    async def watch(self, etcd: Etcd) -> NoReturn:
        """Follow etcd from the mirror's revision, for as long as this runs.

        Resume after interruptions, over all endpoints, with a pause that grows to 5 s. If etcd has compacted
        the revision to resume from, load the mirror again. Observers then see one step, as if all missed
        changes had arrived in one batch.

        Raise ``Broken`` if etcd is another cluster or its revision went back. Raise errors of observers,
        ``NotAllowed`` and other refusals. Tasks that wait for revisions then raise ``Broken`` too. After
        cancellation the mirror is as of the last step, and these tasks raise ``Closed``.
        """
        if self.header.revision == 0:
            raise Bug("cannot watch a key space that is not loaded", root=self.root)
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
                        "the watch of %(prefix)s fell behind; loading again: %(error)s",
                        {"prefix": self.root, "error": error},
                    )
                    await self._reload(etcd)
                except Unavailable as error:
                    log.warning(
                        "resuming the watch of %(prefix)s at revision %(revision)d: %(error)s",
                        {"prefix": self.root, "revision": self._resume_revision, "error": error},
                    )
        except BaseException as error:
            self._end = error
            self._wake()
            raise

    async def wait_for_revision(self, revision: int, *, early: bool = False) -> None:
        """Wait until the mirror is at ``revision`` or later. Bound the wait with ``asyncio.timeout``.

        Only changes under the root count: the revision of a write elsewhere is reached with the next change
        here. With ``early``, steps come sooner, and there are more of them: use it for a call of a user that
        waits for its own change. Raise ``Closed`` or ``Broken`` if ``watch`` has ended.
        """
        if early and self.seen_revision < revision:
            self._wanted_early = max(self._wanted_early, revision)
            self._early.set()
        while self.seen_revision < revision:
            await self.next_change()

    async def next_change(self) -> None:
        """Wait for the next step. Raise ``Closed`` or ``Broken`` if ``watch`` has ended."""
        self._raise_if_ended()
        steps = self._steps
        await self._changed.wait()
        if self._steps == steps:
            self._raise_if_ended()

    def apply(self, responses: Sequence[WatchResponse]) -> None:
        """Take one step: apply the events of ``responses``, in their order, and call the observers.

        Raise ``Broken`` (and change nothing) if a response cannot follow the applied responses.
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
            self._attempt = 0  # an event arrived, so the stream works
        if any(response.events for response in responses):
            self._step(folded, header)
        else:
            self._adopt(header)

    def _adopt(self, header: ResponseHeader) -> None:
        self.header = header
        self.seen_revision = max(self.seen_revision, header.revision)

    async def _watch_once(self, etcd: Etcd) -> NoReturn:
        """Follow one watch until it fails. Responses that arrive shortly one after the other are one step."""
        # The queue is bounded. When it is full, gRPC slows etcd down.
        arrived: asyncio.Queue[WatchResponse] = asyncio.Queue(_PENDING_RESPONSES_MAX)
        # Responses of the next step. They outlive `apply`: the last step is made after its end.
        batch: list[WatchResponse] = []
        self._pending = 0

        async def receive() -> None:
            stream = etcd.watch(self._prefix, start_revision=self._resume_revision)
            async with aclosing(stream):
                async for response in stream:
                    self._pending += bool(response.events)
                    await arrived.put(response)

        async def apply() -> None:
            visit_s = 0.0
            while True:
                batch.append(await arrived.get())
                if self.apply_delay_s > 0:
                    await self._delay(etcd.clock, visit_s)
                begun = etcd.clock.monotonic()
                changes = step()
                # Only visits delay the next step: estimate their part of the time that this step took.
                visits = len(self.key_values) + 1
                share = visits / (visits + _VISITS_PER_CHANGE * changes)
                visit_s = share * (etcd.clock.monotonic() - begun)

        def step() -> int:
            """Apply the responses that have arrived. Return the number of events."""
            while not arrived.empty():
                batch.append(arrived.get_nowait())
            responses = batch.copy()
            batch.clear()
            self._pending -= sum(bool(response.events) for response in responses)
            self.apply(responses)
            return sum(len(response.events) for response in responses)

        try:
            async with TaskScope(f"watch of {self.root}") as scope:
                scope.daemon(receive(), name="receive")
                scope.daemon(apply(), name="apply")
        except Unavailable:
            step()  # apply the responses that arrived before the stream failed
            raise
        raise AssertionError  # unreachable: a daemon never returns, and the scope raises its error

    async def _delay(self, clock: Clock, visit_s: float) -> None:
        """Wait for more events before a step whose visits take ``visit_s``; less if a caller wants it early.

        Events come in bursts. A step visits all keys, for one event or for many. If there are many keys,
        steps come less often.
        """
        longest_s = max(self.apply_delay_s, min(visit_s / _VISIT_SHARE, _APPLY_DELAY_MAX_S))
        until = clock.monotonic() + longest_s
        if visit_s > 0:
            await clock.sleep(min(visit_s / _EARLY_VISIT_SHARE, longest_s))
        if self._wanted_early <= self.seen_revision:
            self._early.clear()
            await sleep_unless(clock, until - clock.monotonic(), self._early)

    async def _reload(self, etcd: Etcd) -> None:
        """Load the mirror again, since etcd has compacted the revision to resume from. If etcd does not
        answer, change nothing. Raise ``Broken`` if etcd's revision went back, or etcd is another cluster."""
        try:
            loaded = await etcd.range(self._prefix)
        except (Unavailable, Compacted) as error:
            log.warning(
                "retrying to load %(prefix)s: %(error)s",
                {"prefix": self.root, "error": error},
            )
            return  # after a pause, the watch finds its revision compacted again
        header = self._check_cluster(loaded.header)
        if header.revision < self.header.revision:
            raise self._went_back(header.revision, self.header.revision)
        # Peers wait for the revision that we report. So it must belong to a change under this root: after a
        # write elsewhere, this root may not change for hours.
        last_revision = max((kv.mod_revision for kv in loaded.kvs), default=0)
        loaded_keys = {kv.key for kv in loaded.kvs}  # Bytes: a key may not be UTF-8.
        is_any_gone = any(kv.raw.key not in loaded_keys for kv in self.key_values)
        # A key that is gone was deleted at an unknown revision, later than the last one that we have seen.
        shown = replace(header, revision=max(last_revision, self.header.revision + is_any_gone))
        self._replace(await self._decoded(loaded, etcd), header, shown)

    async def _decoded(self, loaded: RangeResult, etcd: Etcd) -> fold.Folded:
        """Decode all keys. Other tasks run meanwhile, and see the mirror as it was."""
        entries: list[DecodedKeyValue] = []
        anomalies: list[fold.Anomaly] = []
        for begin in range(0, len(loaded.kvs), _KEYS_PER_SLICE):
            if begin:
                await etcd.clock.sleep(0)
            part = loaded.kvs[begin : begin + _KEYS_PER_SLICE]
            after = entries[-1] if entries else None
            folded = fold.load(part, self._decoder, self.key_values, after)
            entries += folded.key_values
            anomalies += folded.anomalies
        return fold.Folded(entries, tuple(anomalies))

    def _replace(self, folded: fold.Folded, at: ResponseHeader, shown: ResponseHeader) -> None:
        """Take the keys of a load at revision ``at`` as one step, after which ``header`` is ``shown``."""
        self.seen_revision = at.revision
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
        self.key_values = folded.key_values
        self._adopt(header)
        for observer in self.observers:
            observer()
        self._steps += 1
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _next_header(self, last: ResponseHeader, response: WatchResponse) -> ResponseHeader:
        """Return the header after a response that follows ``last``. Raise ``Broken`` if it cannot follow."""
        header = self._check_cluster(response.header)
        if not response.events:
            # The response identifies its sender, but reports no change under the root.
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
            hint="etcd has lost writes, or was restored from a backup. Restart this process.",
            root=self.root,
            revision=revision,
            last=last,
        )

    def _raise_if_ended(self) -> None:
        if self._end is None:
            return
        if isinstance(self._end, asyncio.CancelledError):
            raise Closed("the watch of the key space has ended", root=self.root)
        raise Broken("the watch of the key space has failed", root=self.root) from self._end
