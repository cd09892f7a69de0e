"""Sessions of clicks with the user's plan, on Faust (faust-streaming).

``python visits_faust.py ADDRESS DIRECTORY GUARANTEE``
"""

import asyncio
import sys

import faust

ADDRESS, DIRECTORY, GUARANTEE = sys.argv[1:]
GAP_S = 30 * 60

app = faust.App(
    "visits-faust",
    broker=f"kafka://{ADDRESS}",
    datadir=DIRECTORY,
    store="memory://",
    processing_guarantee=GUARANTEE.replace("-", "_"),
    broker_commit_interval=0.5,
    topic_partitions=4,
    topic_allow_declare=True,
    topic_replication_factor=1,
    value_serializer="json",
)


class Click(faust.Record):
    user: str
    at: int


class Plan(faust.Record):
    user: str
    plan: str


clicks = app.topic("clicks", key_type=str, value_type=Click)
plans = app.topic("plans", key_type=str, value_type=Plan)
visits = app.topic("visits", key_type=str)
sessions = app.Table("sessions", partitions=4)
plan_of = app.Table("plan-of", partitions=4)


@app.agent(plans)
async def take_plans(stream):
    async for plan in stream:
        plan_of[plan.user] = plan.plan


@app.agent(clicks)
async def take_clicks(stream):
    async for click in stream:
        await asyncio.sleep(0.001)  # noqa: TID251 - so that there is a middle in which to kill it.
        begin, last, count = sessions.get(click.user) or (click.at, click.at, 0)
        if click.at >= last + GAP_S:
            visit = {"begin": begin * 1000, "clicks": count, "plan": plan_of.get(click.user)}
            await visits.send(key=click.user, value=visit)
            begin, count = click.at, 0
        sessions[click.user] = (begin, click.at, count + 1)


if __name__ == "__main__":
    sys.argv[1:] = ["worker", "--loglevel=warn", "--without-web"]
    app.main()
