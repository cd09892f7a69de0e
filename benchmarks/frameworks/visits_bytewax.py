"""Sessions of clicks with the user's plan, on bytewax.

``python visits_bytewax.py INPUT OUTPUT DIRECTORY``
"""

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import bytewax.operators as op
import bytewax.operators.windowing as win
from bytewax.connectors.files import FileSink, FileSource
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

SOURCE, TARGET, DIRECTORY = map(Path, sys.argv[1:])


def parse(line):
    time.sleep(0.001)  # noqa: TID251 - so that there is a middle in which to kill it.
    message = json.loads(line)
    return message["user"], message


def at(message):
    return datetime.fromtimestamp(message["at"], UTC)


def with_plan(plan, item):
    """Keep the plan that came last, and give it to visits."""
    if "plan" in item:
        return item["plan"], []
    return plan, [{**item, "plan": plan}]


def visit(keyed):
    user, (_, messages) = keyed
    begin = min(message["at"] for message in messages)
    return user, {"user": user, "begin": begin, "clicks": len(messages)}


flow = Dataflow("visits")
messages = op.map("parse", op.input("in", flow, FileSource(SOURCE, batch_size=10)), parse)
both = op.branch("kind", messages, lambda keyed: "plan" in keyed[1])
clock = win.EventClock(at, wait_for_system_duration=timedelta(seconds=10))
sessions = win.collect_window(
    "sessions", both.falses, clock, win.SessionWindower(timedelta(minutes=30))
)
visits = op.map("visit", sessions.down, visit)
joined = op.stateful_flat_map("plan", op.merge("both", both.trues, visits), with_plan)
op.output(
    "out", op.map("text", joined, lambda keyed: (keyed[0], json.dumps(keyed[1]))), FileSink(TARGET)
)

if __name__ == "__main__":
    if not list(DIRECTORY.iterdir()):
        init_db_dir(DIRECTORY, 1)
    recovery = RecoveryConfig(str(DIRECTORY))
    cluster_main(flow, [], 0, epoch_interval=timedelta(seconds=0.5), recovery_config=recovery)
