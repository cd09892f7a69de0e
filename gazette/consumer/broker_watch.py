"""Check repeatedly that brokers answer, and log failures. A member is not ready before the first answer.

Calls to brokers wait for a connection, since brokers come and go. With a wrong address the calls would
wait in silence. So a member repeats one cheap call for as long as it runs.
"""

from __future__ import annotations

import logging
from typing import Final, NoReturn

from gazette.client.client import Client
from gazette.client.rpc.preflight import require_reachable
from gazette.errors import GazetteError
from gazette.labels import META_NAME
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.clock import Clock
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

REPEAT_S: Final = 60.0
"""Seconds between two log lines for the same cause."""
_CAUSES_MAX: Final = 64
_CONNECT_S: Final = 3.0
_ATTEMPT_S: Final = 10.0
_PAUSE_S: Final = 1.0
_PAUSE_ANSWERED_S: Final = 30.0
_PROBE: Final = LabelSelector.parse(f"{META_NAME} = gazette/probe")
"""Selector of a journal that need not exist: an empty list is an answer, too."""
_HINT: Final = "Check --broker.address, and that a broker listens there."


class RetryLog:
    """A log of retries: one line for each cause and minute. The caller gives the time."""

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int]] = {}
        """By cause, the time of its last line, and the number of failures since then."""

    def due(self, cause: str, now: float) -> int | None:
        """Count a failure. If a log line is due, return the number of failures since the last; else None."""
        logged_at, count = self._logged.get(cause, (-REPEAT_S, 0))
        if now - logged_at < REPEAT_S:
            self._logged[cause] = (logged_at, count + 1)
            return None
        if len(self._logged) >= _CAUSES_MAX:
            self._logged.clear()
        self._logged[cause] = (now, 0)
        return count + 1


class BrokerWatch:
    """Repeated calls to the brokers of a member. Loop-bound; run it as a daemon."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self.not_answered = "brokers were not asked yet"
        """The reason why no broker has answered yet; empty after the first answer."""
        self._client = client
        self._clock = clock
        self._retries = RetryLog()

    async def run(self) -> NoReturn:
        """Repeat the check without end. Cancellation leaves nothing behind."""
        answered_at = self._clock.monotonic()
        while True:
            cause = await self._ask()
            now = self._clock.monotonic()
            if cause:
                self._report(cause, now, now - answered_at)
            else:
                answered_at, self.not_answered = now, ""
            await self._clock.sleep(_PAUSE_S if cause else _PAUSE_ANSWERED_S)

    async def _ask(self) -> str:
        """Return why brokers do not answer; empty while they answer."""
        try:
            async with timeout(_ATTEMPT_S):
                await require_reachable(self._client, "brokers", connect_s=_CONNECT_S, hint=_HINT)
                await self._client.list_journals(_PROBE)
        except TimeoutError:
            return f"no answer within {_ATTEMPT_S:g} s"
        except GazetteError as error:
            return str(error)
        return ""

    def _report(self, cause: str, now: float, seconds: float) -> None:
        """Note why brokers have not answered for ``seconds``. Log a cause once in `REPEAT_S` seconds."""
        if self.not_answered:
            self.not_answered = f"brokers have not answered yet: {cause}"
        if (failures := self._retries.due(cause, now)) is not None:
            log.warning(
                "brokers at %(address)s have not answered for %(seconds).0f s (%(failures)d "
                "attempts), trying again: %(cause)s. %(hint)s",
                {
                    "address": self._client.address,
                    "seconds": seconds,
                    "failures": failures,
                    "cause": cause,
                    "hint": _HINT,
                },
            )
