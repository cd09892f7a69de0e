"""Programs of version 0.1.0 import `SparkRunner` from this module."""

from __future__ import annotations

from gazette.history.spark.backfill import Backfill as Backfill
from gazette.history.spark.backfill import SparkRunner as SparkRunner
