"""The reason why a shard waits, for its status and for commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from gazette.client.client import Client
from gazette.client.wait_question import ask_reason
from gazette.protocol.ids import JournalName, split_journal_meta
from gazette.protocol.shard import ShardSpec
from gazette.runtime.clock import Clock

LOOK_S: Final = 2.0
"""Seconds without progress of a recovery after which the shard asks its brokers."""


class ShardWaits:
    """The last answers of brokers to one shard's waiting calls. Loop-bound.

    ``spec`` returns the shard's specification. ``pending`` returns the journals whose appends wait, each
    with the last error.
    """

    def __init__(
        self,
        client: Client,
        clock: Clock,
        spec: Callable[[], ShardSpec],
        pending: Callable[[], Mapping[JournalName, str]],
    ) -> None:
        self._client = client
        self._clock = clock
        self._spec = spec
        self._pending = pending
        self._broker_reason = ""
        """The reason that a broker has given to `watch`; empty if it gave no reason."""

    @property
    def reason(self) -> str:
        """The journal that the shard waits for, and why; empty if no call waits."""
        return self._repeated_reason() or self._broker_reason

    async def watch(self, progress: Callable[[], int]) -> NoReturn:
        """Ask brokers about the recovery log while ``progress`` does not change, until cancelled.

        While a broker cannot list its blob store, it lets some calls wait without an answer. So these calls
        do not learn the reason.
        """
        log = self._spec().recovery_log
        try:
            while True:
                last_progress = progress()
                await self._clock.sleep(LOOK_S)
                self._broker_reason = ""
                if log and progress() == last_progress and not self._repeated_reason():
                    reason = await ask_reason(self._client, log)
                    self._broker_reason = f"{log}: {reason}" if reason else ""
        finally:
            self._broker_reason = ""

    def _repeated_reason(self) -> str:
        """Return the journal of a repeated call, and the call's last answer; empty if no call is repeated."""
        spec, pending = self._spec(), self._pending()
        sources = [split_journal_meta(source.journal)[0] for source in spec.sources]
        for journal in (spec.recovery_log, *sources):
            if reason := self._client.waits.reason(journal):
                return f"{journal}: {reason}"
        return next((f"{name}: {reason}" for name, reason in pending.items() if reason), "")
