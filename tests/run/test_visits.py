"""Sessions that are joined with a table, of a member that is killed in the middle: docs/coming-from.md."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.message.uuid import OUTSIDE_TXN, build_uuid, clock_at, uuid_text
from tests.run.test_run import ROOT, Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
APPLICATION = (ROOT / "benchmarks" / "frameworks" / "visits_gazette.py").read_text()
BEGIN_S = 1_700_000_000
GAP_S = 1800
USERS = [f"user-{number}" for number in range(20)]


@pytest.fixture
async def project(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    run.program.write_text(APPLICATION)
    yield run
    if run.process is not None and run.process.returncode is None:
        await run.stop()


def frame(producer: int, at_s: int, **fields: Any) -> bytes:
    uuid = build_uuid(bytes([1, 0, 0, 0, 0, producer]), clock_at(at_s * 10**9), OUTSIDE_TXN)
    return json.dumps({"uuid": uuid_text(uuid), **fields}).encode() + b"\n"


def history(rng: random.Random) -> tuple[list[tuple[str, bytes]], list[Any]]:
    """Return messages in the order of their times, by source, and the visits that they make."""
    messages: list[tuple[str, bytes]] = []
    clicks: dict[str, list[int]] = defaultdict(list)
    plans: dict[str, list[tuple[int, str]]] = defaultdict(list)
    at = BEGIN_S
    for _ in range(4000):
        at += rng.randrange(1, 90)
        user = rng.choice(USERS)
        if rng.random() < 0.1:
            plans[user].append((at, f"plan-{len(messages)}"))
            messages.append(("plans", frame(1, at, user=user, plan=plans[user][-1][1])))
        else:
            clicks[user].append(at)
            messages.append(("clicks", frame(2, at, user=user)))
    # The watermark passes everything.
    for far in (at + 10 * GAP_S, at + 20 * GAP_S):
        messages += [
            ("plans", frame(1, far, user="last", plan="none")),
            ("clicks", frame(2, far, user="last")),
        ]
    visits = []
    for user, times in clicks.items():
        first = 0
        for index, time in enumerate(times):
            if index + 1 == len(times) or times[index + 1] >= time + GAP_S:
                visits.append((user, times[first], index + 1 - first, time + GAP_S))
                first = index + 1
    return messages, [(visit, plans[visit[0]]) for visit in visits]


async def test_a_kill_in_the_middle_changes_no_visit(project: Run) -> None:
    messages, expected = history(random.Random(7))
    await project.start()
    await project.until("Ctrl-C stops it")
    (broker,) = re.findall(r"^  brokers +(\S+)$", project.said, re.MULTILINE)
    async with Client(broker) as client:
        for number in range(0, len(messages), 200):
            if number == 2000:
                (member,) = project.children("gazette.run.member")
                member.kill()
            for name in ("plans", "clicks"):
                content = b"".join(one for of, one in messages[number : number + 200] if of == name)
                if content:
                    await client.append(AppendParams(f"{name}/part-000"), content)
                    if number % 1000 == 0:  # As after an answer that was lost.
                        await client.append(AppendParams(f"{name}/part-000"), content)
        await project.until("worker-1 ended (killed by SIGKILL); it is started again")
        visits = await read_visits(project, broker, len(expected))
    assert len(visits) == len(expected)
    found = {(one["user"], one["begin"]): one for one in visits}
    assert len(found) == len(expected), "a visit was published twice"
    for (user, begin, clicks, closes), plans in expected:
        visit = found[user, begin_text(begin)]
        assert visit["clicks"] == clicks
        # The plan when the session closed, which is at its end or a little later.
        held = [plan for at, plan in plans if at <= closes]
        assert visit["plan"] in [*held[-1:], *(plan for at, plan in plans if at > closes), None]
        assert visit["plan"] is not None or not held


def begin_text(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()


async def read_visits(project: Run, broker: str, count: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "gazette.gazctl.main", "read", "visits/part-000"]
    for _ in range(300):
        child = await asyncio.create_subprocess_exec(
            *command,
            f"--broker.address={broker}",
            env=project.environ,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await child.communicate()
        visits = [json.loads(line) for line in output.splitlines()]
        if len(visits) >= count:
            return visits
    raise AssertionError(f"{len(visits)} of {count} visits:\n{project.said}")
