"""The settings of ``gazctl``: what all commands share, and what each has of its own.

Shared ones come from flags, the environment, ``gazctl.ini`` or ``gazctl.yaml``, and defaults. Those of
a command come from flags, or from the command's own section of a file (``[journals.list]``): neither
``$FORMAT`` nor a section of all commands should change what a command does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from gazette.client.flags import BrokerClientFlags, ConsumerClientFlags
from gazette.config.schema import duration, setting
from gazette.runtime.log_setup import LEVELS

flag: Any = partial(setting, flag_only=True)
"""A setting of one command."""

FORMATS: Final = ("table", "yaml", "json", "proto")
_SELECTOR: Final = "label selector of {}"


@dataclass(frozen=True, slots=True)
class SharedFlags:
    """Flags without a group."""

    zone: str = setting("local", "zone of this process: servers of it are preferred")
    timeout: float = duration("60s", "how long a server may take to answer", env="GAZCTL_TIMEOUT")


@dataclass(frozen=True, slots=True)
class BrokerFlags(BrokerClientFlags):
    """Group ``broker``. By default every call goes by way of ``address``, which is all that can be
    reached through a tunnel."""

    cache_size: int = setting(
        0,
        "how many routes are remembered; 0: always by way of the address",
        name="cache.size",
        ini="Size",
    )
    file_root: Path | None = setting(
        None, "directory of file:// stores, to read and to remove fragments there"
    )


@dataclass(frozen=True, slots=True)
class ConsumerFlags(ConsumerClientFlags):
    """Group ``consumer``."""

    cache_size: int = setting(
        0,
        "how many routes are remembered; 0: always by way of the address",
        name="cache.size",
        ini="Size",
    )


@dataclass(frozen=True, slots=True)
class LogFlags:
    """Group ``log``. Not that of `gazette.config.groups`, whose module knows of etcd."""

    level: str = setting("warn", "least severity that is logged", choices=tuple(LEVELS))
    format: str = setting("text", "form of log lines", choices=("text", "json", "color"))


@dataclass(frozen=True, slots=True)
class NoFlags(SharedFlags):
    """Of commands that have none of their own."""


# journals


@dataclass(frozen=True, slots=True)
class JournalsListFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to list (empty: all)"), short="l")
    format: str = flag("table", "form of the output", choices=FORMATS, short="o")
    label_columns: tuple[str, ...] = flag(
        (),
        "labels to show as columns, separated by commas; may be repeated",
        short="L",
        ini="Labels",
    )
    primary: bool = flag(False, "show the primary broker", short="p")
    replicas: bool = flag(False, "show all brokers of the journal", short="r")
    rf: bool = flag(False, "show the replication factor")
    stores: bool = flag(False, "show fragment stores")
    watch: bool = flag(False, "go on, and list again whenever a specification changes")


@dataclass(frozen=True, slots=True)
class ApplyFlags(SharedFlags):
    specs: str = flag("-", "YAML file of specifications (-: stdin)", ini="SpecsPath")
    dry_run: bool = flag(False, "print the request instead of sending it")
    max_txn_size: int = flag(0, "most changes in one transaction of etcd; 0: all of them in one")


@dataclass(frozen=True, slots=True)
class JournalsApplyFlags(ApplyFlags):
    wait: bool = flag(False, "return once every journal has its brokers, or fail after --timeout")


@dataclass(frozen=True, slots=True)
class EditFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("what to edit (required)"), short="l")
    max_txn_size: int = flag(0, "most changes in one transaction of etcd; 0: all of them in one")


@dataclass(frozen=True, slots=True)
class ReadFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to read (required)"), short="l")
    block: bool = flag(False, "at the write head wait for more, until interrupted", short="b")
    tail: bool = flag(False, "begin at the write head instead of the first byte")
    output: str = flag("-", "file to write to (-: stdout)", short="o")
    offsets: Path | None = flag(
        None, "JSON file of the offsets to begin at, by journal", ini="OffsetsPath"
    )
    offsets_out: Path | None = flag(
        None, "JSON file to write the final offsets to", ini="OffsetsOutPath"
    )
    file_root: Path | None = flag(None, "directory of file:// stores (as --broker.file-root)")
    since: str = flag(
        "",
        "skip fragments that were persisted before: Unix seconds, a time, or a duration ago",
        name="from",
        ini="FromUnix",
    )


@dataclass(frozen=True, slots=True)
class AppendFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to append to (required)"), short="l")
    input: str = flag("-", "file to read (-: stdin)", short="i")
    framing: str = flag(
        "none", "what a record of the input is", choices=("none", "lines", "fixed"), short="f"
    )
    mapping: str = flag(
        "random",
        "which journal a record goes to",
        choices=("random", "modulo", "rendezvous", "direct"),
        short="m",
    )
    base64: bool = flag(False, "keys of lines are base64")


@dataclass(frozen=True, slots=True)
class FragmentsFlags(SharedFlags):
    selector: str = flag(
        "", _SELECTOR.format("journals to list fragments of (empty: all)"), short="l"
    )
    format: str = flag("table", "form of the output", choices=FORMATS, short="o")
    since: str = flag(
        "",
        "only fragments persisted at or after: Unix seconds, a time, or a duration ago",
        name="from",
        ini="FromUnix",
    )
    until: str = flag("", "only fragments persisted at or before", name="to", ini="ToUnix")
    url_ttl: float = duration(
        "0s",
        "sign a URL for each fragment, good for this long; 0: no URLs",
        flag_only=True,
        ini="SigTTL",
    )


@dataclass(frozen=True, slots=True)
class JournalsPruneFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to prune (required)"), short="l")
    dry_run: bool = flag(False, "tell what would be removed, and remove nothing")


@dataclass(frozen=True, slots=True)
class ResetHeadFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to reset (required)"), short="l")
    dry_run: bool = flag(False, "tell where heads would be moved to, and move none")


@dataclass(frozen=True, slots=True)
class SuspendFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to suspend (required)"), short="l")
    force: bool = flag(
        False, "suspend journals that have fragments which are not persisted", short="f"
    )
    dry_run: bool = flag(False, "tell which journals would be asked, and suspend none")


@dataclass(frozen=True, slots=True)
class StoreHealthFlags(SharedFlags):
    check_delete_prefix: str = flag(
        "", "also check that objects below this path can be removed (may be empty: the root)"
    )


# shards


@dataclass(frozen=True, slots=True)
class ShardsListFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("shards to list (empty: all)"), short="l")
    format: str = flag("table", "form of the output", choices=FORMATS, short="o")
    label_columns: tuple[str, ...] = flag(
        (),
        "labels to show as columns, separated by commas; may be repeated",
        short="L",
        ini="Labels",
    )
    primary: bool = flag(False, "show the primary member", short="p")
    replicas: bool = flag(False, "show all members of the shard, with their status", short="r")
    rf: bool = flag(False, "show the replication factor: one, and hot standbys")
    lag: bool = flag(False, "show how many bytes of its sources the shard has not consumed")


@dataclass(frozen=True, slots=True)
class ShardsApplyFlags(ApplyFlags):
    verify: bool = flag(
        True, "require that journals which specifications refer to exist and are labeled as needed"
    )


@dataclass(frozen=True, slots=True)
class ShardsEditFlags(EditFlags):
    verify: bool = flag(
        True, "require that journals which specifications refer to exist and are labeled as needed"
    )


@dataclass(frozen=True, slots=True)
class ShardsPruneFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("shards whose logs to prune (required)"), short="l")
    dry_run: bool = flag(False, "tell what would be removed, and remove nothing")


@dataclass(frozen=True, slots=True)
class RecoverFlags(SharedFlags):
    id: str = flag("", "the shard to recover (required)")
    dir: Path | None = flag(None, "directory to recover into (required)", short="d")
    convert: Path | None = flag(
        None, "directory of recovered files: make plain SQLite databases there, and no recovery"
    )
    force: bool = flag(False, "replace what the directory holds")
    backup: int = flag(-1, "recover by this backup of the hints, from 0; -1: by the newest hints")
    at: str = flag(
        "",
        "the state as of a time (2026-01-31T12:00:00Z), an offset of the log, or a checkpoint"
        " (a/source=123,another=456)",
    )


@dataclass(frozen=True, slots=True)
class UnassignFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("shards to unassign (required)"), short="l")
    failed: bool = flag(False, "only replicas that have FAILED")
    dry_run: bool = flag(False, "tell which shards would be unassigned")


@dataclass(frozen=True, slots=True)
class ShardsBackfillFlags(SharedFlags):
    shards: str = flag("", _SELECTOR.format("shards to build the state of (required)"), short="l")
    staging: str = flag(
        "", "directory or URL where states are kept until they are published (required)"
    )
    run_id: str = flag("", "name of the run, to resume it later (default: a new one)")
    until: str = flag(
        "",
        "read what was persisted by then: Unix seconds, a time, or a duration ago (default: all)",
    )
    offsets: str = flag("", "read up to these offsets: JSON by journal, or a file of it")
    master: str = flag("", "run on this Spark cluster; local[*]: Spark on this machine")
    local: bool = flag(False, "run on this machine without Spark (the default)")
    jobs: int = flag(0, "processes of a local run; 0: one for each core")
    direct: bool = flag(False, "read fragments from their stores with credentials of one's own")
    verify: bool = flag(False, "compare some shards with a replay, before anything is published")
    verify_shards: int = flag(3, "how many shards --verify compares")
    enable: bool = flag(False, "enable the shards as they are published")
    overwrite: bool = flag(False, "replace the state of shards that have one")
    forget_publications: bool = flag(
        False, "go on although something that shards publish may be lost"
    )
    dry_run: bool = flag(False, "tell what would be read, and change nothing")
    format: str = flag("table", "form of the output", choices=("table", "json"), short="o")
    scratch_dir: Path | None = flag(None, "local directory of temporary files")
    prefix: str = flag(
        "", "the consumers' --etcd.prefix: only for shards whose store is a database"
    )
    application: str = flag(
        "", "name that the members give their application (default: that of its class)"
    )
    list: bool = flag(False, "instead: list runs, and everything they have left that none needs")
    gc: bool = flag(False, "instead: remove staged objects that no run needs")
    gc_age: float = duration("24h", "how old they must be", flag_only=True)


# others


@dataclass(frozen=True, slots=True)
class AttachUuidsFlags(SharedFlags):
    template: str = flag(
        "{{.UUID}},{{.Line}}\n", "what is written for a line, with these two actions"
    )
    max_length: int = flag(4_194_304, "longest line that is accepted, in bytes")
    skip_header: bool = flag(False, "leave out the first line of each file")


@dataclass(frozen=True, slots=True)
class SupportBundleFlags(SharedFlags):
    output: Path | None = flag(
        None, "file to make (default: gazette-support-<time>.tar.gz)", short="o"
    )
    http: tuple[str, ...] = flag(
        (),
        "HTTP URL of a member, beside those that are guessed: the port after the gRPC one; "
        "may be repeated",
    )
    log_bytes: int = flag(4_194_304, "how much of the end of each log is taken, in bytes")
