"""The command tree: all commands, their arguments, and where each is implemented."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.config.schema import Schema
from gazette.gazctl import flags

GROUPS: Final = {
    "broker": flags.BrokerFlags,
    "consumer": flags.ConsumerFlags,
    "log": flags.LogFlags,
}
"""Groups of settings that commands share. The file may have all of them."""
FILE_STEM: Final = "gazctl"

_BROKER: Final = ("broker", "log")
_BOTH: Final = ("consumer", "broker", "log")
FAMILIES: Final = {"journals": _BROKER, "shards": _BOTH}
"""Groups of commands, and the groups of settings of each."""

SELECTORS: Final = """\
A selector is like "env in (prod, qa), tier != cache, !legacy". A journal is selected by its name with
"name=a/journal", journals below a path with "name:prefix=a/path/", a shard by its id with "id=…"."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command. ``target`` is ``module:function`` of this package.

    The function is a coroutine that takes a `Context`. If the command is ``offline`` it is a plain
    function, and calls no server.
    """

    words: tuple[str, ...]
    summary: str
    flags: type[flags.SharedFlags]
    target: str
    groups: tuple[str, ...]
    description: str
    examples: str = ""
    arguments: str = ""
    offline: bool = False

    @property
    def name(self) -> str:
        return " ".join(self.words)

    def schema(self) -> Schema:
        return Schema(
            f"gazctl {self.name}",
            {"": self.flags, **{name: GROUPS[name] for name in self.groups}},
            file_stem=FILE_STEM,
            arguments=self.arguments,
            description=f"{self.summary}.\n\n{self.description}",
            examples=f"examples:\n{self.examples}" if self.examples else "",
            also_in_file=file_sections(),
            scopes=[".".join(self.words[:count]) for count in range(1, len(self.words) + 1)],
        )


def shared_schema(scope: str) -> Schema:
    """Return the settings that the commands of a group share, such as ``journals``."""
    return Schema(
        "gazctl print-config",
        {"": flags.SharedFlags, **GROUPS},
        file_stem=FILE_STEM,
        also_in_file=file_sections(),
        scopes=[scope],
    )


def file_sections() -> dict[str, type]:
    """Return all sections that a configuration file may have, by their names."""
    sections: dict[str, type] = {"": flags.SharedFlags, **GROUPS}
    for family, groups in FAMILIES.items():
        sections |= {family: flags.SharedFlags}
        sections |= {f"{family}.{name}": GROUPS[name] for name in groups}
    return sections | {".".join(command.words): command.flags for command in COMMANDS}


_JOURNALS: Final = (
    Command(
        ("journals", "list"),
        "List journals and their specifications",
        flags.JournalsListFlags,
        "journals.list:run",
        _BROKER,
        f"""\
{SELECTORS}

The table marks suspended journals with <S>. It marks journals that lack replicas with the number that
they have, as in <2/3>. Behind it are problems that brokers have with journals: stores that are unhealthy or
refuse fragments, and fragments that nothing explains. YAML output is input of `journals apply`, with the
listed revisions. JSON output is one document; with --watch it is one document on each line.""",
        """\
  gazctl journals list
  gazctl journals list -l name:prefix=examples/ --primary --replicas
  gazctl journals list -l app.gazette.dev/message-type=Word -L content-type --stores
  gazctl journals list -l name=a/journal -o yaml > a-journal.yaml""",
    ),
    Command(
        ("journals", "apply"),
        "Create, change and delete journals",
        flags.JournalsApplyFlags,
        "journals.apply:apply",
        _BROKER,
        """\
Reads a YAML tree of specifications, as `journals list -o yaml` writes it. A journal without "revision"
must not exist. With one, the journal must be at that revision; -1 means any. "delete: true" deletes.

Either all changes are made, in one transaction of etcd, or none. etcd accepts 128 changes by default.
--max-txn-size splits them into several transactions: if one fails, the earlier ones stay.

A specification replaces the whole former one, except the suspension. If it names no suspension, that of
the journal stays: without it, the offset at which the journal resumes would be lost.""",
        """\
  gazctl journals apply --specs journals.yaml
  gazctl journals apply --specs journals.yaml --dry-run
  gazctl journals list -l name:prefix=old/ -o yaml | sed '1i delete: true' | gazctl journals apply""",
    ),
    Command(
        ("journals", "edit"),
        "Edit specifications of journals",
        flags.EditFlags,
        "journals.apply:edit",
        _BROKER,
        f"""\
Opens the specifications of selected journals in $GAZ_EDITOR, $EDITOR or vi. Applies them when the editor
ends, unless nothing was changed. Text with an error is opened again, with the error on top. Text that
cannot be applied is kept in a file, and its name is printed.

{SELECTORS}""",
        """\
  gazctl journals edit -l name=a/journal
  GAZ_EDITOR="code --wait" gazctl journals edit -l name:prefix=a/""",
    ),
    Command(
        ("journals", "read"),
        "Read the content of journals",
        flags.ReadFlags,
        "journals.read:run",
        _BROKER,
        f"""\
Merges the content of all selected journals into one output, between messages. Messages are lines, fixed
frames or CSV rows, by the content-type label; without the label, output is merged between fragments. A
read ends at the write head. With --block it continues until interrupted, and also reads journals that
match the selector later.

--offsets is a JSON object of offsets by journal. A journal that it lacks begins at 0, or with --tail at
the write head. --offsets-out is written at the end, also after an interrupt, with the offsets of what was
written to the output. If both name one file, the former content is kept with the suffix ".previous".

Persisted fragments are read from their store if this process can open its URLs; file:// stores need
--file-root. All else comes from brokers: through the one at --broker.address, or with
--broker.cache.size directly from the brokers that serve the journal.

{SELECTORS}""",
        """\
  gazctl journals read -l name=a/journal
  gazctl journals read -l app.gazette.dev/message-type=Word --block --tail
  gazctl journals read -l name:prefix=a/ --offsets at.json --offsets-out at.json -o new.data
  gazctl journals read -l name=a/journal --from 24h --broker.cache.size=256""",
    ),
    Command(
        ("journals", "append"),
        "Append to journals",
        flags.AppendFlags,
        "journals.append:run",
        _BROKER,
        f"""\
With --framing none all of the input is one append to one selected journal, chosen at random: it succeeds
whole or not at all. With "lines" or "fixed" each record is an append of its own, in order within each
journal. Newlines and fixed headers are part of the record. The input may continue without end.

With --mapping modulo or rendezvous, a record that holds its key precedes every record. Equal keys go to
the same journal. With "direct" the key is the journal's name. --base64 decodes keys of lines.

A broker that fails during an append may leave the content twice. Put UUIDs on messages first
(`gazctl attach-uuids`), and consumers drop the second copy.

{SELECTORS}""",
        """\
  gazctl journals append -l name=a/journal -i ./file
  gazctl attach-uuids events.csv | gazctl journals append -l name=a/journal -f lines
  printf '%s\\n' key1 '{"msg":1}' key2 '{"msg":2}' \\
      | gazctl journals append -l my-topic -f lines -m modulo""",
    ),
    Command(
        ("journals", "fragments"),
        "List the fragments of journals",
        flags.FragmentsFlags,
        "journals.fragments:run",
        _BROKER,
        f"""\
Lists fragments by offset. With --to, fragments that are not persisted are left out. JSON output is one
object on each line, and "proto" output is one message for each journal. --url-ttl adds URLs that read
fragments without other credentials. Fully suspended journals have no fragments.

{SELECTORS}""",
        """\
  gazctl journals fragments -l name=a/journal
  gazctl journals fragments -l name:prefix=a/ --from 24h -o json | jq .spec.end
  gazctl journals fragments -l name=a/journal --url-ttl 10m -o json | jq -r .signed_url | xargs curl""",
    ),
    Command(
        ("journals", "prune"),
        "Remove fragments that are older than the retention of their journal",
        flags.JournalsPruneFlags,
        "journals.prune:run",
        _BROKER,
        f"""\
Removes fragments that were persisted longer ago than the "retention" of the journal's specification.
Without a retention all are kept. Recovery logs are skipped: `gazctl shards prune` removes what their
shards do not need.

The credentials of this process must permit the removal. Fragments of file:// stores are removed below
--broker.file-root. A removed fragment may cover older duplicates that brokers do not list: they are
removed too.

{SELECTORS}""",
        """\
  gazctl journals prune -l name:prefix=a/ --dry-run
  gazctl journals prune -l env=prod --broker.file-root=/mnt/fragments""",
    ),
    Command(
        ("journals", "reset-head"),
        "Resume appends to journals that lost all brokers",
        flags.ResetHeadFlags,
        "journals.head:reset",
        _BROKER,
        f"""\
When all brokers of a journal are lost at once, appends are refused (INDEX_HAS_GREATER_OFFSET): its stored
fragments reach beyond what its new brokers know. This command moves the head to the end of the fragments.
Bytes that were appended but not persisted are lost. A journal that takes appends, or that another client
appends to meanwhile, is left unchanged. With --dry-run the table tells which journals need
it, and why. Suspended journals stay suspended.

{SELECTORS}""",
        "  gazctl journals reset-head -l name=a/journal",
    ),
    Command(
        ("journals", "decide-fragments"),
        "Say whose the unexplained fragments of journals are",
        flags.DecideFragmentsFlags,
        "journals.decide:run",
        _BROKER,
        f"""\
Objects below a journal's directory may have names of fragments, in a directory that its path postfix
template cannot have written. A former template may have written them, or they are left of a deleted
journal. Until that is decided, offsets that only they have are neither given out again nor passed over:
appends and reads there fail with the reason.

With --former-template, what that template can have written is the journal's own. With --foreign, a
directory is not. Both are kept as labels of the journal; `journals apply` adds a template that it
replaces. Without either, the command reports what is undecided, and the exit code is 1 if something is.

{SELECTORS}""",
        """\
  gazctl journals decide-fragments -l name=a/journal
  gazctl journals decide-fragments -l name=a/journal \\
      --former-template '{{ .Spool.FirstAppendTime.Format "2006/01/02" }}'
  gazctl journals decide-fragments -l name=a/journal --foreign deleted/journal""",
    ),
    Command(
        ("journals", "suspend"),
        "Suspend idle journals",
        flags.SuspendFlags,
        "journals.head:suspend",
        _BROKER,
        f"""\
A suspended journal has one broker (PARTIAL), or none if it has no fragments either (FULL). The next
append resumes it. A journal is skipped if a fragment is not persisted, or was persisted within the flush
interval (24 hours if it has none). --force persists its fragments and suspends it now.

{SELECTORS}""",
        """\
  gazctl journals suspend -l name:prefix=archive/
  gazctl journals suspend -l name=a/journal --force""",
    ),
    Command(
        ("journals", "store-health"),
        "Check a fragment store, as brokers see it",
        flags.StoreHealthFlags,
        "journals.health:run",
        _BROKER,
        """\
A broker writes, reads and lists a small object in the store, and reports what fails. With
--check-delete-prefix it also checks that objects below that path of the store can be removed.
The exit code is 1 if the store is unhealthy.""",
        """\
  gazctl journals store-health s3://my-bucket/fragments/
  gazctl journals store-health s3://my-bucket/fragments/ --check-delete-prefix ''""",
        arguments="STORE_URL",
    ),
)

_SHARDS: Final = (
    Command(
        ("shards", "list"),
        "List shards, their status and their specifications",
        flags.ShardsListFlags,
        "shards.list:run",
        _BOTH,
        f"""\
The status of a shard is the most advanced of its replicas. Errors of FAILED replicas follow the table.
--lag shows how many bytes of its sources the primary has not consumed, or "?" if that is unknown.

{SELECTORS}""",
        """\
  gazctl shards list --lag
  gazctl shards list -l app.gazette.dev/managed-by=me --primary --replicas
  gazctl shards list -l id=shard-000 -o yaml""",
    ),
    Command(
        ("shards", "apply"),
        "Create, change and delete shards",
        flags.ShardsApplyFlags,
        "shards.apply:apply",
        _BOTH,
        """\
Reads YAML as `shards list -o yaml` writes it. A shard without "revision" must not exist. With one, the
shard must be at that revision; -1 means any. "delete: true" deletes a shard; its recovery log and hints
stay.

First, all journals are checked: sources must exist and have a content-type that can be decoded. Recovery
logs must exist and be labeled as such. Consumers do not make this check.

Either all changes are made, in one transaction of etcd, or none; see --max-txn-size.""",
        """\
  gazctl shards apply --specs shards.yaml
  gazctl shards apply --specs shards.yaml --dry-run""",
    ),
    Command(
        ("shards", "edit"),
        "Edit specifications of shards",
        flags.ShardsEditFlags,
        "shards.apply:edit",
        _BOTH,
        f"""\
Works like `journals edit`, with the checks of `shards apply`.

{SELECTORS}""",
        "  gazctl shards edit -l id=shard-000",
    ),
    Command(
        ("shards", "prune"),
        "Remove fragments of recovery logs that no shard needs",
        flags.ShardsPruneFlags,
        "shards.prune:run",
        _BOTH,
        f"""\
A recovery log holds every write to a shard's store. The shard's hints name the parts that are still
needed. This command removes persisted fragments of the selected shards' logs that no hints need. It reads
the hints of all shards of the consumer, since shards may need parts of each other's logs. So it takes a
token that may list every shard.

A log is skipped unless all of these hold. Its shard has hints with live files in its primary slot and in
every backup (each promotion of the shard fills one). Its stores are healthy. All fragments to remove are
persisted. It is not suspended. If any hints cannot be read, or name bytes that a log does not have,
nothing is removed. The exit code is 1 if a store is unhealthy or a removal failed.

Shards of another consumer, with another etcd prefix, are not seen. Never prune a log from which one of
them was forked.

{SELECTORS}""",
        """\
  gazctl shards prune -l app.gazette.dev/managed-by=me --dry-run
  gazctl shards prune -l id=shard-000 --broker.file-root=/mnt/fragments""",
    ),
    Command(
        ("shards", "recover"),
        "Recover the files of a shard into a directory",
        flags.RecoverFlags,
        "shards.recover:run",
        _BOTH,
        """\
Plays the shard's recovery log to the write head, by its newest hints. The shard keeps running. SQLite
databases become plain files, which every SQLite opens. --backup takes older hints, if the newest are
damaged or name bytes that the log does not have any more.

--at recovers a past state: the last commit at or before a time, an offset of the recovery log, or the
given offsets of its sources. The shard's hints limit how far back that goes (the error names the limit),
as does pruning of the log.

A directory that is not empty is refused. --force replaces its content after the recovery has succeeded.

--convert makes SQLite databases of files that the original's gazctl has recovered, in the directory
where they are: primary.db, and a file for each attached database. SQLite checks each. The command replaces
no file and needs no cluster.""",
        """\
  gazctl shards recover --id shard-000 --dir ./shard-000
  gazctl shards recover --id shard-000 --dir ./yesterday --at 2026-01-30T12:00:00Z
  sqlite3 ./shard-000/primary.db 'SELECT count(*) FROM counts'
  gazctl shards recover --convert ./recovered-by-the-original""",
    ),
    Command(
        ("shards", "unassign"),
        "Take shards from their members, for reassignment",
        flags.UnassignFlags,
        "shards.unassign:run",
        _BOTH,
        f"""\
Removes the primary of each selected shard, and every replica that has FAILED. Healthy standbys stay, and
one of them takes over. With --failed only FAILED replicas are removed: that restarts them.

{SELECTORS}""",
        """\
  gazctl shards unassign -l id=shard-000 --failed
  gazctl shards unassign -l app.gazette.dev/managed-by=me --dry-run""",
    ),
    Command(
        ("shards", "restart-source"),
        "Let shards read a source that was deleted and created again",
        flags.RestartSourceFlags,
        "shards.restart_source:run",
        _BOTH,
        f"""\
Offsets of a journal mean something for one life of it only. A shard that finds another life of a source
fails. This command chooses the offset from which the selected shards read the present life, and restarts
those that have failed. What they know of the producers of the former life is forgotten. Their state stays.

With --same-bytes they read on where they were, with the transactions that were open. It is right only if
the stored fragments of the former journal were kept, and are the content of the present one.

{SELECTORS}""",
        """\
  gazctl shards restart-source -l id=shard-000 --source words/part-000 --offset 0
  gazctl shards restart-source -l id=shard-000 --source words/part-000 --same-bytes --dry-run""",
    ),
    Command(
        ("shards", "backfill"),
        "Build the state of shards from history",
        flags.ShardsBackfillFlags,
        "shards.backfill:run",
        _BOTH,
        f"""\
APP is a `gazette.backfill.definition.Backfill`, as module:Class or path.py:Class. It may also be an
Application, which then gets the messages replayed. The committed messages of the shards' sources are
folded away from the shards, on this machine or by Spark (--master), into the stores that the application
opens. States are staged, then appended to the recovery logs, and take effect all at once. The shards
continue at the offsets, and with the open transactions, with which the history ended.

Shards must be disabled (`disable: true`) and have no assignments; --enable starts them afterwards. Give
the --run-id of an interrupted run to resume it. Shards that have a state are refused without --overwrite.
--list shows runs, and what they and abandoned attempts left; --gc removes it.

{SELECTORS}""",
        """\
  gazctl shards backfill word_count.backfill:WordCountBackfill -l id:prefix=shard- \\
      --staging /mnt/staging --dry-run
  gazctl shards backfill word_count.backfill:WordCountBackfill -l id:prefix=shard- \\
      --staging /mnt/staging --verify --enable
  gazctl shards backfill app.py:Counts -l id=shard-000 --staging s3://bucket/staging --master local[*]
  gazctl shards backfill --list --staging /mnt/staging
  gazctl shards backfill --gc --gc-age 48h --staging /mnt/staging --dry-run""",
        arguments="[APP]",
    ),
)

_MESSAGES: Final = (
    Command(
        ("read",),
        "Write the committed messages of journals as lines of JSON",
        flags.ReadMessagesFlags,
        "messages:read",
        _BROKER,
        f"""\
Writes each message once, when it has committed, as a consumer would be given it: without duplicates,
rolled-back messages and acknowledgements. Journals are read by name, one after the other, each to its
head. With --follow all are read at the same time, and also those that match the selector later.

JSON is written as it is, with its "uuid". A row of CSV becomes an array. For protobuf, --message names the
generated class. With --begin or --tail, what a producer did before that offset is not known.

`gazctl journals read` writes the bytes of journals instead.

{SELECTORS}""",
        """\
  gazctl read first/words
  gazctl read first/words --follow --tail | jq .word
  gazctl read -l name:prefix=orders/ --meta --limit 10
  gazctl read counts/part-000 --message word_count.ngram_pb2:NGramCount""",
        arguments="[JOURNAL...]",
    ),
    Command(
        ("produce",),
        "Publish lines of JSON as messages",
        flags.ProduceMessagesFlags,
        "messages:produce",
        _BROKER,
        f"""\
Reads JSON objects from stdin, one on each line, and publishes each as a message with a UUID. So a retry
counts once, and readers of committed messages see a transaction as a whole or not at all. What the input
has ready is one transaction: a typed line is visible at once. With --one-transaction, all of the input is.

A line that cannot be published ends the command. The error says which line, and how many messages before it
are committed. Equal keys go to the same journal. The value of --key is taken as it is if it is a text,
otherwise as JSON: 7 for a number.

`gazctl journals append` appends bytes instead.

{SELECTORS}""",
        """\
  echo '{"word": "gazette"}' | gazctl produce first/words
  gazctl produce -l name:prefix=orders/ --key customer.id < orders.ndjson
  gazctl produce first/words --one-transaction < words.ndjson""",
        arguments="[JOURNAL...]",
    ),
    Command(
        ("members",),
        "List brokers and consumers",
        flags.MembersFlags,
        "members:run",
        _BOTH,
        """\
Lists the members that serve journals or shards, and the one that answers, with the number of journals or
shards that they serve, and of which they are primary. A member without any is not in these lists.

Consumers are asked only if --consumer.address is given, by a flag, the environment, a file or a context.""",
        """\
  gazctl members
  gazctl members --consumer.address http://localhost:9000 -o json""",
    ),
)

_CONTEXTS: Final = (
    Command(
        ("context", "use"),
        "Use the addresses of a context from now on",
        flags.NoFlags,
        "contexts:use",
        (),
        """\
A flag and the environment go before the context, and the context goes before gazctl.ini. --context takes
another one for a single command. Errors name the context that an address comes from.

Contexts are in ~/.config/gazette/contexts.yaml.""",
        "  gazctl context use production",
        arguments="NAME",
        offline=True,
    ),
    Command(
        ("context", "set"),
        "Create a context, or change its addresses",
        flags.NoFlags,
        "contexts:set_addresses",
        ("consumer", "broker"),
        "Remembers --broker.address and --consumer.address under a name. A context holds no credentials.",
        "  gazctl context set production --broker.address https://brokers:8080 \\\n"
        "      --consumer.address https://members:8080",
        arguments="NAME",
        offline=True,
    ),
    Command(
        ("context", "list"),
        "List contexts",
        flags.NoFlags,
        "contexts:show",
        (),
        "Marks the context that is used with an asterisk.",
        "  gazctl context list",
        offline=True,
    ),
    Command(
        ("context", "delete"),
        "Forget a context",
        flags.NoFlags,
        "contexts:delete",
        (),
        "If it is the one in use, no context is used any more.",
        "  gazctl context delete production",
        arguments="NAME",
        offline=True,
    ),
)

_OTHERS: Final = (
    Command(
        ("attach-uuids",),
        "Put a message UUID before each line of text",
        flags.AttachUuidsFlags,
        "attach_uuids:run",
        (),
        """\
Each line of the files, or of stdin, gets a UUID of one producer, new with each run, and is marked as
committed. Consumers drop a message if they have seen its UUID. Write the output to a file first and append
the file: then you may append it again after a failure. Few large files are better than many small ones,
because consumers remember every producer.

A template may hold {{.UUID}} and {{.Line}} beside text. With --uuid, each line is a JSON object, and its UUID
goes into a field of it. A line with another value in that field ends the command.""",
        """\
  gazctl attach-uuids one.csv two.csv > with-uuids.csv
  gazctl attach-uuids orders.ndjson --uuid _meta.uuid > with-uuids.ndjson
  gazctl attach-uuids --skip-header one.csv two.csv
  gazctl attach-uuids in.json --template=$'{"uuid":"{{.UUID}}","record":{{.Line}}}\\n'""",
        arguments="[FILE...]",
        offline=True,
    ),
    Command(
        ("support-bundle",),
        "Collect diagnostics for support",
        flags.SupportBundleFlags,
        "support_bundle:run",
        _BOTH,
        """\
Makes a .tar.gz with these parts: all specifications with routes, and the status of shards; the number of
fragments of each journal, their range, and what is not persisted; whether each member that can be found
is ready, its metrics and its stacks; the ends of the named log files; a manifest that says which parts
are missing, and why. The command changes nothing.

It leaves out contents of journals and states of shards, and removes what looks like a token, a key or a
password. Names of journals, labels and addresses are in it: read it before you pass it on.

Consumers are asked only if --consumer.address is given.""",
        """\
  gazctl support-bundle -o bundle.tar.gz /var/log/gazette/*.log
  gazctl support-bundle --broker.address http://broker-0:8080 --consumer.address http://app-0:8080
  gazctl support-bundle --http http://broker-0:9000 --http http://broker-1:9000""",
        arguments="[LOG_FILE...]",
    ),
    Command(
        ("print-config",),
        "Print the effective configuration",
        flags.NoFlags,
        "print_config:run",
        _BOTH,
        "Prints the settings that commands share, as a file that both implementations read. "
        "Defaults are comments; secrets are left out.",
        "  gazctl print-config > gazctl.ini",
        offline=True,
    ),
    Command(
        ("completion",),
        "Print a script that completes commands and flags",
        flags.NoFlags,
        "completion:run",
        (),
        "For bash, zsh or fish.",
        """\
  source <(gazctl completion bash)
  gazctl completion zsh > "${fpath[1]}/_gazctl"
  gazctl completion fish > ~/.config/fish/completions/gazctl.fish""",
        arguments="bash|zsh|fish",
        offline=True,
    ),
)

COMMANDS: Final = (*_JOURNALS, *_SHARDS, *_MESSAGES, *_CONTEXTS, *_OTHERS)
