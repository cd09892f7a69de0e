"""``specs`` prints an application's journals and shards as YAML. ``apply`` puts them into a cluster.

Exit codes: 0 done; 1 the cluster refused the changes, or cannot be reached; 2 the command line or the
declaration is wrong.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gazette.client.client import Client
from gazette.client.flags import BrokerClientFlags
from gazette.client.rpc.preflight import require_kind, require_reachable
from gazette.client.shards import ShardClient
from gazette.cluster.process.groups import DebugFlags, EtcdFlags, LogFlags
from gazette.cluster.process.member import ProcessFlags
from gazette.config.schema import Loaded, Schema
from gazette.consumer.declare.apply import (
    changes_needed,
    fitted,
    put_declared,
    require_healthy,
    warnings_of,
)
from gazette.consumer.declare.changes import DeclaredChanges
from gazette.consumer.declare.declaration import Declaration, declaration_of
from gazette.consumer.declare.specs import SpecSettings, journals_yaml, shards_yaml
from gazette.errors import GazetteError, Invalid, Unavailable
from gazette.protocol.text.validation import within
from gazette.runconsumer.flags import (
    ConsumerFlags,
    MemberClientFlags,
    SpecsApplyFlags,
    SpecsFlags,
)
from gazette.runtime.clock import SystemClock
from gazette.runtime.timeouts import timeout

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
_CONNECT_S: Final = 10.0
_ZONE: Final = "local"

_FIELDS: Final = {
    "store": "stores",
    "replication": "replication",
    "hot-standbys": "hot_standbys",
    "fragment-length": "fragment_bytes",
    "flush-interval": "flush_interval_ns",
    "refresh-interval": "refresh_interval_ns",
    "max-txn-duration": "max_txn_duration_ns",
}
"""Fields of `SpecSettings`, by the names of their flags."""

_SPECS: Final = """Print the specifications of what the application declares: those of all journals,
or those of all shards, or both."""
_SPECS_EXAMPLES: Final = """examples:
  {program} journals --store s3://bucket/prefix/ | gazctl journals apply
  {program} shards --store s3://bucket/prefix/ | gazctl shards apply"""
_APPLY: Final = """Create the journals and shards that the application declares and the cluster does
not have. What exists changes only where the declaration or a flag says so. Nothing is deleted."""
_APPLY_EXAMPLES: Final = """examples:
  {program} --store s3://bucket/prefix/ --shards=false     # before the first member runs
  {program} --store s3://bucket/prefix/ --consumer.address http://member:9000 --dry-run"""


def run(
    application: Any,
    command: str,
    program: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> int:
    """Run ``specs`` or ``apply``. Return the exit code. Raise ``Invalid`` for a mistake of the user."""
    if command == "specs":
        return _print_specs(application, program, argv, environ)
    other_groups = {
        "": ProcessFlags,
        "consumer": ConsumerFlags,
        "etcd": EtcdFlags,
        "log": LogFlags,
        "debug": DebugFlags,
        **application.config_groups,
    }
    schema = Schema(
        program,
        {"": SpecsApplyFlags, "broker": BrokerClientFlags, "consumer": MemberClientFlags},
        file_stem="gazette",
        description=_APPLY,
        examples=_APPLY_EXAMPLES.format(program=program),
        also_in_file=other_groups,
    )
    loaded = schema.load(argv, environ)
    flags = loaded.group(SpecsApplyFlags)
    declaration = declaration_of(application, name=flags.application)
    try:
        return asyncio.run(_apply_in_time(declaration, loaded))
    except Invalid:
        raise
    except GazetteError as error:
        sys.stderr.write(f"{program}: {error}\n{error.hint}\n")
        return EXIT_FAILED


def _print_specs(
    application: Any, program: str, argv: Sequence[str], environ: Mapping[str, str]
) -> int:
    schema = Schema(
        program,
        {"": SpecsFlags},
        arguments="[journals | shards]",
        description=_SPECS,
        examples=_SPECS_EXAMPLES.format(program=program),
    )
    loaded = schema.load(argv, environ)
    flags, words = loaded.group(SpecsFlags), loaded.arguments
    if len(words) > 1 or any(word not in ("journals", "shards") for word in words):
        raise Invalid(
            f'unexpected argument "{words[-1]}" (expected journals, shards, or none for both)',
            path=program,
            hint=f"See `{program} --help`.",
        )
    declaration = declaration_of(application, name=flags.application)
    settings = flags.settings()
    journals = journals_yaml(declaration, settings)
    shards = shards_yaml(declaration, settings)
    if not words:
        sys.stdout.write(f"# For `gazctl journals apply`:\n{journals}---\n")
        sys.stdout.write(f"# For `gazctl shards apply`:\n{shards}")
    else:
        sys.stdout.write(journals if words[0] == "journals" else shards)
    return EXIT_OK


async def _apply_in_time(declaration: Declaration, loaded: Loaded) -> int:
    limit_s = loaded.group(SpecsApplyFlags).timeout
    try:
        async with timeout(limit_s):
            return await _apply(declaration, loaded)
    except TimeoutError as error:
        raise Unavailable(
            f"not done within {limit_s:g} s",
            hint="What was applied stays. Look at the logs of brokers and members, and apply again.",
        ) from error


async def _apply(declaration: Declaration, loaded: Loaded) -> int:
    """Show the changes, and make them unless the flags say otherwise. Return the exit code.

    Raise ``Unavailable`` if no broker answers. If no member answers, show or change only the journals, then
    raise ``Unavailable``.
    """
    flags, clock = loaded.group(SpecsApplyFlags), SystemClock()
    settings = flags.settings()
    given_fields = {
        field for key, field in _FIELDS.items() if loaded.sources.get(key, "default") != "default"
    }
    with within("--broker"):
        brokers = loaded.group(BrokerClientFlags).client(_ZONE, clock)
    async with brokers:
        await require_reachable(
            brokers,
            "broker",
            connect_s=_CONNECT_S,
            hint="Check that it runs there, or give another address with --broker.address.",
        )
        await require_kind(brokers, "broker", timeout_s=_CONNECT_S)
        members = _members(loaded) if flags.shards else None
        try:
            no_member = None if members is None else await _unreachable(members)
            reached = members if no_member is None else None
            if not flags.replication:
                settings = await fitted(settings, brokers)
            applying = _Applying(declaration, settings, flags, given_fields, brokers, reached)
            if flags.dry_run:
                await applying.find()
                sys.stdout.write("dry run: nothing was changed\n")
            else:
                await put_declared(applying.find, brokers, reached)
                sys.stdout.write("applied\n" if no_member is None else "applied journals\n")
            if no_member is not None:
                raise no_member
        finally:
            if members is not None:
                await members.close()
    return EXIT_OK


@dataclass(slots=True)
class _Applying:
    """One run of ``apply``. ``members`` is None if shards are left out, or if no member answers. ``given``
    has the names of the fields of ``settings`` for which the user gave flags."""

    declaration: Declaration
    settings: SpecSettings
    flags: SpecsApplyFlags
    given: Collection[str]
    brokers: Client
    members: ShardClient | None
    _compared: bool = False

    async def find(self) -> DeclaredChanges:
        """Return and print the changes that the cluster needs now."""
        changes = await changes_needed(
            self.declaration,
            self.settings,
            self.brokers,
            self.members,
            given=self.given,
            more_partitions=self.flags.more_partitions,
            changed_key=self.flags.changed_key,
        )
        if self._compared:
            sys.stdout.write("another program changed some of these meanwhile. What differs now:\n")
        self._compared = True
        _show(changes, shards=self.flags.shards)
        for line in await warnings_of(changes, self.brokers):
            sys.stderr.write(f"{line}\n")
        if not self.flags.dry_run:
            await require_healthy(self.brokers, changes)
        return changes


def _members(loaded: Loaded) -> ShardClient:
    flags = loaded.group(MemberClientFlags)
    if not flags.address:
        raise Invalid(
            "shards are applied by a member of the application, and none is given",
            path="--consumer.address",
            hint="Give the address of one, as http://HOST:PORT. Before the first member runs, apply "
            "the journals alone: --shards=false.",
        )
    with within("--consumer"):
        return flags.client(_ZONE, SystemClock())


async def _unreachable(members: ShardClient) -> Unavailable | None:
    """Return the error if no member answers, otherwise None. Raise ``Invalid`` for another kind of server."""
    hint = "Start a member (`serve`), and apply again: only the shards are missing."
    try:
        await require_reachable(members, "consumer", connect_s=_CONNECT_S, hint=hint)
    except Unavailable as error:
        return error
    await require_kind(members, "consumer", timeout_s=_CONNECT_S)
    return None


def _show(changes: DeclaredChanges, *, shards: bool) -> None:
    lines = changes.lines(shards=shards)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
