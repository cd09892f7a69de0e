"""Programs of version 0.1.0 import from here what `gazette.backfill` has."""

from __future__ import annotations

from gazette.history.backfill.definition import Backfill as Backfill
from gazette.history.backfill.definition import Batches as Batches
