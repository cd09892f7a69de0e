"""Restarts of failed shards: which ones, when, and how often.

A shard is restarted only if its label `LABEL`, or else ``--consumer.max-restarts``, asks for that.
Otherwise a failure that time does not heal would repeat for ever, and hide.

The exception is a shard that was *fenced* and is still assigned. Its former owner set a fence late
(see `gazette.consumer.shard.ownership`), which does not happen again. Even these restarts are
bounded: another cluster that takes the shard for its own fences it each time.
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
"""Seconds for which a restart counts against the limits."""
DELAY_S: Final = 1.0
DELAY_MAX_S: Final = 60.0
FENCED_MAX: Final = 5
"""Most restarts of a fenced shard within `WINDOW_S`. No setting changes this limit."""
_CAUSES_MAX: Final = 16
ANNOUNCED: Final = "It is restarted after"
"""First words of the sentence in a status that announces a restart. No other text has them."""


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The fate of a failed shard. ``text`` is for readers of its status."""

    delay_s: float | None
    """Seconds until it is restarted; None if it is not."""
    text: str = ""


def is_fenced(error: BaseException) -> bool:
    """Return True if the cause of a failure is `Fenced`, also if other errors wrap it."""
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None or isinstance(cause, Fenced):
            return cause is not None
        cause = cause.__cause__
    return False


class Restarts:
    """Restarts of a member's shards. Pure: moments are passed in."""

    def __init__(self, max_default: int) -> None:
        self._max_default = max_default
        self._moments: dict[tuple[str, bool], list[float]] = {}
        """Times of restarts, by the shard's id and by True if it was fenced: the two kinds have
        limits of their own.
        """

    def failed(self, spec: ShardSpec, now: float, *, fenced: bool = False) -> RestartDecision:
        """Decide about a shard that failed and is still assigned. Count its restart, if any."""
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
                    f"It was taken over by another owner {times}, while it was assigned "
                    "here, and is not restarted. Does another cluster have a shard of that "
                    "name in the same database or recovery log? Correct the cause, then: "
                    "gazctl shards unassign --failed.",
                )
            return RestartDecision(
                None,
                f"It was restarted {times}, and is not again. Correct the cause, then: "
                "gazctl shards unassign --failed.",
            )
        delay_s = min(DELAY_MAX_S, DELAY_S * 2 ** len(moments))
        moments.append(now)
        why = "It is still assigned here: a former owner set its fence late. " if fenced else ""
        return RestartDecision(
            delay_s, f"{why}{ANNOUNCED} {delay_s:g} s ({len(moments)} of {allowed})."
        )

    def count(self, shard_id: str, now: float) -> int:
        """Return how often it was restarted within the window."""
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
