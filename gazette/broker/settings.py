"""All limits and choices of a broker, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.cluster.process.member import MemberSettings
from gazette.errors import Invalid
from gazette.fragment.spool_bytes import LIMIT_BYTES

MAX_TXN_OPS: Final = 128
"""Greatest number of operations in one transaction that etcd accepts, by its default."""


@dataclass(frozen=True, slots=True)
class BrokerSettings(MemberSettings):
    """The settings of a broker. Rates are bytes per second (zero: no limit), sizes bytes, times seconds.

    Flags, environment names and defaults are those of ``gazette serve`` (``broker/flags.py``). Settings
    without a flag are here so that they have a name, and so that tests can lower them.
    """

    id: str = "local-broker"
    journal_limit: int = 1024

    max_replication: int = 9
    """Upper bound of any journal's effective replication."""
    max_append_rate: int = 0
    min_append_rate: int = 65_536
    auto_suspend: bool = False
    suspend_after_idle_ticks: int = 15
    """Number of timed pulses, without a change of route, after which an idle journal is suspended."""

    spool_dir: Path | None = None
    """Directory of spool files; None: the directory for temporary files."""
    file_root: Path | None = None
    fsspec_protocols: frozenset[str] = frozenset()
    """Protocols that ``fsspec+NAME://`` stores may use."""
    file_only: bool = False

    read_chunk_bytes: int = 131_072
    """Content of one ReadResponse, in bytes."""
    remote_block_bytes: int = 262_144
    """Bytes of a stored fragment that a pool thread decodes at a time."""
    list_page_journals: int = 25
    fragments_page_default: int = 1000
    signed_url_ttl_s: float = 60.0

    pulse_interval_s: float = 60.0
    pulse_timeout_s: float = 60.0
    peer_timeout_s: float = 15.0
    """Seconds for which a peer may make no progress while it owes an answer, or has content to accept."""
    store_check_timeout_s: float = 60.0
    listing_timeout_s: float = 15.0
    """Seconds for which a call waits for the first listing of a journal's stores. Then it is refused."""
    assignment_wait_s: float = 5.0
    """Seconds for which an append to a journal without brokers waits for them: the journal may be new."""
    spool_threads: int = 4
    """Threads for hashing and compression. As many threads write spool files, and as many read them."""
    spool_memory_bytes: int = LIMIT_BYTES
    """Upper bound in bytes of content in no spool file yet. Beyond it, appends wait for the disk."""
    blob_threads: int = 16
    """Greatest number of calls of one blob store at a time."""
    store_hung_after_s: float = 60.0
    """Seconds without progress after which a call of a blob store counts as hung. While hung calls hold all
    threads of a store, the store is unhealthy, and new calls fail at once."""
    kept_spools: int = 256
    """Greatest number of files of stored fragments that stay open for readers until the next listing."""
    parallel_persists: int = 32
    """Greatest number of spools of one blob store that are uploaded, or wait for a thread, at a time."""

    drain_timeout_s: float = 30.0
    drain_timeout_max_s: float = 21_600.0
    persist_timeout_s: float = 300.0
    """Seconds that the upload of the last spools may take at exit."""

    def __post_init__(self) -> None:
        if self.file_only and self.file_root is None:
            raise Invalid("--broker.file-only requires --broker.file-root", path="broker.file-only")
        if self.max_replication < 1:
            raise Invalid(
                f"invalid max-replication ({self.max_replication}; expected >= 1)",
                path="broker.max-replication",
                hint="Set 1 or more: with 0, no broker would serve any journal.",
            )
        if self.min_append_rate < 0 or self.max_append_rate < 0:
            raise Invalid("append rates cannot be negative", path="broker.max-append-rate")
        if not 0 <= self.journal_limit <= 1 << 17:
            raise Invalid(
                f"invalid limit ({self.journal_limit}; expected 0 <= limit <= 131072)",
                path="broker.limit",
            )
