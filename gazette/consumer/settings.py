"""All limits and choices of a consumer member, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gazette.cluster.process.member import MemberSettings
from gazette.consumer.hint_keys import HintKeys
from gazette.errors import Invalid


@dataclass(frozen=True, slots=True)
class ConsumerSettings(MemberSettings):
    """Times in seconds. Flags, environment names and defaults are in ``runconsumer/flags.py``."""

    id: str = "local-consumer"
    root: str = "/gazette/consumers/application"
    """etcd prefix of the application's members, without a trailing slash."""
    application: str = ""
    """Name of the application. If empty, the name is the default of ``application_name.name_of``."""
    adopt_from: str = ""
    """A former name of the application: the prefix and states with this name are taken over."""
    shard_limit: int = 32
    max_hot_standbys: int = 3

    scratch_directory: Path | None = None
    """Directory of shards' files while the shards run. If None, the directory of temporary files."""
    hint_prefixes: tuple[str, ...] = ()
    """Prefixes in etcd below which hints may be written. If empty, the defaults of ``HintKeys.of``."""
    hints_interval_s: float = 300.0
    stall_timeout_s: float = 60.0
    """Seconds without bytes of the log after which play-back fails the shard, with the reason."""
    lag_interval_s: float = 5.0
    """Seconds between two measurements of how far a standby is behind its log."""
    max_restarts: int = 0
    """Greatest number of restarts of a failed shard within ten minutes. A label of the shard overrides it."""
    append_memory_bytes: int = 256 << 20
    """Bytes of appends that shards and APIs keep in memory; further bytes wait in files."""
    query_timeout_s: float = 60.0
    """Seconds that a query may take, including the wait for a shard. Give more than the length of the lease,
    so that queries outlast a fail-over."""
    query_threads: int = 8
    player_threads: int = 4

    @property
    def hint_keys(self) -> HintKeys:
        """The keys in etcd at which hints may be written. Raises the ``Invalid`` of ``HintKeys.of``."""
        return HintKeys.of(self.hint_prefixes, self.root)

    def __post_init__(self) -> None:
        HintKeys.of(self.hint_prefixes, self.root)
        if not 0 <= self.shard_limit <= 1 << 17:
            raise Invalid(
                f"invalid limit ({self.shard_limit}; expected 0 <= limit <= 131072)",
                path="consumer.limit",
            )
        if self.max_restarts < 0:
            raise Invalid(
                f"invalid max-restarts ({self.max_restarts}; expected >= 0)",
                path="consumer.max-restarts",
            )
        if self.append_memory_bytes < 1 << 20:
            raise Invalid(
                f"invalid append-memory ({self.append_memory_bytes}; expected >= 1 MiB)",
                path="consumer.append-memory",
            )
        if self.max_hot_standbys < 0:
            raise Invalid("invalid max-hot-standbys", path="consumer.max-hot-standbys")
