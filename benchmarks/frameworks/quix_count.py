"""The word count on quixstreams: ``python quix_count.py ADDRESS DIRECTORY GUARANTEE GROUP STEP TOPIC``.

Run by `compare.py`, in an environment that has quixstreams and nothing of ours. Counts are in RocksDB, with
a changelog topic.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from quixstreams import Application, State

COMMIT_S = 1.0
SESSION_MS = 10_000


def main() -> None:
    address, directory, guarantee, group, steps, topic = sys.argv[1:]
    step = int(steps)
    application = Application(
        address,
        consumer_group=group,
        auto_offset_reset="earliest",
        commit_interval=COMMIT_S,
        state_dir=directory,
        processing_guarantee=guarantee,  # type: ignore[arg-type]
        consumer_extra_config={"session.timeout.ms": SESSION_MS},
        loglevel="ERROR",
    )
    seen = 0

    def count(value: dict[str, Any], state: State) -> None:
        nonlocal seen
        state.set("n", state.get("n", 0) + value["count"])
        seen += 1
        if not seen % step:
            print(seen, time.perf_counter(), flush=True)

    words = application.topic(topic, value_deserializer="json")
    application.dataframe(words).update(count, stateful=True)
    application.run()


if __name__ == "__main__":
    main()
