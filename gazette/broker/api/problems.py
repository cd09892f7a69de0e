"""The problems of journals that a broker serves, for a List call that asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gazette.client.rpc.problems import problems_metadata

if TYPE_CHECKING:
    from gazette.broker.replica import Replica
    from gazette.protocol.label_set import LabelSelector
    from gazette.runtime.clock import Clock

_PER_SLICE: Final = 500
"""Replicas that are checked before other tasks get the loop."""


async def problems_of(
    replicas: Sequence[Replica], selector: LabelSelector, allowed: LabelSelector, clock: Clock
) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata with the problems of replicas whose journals match."""
    problems: list[tuple[str, str]] = []
    for index, replica in enumerate(replicas):
        if index % _PER_SLICE == _PER_SLICE - 1:
            await clock.sleep(0)
        problem, spec = replica.problem, replica.spec
        if not problem or spec is None:
            continue
        labels = spec.labels_with_name()
        if selector.matches(labels) and allowed.matches(labels):
            problems.append((replica.journal, problem))
    return problems_metadata(problems)
