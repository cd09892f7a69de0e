"""What a broker says, beside a list, of the journals that it serves and that have a problem.

Messages of the protocol have no field for it, so it is in the trailing metadata of a List call that asks
for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from gazette.client.journals import PROBLEM_KEY, PROBLEMS_ASKED

if TYPE_CHECKING:
    from gazette.broker.replica import Replica
    from gazette.protocol.label_set import LabelSelector
    from gazette.runtime.clock import Clock

_PROBLEMS_MAX: Final = 16
"""Problems that one answer names: peers bound the size of metadata."""
_TEXT_MAX: Final = 400
_PER_SLICE: Final = 500
"""Replicas that are looked at before other tasks get the loop."""
_PLAIN: Final = " !\"#$&'()*+,-./:;<=>?@[]^_`{|}~"


def asks_for_problems(call: Any) -> bool:
    """Return True if a List call asks for the problems of journals, and for no journals."""
    return (PROBLEMS_ASKED, "1") in [
        (key, value) for key, value in call.invocation_metadata() or ()
    ]


async def problems_of(
    replicas: Sequence[Replica], selector: LabelSelector, allowed: LabelSelector, clock: Clock
) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata with the problems of replicas whose journals match."""
    found: list[tuple[str, str]] = []
    for index, replica in enumerate(replicas):
        if index % _PER_SLICE == _PER_SLICE - 1:
            await clock.sleep(0)
        problem, spec = replica.problem, replica.spec
        if not problem or spec is None:
            continue
        labels = spec.labels_with_name()
        if selector.matches(labels) and allowed.matches(labels):
            found.append((replica.journal, problem[:_TEXT_MAX]))
    return tuple(
        (PROBLEM_KEY, quote(f"{journal} {problem}", safe=_PLAIN))
        for journal, problem in sorted(found)[:_PROBLEMS_MAX]
    )
