"""The word count on Faust: ``python faust_count.py ADDRESS DIRECTORY GUARANTEE GROUP STEP TOPIC``.

Run by `compare.py`, in an environment that has faust-streaming and nothing of ours. Counts are in a table in
memory, the fastest that it has, with a changelog topic.
"""

import sys
import time

import faust

ADDRESS, DIRECTORY, GUARANTEE, GROUP, STEPS, TOPIC = sys.argv[1:]
STEP = int(STEPS)
PARTITIONS = 4

app = faust.App(
    GROUP,
    broker=f"kafka://{ADDRESS}",
    datadir=DIRECTORY,
    store="memory://",
    processing_guarantee=GUARANTEE,
    broker_commit_interval=1.0,
    broker_session_timeout=10.0,
    topic_partitions=PARTITIONS,
    topic_replication_factor=1,
    value_serializer="json",
)
words = app.topic(TOPIC, key_type=str)
counts = app.Table("counts", default=int, partitions=PARTITIONS)


@app.agent(words)
async def count(messages):
    seen = 0
    async for message in messages:
        counts[message["word"]] += message["count"]
        seen += 1
        if not seen % STEP:
            # What goes to sys.stdout becomes a line of the log.
            print(seen, time.perf_counter(), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.argv[1:] = ["--loop=uvloop", "worker", "--loglevel=warn", "--without-web"]
    app.main()
