"""The settings of ``gazette serve``: flags, and their values for the parts of a broker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gazette.blobs.fsspec import check_protocols
from gazette.broker.settings import BrokerSettings
from gazette.cluster.process.groups import check_directory
from gazette.cluster.process.member import MemberFlags
from gazette.config.schema import duration, setting
from gazette.http2.connection import STREAMS_MAX
from gazette.net.server import ServerSettings


@dataclass(frozen=True, slots=True)
class BrokerFlags(MemberFlags):
    """Group ``broker``."""

    limit: int = setting(
        1024, "largest number of journals (their replicas) that this broker serves"
    )
    file_root: Path | None = setting(None, "root directory of file:// stores")
    fsspec_protocols: tuple[str, ...] = setting(
        (), "protocol NAME that fsspec+NAME:// stores may use; may be repeated (empty: none)"
    )
    file_only: bool = setting(False, "use directories of file-root in place of all stores")
    max_append_rate: int = setting(0, "upper bound of any journal's append rate, bytes per second")
    max_replication: int = setting(9, "upper bound of any journal's replication")
    min_append_rate: int = setting(
        65_536, "lower bound of a client's append rate, bytes per second"
    )
    auto_suspend: bool = setting(False, "suspend journals without appends")
    spool_dir: Path | None = setting(None, "directory of spool files (empty: the temporary one)")
    drain_timeout: float = duration(
        "30s", "at exit, longest wait for a hand-off when no other broker could take over"
    )
    drain_timeout_max: float = duration("6h", "at exit, longest wait for any hand-off")
    persist_timeout: float = duration("5m", "at exit, longest time for the last uploads")

    def settings(self, process_id: str, root: str, lease_ttl_s: float) -> BrokerSettings:
        """Return the broker's settings. Raise ``Invalid`` for a value or directory that cannot be used."""
        # Stores own the content of the root, and some of them may be read-only.
        check_directory("broker.file-root", self.file_root, to_write=False)
        check_directory("broker.spool-dir", self.spool_dir)
        return BrokerSettings(
            zone=self.zone,
            id=process_id,
            root=root,
            journal_limit=self.limit,
            lease_ttl_s=lease_ttl_s,
            watch_delay_s=self.watch_delay,
            max_replication=self.max_replication,
            max_append_rate=self.max_append_rate,
            min_append_rate=self.min_append_rate,
            auto_suspend=self.auto_suspend,
            spool_dir=self.spool_dir,
            file_root=self.file_root,
            file_only=self.file_only,
            fsspec_protocols=check_protocols(self.fsspec_protocols, "broker.fsspec-protocols"),
            allow_origins=self.allow_origin,
            allow_hosts=self.allow_host,
            graceful_stop_s=self.graceful_stop,
            drain_timeout_s=self.drain_timeout,
            drain_timeout_max_s=self.drain_timeout_max,
            persist_timeout_s=self.persist_timeout,
        )

    def server_settings(self, default_host: str) -> ServerSettings:
        """Return the settings of the broker's servers. Raise ``Invalid`` for a value that cannot be used."""
        settings = MemberFlags.server_settings(self, default_host)
        # On one connection, a peer may need a call for each journal that this broker replicates for it.
        streams_max = self.max_streams or STREAMS_MAX + self.limit
        return replace(settings, streams_max=streams_max)
