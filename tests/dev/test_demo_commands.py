"""The commands that ``gazette demo --keep`` prints reach its cluster, without a context or a default."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path

from gazette.cluster.etcd.client import Etcd
from gazette.run.dev.demo import commands_to_try
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import Tally, source_spec


async def test_commands_of_gazctl_name_all_servers_that_they_ask(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with (
        await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker,
        await ConsumerFixture.start(etcd, broker, Tally(), tmp_path, lease_ttl_s=60.0) as member,
    ):
        await broker.create(source_spec("words/one"), log_spec("shard-one"))
        await member.create(shard_spec("shard-one", "words/one"))
        lines = commands_to_try(
            member.http, member.endpoint, broker.http, broker.endpoint, "words/one"
        )
        commands = [words for line in lines if (words := shlex.split(line))[0] == "gazctl"]
        assert [command[1] for command in commands] == ["journals", "shards"]
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])}
        for _, *arguments in commands:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gazette.gazctl.main", *arguments),
                env={**environ, "HOME": str(tmp_path)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()
            assert b"one" in output
