"""Whether a shard that failed is started again by itself, when, and how often.

Nothing is, unless somebody asked for it: by the label `LABEL` of the shard, or else by
``--consumer.max-restarts``. A failure that time does not heal would else be repeated for ever, and hide.

The exception is a shard that was *fenced* and is still assigned: by an owner before it whose fence came
late (see `gazette.consumer.shard.ownership`), and that does not come again. It is bounded all the same:
another
cluster which takes the shard for its own fences it each time anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.errors import Fenced
from gazette.protocol.shard import ShardSpec
from gazette.runtime.numbers import is_digits

LABEL: Final = "app.gazette.dev/max-restarts"
LABEL_MAX: Final = 1_000
WINDOW_S: Final = 600.0
"""Restarts of so long ago do not count any more."""
DELAY_S: Final = 1.0
DELAY_MAX_S: Final = 60.0
FENCED_MAX: Final = 5
"""How often a shard is started again after it was fenced, whatever is asked for."""
_CAUSES_MAX: Final = 16
ANNOUNCED: Final = "It is restarted after"
"""Begins the sentence of a status that says so: nobody else needs to."""


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """What becomes of a shard that failed. ``text`` is for those who read its status."""

    delay_s: float | None
    """Seconds until it is started again; None: it stays as it is."""
    text: str = ""


def is_fenced(error: BaseException) -> bool:
    """Whether a failure is that of an owner whose fence somebody else replaced, however wrapped."""
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None or isinstance(cause, Fenced):
            return cause is not None
        cause = cause.__cause__
    return False


class Restarts:
    """What a member remembers of the restarts of its shards. Pure: moments are passed in."""

    def __init__(self, max_default: int) -> None:
        self._max_default = max_default
        self._moments: dict[tuple[str, bool], list[float]] = {}
        """By the shard's id, and whether it was fenced: one does not use up the other's restarts."""

    def failed(self, spec: ShardSpec, now: float, *, fenced: bool = False) -> RestartDecision:
        """A shard failed, and is still assigned. If it is to be restarted, that counts from now on."""
        allowed, problem = (FENCED_MAX, "") if fenced else self._allowed(spec)
        if not allowed:
            return RestartDecision(None, problem)
        moments = self._recent(spec.id, fenced, now)
        self._moments[spec.id, fenced] = moments
        if len(moments) >= allowed:
            times = f"{len(moments)} times within {WINDOW_S / 60:.0f} minutes"
            if fenced:
                return RestartDecision(
                    None,
                    f"It was taken over by somebody else {times}, while it was assigned here, and is not"
                    " started again. Does another cluster have a shard of that name in the same database"
                    " or recovery log? Correct the cause, then: gazctl shards unassign --failed.",
                )
            return RestartDecision(
                None,
                f"It was restarted {times}, and is not again. Correct the cause, then: gazctl shards"
                " unassign --failed.",
            )
        delay_s = min(DELAY_MAX_S, DELAY_S * 2 ** len(moments))
        moments.append(now)
        why = "It is still assigned here: an owner before it came late. " if fenced else ""
        return RestartDecision(
            delay_s, f"{why}{ANNOUNCED} {delay_s:g} s ({len(moments)} of {allowed})."
        )

    def count(self, shard_id: str, now: float) -> int:
        """How often it was restarted lately."""
        return sum(len(self._recent(shard_id, fenced, now)) for fenced in (False, True))

    def _recent(self, shard_id: str, fenced: bool, now: float) -> list[float]:
        return [one for one in self._moments.get((shard_id, fenced), []) if now - one < WINDOW_S]

    def _allowed(self, spec: ShardSpec) -> tuple[int, str]:
        text = spec.labels.value_of(LABEL)
        if not text:
            return self._max_default, ""
        if is_digits(text) and int(text) <= LABEL_MAX:
            return int(text), ""
        return 0, f"It is not restarted: label {LABEL} is {text!r} (expected 0 to {LABEL_MAX})."
