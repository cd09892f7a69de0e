"""The judge of queries: each answer is the state of a commit, and is not older than it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gazette.protocol.shard import ShardSpec
from gazette.testing.simulation.queries import SeenRows
from gazette.testing.simulation.shard_history import Promotion, RecordedTransaction, ShardHistory
from gazette.testing.simulation.states import (
    Rows,
    compared,
    sources_of_state,
    without_checkpoint,
)

Span: TypeAlias = tuple[str, tuple[int, int]]
"""A journal, and the begin and end of a message."""
_ROUNDING_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class WrongRows:
    """A fault of an answer, as text."""

    what: str
    details: str


@dataclass(frozen=True, slots=True)
class _Place:
    """A state of a shard: as a promotion restored it, or as a transaction left it."""

    promotion: Promotion
    count: int
    """Number of the promotion's transactions up to this state."""
    rows: Rows | None

    @property
    def last(self) -> RecordedTransaction | None:
        return self.promotion.transactions[self.count - 1] if self.count else None


class QueryJudge:
    """The judge of the answers of one run."""

    def __init__(
        self,
        history: ShardHistory,
        specs: Sequence[ShardSpec],
        committed: Callable[[str, int], Sequence[tuple[int, int]]],
        states: dict[str, Rows | None],
        *,
        counts_messages: bool,
    ) -> None:
        """Create a judge. ``committed`` returns the messages of a journal that are committed below an offset.

        ``states`` are the states of shards at the end. ``counts_messages`` is False if shards may leave
        messages out.
        """
        self._history = history
        self._specs = {spec.id: spec for spec in specs}
        self._committed = committed
        self._states = states
        self._counts_messages = counts_messages
        self._all: dict[str, list[_Place]] = {spec.id: [] for spec in specs}
        self._before: dict[int, list[list[RecordedTransaction]]] = {}
        for promotion in history.promotions:
            self._all[promotion.shard_id] += self._places_of(promotion)

    @staticmethod
    def _places_of(promotion: Promotion) -> Iterator[_Place]:
        yield _Place(promotion, 0, promotion.restored_state)
        for count, transaction in enumerate(promotion.transactions, 1):
            if transaction.checkpoint is not None:
                yield _Place(promotion, count, transaction.left)

    def wrong(self, answers: Sequence[SeenRows]) -> WrongRows | None:
        """Return the first answer that is wrong; None if all are right."""
        former: dict[tuple[int, str], tuple[SeenRows, list[_Place]]] = {}
        for answer in answers:
            if answer.rows is None:
                continue
            places = [place for place in self._all[answer.shard] if place.rows == answer.rows]
            if not places:
                return self._of_no_commit(answer)
            if answer.final:
                wrong = self._not_the_end(answer)
            elif answer.max_staleness_s is not None:
                wrong = self._too_stale(answer, places)
            else:
                key = answer.client, answer.shard
                wrong = self._older(answer, places, *former[key]) if key in former else None
                wrong = wrong or self._lacks(answer, places)
                former[key] = answer, places
            if wrong is not None:
                return wrong
        return None

    # Single answers.

    def _of_no_commit(self, answer: SeenRows) -> WrongRows:
        """Compare an answer that no commit left with the last state of its offsets, or of any offsets."""
        offsets = sources_of_state(answer.rows)
        places = self._all[answer.shard]
        alike = [place for place in places if sources_of_state(place.rows) == offsets]
        expected = (alike or places)[-1]
        return WrongRows(
            f"a query of {answer.shard} answers a state that no commit left",
            _compared("in the answer", answer, "in the state", expected.rows),
        )

    def _not_the_end(self, answer: SeenRows) -> WrongRows | None:
        state = self._states.get(answer.shard)
        assert answer.rows is not None
        if state is None or without_checkpoint(answer.rows) == state:
            return None
        return WrongRows(
            f"a query of {answer.shard} does not answer its last state",
            _compared("in the answer", answer, "in the state", state),
        )

    def _too_stale(self, answer: SeenRows, places: Sequence[_Place]) -> WrongRows | None:
        """Require that an answer of some staleness has each commit that was durable so long before."""
        allowed = answer.max_staleness_s or 0.0
        if answer.staleness_s > allowed + _ROUNDING_S:
            return WrongRows(
                f"a query of {answer.shard} permits a state of {allowed:g} s, and gets one of"
                f" {answer.staleness_s:.3f} s",
                "",
            )
        as_of = answer.asked_at - answer.staleness_s - _ROUNDING_S
        durable = [
            place
            for place in self._all[answer.shard]
            if place.last is not None
            and place.last.durable_at is not None
            and place.last.durable_at < as_of
        ]
        if not durable:
            return None
        latest = max(durable, key=lambda place: (place.last and place.last.durable_at) or 0.0)
        if not all(self._is_before(place, latest) for place in places):
            return None
        return WrongRows(
            f"a query of {answer.shard} gets an older state than the {answer.staleness_s:.3f} s that the"
            " answer names",
            _compared("in the answer", answer, "committed before", latest.rows),
        )

    def _lacks(self, answer: SeenRows, places: Sequence[_Place]) -> WrongRows | None:
        """Require all messages up to the offsets that the answer was asked to reflect."""
        if not self._counts_messages:
            return None
        wanted = self._wanted(answer)
        lacks = [wanted - self._consumed(chain) for chain in self._chains(places)]
        if not lacks or not all(lacks):
            return None
        least = min(lacks, key=len)
        with_it = next(
            (
                place
                for place in self._all[answer.shard]
                if any(wanted <= self._consumed(chain) for chain in self._chains([place]))
            ),
            None,
        )
        journal, (begin, end) = min(least)
        asked = ", ".join(f"{name}={offset}" for name, offset in sorted(answer.wanted.items()))
        return WrongRows(
            f"a query of {answer.shard} is behind the offsets that it asks for",
            f"the message {begin} to {end} of {journal} is not in the answer, read through {asked}\n"
            + _compared("in the answer", answer, "with it", with_it.rows if with_it else None),
        )

    def _wanted(self, answer: SeenRows) -> set[Span]:
        sources = {source.journal for source in self._specs[answer.shard].sources}
        return {
            (journal, span)
            for journal, offset in answer.wanted.items()
            if journal in sources
            for span in self._committed(journal, offset)
        }

    @staticmethod
    def _consumed(chain: Sequence[RecordedTransaction]) -> set[Span]:
        return {
            (step.journal, span)
            for transaction in chain
            for step in transaction.steps
            for span in step.spans
        }

    # Two answers of one client.

    def _older(
        self,
        answer: SeenRows,
        places: Sequence[_Place],
        former: SeenRows,
        before: Sequence[_Place],
    ) -> WrongRows | None:
        """Require that an answer is not older than a durable state that the client has seen before."""
        for seen in before:
            last = seen.last
            if last is not None and not last.has_committed:
                return None  # The owner may have lost the state. `_lacks` checks the messages.
            if not all(self._is_before(place, seen) for place in places):
                return None
        return WrongRows(
            f"a query of {answer.shard} goes back to an older state",
            _compared("in the answer", answer, f"before ({former})", former.rows),
        )

    def _is_before(self, place: _Place, later: _Place) -> bool:
        """Return True if a state is before ``later`` in each sequence that may have led to ``later``."""
        return all(
            any(
                len(chain) < len(later_chain) and chain == later_chain[: len(chain)]
                for chain in self._chains([place])
            )
            for later_chain in self._chains([later])
        )

    def _chains(self, places: Sequence[_Place]) -> Iterator[list[RecordedTransaction]]:
        """Yield the transactions that may have led to each of these states: see `ShardHistory.effective`."""
        for place in places:
            promotion = place.promotion
            if id(promotion) not in self._before:
                self._before[id(promotion)] = self._history.leading_to(promotion)
            for before in self._before[id(promotion)]:
                yield [*before, *promotion.transactions[: place.count]]


def _compared(label: str, answer: SeenRows, other: str, rows: Rows | None) -> str:
    assert answer.rows is not None
    ours, theirs = without_checkpoint(answer.rows), without_checkpoint(rows or {})
    return compared(f"{label} ({answer})", ours, other, theirs)
