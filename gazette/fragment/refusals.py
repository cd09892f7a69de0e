"""Finds stores that are healthy, but refuse the fragments of a journal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gazette.blobs.registry import ActiveStore, BlobStores
    from gazette.fragment.upload import Upload
    from gazette.runtime.clock import Clock

_REFUSED_AFTER: Final = 2
"""Failures of one upload after which its store may refuse the journal's fragments.

After each failure, a check must have found the store healthy. Otherwise the store itself may fail, and
appends wait for it. A store that sometimes fails may be healthy in between: failures must also span a time.
"""


@dataclass(slots=True)
class _Suspicion:
    """The failures of one upload to a store that seems to be healthy. Times are monotonic."""

    store: str
    since: float = math.inf
    failed_at: float = math.inf
    """Time of the first failure after the last healthy check."""
    confirmed: int = 0
    """Number of failures after which a check found the store healthy."""


class Refusals:
    """Keeps ``ActiveStore.refusals``: journals whose uploads fail for ``after_s`` in a healthy store."""

    def __init__(self, blob_stores: BlobStores, clock: Clock, after_s: float) -> None:
        self._blob_stores = blob_stores
        self._clock = clock
        self._after_s = after_s
        self._suspected: dict[Upload, _Suspicion] = {}
        self._refused: dict[Upload, ActiveStore] = {}

    def failed(self, upload: Upload) -> None:
        """Count a failure of an upload to a store that counts as healthy, and have the store checked. Begin
        the count again for a store that is unhealthy."""
        active = self._blob_stores.get(upload.first_store(upload.spec()))
        suspicion = self._suspected.get(upload)
        if suspicion is not None and suspicion.store != active.url:
            self._take_back(upload)  # The journal has got another store.
            suspicion = None
        if suspicion is None or active.health.error is not None:  # The store itself may fail.
            suspicion = self._suspected[upload] = _Suspicion(active.url)
        if active.health.error is not None:
            return
        if active.health.began >= suspicion.failed_at:  # Healthy in a check after the failure.
            suspicion.failed_at = math.inf
            suspicion.confirmed += 1
        active.failed()
        now = self._clock.monotonic()
        suspicion.failed_at = min(suspicion.failed_at, now)
        suspicion.since = min(suspicion.since, now)
        if suspicion.confirmed >= _REFUSED_AFTER and now - suspicion.since >= self._after_s:
            self.refuse(upload, active)

    def refuse(self, upload: Upload, active: ActiveStore) -> None:
        """Record that the store refuses the journal of the failed upload."""
        active.refusals[upload.spool.fragment.journal, upload.life] = upload.error
        self._refused[upload] = active

    def ended(self, upload: Upload) -> None:
        """Forget an upload that is done or dropped."""
        self._suspected.pop(upload, None)
        self._take_back(upload)

    def _take_back(self, upload: Upload) -> None:
        active = self._refused.pop(upload, None)
        if active is not None:
            active.refusals.pop((upload.spool.fragment.journal, upload.life), None)
