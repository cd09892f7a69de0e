"""Settings of ``gazctl``: shared settings of all commands, and settings of one command.

Shared settings come from flags, the environment, ``gazctl.ini`` or ``gazctl.yaml``, and defaults.
Settings of one command come only from flags, or from the command's section of a file
(``[journals.list]``): a variable such as ``$FORMAT`` must not change a command.
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
"""Describe a setting of one command."""

FORMATS: Final = ("table", "yaml", "json", "proto")
_UUID: Final = (
    "place of the UUID in messages; dots join nested fields (empty: as the label "
    "app.gazette.dev/message-uuid of the journal says, or else uuid)"
)
_SELECTOR: Final = "label selector of {}"


@dataclass(frozen=True, slots=True)
class SharedFlags:
    """Settings without a group."""

    context: str = setting(
        "",
        "context whose addresses are used (empty: that of `gazctl context use`)",
        env="GAZCTL_CONTEXT",
    )
    zone: str = setting(
        "local", "zone of this process; servers in it are preferred", env="GAZETTE_ZONE"
    )
    timeout: float = duration(
        "60s", "longest time that a server may take to answer", env="GAZCTL_TIMEOUT"
    )


@dataclass(frozen=True, slots=True)
class BrokerFlags(BrokerClientFlags):
    """Group ``broker``. By default calls about a journal go to ``address``: a tunnel may reach no other
    broker."""

    cache_size: int = setting(
        0,
        "number of routes to remember; 0 sends every call to the address",
        name="cache.size",
        ini="Size",
    )
    file_root: Path | None = setting(
        None, "directory of file:// stores, to read and remove fragments there"
    )


@dataclass(frozen=True, slots=True)
class ConsumerFlags(ConsumerClientFlags):
    """Group ``consumer``."""

    cache_size: int = setting(
        0,
        "number of routes to remember; 0 sends every call to the address",
        name="cache.size",
        ini="Size",
    )


@dataclass(frozen=True, slots=True)
class LogFlags:
    """Group ``log``. Servers have another group, but its module imports the client of etcd."""

    level: str = setting("warn", "least severity to log", choices=tuple(LEVELS))
    format: str = setting("text", "form of log lines", choices=("text", "json", "color"))


@dataclass(frozen=True, slots=True)
class NoFlags(SharedFlags):
    """Settings of a command with shared settings only."""


@dataclass(frozen=True, slots=True)
class LoginFlags(SharedFlags):
    issuer: str = flag("", "OpenID Connect provider (https://…; empty: as the last time)")
    client_id: str = flag("", "name by which the provider knows gazctl (empty: as the last time)")
    scope: str = flag("openid offline_access", "scopes to ask for; offline_access renews tokens")
    audience: str = flag("", "audience to ask for; some providers need it")
    id_token: bool = flag(False, "present the ID token: access tokens of some providers are no JWT")
    browser: bool = flag(
        False, "have a browser of this machine come back, rather than type a code on any device"
    )


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
    watch: bool = flag(False, "keep running, and list again after each change of a specification")


@dataclass(frozen=True, slots=True)
class ApplyFlags(SharedFlags):
    specs: str = flag("-", "YAML file of specifications; - for stdin", ini="SpecsPath")
    dry_run: bool = flag(False, "print the request instead of sending it")
    max_txn_size: int = flag(
        0, "largest number of changes in one transaction of etcd; 0 makes one transaction of all"
    )


@dataclass(frozen=True, slots=True)
class JournalsApplyFlags(ApplyFlags):
    wait: bool = flag(False, "wait until every journal has its brokers; fail after --timeout")


@dataclass(frozen=True, slots=True)
class JournalsCreateFlags(SharedFlags):
    store: tuple[str, ...] = flag(
        (), "URL of the blob store, where fragments are kept (required); may be repeated"
    )
    replication: int = flag(0, "number of brokers with a replica (0: at most 3 of all)")
    label: tuple[str, ...] = flag((), "label as NAME=VALUE; may be repeated")
    retention: float = duration(
        "0s", "age from which `journals prune` removes fragments; 0 keeps all", flag_only=True
    )
    dry_run: bool = flag(False, "print the specifications as YAML instead of creating journals")
    wait: bool = flag(False, "wait until every journal has its brokers; fail after --timeout")


@dataclass(frozen=True, slots=True)
class EditFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals or shards to edit (required)"), short="l")
    max_txn_size: int = flag(
        0, "largest number of changes in one transaction of etcd; 0 makes one transaction of all"
    )


@dataclass(frozen=True, slots=True)
class ReadFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to read (required)"), short="l")
    block: bool = flag(
        False, "at the write head, wait for more content until interrupted", short="b"
    )
    tail: bool = flag(False, "begin at the write head instead of the first byte")
    output: str = flag("-", "file to write; - for stdout", short="o")
    offsets: Path | None = flag(
        None, "JSON file with the offset to begin at, by journal", ini="OffsetsPath"
    )
    offsets_out: Path | None = flag(
        None, "JSON file to write the final offsets to", ini="OffsetsOutPath"
    )
    file_root: Path | None = flag(None, "directory of file:// stores (same as --broker.file-root)")
    since: str = flag(
        "",
        "skip fragments persisted before this: Unix seconds, a time, or a duration ago",
        name="from",
        ini="FromUnix",
    )


@dataclass(frozen=True, slots=True)
class TailFlags(SharedFlags):
    lines: int = flag(10, "number of last lines to begin with", short="n")
    no_follow: bool = flag(False, "end at the write head instead of waiting for more")


@dataclass(frozen=True, slots=True)
class AppendFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to append to (required)"), short="l")
    input: str = flag("-", "file to read; - for stdin", short="i")
    framing: str = flag(
        "none", "how to split the input into records", choices=("none", "lines", "fixed"), short="f"
    )
    mapping: str = flag(
        "random",
        "how to choose the journal of a record",
        choices=("random", "modulo", "rendezvous", "direct"),
        short="m",
    )
    base64: bool = flag(False, "decode the keys of lines from base64")


@dataclass(frozen=True, slots=True)
class FragmentsFlags(SharedFlags):
    selector: str = flag(
        "", _SELECTOR.format("journals to list fragments of (empty: all)"), short="l"
    )
    format: str = flag("table", "form of the output", choices=FORMATS, short="o")
    since: str = flag(
        "",
        "list fragments persisted at or after this: Unix seconds, a time, or a duration ago",
        name="from",
        ini="FromUnix",
    )
    until: str = flag("", "list fragments persisted at or before this", name="to", ini="ToUnix")
    url_ttl: float = duration(
        "0s",
        "sign a URL for each fragment, valid for this duration; 0 signs none",
        flag_only=True,
        ini="SigTTL",
    )


@dataclass(frozen=True, slots=True)
class JournalsUsageFlags(SharedFlags):
    selector: str = flag(
        "",
        _SELECTOR.format("journals to sum up (empty: all, and what is of no journal)"),
        short="l",
    )
    format: str = flag("table", "form of the output", choices=("table", "yaml", "json"), short="o")


@dataclass(frozen=True, slots=True)
class JournalsPruneFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to prune (required)"), short="l")
    dry_run: bool = flag(False, "show what would be removed; remove nothing")


@dataclass(frozen=True, slots=True)
class ResetHeadFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to reset (required)"), short="l")
    dry_run: bool = flag(False, "show where each head would move; move none")


@dataclass(frozen=True, slots=True)
class DecideFragmentsFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to decide about (required)"), short="l")
    former_template: str = flag(
        "", "path postfix template that the journals had: what it can have written is theirs"
    )
    foreign: tuple[str, ...] = flag(
        (),
        "directories below the journals whose fragments are not theirs, separated by commas; . is all "
        "that no template explains; may be repeated",
    )
    dry_run: bool = flag(False, "show which journals would be changed; change none")


@dataclass(frozen=True, slots=True)
class SuspendFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to suspend (required)"), short="l")
    force: bool = flag(
        False, "suspend journals even if some fragments are not persisted", short="f"
    )
    dry_run: bool = flag(False, "show which journals would be asked; suspend none")


@dataclass(frozen=True, slots=True)
class StoreHealthFlags(SharedFlags):
    check_delete_prefix: str = flag(
        "", "also check that objects below this path can be removed (may be empty, for the root)"
    )


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
    rf: bool = flag(False, "show the replication factor: one primary plus hot standbys")
    lag: bool = flag(False, "show how many bytes of its sources the shard has not consumed")


@dataclass(frozen=True, slots=True)
class ShardsApplyFlags(ApplyFlags):
    wait: bool = flag(
        False, "wait until every shard has a primary and its standbys; fail after --timeout"
    )
    verify: bool = flag(
        True, "require that the journals of a specification exist and have the needed labels"
    )


@dataclass(frozen=True, slots=True)
class ShardsEditFlags(EditFlags):
    verify: bool = flag(
        True, "require that the journals of a specification exist and have the needed labels"
    )


@dataclass(frozen=True, slots=True)
class ShardsHintsFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("shards whose hints to show (empty: all)"), short="l")
    format: str = flag("table", "form of the output", choices=("table", "yaml", "json"), short="o")
    files: bool = flag(
        False, "list the segments of each live file, and the properties, in the table"
    )


@dataclass(frozen=True, slots=True)
class ShardsPruneFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("shards whose logs to prune (required)"), short="l")
    dry_run: bool = flag(False, "show what would be removed; remove nothing")


@dataclass(frozen=True, slots=True)
class RecoverFlags(SharedFlags):
    id: str = flag("", "shard to recover (required)")
    dir: Path | None = flag(None, "directory to recover into (required)", short="d")
    convert: Path | None = flag(
        None, "directory of recovered files to convert to plain SQLite databases; recovers nothing"
    )
    force: bool = flag(False, "replace the content of the directory")
    backup: int = flag(
        -1, "number of the backup of the hints to recover by, from 0; -1 takes the newest hints"
    )
    at: str = flag(
        "",
        "state to recover: a time (2026-01-31T12:00:00Z), an offset of the log, or a "
        "checkpoint (a/source=123,another=456)",
    )


@dataclass(frozen=True, slots=True)
class ShardsQueryFlags(SharedFlags):
    at: str = flag(
        "",
        "state to query: a time (2026-01-31T12:00:00Z), an offset of the log, or a "
        "checkpoint (a/source=123,another=456); empty for the newest",
    )
    format: str = flag("table", "form of the output", choices=("table", "json", "csv"), short="o")
    max_rows: int = flag(1000, "largest number of rows to write")
    scratch_dir: Path | None = flag(None, "local directory for the recovered files")


@dataclass(frozen=True, slots=True)
class UnassignFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("shards to unassign (required)"), short="l")
    failed: bool = flag(False, "unassign only replicas that have FAILED")
    dry_run: bool = flag(False, "show which shards would be unassigned; change nothing")


@dataclass(frozen=True, slots=True)
class RestartSourceFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("shards that read it (required)"), short="l")
    source: str = flag("", "journal that was deleted and created again (required)")
    offset: int = flag(-1, "offset of the present journal from which they read; 0 for its begin")
    same_bytes: bool = flag(
        False, "the journal has the bytes of the former one: read on at each shard's own offset"
    )
    dry_run: bool = flag(False, "show which shards would read it again; change nothing")


@dataclass(frozen=True, slots=True)
class ShardsBackfillFlags(SharedFlags):
    shards: str = flag("", _SELECTOR.format("shards to build the state of (required)"), short="l")
    staging: str = flag(
        "", "directory or URL that holds states until they are published (required)"
    )
    run_id: str = flag("", "name of the run, to resume it later (empty: a new name)")
    until: str = flag(
        "",
        "read what was persisted by then: Unix seconds, a time, or a duration ago (empty: all)",
    )
    offsets: str = flag("", "read up to these offsets: JSON by journal, or the name of a JSON file")
    master: str = flag("", "Spark cluster to run on; local[*] runs Spark on this machine")
    local: bool = flag(False, "run on this machine without Spark (the default)")
    jobs: int = flag(0, "number of processes of a local run; 0 is one for each core")
    direct: bool = flag(False, "read fragments from their stores with credentials of this process")
    verify: bool = flag(False, "compare some shards with a replay before anything is published")
    verify_shards: int = flag(3, "number of shards that --verify compares")
    enable: bool = flag(False, "enable the shards when they are published")
    overwrite: bool = flag(False, "replace the state of shards that have one")
    forget_publications: bool = flag(
        False, "continue even if messages that the shards publish may be lost"
    )
    dry_run: bool = flag(False, "show what would be read; change nothing")
    format: str = flag("table", "form of the output", choices=("table", "json"), short="o")
    scratch_dir: Path | None = flag(None, "local directory for temporary files")
    prefix: str = flag(
        "", "--etcd.prefix of the consumers; needed only if the store of a shard is a database"
    )
    application: str = flag(
        "", "application name that the members use (empty: the name of its class)"
    )
    list: bool = flag(False, "list runs, and everything they left that no run needs; build nothing")
    gc: bool = flag(False, "remove staged objects that no run needs; build nothing")
    gc_age: float = duration("24h", "least age of the objects that --gc removes", flag_only=True)


@dataclass(frozen=True, slots=True)
class ReadMessagesFlags(SharedFlags):
    selector: str = flag("", _SELECTOR.format("journals to read, instead of names"), short="l")
    follow: bool = flag(False, "at the head, wait for more messages until interrupted", short="f")
    tail: bool = flag(False, "begin at the head instead of the first message")
    begin: int = flag(0, "offset to begin at, in every journal")
    last: int = flag(
        0, "number of last messages of each journal to begin with; 0 begins with the first"
    )
    limit: int = flag(0, "largest number of messages to write; 0 writes all", short="n")
    meta: bool = flag(
        False, "write an object with journal, offset and time around each message", short="m"
    )
    message: str = flag("", "class of protobuf messages, as module:Class")
    uuid: str = flag("", _UUID)
    uncommitted: bool = flag(False, "write every message as it stands in its journal")
    skip_malformed: bool = flag(
        False, "leave out what is no message, and say so, instead of failing"
    )


@dataclass(frozen=True, slots=True)
class ProduceMessagesFlags(SharedFlags):
    selector: str = flag(
        "", _SELECTOR.format("journals to publish to, instead of a name"), short="l"
    )
    declared: str = flag(
        "",
        "Source or Output of an application, as module:Class.attribute, instead of a name: its key "
        "and its type are used",
    )
    key: str = flag(
        "",
        "field by which a message is mapped to its journal; dots join nested fields "
        "(empty: the key that labels of the journals name, or else any journal)",
        short="k",
    )
    mapping: str = flag(
        "modulo",
        "how a key chooses the journal, unless labels of the journals say it: use that of the application",
        choices=("modulo", "rendezvous"),
        short="m",
    )
    uuid: str = flag("", _UUID)
    one_transaction: bool = flag(False, "publish all of the input in one transaction, or nothing")


@dataclass(frozen=True, slots=True)
class MembersFlags(SharedFlags):
    format: str = flag("table", "form of the output", choices=("table", "json"), short="o")


@dataclass(frozen=True, slots=True)
class TopFlags(SharedFlags):
    sort: str = flag("rate", "column to order by", choices=("rate", "lag", "age"), short="s")
    selector: str = flag(
        "", _SELECTOR.format("journals and shards to show (empty: all)"), short="l"
    )
    interval: float = duration("2s", "time between refreshes, at least 500ms", flag_only=True)
    once: bool = flag(False, "ask twice, write a table, and end")
    json: bool = flag(False, "write JSON instead of a table, as by --once")


@dataclass(frozen=True, slots=True)
class AttachUuidsFlags(SharedFlags):
    template: str = flag(
        "{{.UUID}},{{.Line}}\n", "text to write for each line; both actions are required"
    )
    uuid: str = flag(
        "",
        "put the UUID into the JSON object of each line, in this place, instead of the template; dots "
        "join nested fields",
    )
    max_length: int = flag(4_194_304, "longest line to accept, in bytes")
    skip_header: bool = flag(False, "skip the first line of each file")


@dataclass(frozen=True, slots=True)
class SupportBundleFlags(SharedFlags):
    output: Path | None = flag(
        None, "file to create (default: gazette-support-<time>.tar.gz)", short="o"
    )
    http: tuple[str, ...] = flag(
        (),
        "HTTP URL of a member, in addition to the guessed ones (port after the gRPC port); "
        "may be repeated",
    )
    log_bytes: int = flag(4_194_304, "number of bytes to take from the end of each log")
