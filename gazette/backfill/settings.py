"""Programs of version 0.1.0 import names of `gazette.backfill` from this module."""

from __future__ import annotations

from gazette.history.backfill.settings import RunSettings as RunSettings
