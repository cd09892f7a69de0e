"""Backfills: ``Backfill`` describes one, and ``BackfillRun`` runs it. `gazette.spark` has Spark run it."""

from __future__ import annotations

import sys

from gazette.history.backfill import definition, run
from gazette.history.backfill.definition import Backfill as Backfill
from gazette.history.backfill.definition import Batches as Batches
from gazette.history.backfill.run import BackfillRun as BackfillRun

__all__ = ["Backfill", "BackfillRun", "Batches"]

# Programs of version 0.1.0 import these two modules from here.
__path__: list[str] = []
sys.modules[f"{__name__}.definition"] = definition
sys.modules[f"{__name__}.run"] = run
