"""The commands of ``gazctl shards``."""

from __future__ import annotations

from typing import Final

from gazette.gazctl.command import BOTH, SELECTORS, Command

SHARDS: Final = (
    Command(
        ("shards", "list"),
        "List shards, their status and their specifications",
        "ShardsListFlags",
        "gazette.gazctl.shards.list:run",
        BOTH,
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
        "ShardsApplyFlags",
        "gazette.gazctl.shards.apply:apply",
        BOTH,
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
        "ShardsEditFlags",
        "gazette.gazctl.shards.apply:edit",
        BOTH,
        f"""\
Works like `journals edit`, with the checks of `shards apply`.

{SELECTORS}""",
        "  gazctl shards edit -l id=shard-000",
    ),
    Command(
        ("shards", "hints"),
        "Show the hints of shards, and what a recovery by them reads",
        "ShardsHintsFlags",
        "gazette.gazctl.shards.hints:run",
        BOTH,
        f"""\
Hints name the live files of a shard's store, and the segments of recovery logs that have them. A shard has
hints in its primary slot, and backups: each promotion of the shard fills one. The table has one row for each
slot: the log, the number of files, segments and properties, the size of the hints as JSON, the first offset
of the log that is needed, and how much a recovery reads now. --files lists every segment of every file.

The exit code is 1 if hints of a shard, or the end of a log, cannot be read. The others are shown.

{SELECTORS}""",
        """\
  gazctl shards hints
  gazctl shards hints -l id=shard-000 --files
  gazctl shards hints -l id=shard-000 -o json | jq '.[].slots[].read_bytes'""",
    ),
    Command(
        ("shards", "prune"),
        "Remove fragments of recovery logs that no shard needs",
        "ShardsPruneFlags",
        "gazette.gazctl.shards.prune:run",
        BOTH,
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
        "RecoverFlags",
        "gazette.gazctl.shards.recover:run",
        BOTH,
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
        ("shards", "query"),
        "Query the SQLite state of a shard by SQL",
        "ShardsQueryFlags",
        "gazette.gazctl.shards.query:run",
        BOTH,
        """\
Plays the shard's recovery log into a temporary directory, as `shards recover` does, and runs one read-only
statement there. So each query costs a recovery: its time, and as much disk as the state takes. The shard is
not asked or disturbed. For several queries, run `shards recover` once and open the file.

The state is that of the last commit, or with --at a past one, as by `shards recover --at`. The query itself
ends after --timeout. Rows after --max-rows are left out, with a note. Nothing is written: a statement that
would change a database or a file is refused. Functions and collations of the application are not known.

Only states of SQLite stores have SQL. For other stores, the error says what to use.""",
        """\
  gazctl shards query shard-000 'SELECT count(*) FROM counts'
  gazctl shards query shard-000 'SELECT * FROM counts LIMIT 5' --at 2026-01-30T12:00:00Z -o csv
  gazctl shards query shard-000 'SELECT name, sql FROM sqlite_schema' -o json""",
        arguments="ID SQL",
    ),
    Command(
        ("shards", "unassign"),
        "Take shards from their members, for reassignment",
        "UnassignFlags",
        "gazette.gazctl.shards.unassign:run",
        BOTH,
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
        "RestartSourceFlags",
        "gazette.gazctl.shards.restart_source:run",
        BOTH,
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
        "ShardsBackfillFlags",
        "gazette.gazctl.shards.backfill:run",
        BOTH,
        f"""\
APP is a `gazette.history.backfill.definition.Backfill`, as module:Class or path.py:Class. It may also be an
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
