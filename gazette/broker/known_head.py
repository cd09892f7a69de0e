"""The known head of a journal: a key in etcd that stops an empty store from restarting the journal at 0.

Spools are files without a name, and a store may be empty, stale or not mounted. So a journal that lost all
its brokers would begin again at an offset that was given out before. The known head forbids that. The known
head is at most the offset that all replicas have acknowledged. An append below the known head is refused
until an operator confirms where to go on (`gazctl journals reset-head`). No operator is needed if the last
primary left in good order and stores have all bytes, or if the journal has no store.

A primary writes the key before it answers its first append, and after each completed fragment. It also writes
the key when it suspends the journal, or leaves in good order. It never writes the key per append. (Without
etcd, a primary that leaves writes a closing into the journal's store: see `gazette.fragment.closing`.) The
key is outside of the prefix that brokers watch: it neither wakes the allocator nor confuses brokers of older
versions. The value names the journal's life: a key of a former journal of the same name has no effect.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gazette.cluster.allocator.model import item_key
from gazette.cluster.etcd.values import Compare, KeyValue, Op
from gazette.errors import Conflict, GazetteError, Unavailable
from gazette.fragment.closing import Closing, ClosingName
from gazette.protocol.ids import JournalName, Offset, Revision
from gazette.protocol.label_set import Label, LabelSet

if TYPE_CHECKING:
    from gazette.broker.replica_context import ReplicaContext
    from gazette.cluster.etcd.client import Etcd

log = logging.getLogger(__name__)

_TENURES_MAX: Final = 64
_LOST_MAX: Final = 64
_ATTEMPTS_MAX: Final = 5
"""Greatest number of attempts of one write. An attempt fails if another primary has written a newer value."""
_RETRY_S: Final = 5.0


def head_key(root: str, journal: JournalName) -> str:
    """Return the key of a journal's known head, in a cluster of prefix ``root``."""
    parent, _, name = root.rpartition("/")
    return f"{parent}/.heads/{name}/{journal}"


@dataclass(frozen=True, slots=True)
class Head:
    """The value of the key. ``tenures`` has the primaries that have begun, in order.

    - Each tenure is the creation revision of a primary's assignment, with the offset at which the primary
      began. A tenure is left out if a later primary began at or below its offset: it limits no upload then.
    - ``closed`` holds the journal's registers if the last primary left in good order, with nothing
      acknowledged beyond ``offset``. It is None while a primary may have acknowledged more.
    - ``lost`` are the offsets that no fragment had when an operator confirmed a head after them, or when a
      journal without a store went on after them.
    - ``lease`` is the lease of the last primary in ``tenures``; 0 if a broker of an older version has written
      the key since.
    """

    life: Revision
    offset: Offset = 0
    tenures: tuple[tuple[Revision, Offset], ...] = ()
    closed: LabelSet | None = None
    lost: tuple[tuple[Offset, Offset], ...] = ()
    lease: int = 0

    def encode(self) -> bytes:
        fields: dict[str, Any] = {"life": self.life, "offset": self.offset, "tenures": self.tenures}
        if self.closed is not None:
            fields["closed"] = [(label.name, label.value) for label in self.closed.labels]
        if self.lost:
            fields["lost"] = self.lost
        if self.lease:
            fields["lease"] = self.lease
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, value: bytes) -> Head:
        """Return the head that ``value`` encodes. Raise ``Conflict`` for a value of another form."""
        try:
            fields = json.loads(value)
            tenures = tuple((int(tenure), int(begin)) for tenure, begin in fields["tenures"])
            closed = fields.get("closed")
            if closed is not None:
                closed = LabelSet(tuple(Label(str(name), str(value)) for name, value in closed))
            lost = tuple((int(begin), int(end)) for begin, end in fields.get("lost", ()))
            offset, lease = int(fields["offset"]), int(fields.get("lease", 0))
            return cls(int(fields["life"]), offset, tenures, closed, lost, lease)
        except (ValueError, TypeError, KeyError) as error:
            raise Conflict(
                "the known head of a journal cannot be read",
                hint="Another version or another program wrote it. Delete the key if you know the end of "
                "the journal.",
                value=repr(value[:200]),
            ) from error

    def begun(self, tenure: Revision, begin: Offset, end: Offset, lease: int = 0) -> Head:
        """Return the head to write when a primary begins at ``begin``, or has acknowledged its first append,
        ``[begin, end)``."""
        tenures = self.tenures
        if not tenures or tenures[-1][0] != tenure:
            tenures = _with_tenure(tenures, tenure, begin)
        offset = max(self.offset, end)
        return replace(self, offset=offset, tenures=tenures, closed=None, lease=lease)

    def with_lost(self, lost: Iterable[tuple[Offset, Offset]]) -> Head:
        """Return this head with the ranges ``lost``, confirmed as lost, too. Keep the last `_LOST_MAX`."""
        return replace(self, lost=tuple(sorted({*self.lost, *lost})[-_LOST_MAX:]))

    def limit(self, tenure: Revision) -> Offset | None:
        """Return the least offset at which a primary later than ``tenure`` began; None: no later primary."""
        return min((begin for later, begin in self.tenures if later > tenure), default=None)


def _with_tenure(
    tenures: tuple[tuple[Revision, Offset], ...], tenure: Revision, begin: Offset
) -> tuple[tuple[Revision, Offset], ...]:
    """Return ``tenures`` with ``tenure``, the latest, added.

    If there are too many, merge the two oldest into one at the lower offset: uploads of earlier primaries
    still end there. Otherwise bytes that were stored aside 64 primaries ago would become a fragment, over
    bytes that were acknowledged since.
    """
    kept = [entry for entry in tenures if entry[1] < begin]
    kept.append((tenure, begin))
    if len(kept) > _TENURES_MAX:
        (_, lower), (later, _), *others = kept
        kept = [(later, lower), *others]
    return tuple(kept)


class KnownHead:
    """The known head of one replica's journal. Loop-bound.

    ``offset`` is the head as last read. The head is at most the acknowledged offset. Between two writes of a
    primary, it may be lower: by one fragment, or more while etcd does not answer. Methods that wait for etcd
    raise ``Unavailable`` if etcd does not answer, ``NotAllowed`` if etcd refuses.
    """

    def __init__(self, context: ReplicaContext, journal: JournalName, life: Revision) -> None:
        self._context = context
        self._journal = journal
        self._key = head_key(context.settings.root, journal)
        self._item_key = item_key(context.settings.root, journal)
        self._head = Head(life)
        self._mod_revision: Revision = 0  # The key's last change; 0: the key does not exist.
        self.loaded = False
        """True if the head was read from etcd. Set it to False to have the head read again."""
        self._tenure: Revision | None = None
        """The tenure of this replica as primary, once etcd knows of its first append or suspension."""
        self._noted: Offset = 0
        """The greatest offset that etcd has, or is to get in the background."""
        self._closed: LabelSet | None = None
        """The registers with which to close the head in the background; None: the head stays open."""
        self._claimed: Revision | None = None
        """The tenure of this replica, once etcd may name it as the tenure of a primary."""
        self._begun = False
        """True once ``begin`` of this primary has succeeded."""
        self._noting: asyncio.Task[None] | None = None  # Writes `_noted` and `_closed`.
        self.settled = asyncio.Event()
        """Set once etcd has the end and registers given to ``close_later``, or will not take them: a later
        primary has begun, or the journal is gone."""

    @property
    def offset(self) -> Offset:
        return self._head.offset

    @property
    def closed_registers(self) -> LabelSet | None:
        """The journal's registers at ``offset``, if nothing was acknowledged beyond it. Otherwise None.

        Also None once this primary has begun: stores may then show bytes of a former primary, which removes
        them again.
        """
        return None if self._begun else self._head.closed

    @property
    def awaited(self) -> ClosingName | None:
        """The closing that would close the head: the closing of the last primary that etcd names.

        None if the head is closed, or if etcd does not have the lease of that primary. Also None once this
        replica has begun as primary.
        """
        head = self._head
        has_begun = self._begun or self._tenure is not None
        if not self.loaded or has_begun or head.closed is not None or not head.lease:
            return None
        return ClosingName(self._journal, head.life, head.tenures[-1][0], head.lease)

    def has_passed(self, name: ClosingName) -> bool:
        """Return True if a closing is not needed any more: this replica has acknowledged an append since."""
        life = self._head.life
        if self._tenure is None:
            return False
        return name.life < life or (name.life == life and name.tenure < self._tenure)

    @property
    def lost(self) -> tuple[tuple[Offset, Offset], ...]:
        """Offsets that are known as lost: see `Head`."""
        return self._head.lost

    def limit(self, tenure: Revision) -> Offset | None:
        """Return the least offset at which a primary later than ``tenure`` has begun, as last read; None if
        no later primary has begun."""
        return self._head.limit(tenure)

    def names(self, tenure: Revision) -> bool:
        """Return True if etcd names the primary of ``tenure``, and the head is open. Then no write is due."""
        return self._tenure == tenure and self._closed is None

    async def load(self, *, lives: bool = False) -> None:
        """Read the head from etcd. With ``lives``, also check that the journal still exists.

        Raise ``Conflict`` for an unknown value, or if the journal is known to be deleted. Each write checks
        that the journal exists, so most reads need not check it.
        """
        context, life = self._context, self._head.life
        if lives:
            lives, kv = await read_head(context.etcd, context.settings.root, self._journal, life)
        else:
            lives, kv = True, await context.etcd.get(self._key)
        head = Head(life) if kv is None else Head.decode(kv.value)
        if not lives or head.life > life:
            # Never overwrite the key: it protects the bytes that a later journal has acknowledged.
            raise Conflict(
                "the journal was deleted, and may have been created again",
                hint="No action: this broker learns of it from etcd.",
                journal=self._journal,
                life=life,
            )
        if head.life < life:
            head = Head(life)
        if kv is None or kv.mod_revision >= self._mod_revision:  # Else a write overtook this read.
            self._head, self._mod_revision = head, 0 if kv is None else kv.mod_revision
        self.loaded = True

    async def begin(self, tenure: Revision, begin: Offset) -> bool:
        """Record in etcd that the primary of ``tenure`` begins at ``begin``. From then on, former primaries
        upload no byte beyond ``begin``.

        Return False, without effect, if a former primary has acknowledged bytes after ``begin``. An operator
        may have confirmed the head while that primary was paused. Raise ``Conflict`` if a later primary has
        begun, or the journal was deleted.

        A head that is closed at ``begin`` stays closed in etcd: this primary has acknowledged nothing yet.
        """

        def change(head: Head) -> Head:
            closed = head.closed if begin == head.offset else None
            return replace(head.begun(tenure, begin, begin, self._lease), closed=closed)

        self._claimed = tenure
        self._begun = self._tenure == tenure or await self._write(change, tenure, begin)
        return self._begun

    async def adopt(self, closing: Closing, tenure: Revision) -> None:
        """Record in etcd that the head is closed, as ``closing`` of the last primary says.

        ``tenure`` is this primary's tenure. No effect if the head has changed and awaits another closing.
        Raise ``Conflict`` if a later primary has begun, or the journal was deleted.
        """

        def change(head: Head) -> Head:
            if self.awaited != closing.name:
                return head
            offset = max(head.offset, closing.end)
            return replace(head, offset=offset, closed=closing.registers)

        await self._write(change, tenure)

    async def confirm(self, tenure: Revision, lost: Collection[tuple[Offset, Offset]]) -> None:
        """Record in etcd that the offsets of ``lost`` are lost: the journal goes on after them.

        Raise ``Conflict`` if a primary later than ``tenure`` has begun, or the journal was deleted.
        """
        if not set(lost) <= set(self._head.lost):
            await self._write(lambda head: head.with_lost(lost), tenure)

    async def record_first_append(self, tenure: Revision, begin: Offset, end: Offset) -> None:
        """Return once the primary of ``tenure`` may answer an append of ``[begin, end)``.

        Write to etcd only for the first append of a tenure, or after a suspension. Raise ``Conflict`` if a
        later primary has begun, or a former primary has acknowledged bytes after ``begin``, or the journal
        was deleted. After ``Unavailable``, the head may have been written.
        """
        if self.names(tenure):
            return
        self._claimed, self._tenure, self._closed = tenure, None, None
        self.settled.clear()
        change = partial(Head.begun, tenure=tenure, begin=begin, end=end, lease=self._lease)
        if not await self._write(change, tenure, begin):
            raise Conflict(
                "a former primary has acknowledged bytes at the offsets of this append",
                hint="No action: the next append begins after these bytes, or its error names the offsets.",
                journal=self._journal,
                begin=begin,
                known_head=self._head.offset,
            )
        self._tenure = tenure
        self._noted = max(self._noted, end)

    async def suspend(self, tenure: Revision, end: Offset, registers: LabelSet) -> None:
        """Record in etcd that nothing follows ``end``, where the journal has ``registers``.

        Call this before the journal is suspended, while no append is under way. A suspended journal may lose
        all replicas: the next primary takes the registers from the head. ``record_first_append`` opens the
        head again. Raise ``Conflict`` if a later primary has begun, or if the known head is beyond ``end``.
        """

        def change(head: Head) -> Head:
            return replace(head.begun(tenure, end, end, self._lease), closed=registers)

        self._claimed, self._tenure = tenure, None
        self._noted, self._closed = end, registers
        if not await self._write(change, tenure, end):
            raise Conflict(
                "the known head of the journal is beyond the end of its spool",
                hint="No action: the journal is suspended later.",
                journal=self._journal,
                end=end,
                known_head=self._head.offset,
            )
        self._tenure = tenure
        self.settled.set()

    def note(self, end: Offset) -> None:
        """Write in the background that everything before ``end`` is acknowledged.

        No effect unless this primary has acknowledged an append.
        """
        if self._tenure is None or end <= self._noted:
            return
        self._noted = end
        if self._noting is None or self._noting.done():
            self._noting = self._context.scope.spawn(
                self._write_noted(self._tenure), name=f"head {self._journal}"
            )

    def close_later(self, end: Offset, registers: LabelSet) -> None:
        """Write in the background that nothing was acknowledged beyond ``end``, and the registers there.

        The next primary then begins at ``end`` without an operator, once stores have all bytes before it. No
        effect unless this primary has acknowledged an append. No append may follow. Until ``settled`` is
        set, the head in etcd may not be closed: see ``closing_without_etcd``.
        """
        if self._tenure is None:
            return
        self._noted, self._closed = end, registers
        if self._noting is None or self._noting.done():
            self._noting = self._context.scope.spawn(
                self._write_noted(self._tenure), name=f"head {self._journal}"
            )

    def closing_without_etcd(self, end: Offset, registers: LabelSet) -> Closing | None:
        """Return the closing that replaces ``close_later`` without etcd; None if no closing is needed.

        A primary whose write to etcd got no answer needs a closing, too: etcd may name that primary.
        """
        if self._claimed is None or self.settled.is_set():
            return None
        name = ClosingName(self._journal, self._head.life, self._claimed, self._lease)
        return Closing(name, end, registers, end)

    @property
    def _lease(self) -> int:
        return self._context.lease.id

    async def settle(self, timeout_s: float) -> None:
        """Return when all noted writes are done, or after ``timeout_s``. Cancellation: no effect."""
        if self._noting is not None:
            await asyncio.wait({self._noting}, timeout=timeout_s)

    async def _write_noted(self, tenure: Revision) -> None:
        """Write the present `_noted` and `_closed` again and again, until etcd has both. End if a later
        primary has begun, or the journal is gone. Repeat writes that fail, without bound."""
        while self._head.offset < self._noted or self._head.closed != self._closed:
            try:
                await self._write(
                    lambda head: replace(
                        head, offset=max(head.offset, self._noted), closed=self._closed
                    ),
                    tenure,
                )
            except Conflict as error:
                log.warning(
                    "the known head of %(journal)s is left to a later primary: %(error)s",
                    {"journal": self._journal, "error": error},
                )
                self.settled.set()
                return
            except GazetteError as error:
                log.warning(
                    "the known head of %(journal)s could not be written (will retry): %(error)s",
                    {"journal": self._journal, "error": error},
                    extra={"cause": f"known heads: {type(error).__name__}"},
                )
                await self._context.clock.sleep(_RETRY_S)
        if self._closed is not None:
            self.settled.set()

    async def _write(
        self, change: Callable[[Head], Head], tenure: Revision, begin: Offset | None = None
    ) -> bool:
        """Change the head in etcd. Return False if the head is beyond ``begin`` already. Raise ``Conflict``
        if a later primary has begun, or the journal is gone. Raise ``Unavailable`` if others keep writing."""
        for _ in range(_ATTEMPTS_MAX):
            if (later_begin := self._head.limit(tenure)) is not None:
                raise Conflict(
                    "a later primary of the journal has begun",
                    hint="No action: this broker learns of it from etcd, and stops leading.",
                    journal=self._journal,
                    begun_at=later_begin,
                )
            if begin is not None and begin < self._head.offset:
                return False
            head = change(self._head)
            compares = [
                Compare.mod_revision(self._key, "=", self._mod_revision),
                Compare.create_revision(self._item_key, "=", head.life),
            ]
            result = await self._context.etcd.txn(compares, [Op.put(self._key, head.encode())])
            if result.succeeded:
                # Meanwhile ``load`` may have read a later head.
                if result.header.revision > self._mod_revision:
                    self._head, self._mod_revision = head, result.header.revision
                return True
            await self.load(lives=True)
        raise Unavailable(
            "the known head of the journal changes too often to be written",
            hint="Several brokers act as the journal's primary: compare the routes that they report.",
            journal=self._journal,
        )


async def read_head(
    etcd: Etcd, root: str, journal: JournalName, life: Revision
) -> tuple[bool, KeyValue | None]:
    """Return True if the journal of ``life`` exists, and the key of its known head (None: no head).

    The head is deleted soon after the journal. If a journal exists without a head, no primary has begun.
    """
    item, head = await etcd.get_each(item_key(root, journal), head_key(root, journal))
    lives = item is not None and item.create_revision == life
    return lives, head if lives else None
