"""The commands of ``gazctl journals``."""

from __future__ import annotations

from typing import Final

from gazette.gazctl.command import BROKER, SELECTORS, Command

JOURNALS: Final = (
    Command(
        ("journals", "list"),
        "List journals and their specifications",
        "JournalsListFlags",
        "gazette.gazctl.journals.list:run",
        BROKER,
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
        ("journals", "create"),
        "Create journals by name",
        "JournalsCreateFlags",
        "gazette.gazctl.journals.create:run",
        BROKER,
        """\
All of the named journals are created alike, or none is: one that exists already is an error. The store is
checked first. Fragments are compressed by Zstandard, closed at 256 MiB, and stored within an hour; `journals
edit` changes that. Journals of messages need the label "content-type". Without --replication, it is what the
running brokers can hold.

With --dry-run the output is input of `journals apply`. More than 128 journals take several transactions.""",
        """\
  gazctl journals create a/journal --store s3://my-bucket/fragments/
  gazctl journals create words/part-000 words/part-001 --store file:/// --replication 1 \\
      --label content-type=application/x-ndjson --retention 720h --wait""",
        arguments="NAME...",
    ),
    Command(
        ("journals", "apply"),
        "Create, change and delete journals",
        "JournalsApplyFlags",
        "gazette.gazctl.journals.apply:apply",
        BROKER,
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
        "EditFlags",
        "gazette.gazctl.journals.apply:edit",
        BROKER,
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
        "ReadFlags",
        "gazette.gazctl.journals.read:run",
        BROKER,
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
        ("journals", "tail"),
        "Show the last lines of a journal, and those that follow",
        "TailFlags",
        "gazette.gazctl.journals.tail:run",
        BROKER,
        """\
Writes the last lines of a journal, and then those that come, until it is interrupted. It is for people:
control characters, and bytes that are no UTF-8, are escaped. `gazctl journals read` writes bytes as they are.

Lines are shown as they stand in the journal, also those of transactions that are pending or rolled back.
`gazctl read NAME --last 10 --follow` shows committed messages. The command searches at most 32 MiB of the
journal's end for the begin of the lines.""",
        """\
  gazctl journals tail a/journal
  gazctl journals tail a/journal --lines 100 --no-follow""",
        arguments="NAME",
    ),
    Command(
        ("journals", "append"),
        "Append to journals",
        "AppendFlags",
        "gazette.gazctl.journals.append:run",
        BROKER,
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
        "FragmentsFlags",
        "gazette.gazctl.journals.fragments:run",
        BROKER,
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
        ("journals", "usage"),
        "Sum up the bytes that journals take in their stores",
        "JournalsUsageFlags",
        "gazette.gazctl.journals.usage:run",
        BROKER,
        f"""\
Lists the stores of all journals, or the named ones, with the credentials of this process. The files of
file:// stores are below --broker.file-root. "Stored" is the size of objects, "Content" that of the journal's
bytes in them before compression. Copies and fragments that others cover count. What brokers have not stored
yet does not.

Objects of no journal that exists are summed up by directory: left of deleted journals, or unexplained.
With a selector only the directories of its journals are listed. The exit code is 1 if a store cannot be
listed.

{SELECTORS}""",
        """\
  gazctl journals usage
  gazctl journals usage s3://my-bucket/fragments/ -o json | jq '.stores[].stored_bytes'
  gazctl journals usage -l name:prefix=recovery/ --broker.file-root /mnt/fragments""",
        arguments="[STORE_URL...]",
    ),
    Command(
        ("journals", "prune"),
        "Remove fragments that are older than the retention of their journal",
        "JournalsPruneFlags",
        "gazette.gazctl.journals.prune:run",
        BROKER,
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
        "ResetHeadFlags",
        "gazette.gazctl.journals.head:reset",
        BROKER,
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
        "DecideFragmentsFlags",
        "gazette.gazctl.journals.decide:run",
        BROKER,
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
        "SuspendFlags",
        "gazette.gazctl.journals.head:suspend",
        BROKER,
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
        "StoreHealthFlags",
        "gazette.gazctl.journals.health:run",
        BROKER,
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
