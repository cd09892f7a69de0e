"""Addresses given to a client, and the choice of the one to call."""

from __future__ import annotations

from typing import Final

from gazette.client.rpc.channel import Channels
from gazette.client.rpc.counted_channel import Health
from gazette.errors import Invalid
from gazette.protocol.route import validate_endpoint

_PAUSE_S: Final = 0.1


class Addresses:
    """Endpoints of one cluster, separated by commas. Their channels stay open even if unused.

    Calls stay with one endpoint until its connection fails or `pass_over` leaves it. Then they move to the
    next endpoint that is not failing. When all are failing, each call tries another endpoint.
    """

    def __init__(self, text: str, channels: Channels) -> None:
        """Parse the endpoints. Raise ``Invalid`` for a malformed one."""
        self._endpoints = tuple(part.strip() for part in text.split(",") if part.strip())
        if not self._endpoints:
            raise Invalid("an address is needed", path="address")
        for endpoint in self._endpoints:
            validate_endpoint(endpoint)
            channels.pin(endpoint)
        self._channels = channels
        self._current = 0  # Index of the endpoint to call.

    @property
    def wait_for_ready(self) -> bool:
        """True if a call is to wait for its endpoint's connection, because there is only one endpoint.

        Of several, ``connected`` returns a connected endpoint. If that endpoint's process ends just then, a
        call that waits for it would wait for ever, while other endpoints answer.
        """
        return len(self._endpoints) == 1

    @property
    def attempts(self) -> int:
        """Number of times to begin a call that only reads, so that every endpoint has a chance to answer."""
        return 1 if self.wait_for_ready else len(self._endpoints) + 1

    async def connected(self) -> str:
        """Return the endpoint to call now. Pass ``wait_for_ready`` to that call.

        Of several endpoints, return a connected one; wait while none can be reached. Cancellation has no
        effect."""
        attempts = 0
        while len(self._endpoints) > 1:
            endpoint = self.pick()
            if await self._channels.connect(endpoint):
                return endpoint
            attempts += 1
            if attempts % len(self._endpoints) == 0:
                await self._channels.clock.sleep(_PAUSE_S)
        return self._endpoints[0]

    def pick(self) -> str:
        """Return the endpoint to call now."""
        count = len(self._endpoints)
        if count == 1:
            return self._endpoints[0]
        for step in range(count):
            index = (self._current + step) % count
            if self._channels.health(self._endpoints[index]) is not Health.FAILING:
                self._current = index
                return self._endpoints[index]
        self._current = (self._current + 1) % count
        return self._endpoints[self._current]

    def pass_over(self, endpoint: str) -> None:
        """Move from ``endpoint`` to the next, since ``endpoint`` is connected and does not answer."""
        if endpoint == self._endpoints[self._current]:
            self._current = (self._current + 1) % len(self._endpoints)
