"""The flags of an application's commands, and the settings that are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gazette.client.flags import ConsumerClientFlags
from gazette.cluster.process.groups import check_directory
from gazette.cluster.process.member import MemberFlags
from gazette.config.schema import duration, setting
from gazette.consumer.declare.specs import REPLICAS_MAX, SpecSettings
from gazette.consumer.settings import ConsumerSettings
from gazette.protocol.text.duration import SECOND


@dataclass(frozen=True, slots=True)
class ConsumerFlags(MemberFlags):
    """Flags of the group ``consumer``."""

    limit: int = setting(32, "largest number of shards (their replicas) that this process serves")
    max_hot_standbys: int = setting(3, "largest number of hot standbys of a shard")

    scratch_dir: Path | None = setting(
        None, "directory of shards' files while they run (empty: the temporary directory)"
    )
    application: str = setting(
        "", "name of the application in etcd and in its states (empty: that of its class)"
    )
    adopt_from: str = setting(
        "", "former name of the application; its etcd prefix and states are taken over"
    )
    hint_prefix: tuple[str, ...] = setting(
        (),
        "etcd prefix below which hints of shards are written; may be repeated (empty: "
        "/gazette/hints, and hints below the prefix of the members)",
    )
    hints_interval: float = duration("5m", "interval at which recovery hints are stored")
    stall_timeout: float = duration("60s", "time without bytes after which play-back fails")
    max_restarts: int = setting(
        0, "number of restarts of a failed shard within ten minutes, unless its label says"
    )
    append_memory: int = setting(
        256 << 20, "bytes of memory for pending appends; more goes to files"
    )
    query_timeout: float = duration("60s", "longest time that a query may take")
    drain_timeout: float = duration(
        "10s", "at exit, longest wait for a hand-off when no other member could take over"
    )
    drain_timeout_max: float = duration("1h", "at exit, longest wait for any hand-off")

    def settings(self, process_id: str, root: str, lease_ttl_s: float) -> ConsumerSettings:
        """Return the member's settings. Raise ``Invalid`` for a scratch directory that cannot be used."""
        check_directory("consumer.scratch-dir", self.scratch_dir)
        return ConsumerSettings(
            zone=self.zone,
            id=process_id,
            root=root,
            application=self.application,
            adopt_from=self.adopt_from,
            shard_limit=self.limit,
            max_hot_standbys=self.max_hot_standbys,
            lease_ttl_s=lease_ttl_s,
            watch_delay_s=self.watch_delay,
            allow_origins=self.allow_origin,
            allow_hosts=self.allow_host,
            scratch_directory=self.scratch_dir,
            hint_prefixes=self.hint_prefix,
            hints_interval_s=self.hints_interval,
            stall_timeout_s=self.stall_timeout,
            max_restarts=self.max_restarts,
            append_memory_bytes=self.append_memory,
            query_timeout_s=self.query_timeout,
            graceful_stop_s=self.graceful_stop,
            drain_timeout_s=self.drain_timeout,
            drain_timeout_max_s=self.drain_timeout_max,
        )


@dataclass(frozen=True, slots=True)
class SpecsFlags:
    """Flags of ``specs``."""

    store: tuple[str, ...] = setting(
        (),
        "URL of the blob store of new journals, such as s3://bucket/prefix/; more of them are read",
        flag_only=True,
    )
    replication: int = setting(
        0,
        "number of brokers with a replica of a journal (0: all that run, at most 3)",
        flag_only=True,
    )
    hot_standbys: int = setting(1, "number of hot standbys of a shard", flag_only=True)
    fragment_length: int = setting(256 << 20, "bytes at which a fragment is closed", flag_only=True)
    flush_interval: float = duration(
        "1h", "age at which a fragment is closed, and stored", flag_only=True
    )
    refresh_interval: float = duration(
        "5m", "interval at which brokers list the stores", flag_only=True
    )
    max_txn_duration: float = duration(
        "1s", "longest time for which a transaction consumes", flag_only=True
    )
    application: str = setting(
        "", "name of the application (empty: that of its class)", flag_only=True
    )

    def settings(self) -> SpecSettings:
        """Return the settings of specifications. Raise ``Invalid`` if no store is given."""
        return SpecSettings(
            stores=self.store,
            replication=self.replication or REPLICAS_MAX,
            hot_standbys=self.hot_standbys,
            fragment_bytes=self.fragment_length,
            flush_interval_ns=round(self.flush_interval * SECOND),
            refresh_interval_ns=round(self.refresh_interval * SECOND),
            max_txn_duration_ns=round(self.max_txn_duration * SECOND),
        )


@dataclass(frozen=True, slots=True)
class SpecsApplyFlags(SpecsFlags):
    """Flags of ``apply``."""

    dry_run: bool = setting(False, "show the changes, and make none", flag_only=True)
    shards: bool = setting(
        True, "apply shards, by a member that runs; false: journals only", flag_only=True
    )
    more_partitions: bool = setting(
        False, "raise numbers of partitions, though keys move to other shards", flag_only=True
    )
    changed_key: bool = setting(
        False, "take another key, though messages of a key are in several shards", flag_only=True
    )
    timeout: float = duration("60s", "longest time that all calls may take", flag_only=True)


@dataclass(frozen=True, slots=True)
class MemberClientFlags(ConsumerClientFlags):
    """Flags of the group ``consumer`` of ``apply``."""

    address: str = setting("", "endpoint of a member; or several, separated by commas")
