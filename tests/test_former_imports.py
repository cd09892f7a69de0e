"""Programs that were written for a former version import what its pages named."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

NAMES = [
    "gazette.backfill.definition.Backfill",
    "gazette.backfill.definition.Batches",
    "gazette.backfill.run.BackfillRun",
    "gazette.backfill.settings.RunSettings",
    "gazette.blobs.file.FileStore",
    "gazette.client.append.service.AppendTxn",
    "gazette.client.append.txn.AppendTxn",
    "gazette.config.setting",
    "gazette.consumer.application.Store",
    "gazette.consumer.service.ConsumerService",
    "gazette.consumer.timers.timer.TimerRow",
    "gazette.consumer.transaction.inbox.Feed",
    "gazette.runconsumer.main",
    "gazette.spark.backfill.SparkRunner",
]
AT_ONCE = """
import threading, importlib
names = ["gazette.backfill.run", "gazette.backfill", "gazette.backfill.definition"] * 4
begin, failures = threading.Barrier(len(names)), []
def load(name):
    begin.wait()
    try:
        importlib.import_module(name)
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_former_pages_is_still_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert getattr(import_module(module), attribute) is not None


def test_threads_may_import_backfills_at_once() -> None:
    """A module that is found by an alias only is not found while its parent is being imported."""
    subprocess.run([sys.executable, "-c", AT_ONCE], check=True)
