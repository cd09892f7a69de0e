"""The connection to etcd at the start of a process, which waits for etcd without bound, and logs the wait."""

from __future__ import annotations

import logging
from typing import Final

from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.errors import Unavailable
from gazette.http2.transport import Transport
from gazette.runtime.clock import Clock

log = logging.getLogger(__name__)

_ATTEMPT_S: Final = 3.0
_PAUSE_S: Final = 1.0


async def connect_with_retry(
    settings: EtcdSettings, clock: Clock, *, transport: Transport | None = None
) -> Etcd:
    """Connect to etcd. Until etcd answers, try again without end, and log that every few seconds.

    If this process and etcd are started together, etcd may be ready later. Raise ``Invalid`` and
    ``NotAllowed`` at once: waiting does not cure these. Cancellation: nothing is left.
    """
    began = clock.monotonic()
    while True:
        try:
            return await Etcd.connect(settings, clock, transport=transport, answer_s=_ATTEMPT_S)
        except Unavailable as error:
            log.warning(
                "etcd at %(endpoint)s cannot be reached for %(seconds).0f s now, trying again: %(error)s",
                {
                    "endpoint": ", ".join(settings.endpoints),
                    "seconds": clock.monotonic() - began,
                    "error": error,
                },
            )
            await clock.sleep(_PAUSE_S)
