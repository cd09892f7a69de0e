"""One stream of watches: which responses it owes to its client, and when. Pure.

As in etcd, a watch that keeps up gets one response per write. A watch that falls behind, or begins in the
past, catches up from the store. It gets larger responses, whose headers are ahead of their events. If events
that it needs were compacted meanwhile, it is cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from google.protobuf.unknown_fields import UnknownFieldSet

from gazette.cluster.etcd.pb import rpc_pb2
from gazette.testing.simulation.etcd import errors
from gazette.testing.simulation.etcd.store import REQUEST_BYTES_MAX, EtcdStore, Event

FRAGMENT_BYTES: Final = REQUEST_BYTES_MAX + 512 * 1024
_BUFFERED_MAX: Final = 128
_CATCH_UP_REVISIONS: Final = 1_000
_FROM_KEY: Final = b"\0"
_BROADCAST: Final = -1


class DueResponse(NamedTuple):
    """A response, and the time from which it may be sent (seconds of the monotonic clock)."""

    at: float
    response: rpc_pb2.WatchResponse


@dataclass(slots=True)
class _Watch:
    id: int
    key: bytes
    range_end: bytes
    next_revision: int
    prev_kv: bool
    fragment: bool
    progress: bool
    synced: bool
    reported_at: float
    """Time of the watch's last response."""
    ended: bool = False

    def matches(self, event: Event) -> bool:
        key = event.kv.key
        if not self.range_end:
            return key == self.key
        return self.key <= key and (self.range_end == _FROM_KEY or key < self.range_end)


@dataclass(slots=True)
class WatchStream:
    """The watches of one stream. ``wake`` is called when there may be something to send.

    ``delay_s`` is added to the delivery of each event and progress; ``hold`` stops delivery until
    ``release``. Neither delays the answers to requests.
    """

    store: EtcdStore
    peer: str
    now: Callable[[], float]
    wake: Callable[[], None]
    progress_interval_s: float
    delay_s: float = 0.0
    _held: bool = False
    _progress_owed: int = 0
    _next_id: int = 0
    _watches: dict[int, _Watch] = field(default_factory=dict)
    _answers: deque[rpc_pb2.WatchResponse] = field(default_factory=deque)
    _buffered: deque[DueResponse] = field(default_factory=deque)

    @property
    def held(self) -> bool:
        return self._held

    @property
    def keys(self) -> list[bytes]:
        """The first key of each watch."""
        return [watch.key for watch in self._watches.values()]

    def hold(self) -> None:
        """Deliver nothing more until ``release``."""
        self._held = True

    def release(self) -> None:
        """Deliver again, beginning with the missed events."""
        self._held = False
        self.wake()

    def receive(self, request: rpc_pb2.WatchRequest) -> None:
        """Take a request. Raise ``EtcdRefusal`` for a feature that the fake lacks, with its name."""
        match request.WhichOneof("request_union"):
            case "create_request":
                self._create(request.create_request)
            case "cancel_request":
                self._cancel(request.cancel_request.watch_id)
            case "progress_request":
                self._progress_owed += 1
            case _:
                return
        self.wake()

    def observe(self, revision: int, events: Sequence[Event]) -> None:
        """Take a write of the store."""
        for watch in self._watches.values():
            if not watch.synced or watch.ended:
                continue
            if self._held or len(self._buffered) >= _BUFFERED_MAX:
                watch.synced = False
                continue
            if revision >= watch.next_revision:
                self._deliver(watch, events)
                watch.next_revision = revision + 1
        self.wake()

    def tick(self) -> None:
        """Report the revision on watches that want progress and have had no response for long."""
        now = self.now()
        for watch in self._watches.values():
            quiet = now - watch.reported_at >= self.progress_interval_s
            if watch.progress and quiet and watch.synced and not watch.ended and not self._held:
                watch.reported_at = now
                self._buffer(rpc_pb2.WatchResponse(header=self._header(), watch_id=watch.id))
                self.wake()

    def next(self) -> DueResponse | None:
        """Return the next response and its time; None without a response to send."""
        if self._answers:
            return DueResponse(0.0, self._answers[0])
        if self._held:
            return None
        if not self._buffered:
            self._catch_up()
        if not self._buffered and self._progress_owed:
            # As of etcd 3.5.8: report progress only once every watch has got its events.
            self._progress_owed -= 1
            self._buffer(rpc_pb2.WatchResponse(header=self._header(), watch_id=_BROADCAST))
        return self._buffered[0] if self._buffered else None

    def sent(self) -> None:
        """Forget the response that ``next`` returned last."""
        (self._answers or self._buffered).popleft()

    # Requests.

    def _create(self, request: rpc_pb2.WatchCreateRequest) -> None:
        if len(UnknownFieldSet(request)) > 0:
            raise errors.unimplemented("filters or other unknown fields of a watch")
        if request.start_revision < 0:
            raise errors.unimplemented("a watch from a negative revision")
        range_end = request.range_end
        key = request.key or _FROM_KEY
        if range_end and range_end != _FROM_KEY and range_end <= key:
            self._refuse("mvcc: watcher range is empty")
            return
        if request.watch_id in self._watches and request.watch_id != 0:
            self._refuse("mvcc: duplicate watch ID provided on the WatchStream")
            return
        watch = _Watch(
            id=request.watch_id or self._new_id(),
            key=key,
            range_end=range_end,
            next_revision=request.start_revision or self.store.revision + 1,
            prev_kv=request.prev_kv,
            fragment=request.fragment,
            progress=request.progress_notify,
            synced=request.start_revision == 0 or request.start_revision > self.store.revision,
            reported_at=self.now(),
        )
        self._watches[watch.id] = watch
        self._answers.append(
            rpc_pb2.WatchResponse(header=self._header(), watch_id=watch.id, created=True)
        )

    def _refuse(self, reason: str) -> None:
        self._answers.append(
            rpc_pb2.WatchResponse(
                header=self._header(),
                watch_id=_BROADCAST,
                created=True,
                canceled=True,
                cancel_reason=reason,
            )
        )

    def _cancel(self, watch_id: int) -> None:
        if self._watches.pop(watch_id, None) is None:
            return
        kept = [due for due in self._buffered if due.response.watch_id != watch_id]
        self._buffered = deque(kept)
        self._answers.append(
            rpc_pb2.WatchResponse(header=self._header(), watch_id=watch_id, canceled=True)
        )

    def _new_id(self) -> int:
        while self._next_id in self._watches:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    # Delivery.

    def _catch_up(self) -> None:
        """Buffer the events that late watches have missed."""
        for watch in self._watches.values():
            while not watch.synced and not watch.ended and len(self._buffered) < _BUFFERED_MAX:
                self._catch_up_once(watch)

    def _catch_up_once(self, watch: _Watch) -> None:
        store = self.store
        if watch.next_revision < store.compacted:
            watch.ended = True  # its id stays taken, as in etcd
            self._buffer(
                rpc_pb2.WatchResponse(
                    header=rpc_pb2.ResponseHeader(),
                    watch_id=watch.id,
                    canceled=True,
                    compact_revision=store.compacted,
                )
            )
            return
        writes = store.events_from(watch.next_revision, _CATCH_UP_REVISIONS)
        watch.synced = len(writes) < _CATCH_UP_REVISIONS
        watch.next_revision = store.revision + 1 if watch.synced else writes[-1][0] + 1
        self._deliver(watch, [event for _, events in writes for event in events])

    def _deliver(self, watch: _Watch, events: Iterable[Event]) -> None:
        wanted = [event for event in events if watch.matches(event)]
        if not wanted:
            return
        response = rpc_pb2.WatchResponse(header=self._header(), watch_id=watch.id, events=wanted)
        if watch.prev_kv:
            for event in response.events:
                created = event.kv.create_revision == event.kv.mod_revision
                if not created and (before := self.store.before(event)) is not None:
                    event.prev_kv.CopyFrom(before)
        watch.reported_at = self.now()
        for part in _fragments(response) if watch.fragment else (response,):
            self._buffer(part)

    def _buffer(self, response: rpc_pb2.WatchResponse) -> None:
        # Responses keep their order: a response without a delay waits for an earlier, delayed one.
        self._buffered.append(DueResponse(self.now() + self.delay_s, response))

    def _header(self) -> rpc_pb2.ResponseHeader:
        return self.store.header()


def _fragments(response: rpc_pb2.WatchResponse) -> list[rpc_pb2.WatchResponse]:
    """Split a response that is too large for one message. All parts but the last have ``fragment`` set."""
    if response.ByteSize() < FRAGMENT_BYTES:
        return [response]
    fragments: list[rpc_pb2.WatchResponse] = []
    events = deque(response.events)
    while events:
        fragment = rpc_pb2.WatchResponse(
            header=response.header, watch_id=response.watch_id, fragment=True
        )
        length = fragment.ByteSize()
        while events and (not fragment.events or length + events[0].ByteSize() < FRAGMENT_BYTES):
            length += events[0].ByteSize()
            fragment.events.append(events.popleft())
        fragments.append(fragment)
    fragments[-1].fragment = False
    return fragments
