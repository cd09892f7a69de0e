"""Programs of version 0.1.0 import from here what `gazette.backfill` has."""

from __future__ import annotations

from gazette.history.backfill.settings import RunSettings as RunSettings
