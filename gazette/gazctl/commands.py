"""The command tree: what there is, what each takes, and where it is implemented."""

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
"""The groups of settings that commands share, all of which the file may have."""
FILE_STEM: Final = "gazctl"

_BROKER: Final = ("broker", "log")
_BOTH: Final = ("consumer", "broker", "log")
FAMILIES: Final = {"journals": _BROKER, "shards": _BOTH}
"""Groups of commands, with the groups of settings that each has."""

SELECTORS: Final = """\
A selector is like "env in (prod, qa), tier != cache, !legacy". A journal is selected by its name with
"name=a/journal", journals below a path with "name:prefix=a/path/", a shard by its id with "id=…"."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command. ``target`` is ``module:function`` of this package, a coroutine of a `Context`, or
    a plain function if the command is ``offline``: it speaks to nobody."""

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

The table marks suspended journals with <S>, and those that have fewer replicas than they should with
how many, as in <2/3>. YAML is what `journals apply` reads, with the revisions at which it was listed.
JSON is one document (with --watch: one on each line).""",
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
Reads a YAML tree of specifications, as `journals list -o yaml` writes it. A journal whose "revision"
is absent must not exist; else it must be at that revision, and -1 is for any. "delete: true" deletes.

All changes are made in one transaction of etcd, or none is. etcd takes 128 by default: with
--max-txn-size they are made in several, of which the first stand when a later one fails.

A specification replaces the whole of the former one, but for the suspension: where it says none, that
of the journal stays, since without it the offset would be lost at which the journal resumes.""",
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
Opens the specifications of selected journals in $GAZ_EDITOR, $EDITOR or vi, and applies them when the
editor ends. Nothing is done if nothing was changed. What cannot be read is opened again, with the error
on top; what cannot be applied is kept in a file whose name is told.

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
Content of all selected journals is merged into one output, at ends of messages: of lines, fixed frames
and CSV rows by the content-type label; of journals without one, at ends of fragments. A read ends at
the write head. With --block it goes on until interrupted, and follows the selector: journals that come
to match are read too.

--offsets is a JSON object of offsets by journal; journals that it does not have begin at 0, or with
--tail at the write head. --offsets-out is written at the end, an interrupt included, with the offsets
of what was written to the output. If both are one file, the former is kept with the suffix ".previous".

Persisted fragments are read from their store where URLs of it can be opened from here; of file:// stores
that takes --file-root. All else comes from brokers: by way of the one at --broker.address, or with
--broker.cache.size from those that have it.

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
With --framing none all of the input is one append to one of the selected journals, chosen at random:
it is there whole, or not at all. With "lines" or "fixed" every record is appended for itself, in order
within each journal; newlines and fixed headers are part of it. The input may go on for ever.

With --mapping modulo or rendezvous, every record is preceded by its key, as a record of its own; equal
keys go to the same journal. With "direct" that is the journal's name. --base64 decodes keys of lines.

A broker that fails in mid-append may leave the content twice: put UUIDs on messages beforehand
(`gazctl attach-uuids`), and consumers drop the second.

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
Fragments are listed by offset. With --to, fragments that are not persisted yet are left out. JSON is
one object on each line, and "proto" one message for each journal. --url-ttl adds URLs to read
fragments with, without further credentials. Fully suspended journals have no fragments.

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
Removes persisted fragments that were persisted longer ago than "retention" of their journal's
specification says; where it says none, all are kept. Recovery logs are left out: they are pruned by
what their shards need, with `gazctl shards prune`.

Fragments are removed with credentials of this process, which must permit it; of file:// stores below
--broker.file-root. Older duplicates that a removed fragment covers, and brokers do not list, are removed
with it.

{SELECTORS}""",
        """\
  gazctl journals prune -l name:prefix=a/ --dry-run
  gazctl journals prune -l env=prod --broker.file-root=/mnt/fragments""",
    ),
    Command(
        ("journals", "reset-head"),
        "Let journals go on that lost their brokers",
        flags.ResetHeadFlags,
        "journals.head:reset",
        _BROKER,
        f"""\
When all brokers of a journal were lost at once, appends to it are refused (INDEX_HAS_GREATER_OFFSET):
its stored fragments reach beyond what its new brokers know. This moves their head to the end of the
fragments. What was appended and not yet persisted is lost. A journal that is written to meanwhile is
left as it is, and suspended journals stay so.

{SELECTORS}""",
        "  gazctl journals reset-head -l name=a/journal",
    ),
    Command(
        ("journals", "suspend"),
        "Suspend journals that nobody appends to",
        flags.SuspendFlags,
        "journals.head:suspend",
        _BROKER,
        f"""\
A suspended journal has one broker (PARTIAL), or none if it has no fragments either (FULL). The next
append resumes it. Journals with fragments that are not persisted, or were within the flush interval (24
hours if there is none), are left alone. With --force they are persisted and suspended now.

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
A broker writes, reads and lists a small object in the store, and tells what fails. With
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
The status of a shard is the most advanced of its replicas; errors of FAILED ones follow the table.
--lag is what the primary has not consumed of its sources, in bytes; "?" where nobody can tell.

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
Reads YAML as `shards list -o yaml` writes it. A shard whose "revision" is absent must not exist; else
it must be at that revision, and -1 is for any. "delete: true" deletes a shard; its recovery log and
hints stay.

Before, all journals are looked up: sources must exist and have a content-type that can be decoded,
recovery logs must exist and be labeled as such. Consumers do not check this by themselves.

All changes are made in one transaction of etcd, or none is; see --max-txn-size.""",
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
As `journals edit`, with the checks of `shards apply`.

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
A recovery log holds everything that was ever written to a shard's store. Its hints tell which parts of
that are still needed. This removes the persisted fragments of logs of selected shards that no hints of
any shard of the consumer need: hints of all shards are read, whatever the selector, because shards may
need parts of each other's logs. So it takes a token that may list every shard.

A log is skipped unless its shard has hints with live files in its primary slot and in every backup (each
promotion of the shard fills one), its stores are healthy, all that would be removed is persisted, and it
is not suspended. If any hints cannot be read, or name what a log does not have, nothing is removed. The
exit code is 1 if a store is unhealthy or a removal failed.

Shards of another consumer, with another etcd prefix, are not seen. Never prune a log that one of them was
forked from.

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
Plays the shard's recovery log, by its newest hints, to the write head. The shard is not disturbed: it
goes on. SQLite databases become plain files, which every SQLite opens. --backup takes older hints, if the
newest are damaged or name what the log does not have any more.

--at gives the state of the past: the last commit that was recorded at a time or before, that ends at an
offset of the recovery log or before, or that had read sources that far at most. How far back that goes is
bounded by the hints that the shard has (the error tells), and by what was pruned.

A directory that is not empty is refused. With --force its content is replaced, once the recovery has
succeeded.

--convert makes SQLite databases of files that the original's gazctl has recovered, in the directory
where they are: primary.db, and a file for each attached database. SQLite checks each. Nothing is
replaced, and no cluster is needed.""",
        """\
  gazctl shards recover --id shard-000 --dir ./shard-000
  gazctl shards recover --id shard-000 --dir ./yesterday --at 2026-01-30T12:00:00Z
  sqlite3 ./shard-000/primary.db 'SELECT count(*) FROM counts'
  gazctl shards recover --convert ./recovered-by-the-original""",
    ),
    Command(
        ("shards", "unassign"),
        "Take shards from their members, to be assigned anew",
        flags.UnassignFlags,
        "shards.unassign:run",
        _BOTH,
        f"""\
Removes the primary of each selected shard, and every replica that has FAILED; healthy standbys stay,
and one of them takes over. With --failed only those that have FAILED are removed: that restarts them.

{SELECTORS}""",
        """\
  gazctl shards unassign -l id=shard-000 --failed
  gazctl shards unassign -l app.gazette.dev/managed-by=me --dry-run""",
    ),
    Command(
        ("shards", "backfill"),
        "Build the state of shards from history",
        flags.ShardsBackfillFlags,
        "shards.backfill:run",
        _BOTH,
        f"""\
APP is a `gazette.backfill.definition.Backfill`, as module:Class or path.py:Class; of an Application, whose
messages are then replayed through it. The committed messages of the shards' sources are folded away from
the shards, on this machine or by Spark (--master), into the stores that the application opens. They are
staged, appended to the recovery logs, and take effect all at once: the shards go on at the offsets, and
with the open transactions, that the history ended with.

Shards must be disabled (`disable: true`), and held by nobody; with --enable they run from then on. A run
that was interrupted goes on if it is given its --run-id. Shards that have a state are refused without
--overwrite. --list lists runs, and what they, and attempts that did not count, have left; --gc removes it.

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

_OTHERS: Final = (
    Command(
        ("attach-uuids",),
        "Put a message UUID before each line of text",
        flags.AttachUuidsFlags,
        "attach_uuids:run",
        (),
        """\
Every line of the files, or of stdin, gets a UUID of one producer that is new with each run, and is
marked as committed. Consumers drop what they have seen by its UUID: write the output to a file first,
and append that, so that it may be appended again after a failure. Few large files are better than many
small ones, because consumers remember every producer.

{{.UUID}} and {{.Line}} are what a template may hold beside text.""",
        """\
  gazctl attach-uuids one.csv two.csv > with-uuids.csv
  gazctl attach-uuids --skip-header one.csv two.csv
  gazctl attach-uuids in.json --template=$'{"uuid":"{{.UUID}}","record":{{.Line}}}\\n'""",
        arguments="[FILE...]",
        offline=True,
    ),
    Command(
        ("support-bundle",),
        "Collect what somebody who is to help needs to see",
        flags.SupportBundleFlags,
        "support_bundle:run",
        _BOTH,
        """\
Makes a .tar.gz of: all specifications with routes and, of shards, their status; of each journal how many
fragments it has, from where to where, and what is not persisted; of every member that can be found whether
it is ready, its metrics and its stacks; the ends of log files that are named; and a manifest, which says
what could not be had, and why. Nothing is changed anywhere.

Contents of journals and states of shards are not in it. What looks like a token, a key or a password is
taken out. Names of journals, labels and addresses are in it: look before you pass it on.

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
        "The settings that commands share, as a file that both implementations read. Defaults are comments;"
        " secrets are left out.",
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

COMMANDS: Final = (*_JOURNALS, *_SHARDS, *_OTHERS)
