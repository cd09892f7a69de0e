"""Restarts of failed shards: which shards, when, and how often.

A shard is restarted only if its label `LABEL`, or else ``--consumer.max-restarts``, permits that. Otherwise
a failure that a restart cannot cure would repeat for ever, and few operators would see it.

After two failures, a shard is restarted without a setting:

- It was *fenced* and is still assigned. Its former owner set a fence late, which does not happen
  again (see `gazette.consumer.shard.ownership`).
- Its store has *rolled back* a transaction in favour of another transaction, for example of a zombie. If the
  transaction is repeated, it succeeds.

These restarts are bounded, too. Another cluster with the same shard would set a fence each time, and two
transactions may conflict for ever.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gazette.consumer.contract.error_cause import ErrorCause, chain_of, is_aborted
from gazette.errors import Fenced
from gazette.protocol.shard import ShardSpec
from gazette.runtime.numbers import is_digits

log = logging.getLogger(__name__)

LABEL: Final = "app.gazette.dev/max-restarts"
LABEL_MAX: Final = 1_000
WINDOW_S: Final = 600.0
"""Seconds for which a restart counts against the limits."""
DELAY_S: Final = 1.0
DELAY_MAX_S: Final = 60.0
UNASKED_MAX: Final = 5
"""Greatest number of restarts without a setting within `WINDOW_S`, for each of the two failures."""
ANNOUNCED: Final = "It is restarted after"
"""First words of the sentence that announces a restart in a status. Commands search for them."""


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The decision about a failed shard. The shard's status shows ``text``."""

    delay_s: float | None
    """Seconds until the shard is restarted; None for no restart."""
    text: str = ""


class RestartReason(enum.Enum):
    """The kind of a failure. After `OTHER`, only a label or the flag lets the shard restart."""

    OTHER = "other"
    FENCED = "fenced"
    ABORTED = "aborted"


_REASONS: Final = {
    RestartReason.OTHER: "",
    RestartReason.FENCED: "It is still assigned here: a former owner set its fence late. ",
    RestartReason.ABORTED: "Its store has rolled a transaction back in favour of another one. ",
}


def reason_of(
    error: BaseException, classify: Callable[[Exception], ErrorCause] | None
) -> RestartReason:
    """Return the kind of a failure, even if other errors wrap its cause.

    ``classify`` is `Store.classify_error` of the shard's store, or None if no store was made.
    """
    if any(isinstance(link, Fenced) for link in chain_of(error)):
        return RestartReason.FENCED

    def classified(one: Exception) -> ErrorCause:
        try:
            return ErrorCause.STORE if classify is None else classify(one)
        except Exception:
            # The application may define this function. If it raises, still report the first failure.
            log.exception("classify_error of a store has failed")
            return ErrorCause.STORE

    return RestartReason.ABORTED if is_aborted(error, classified) else RestartReason.OTHER


class Restarts:
    """Restarts of a member's shards. Pure: callers give the time."""

    def __init__(self, max_default: int) -> None:
        self._max_default = max_default
        self._moments: dict[tuple[str, RestartReason], list[float]] = {}
        """Times of restarts, by shard id and reason: each reason has its own limit."""

    def failed(
        self, spec: ShardSpec, now: float, reason: RestartReason = RestartReason.OTHER
    ) -> RestartDecision:
        """Decide about a failed shard that is still assigned. Count its restart, if any."""
        allowed, problem = (
            self._allowed(spec) if reason is RestartReason.OTHER else (UNASKED_MAX, "")
        )
        if not allowed:
            return RestartDecision(None, problem)
        moments = self._recent(spec.id, reason, now)
        self._moments[spec.id, reason] = moments
        if len(moments) >= allowed:
            return RestartDecision(None, _no_more(reason, len(moments)))
        delay_s = min(DELAY_MAX_S, DELAY_S * 2 ** len(moments))
        moments.append(now)
        text = f"{ANNOUNCED} {delay_s:g} s ({len(moments)} of {allowed})."
        return RestartDecision(delay_s, f"{_REASONS[reason]}{text}")

    def count(self, shard_id: str, now: float) -> int:
        """Return the number of restarts of the shard within `WINDOW_S`."""
        return sum(len(self._recent(shard_id, reason, now)) for reason in RestartReason)

    def _recent(self, shard_id: str, reason: RestartReason, now: float) -> list[float]:
        return [time for time in self._moments.get((shard_id, reason), []) if now - time < WINDOW_S]

    def _allowed(self, spec: ShardSpec) -> tuple[int, str]:
        """Return the limit of restarts, and a text about an invalid label (empty for a valid label)."""
        text = spec.labels.value_of(LABEL)
        if not text:
            return self._max_default, ""
        if is_digits(text) and int(text) <= LABEL_MAX:
            return int(text), ""
        return 0, f"It is not restarted: label {LABEL} is {text!r} (expected 0 to {LABEL_MAX})."


def _no_more(reason: RestartReason, count: int) -> str:
    """Return a text that says why a shard is not restarted again."""
    times = f"{count} times within {WINDOW_S / 60:.0f} minutes"
    match reason:
        case RestartReason.FENCED:
            return (
                f"It was taken over by another owner {times}, while it was assigned here, and is not "
                "restarted. Does another cluster have a shard of that name in the same database or "
                "recovery log? Correct the cause, then: gazctl shards unassign --failed."
            )
        case RestartReason.ABORTED:
            return (
                f"Its store has rolled transactions back {times} in favour of others, and it is not "
                "restarted. Have all transactions change rows in the same order, then: gazctl shards "
                "unassign --failed."
            )
    return (
        f"It was restarted {times}, and is not again. Correct the cause, then: "
        "gazctl shards unassign --failed."
    )
