"""The command tree: all commands, and the texts that list them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gazette.gazctl.command import BOTH, BROKER, SELECTORS, Command
from gazette.gazctl.journals.commands import JOURNALS
from gazette.gazctl.shards.commands import SHARDS
from gazette.version import __version__

FAMILIES: Final = {"journals": BROKER, "shards": BOTH}
"""Groups of commands, with the groups of their settings."""
HELP: Final = ("-h", "--help", "help")
VERSION: Final = ("-V", "--version", "version")
_GROUP_SUMMARIES: Final = {
    "journals": "Journals",
    "shards": "Shards of consumers",
    "context": "Named addresses",
}

_MESSAGES: Final = (
    Command(
        ("read",),
        "Write the committed messages of journals as lines of JSON",
        "ReadMessagesFlags",
        "gazette.gazctl.messages:read",
        BROKER,
        f"""\
Writes each message once, when it has committed, as a consumer would be given it: without duplicates,
rolled-back messages and acknowledgements. Journals are read by name, one after the other, each to its
head. With --follow all are read at the same time, and also those that match the selector later.

JSON is written as it is, with its "uuid". A row of CSV becomes an array. For protobuf, --message names the
generated class. With --begin or --tail, what a producer did before that offset is not known. --last reads
backwards, and writes what a read of the whole journal would end with.

`gazctl journals read` writes the bytes of journals instead.

{SELECTORS}""",
        """\
  gazctl read first/words
  gazctl read first/words --follow --tail | jq .word
  gazctl read first/words --last 20
  gazctl read -l name:prefix=orders/ --meta --limit 10
  gazctl read counts/part-000 --message word_count.ngram_pb2:NGramCount""",
        arguments="[JOURNAL...]",
    ),
    Command(
        ("produce",),
        "Publish lines of JSON as messages",
        "ProduceMessagesFlags",
        "gazette.gazctl.messages:produce",
        BROKER,
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
        "MembersFlags",
        "gazette.gazctl.members:run",
        BOTH,
        """\
Lists the members that serve journals or shards, and the one that answers, with the number of journals or
shards that they serve, and of which they are primary. A member without any is not in these lists.

Consumers are asked only if --consumer.address is given, by a flag, the environment, a file or a context.""",
        """\
  gazctl members
  gazctl members --consumer.address http://localhost:9000 -o json""",
    ),
    Command(
        ("top",),
        "Show journals and shards by rate, lag or age",
        "TopFlags",
        "gazette.gazctl.top.command:run",
        BOTH,
        f"""\
Refreshes a screen until q or Ctrl-C. The keys r, l and a change the order. Rate is the number of bytes that
a journal got, or a shard read, in a second. Lag is the number of bytes that a shard has not read. Age is the
time since the head of a journal, or the reads of a shard, last moved; ">" says: or earlier.

A refresh makes at most 200 calls, however many journals there are: for the rows of the screen, and for
others in turn. Lists of journals and of shards, one call each, come every 10 s or less often. With --once, or
without a terminal, the command asks twice, --interval apart, and writes a table: 2000 calls each at most.

Consumers are asked only if --consumer.address is given, by a flag, the environment, a file or a context.

{SELECTORS}""",
        """\
  gazctl top
  gazctl top --sort lag -l app.gazette.dev/managed-by=me
  gazctl top --once --json | jq '.items[] | select(.lag_bytes > 1000000) | .name'""",
    ),
)

_CONTEXTS: Final = (
    Command(
        ("context", "use"),
        "Use the addresses of a context from now on",
        "NoFlags",
        "gazette.gazctl.context_commands:use",
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
        "NoFlags",
        "gazette.gazctl.context_commands:set_addresses",
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
        "NoFlags",
        "gazette.gazctl.context_commands:show",
        (),
        "Marks the context that is used with an asterisk. Runs of `gazette run` have one each.",
        "  gazctl context list",
        offline=True,
    ),
    Command(
        ("context", "delete"),
        "Forget a context",
        "NoFlags",
        "gazette.gazctl.context_commands:delete",
        (),
        "If it is the one in use, no context is used any more.",
        "  gazctl context delete production",
        arguments="NAME",
        offline=True,
    ),
)

_SIGN_IN: Final = (
    Command(
        ("login",),
        "Sign in at an OpenID Connect provider",
        "LoginFlags",
        "gazette.gazctl.login:login",
        (),
        """\
Asks the provider for a token, for the commands that use the addresses of a context. Shows a URL and a code,
to confirm in a browser of any device; with --browser, a browser of this machine is enough. Tokens are kept in
~/.config/gazette/sign-ins, in a file that only you can read, and are renewed before they end.

The context is that of --context, or the one in use. Tokens and keys of other settings go before it.""",
        """\
  gazctl login --context production --issuer https://login.example/realms/main --client-id gazctl
  gazctl login
  gazctl login --issuer https://accounts.example --client-id gazctl --browser --id-token""",
    ),
    Command(
        ("logout",),
        "Forget the tokens of a context",
        "NoFlags",
        "gazette.gazctl.login:logout",
        (),
        "Has the provider revoke the refresh token, if it can, and removes the file of `gazctl login`.",
        "  gazctl logout --context production",
    ),
)

_OTHERS: Final = (
    Command(
        ("attach-uuids",),
        "Put a message UUID before each line of text",
        "AttachUuidsFlags",
        "gazette.gazctl.attach_uuids:run",
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
        "SupportBundleFlags",
        "gazette.gazctl.support_bundle:run",
        BOTH,
        """\
Makes a .tar.gz with these parts: all specifications with routes, and the status of shards; the number of
fragments of each journal, their range, and what is not persisted; whether each member that can be found
is ready, its metrics and its stacks; the ends of the named log files; a manifest that says which parts
are missing, and why. The command changes nothing.

It shows what is known to hold no secret, and cuts everything else: contents, states, values of labels, paths
of stores, texts of errors, and logs of other programs. Names of journals, shards and hosts are in it: read
it before you pass it on.

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
        "NoFlags",
        "gazette.gazctl.print_config:run",
        BOTH,
        "Prints the settings that commands share, as a file that both implementations read. "
        "Defaults are comments; secrets are left out.",
        "  gazctl print-config > gazctl.ini",
        offline=True,
    ),
    Command(
        ("completion",),
        "Print a script that completes commands and flags",
        "NoFlags",
        "gazette.gazctl.completion:run",
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

COMMANDS: Final = (*JOURNALS, *SHARDS, *_MESSAGES, *_CONTEXTS, *_SIGN_IN, *_OTHERS)


def usage(group: str = "") -> str:
    """Return the text with all commands, or with the commands of a group."""
    if group:
        rows = [
            (command.words[1], command.summary) for command in COMMANDS if command.words[0] == group
        ]
    else:
        rows = [
            (name, f"{summary}: {', '.join(_commands_of(name))}")
            for name, summary in _GROUP_SUMMARIES.items()
        ]
        rows += [(command.name, command.summary) for command in COMMANDS if len(command.words) == 1]
    width = max(len(name) for name, _ in rows)
    lines = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in rows)
    program = f"gazctl {group}".rstrip()
    return (
        f"gazctl {__version__}\n\nusage: {program} COMMAND [FLAGS]\n\n{lines}\n\n"
        f"`{program} COMMAND --help` lists the flags of a command.\n"
    )


def _commands_of(group: str) -> list[str]:
    return [command.words[1] for command in COMMANDS if command.words[0] == group]


def help_text(argv: Sequence[str]) -> str:
    """Return the version or a list of commands if the words ask for nothing else; else an empty text."""
    if argv and argv[0] in VERSION:
        return f"{__version__}\n"
    if len(argv) == 1 and argv[0] in HELP:
        return usage()
    return (
        usage(argv[0]) if len(argv) == 2 and argv[0] in _GROUP_SUMMARIES and argv[1] in HELP else ""
    )
