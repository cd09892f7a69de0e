"""Sessions of clicks by user, with the plan that the user had when the session closed."""

from datetime import timedelta

from gazette import Application, EventTime, Message, Output, Source, runconsumer
from gazette.stores.sqlite import SQLiteStore
from gazette.windows import Sessions, TableJoin, Windows, count


class Click(Message):
    user: str


class Plan(Message):
    user: str
    plan: str | None


class Visit(Message):
    user: str
    begin: str
    clicks: int
    plan: str | None = None


class Visits(Application[SQLiteStore]):
    application_name = "visits"
    event_time = EventTime(lateness=timedelta(seconds=10))
    clicks = Source("clicks", Click, key="user")
    plans = Source("plans", Plan, key="user")
    visits = Output("visits", Visit, key="user")
    sessions = Windows("sessions", Sessions(timedelta(minutes=30)), count())
    joined = TableJoin("plan", value_type=Visit, row_type=str)

    def new_store(self, shard, recorder):
        return SQLiteStore(recorder, self.sessions.schema + self.joined.schema)

    def consume_message(self, shard, store, envelope, publisher):
        message, at = envelope.message, envelope.time
        if isinstance(message, Plan):
            self.joined.put(shard, store, message.user, at, message.plan)
        else:
            self.sessions.add(shard, store, message.user, at, 1)

    def on_timer(self, shard, store, timer, publisher):
        for one in self.sessions.on_timer(shard, store, timer):
            visit = Visit(user=one.key, begin=one.begin.isoformat(), clicks=one.value)
            self.joined.add(shard, store, one.key, shard.watermark, visit)
        for one in self.joined.on_timer(shard, store, timer):
            one.value.plan = one.row
            publisher.publish_uncommitted(self.visits.mapping(), one.value)


if __name__ == "__main__":
    runconsumer.main(Visits(), bind_host="127.0.0.1")
