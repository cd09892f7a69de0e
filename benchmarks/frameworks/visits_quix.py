"""Sessions of clicks with the user's plan, on quixstreams.

``python visits_quix.py ADDRESS DIRECTORY GUARANTEE``
"""

import sys
import time
from datetime import timedelta

from quixstreams import Application

ADDRESS, DIRECTORY, GUARANTEE = sys.argv[1:]

application = Application(
    ADDRESS,
    consumer_group="visits",
    auto_offset_reset="earliest",
    commit_interval=0.5,
    state_dir=DIRECTORY,
    processing_guarantee=GUARANTEE,
)
clicks = application.topic("clicks", timestamp_extractor=lambda value, *_: value["at"] * 1000)
plans = application.topic("plans", timestamp_extractor=lambda value, *_: value["at"] * 1000)
visits = application.topic("visits")


def paced(value):
    time.sleep(0.001)  # noqa: TID251 - so that there is a middle in which to kill it.
    return value


def merged(visit, plan):
    return {"begin": visit["start"], "clicks": visit["value"], "plan": plan and plan["plan"]}


sessions = (
    application.dataframe(clicks)
    .apply(paced)
    .session_window(timedelta(minutes=30), grace_ms=timedelta(seconds=10))
    .count()
    .final()
)
rows = application.dataframe(plans)
joined = sessions.join_asof(rows, how="left", grace_ms=timedelta(days=7), on_merge=merged)
joined.to_topic(visits)

if __name__ == "__main__":
    application.run()
