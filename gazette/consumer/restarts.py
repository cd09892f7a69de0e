"""Whether a shard that failed is started again by itself, when, and how often.

Nothing is, unless somebody asked for it: by the label `LABEL` of the shard, or else by
``--consumer.max-restarts``. A failure that time does not heal would else be repeated for ever, and hide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.protocol.shard import ShardSpec

LABEL: Final = "app.gazette.dev/max-restarts"
LABEL_MAX: Final = 1_000
WINDOW_S: Final = 600.0
"""Restarts of so long ago do not count any more."""
DELAY_S: Final = 1.0
DELAY_MAX_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a shard that failed. ``text`` is for those who read its status."""

    delay_s: float | None
    """Seconds until it is started again; None: it stays as it is."""
    text: str = ""


class Restarts:
    """What a member remembers of the restarts of its shards. Pure: moments are passed in."""

    def __init__(self, max_default: int) -> None:
        self._max_default = max_default
        self._moments: dict[str, list[float]] = {}

    def failed(self, spec: ShardSpec, now: float) -> Verdict:
        """A shard failed. If it is to be restarted, the restart counts from now on."""
        allowed, problem = self._allowed(spec)
        if not allowed:
            return Verdict(None, problem)
        moments = [one for one in self._moments.get(spec.id, []) if now - one < WINDOW_S]
        self._moments[spec.id] = moments
        if len(moments) >= allowed:
            return Verdict(
                None,
                f"It was restarted {len(moments)} times within {WINDOW_S / 60:.0f} minutes, and is"
                " not again. Correct the cause, then: gazctl shards unassign --failed.",
            )
        delay_s = min(DELAY_MAX_S, DELAY_S * 2 ** len(moments))
        moments.append(now)
        return Verdict(
            delay_s, f"It is restarted after {delay_s:g} s ({len(moments)} of {allowed})."
        )

    def count(self, shard_id: str, now: float) -> int:
        """How often it was restarted lately."""
        return sum(now - one < WINDOW_S for one in self._moments.get(shard_id, []))

    def _allowed(self, spec: ShardSpec) -> tuple[int, str]:
        text = spec.labels.value_of(LABEL)
        if not text:
            return self._max_default, ""
        if text.isascii() and text.isdecimal() and int(text) <= LABEL_MAX:
            return int(text), ""
        return 0, f"It is not restarted: label {LABEL} is {text!r} (expected 0 to {LABEL_MAX})."
