"""Objects and settings that all shards of a member share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gazette.client.append.service import AppendService, MemoryBudget
from gazette.client.client import Client
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.consumer.application import Application
from gazette.consumer.application_name import Owner
from gazette.consumer.hint_keys import HintKeys
from gazette.consumer.settings import ConsumerSettings
from gazette.consumer.shard.callback_watch import CallbackWatch
from gazette.consumer.shard.restarts import Restarts
from gazette.consumer.shard.thread import WorkerFactory
from gazette.message.publisher import Publisher
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import Pool


@dataclass(frozen=True, slots=True)
class ShardContext:
    """Objects and settings that all shards of a member share."""

    application: Application[Any]
    etcd: Etcd
    key_space: KeySpace
    client: Client
    clock: Clock
    rng: random.Random
    player_pool: Pool
    new_publisher: Callable[[AppendService], Publisher]
    callback_watch: CallbackWatch
    owner: Owner
    """The application to which the shards belong."""
    hint_keys: HintKeys
    """Keys at which hints may be written."""
    settings: ConsumerSettings
    append_budget: MemoryBudget
    """Memory for the waiting appends of all shards."""
    restarts: Restarts
    new_worker: WorkerFactory
