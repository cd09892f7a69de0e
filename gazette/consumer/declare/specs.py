"""Make the specifications of a declaration: journals, recovery logs and shards.

No IO. `journals_yaml` and `shards_yaml` return the YAML that an operator would write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from gazette.consumer.contract.poison import DeadLetter
from gazette.consumer.declare.declaration import Declaration, DeclaredJournals, shards_of
from gazette.consumer.declare.source import RECOVERY_DIRECTORY
from gazette.errors import Invalid
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSpec
from gazette.protocol.text import duration
from gazette.protocol.text.validation import within

HINTS_DIRECTORY: Final = "/gazette/hints"
HINT_BACKUPS: Final = 2


REPLICAS_MAX: Final = 3
"""Default number of replicas of a journal, if there are enough brokers."""


@dataclass(frozen=True, slots=True)
class SpecSettings:
    """Settings for specifications that a declaration does not have: stores, replication and so on."""

    stores: tuple[str, ...]
    """URLs of blob stores. Brokers write fragments to the first store, and read from all stores."""
    replication: int = REPLICAS_MAX
    """Number of replicas of each journal."""
    hot_standbys: int = 1
    """Number of hot standbys of each shard."""
    fragment_bytes: int = 256 << 20
    """Length in bytes at which a fragment is closed."""
    flush_interval_ns: int = duration.HOUR
    """Age in nanoseconds at which a fragment of any length is closed and stored."""
    refresh_interval_ns: int = 5 * duration.MINUTE
    """Interval in nanoseconds at which brokers list the stores."""
    max_txn_duration_ns: int = duration.SECOND
    """Longest time in nanoseconds for which a transaction consumes messages before it commits."""

    def __post_init__(self) -> None:
        """Raise ``Invalid`` if no store is given."""
        if not self.stores:
            raise Invalid(
                "no blob store is given, and nothing else keeps journals for good",
                path="--store",
                hint="Give the store of the brokers, such as --store s3://bucket/prefix/ "
                "(or file:///, if all brokers have one --broker.file-root).",
            )


DEVELOPMENT: Final = SpecSettings(
    stores=("file:///",),
    replication=1,
    hot_standbys=0,
    fragment_bytes=16 << 20,
    flush_interval_ns=10 * duration.MINUTE,
    refresh_interval_ns=duration.MINUTE,
)
"""Settings for one machine: one replica, in files below the directory of the brokers."""


def journal_specs(declaration: Declaration, settings: SpecSettings) -> list[JournalSpec]:
    """Return journals of sources and outputs, ordered by name. Raise ``Invalid`` for an invalid journal."""
    specs = [
        _checked(spec)
        for declared in declaration.journals
        for spec in partition_specs(declared, settings)
    ]
    return sorted(specs, key=lambda spec: spec.name)


def partition_specs(declared: DeclaredJournals, settings: SpecSettings) -> list[JournalSpec]:
    """Return the journals of one source or output, in order."""
    labels, fragment = declared.labels, fragment_spec(settings, declared.retention_ns)
    return [JournalSpec(name, settings.replication, labels, fragment) for name in declared.journals]


def log_spec(name: str, settings: SpecSettings) -> JournalSpec:
    """Return the journal of a recovery log. Raise ``Invalid`` for an invalid journal."""
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_RECOVERY_LOG))
    return _checked(JournalSpec(name, settings.replication, labels, fragment_spec(settings, 0)))


def dead_letter_specs(declaration: Declaration, settings: SpecSettings) -> list[JournalSpec]:
    """Return the dead-letter journals, ordered by name. Raise ``Invalid`` for an invalid journal."""
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), (MESSAGE_TYPE, DeadLetter.__name__))
    return [
        _checked(JournalSpec(name, settings.replication, labels, fragment_spec(settings, 0)))
        for name in declaration.dead_letters
    ]


def shard_specs(declaration: Declaration, settings: SpecSettings) -> list[ShardSpec]:
    """Return the shards of `shards_of` with these settings. Raise ``Invalid`` for an invalid shard."""
    log_fields: dict[str, Any] = {}
    if declaration.recovery_logs:
        log_fields = {
            "recovery_log_prefix": f"{RECOVERY_DIRECTORY}/{declaration.slug}",
            "hint_prefix": f"{HINTS_DIRECTORY}/{declaration.slug}",
            "hint_backups": HINT_BACKUPS,
        }
    specs = [
        replace(
            spec,
            max_txn_duration_ns=settings.max_txn_duration_ns,
            hot_standbys=settings.hot_standbys,
            **log_fields,
        )
        for spec in shards_of(declaration)
    ]
    for spec in specs:
        with within(spec.id):
            spec.validate()
    return specs


def log_specs(declaration: Declaration, settings: SpecSettings) -> list[JournalSpec]:
    """Return the shards' recovery logs, ordered by name. Raise ``Invalid`` for an invalid journal."""
    shards = shard_specs(declaration, settings)
    return [log_spec(spec.recovery_log, settings) for spec in shards if spec.recovery_log]


def journals_yaml(declaration: Declaration, settings: SpecSettings) -> str:
    """Return the YAML for ``gazctl journals apply``: new journals, recovery logs and dead-letter journals."""
    specs = [
        *journal_specs(declaration, settings),
        *log_specs(declaration, settings),
        *dead_letter_specs(declaration, settings),
    ]
    from gazette.protocol.journal_tree import JournalNode  # Members need no YAML.

    return JournalNode.of((spec, 0) for spec in specs).to_yaml()


def shards_yaml(declaration: Declaration, settings: SpecSettings) -> str:
    """Return the YAML for ``gazctl shards apply``: new shards."""
    from gazette.protocol.shard_list import ShardList

    return ShardList.of((spec, 0) for spec in shard_specs(declaration, settings)).to_yaml()


def fragment_spec(settings: SpecSettings, retention: int) -> FragmentSpec:
    """Return the fragment settings of new journals. ``retention`` is in nanoseconds; 0 keeps everything."""
    return FragmentSpec(
        length=settings.fragment_bytes,
        codec=Codec.ZSTANDARD,
        stores=settings.stores,
        refresh_interval_ns=settings.refresh_interval_ns,
        retention_ns=retention,
        flush_interval_ns=settings.flush_interval_ns,
    )


def _checked(spec: JournalSpec) -> JournalSpec:
    with within(spec.name):
        spec.validate()
    return spec
