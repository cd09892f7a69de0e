"""Backfills: ``Backfill`` describes a backfill, ``BackfillRun`` runs it. `gazette.spark` runs it on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.lazy import lazy_names

if TYPE_CHECKING:
    from gazette.history.backfill.definition import Backfill as Backfill
    from gazette.history.backfill.definition import Batches as Batches
    from gazette.history.backfill.run import BackfillRun as BackfillRun
    from gazette.history.backfill.settings import RunSettings as RunSettings

_HOMES = {
    "Backfill": "gazette.history.backfill.definition",
    "BackfillRun": "gazette.history.backfill.run",
    "Batches": "gazette.history.backfill.definition",
    "RunSettings": "gazette.history.backfill.settings",
}

__all__ = ["Backfill", "BackfillRun", "Batches", "RunSettings"]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.
    __getattr__ = lazy_names(__name__, _HOMES)
