"""The leader's loop: observe the state, solve for the desired assignments, take one step towards them.

Every member runs this loop, and the oldest member acts. Each transaction compares the leader's member key. So
a leader that was replaced, and does not know that, changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NoReturn

from gazette.cluster.allocator import metrics
from gazette.cluster.allocator.converge import ItemStep, Round, converge
from gazette.cluster.allocator.desired import SolverInput
from gazette.cluster.allocator.model import DecodedKV, MemberId
from gazette.cluster.allocator.solver import Solution, solve
from gazette.cluster.allocator.solver_process import solve_in_child
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compare, GetOp, Operation, RangeResult, Target, TxnResult
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Broken, Conflict, Invalid, NotAllowed, NotFound, Retryable
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import Pool

log = logging.getLogger(__name__)

MAX_TXN_OPS = 128
"""Greatest number of comparisons, and of operations, per transaction: etcd's default ``--max-txn-ops``."""

_INLINE_CHOICES = 20_000  # about 20 ms on the event loop; a child process takes 150 ms to start
_SOLVE_TIMEOUT_S = 600.0  # A thousand members on a slow machine. A plan that fails is tried again.
_RETRY_S = 1.0
_STALE_ROUNDS = 8
_ITEMS_PER_SLICE = 1_000  # a few milliseconds of a round, then the event loop runs other tasks


async def allocate(etcd: Etcd, ks: KeySpace, state: State, *, clock: Clock, pool: Pool) -> None:
    """Run until the local member is exiting and holds no assignment, then return.

    ``state.observe`` must be an observer of ``ks``, and the caller must watch ``ks``. A large
    problem is solved in one thread of ``pool``.

    Raise ``Broken`` if the local member's key is gone: the member must stop serving. Raise ``Closed`` or
    ``Broken`` if the watch of ``ks`` has ended. After a cancellation, a transaction that was sent may take
    effect: the next leader continues from there.
    """
    leader = _Leader(etcd, state, clock, pool)
    while True:
        revision = ks.header.revision
        if state.local_member is None:
            raise Broken(
                "member key not found in etcd",
                hint="Its lease expired, or the key was deleted. Restart the process.",
                key=state.local_key,
                revision=revision,
            )
        if state.should_exit():
            return
        applied = 0
        if state.is_leader():
            try:
                applied = await leader.converge()
            except Conflict as error:
                # The state changed during the round. The mirror will report the change.
                log.info("allocation continues at the next revision: %(error)s", {"error": error})
            except (Retryable, Broken, Invalid, NotAllowed, NotFound) as error:
                log.warning(
                    "allocation failed; retrying in %(seconds)s s: %(error)s",
                    {"seconds": _RETRY_S, "error": error},
                )
                await clock.sleep(_RETRY_S)
                continue
        # Wait for the changes of this round, and for any other change: else the next round finds nothing new.
        await ks.wait_for_revision(applied)
        while ks.header.revision == revision:
            await ks.next_change()


class _Stale(Conflict):
    """Conflict over items whose keys in etcd differ from the mirror."""

    def __init__(self, items: frozenset[str]) -> None:
        super().__init__("transaction checks did not succeed", items=len(items))
        self.items = items


class _Leader:
    """State that the acting member keeps between rounds: the last solution."""

    def __init__(self, etcd: Etcd, state: State, clock: Clock, pool: Pool) -> None:
        self._etcd = etcd
        self._state = state
        self._clock = clock
        self._pool = pool
        self._solved_hash: int | None = None  # Hash of the demand at the last solution.
        self._desired: Mapping[str, tuple[MemberId, ...]] = {}

    async def converge(self) -> int:
        """Do one round. Return the revision of its last transaction, or 0 if nothing was to be done.

        Leave out items that turn out to be stale, so that they do not block the others. The mirror may *stay*
        behind etcd for an item whose newest value does not decode. Raise ``Conflict`` if a transaction did
        not apply, also `_Stale` after `_STALE_ROUNDS` attempts. Earlier transactions have applied.
        """
        if self._state.network_hash != self._solved_hash:
            await self._solve()
        stale: frozenset[str] = frozenset()
        for _ in range(_STALE_ROUNDS):
            try:
                return await self._round(stale)
            except _Stale as error:
                stale |= error.items
        raise _Stale(stale)

    async def _round(self, stale: frozenset[str]) -> int:
        """Send the steps of all items but ``stale``. Return the last revision, or 0 if nothing was sent."""
        state = self._state
        leader = state.leader
        if leader is None or leader.key != state.local_key:
            return 0  # the state changed while the solver ran
        metrics.CONVERGE.inc()
        round_ = Round(
            state.root,
            state.items,
            state.assignments,
            state.members_by_id(),
            state.is_consistent,
            state.demand.replication,
            stale,
            state.progress,
        )
        batch = _Batch(self._etcd, leader)
        for index, step in enumerate(converge(round_, self._desired, state.loads())):
            if step is not None:
                await batch.add(step)
            elif index % _ITEMS_PER_SLICE == _ITEMS_PER_SLICE - 1:
                await self._clock.sleep(0)
        await batch.flush()
        return batch.revision

    async def _solve(self) -> None:
        """Solve for the present state. The state may change meanwhile, which does no harm."""
        solver_input = SolverInput.of(self._state)
        begun = self._clock.monotonic()
        solution = await self._solution(solver_input)
        elapsed = self._clock.monotonic() - begun
        self._desired = solver_input.answer(solution)
        self._solved_hash = solver_input.network_hash

        slots = sum(map(len, solution))
        items, members = len(self._desired), len(solver_input.members)
        metrics.MAX_FLOW_SECONDS.observe(elapsed)
        metrics.DESIRED_REPLICATION_SLOTS.set(solver_input.item_slots)
        metrics.ITEMS.set(items)
        metrics.MEMBERS.set(members)
        log.info(
            "solved for assignments: items=%(items)d members=%(members)d item_slots=%(item_slots)d "
            "member_slots=%(member_slots)d assigned=%(assigned)d seconds=%(seconds).3f",
            {
                "items": items,
                "members": members,
                "item_slots": solver_input.item_slots,
                "member_slots": solver_input.member_slots,
                "assigned": slots,
                "seconds": elapsed,
            },
        )
        if slots < solver_input.item_slots:
            log.warning(
                "cannot reach the desired replication of all items: add members or raise their limits "
                "(assigned=%(assigned)d desired=%(desired)d member_slots=%(member_slots)d "
                "members=%(members)d)",
                {
                    "assigned": slots,
                    "desired": solver_input.item_slots,
                    "member_slots": solver_input.member_slots,
                    "members": members,
                },
            )

    async def _solution(self, solver_input: SolverInput) -> Solution:
        problem = solver_input.problem
        if problem.choices <= _INLINE_CHOICES:
            return solve(problem)
        return await self._pool.run(solve_in_child, problem, _SOLVE_TIMEOUT_S)


class _Batch:
    """Item steps to send to etcd, in as few transactions as possible."""

    def __init__(self, etcd: Etcd, leader: DecodedKV) -> None:
        self._etcd = etcd
        self._fixed = Compare.mod_revision(leader.key, "=", leader.raw.mod_revision)
        self._compares: dict[Compare, None] = {self._fixed: None}
        self._operations: list[Operation] = []
        self._steps: list[ItemStep] = []
        self.revision = 0

    async def add(self, step: ItemStep) -> None:
        """Add a step. First send the earlier steps if the transaction would become too large."""
        compares = len(self._compares) + sum(c not in self._compares for c in step.compares)
        operations = len(self._operations) + len(step.operations)
        if self._steps and max(compares, operations) > MAX_TXN_OPS:
            await self.flush()
        self._compares.update(dict.fromkeys(step.compares))
        self._operations += step.operations
        self._steps.append(step)

    async def flush(self) -> None:
        """Send the steps of the batch. Raise ``Conflict`` if the transaction did not apply."""
        if not self._steps:
            return
        compares = tuple(self._compares)
        result = await self._etcd.txn(
            compares, tuple(self._operations), tuple(GetOp(c.key, c.range_end) for c in compares)
        )
        if not result.succeeded:
            self._raise_stale(compares, result)
        self.revision = result.header.revision
        for step in self._steps:
            metrics.ADDED.inc(step.added)
            metrics.REMOVED.inc(step.removed)
            metrics.PACKED.inc(step.packed)
        self._compares = {self._fixed: None}
        self._operations = []
        self._steps = []

    def _raise_stale(self, compares: tuple[Compare, ...], result: TxnResult) -> NoReturn:
        """Raise `_Stale` for the steps whose comparisons failed, by the keys that ``result`` read. Raise
        ``Conflict`` if the leader's member key has changed."""
        failed = {
            compare
            for compare, read in zip(compares, result.results, strict=True)
            if isinstance(read, RangeResult) and not _holds(compare, read)
        }
        if self._fixed in failed:
            raise Conflict("the leader's member key changed")
        raise _Stale(
            frozenset(step.item_id for step in self._steps if not failed.isdisjoint(step.compares))
        )


def _holds(compare: Compare, read: RangeResult) -> bool:
    """Return True if a condition of a step holds for the keys in ``read``. Steps compare only revisions."""
    is_create = compare.target is Target.CREATE_REVISION
    revisions = [kv.create_revision if is_create else kv.mod_revision for kv in read.kvs]
    revision = max(revisions, default=0)
    if compare.relation == "<":
        assert isinstance(compare.operand, int)
        return revision < compare.operand
    return revision == compare.operand
