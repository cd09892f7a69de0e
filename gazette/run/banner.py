"""The lines that `gazette run` prints once an application runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

import msgspec

from gazette.consumer.declare.declaration import Declaration, DeclaredJournals
from gazette.message.key_hash import fnv32a
from gazette.run.samples import NOW, NOW_S, MessageSample

_SHELL_TIMES: Final = {
    NOW: "'$(date -u +%Y-%m-%dT%H:%M:%S)'",
    str(NOW_S): "'$(date +%s)'",
}
"""Shell code that replaces a time in a sample: a closing quote, the present time, and an opening quote."""
_PATH_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


def banner(
    declaration: Declaration,
    samples: Mapping[str, MessageSample],
    routes: Sequence[str],
    *,
    target: str,
    state: str,
    brokers: str,
    members: Sequence[tuple[str, str]],
    pids: Sequence[int] = (),
) -> list[str]:
    """Return the lines. ``members`` has the (gRPC, HTTP) addresses of the processes, ``pids`` their ids."""
    lines = [f"{target} runs as application {declaration.application}"]
    if state:
        lines.append(f"  state    {state}")
    lines.append(f"  brokers  {brokers}")
    for index, (grpc, http) in enumerate(members):
        pid = f"   process {pids[index]}" if pids else ""
        lines.append(f"  serves   {http} (HTTP)   {grpc} (gRPC){pid}")
    lines += [f"  reads    {_journals_text(journals)}" for journals in declaration.sources]
    lines += [f"  writes   {_journals_text(journals)}" for journals in declaration.outputs]
    lines.append("try")
    lines += [
        f"  {publish_command(source, samples[source.name], brokers)}"
        for source in declaration.sources
        if source.name in samples
    ]
    values = {"shard": _shard_of(declaration, samples), **_fields_of(samples)}
    lines.append(f"  {query_command(routes, members[0][1], values)}")
    lines.append("Ctrl-C stops it" + ("; the state stays." if state else "."))
    return lines


def publish_command(source: DeclaredJournals, sample: MessageSample, brokers: str) -> str:
    """Return a command that publishes one message, to the partition of its key.

    The command names the brokers, because the user's own context or environment may name others.
    """
    selector, lines = f"-l name:prefix={source.name}/part-", [sample.line]
    if not sample.has_uuid:
        command = f"gazctl journals append {selector} --framing lines"
        if source.key is not None and source.partitions > 1:
            command += " --mapping modulo"
            lines.insert(0, sample.key)
    elif sample.declared:
        path = f"{shlex.quote(sample.directory)}:$PYTHONPATH"
        command = f"PYTHONPATH={path} gazctl produce --declared {sample.declared}"
    else:
        command = f"gazctl produce {selector}"
    words = " ".join(map(_shell_word, lines))
    return f"printf '%s\\n' {words} | {command} --broker.address {shlex.quote(brokers)}"


def _shell_word(line: str) -> str:
    """Return a line as a word of a shell, which puts the present time into the line."""
    word = "'" + line.replace("'", "'\"'\"'") + "'"
    for text, time in _SHELL_TIMES.items():
        word = word.replace(text, time)
    return word


def query_command(routes: Sequence[str], address: str, values: Mapping[str, str]) -> str:
    """Return a command that asks a route of the application, or the runtime if there is no route.

    ``values`` holds values of path parameters, by name. Unknown values are replaced by names in capitals.
    """

    def rank(route: str) -> tuple[bool, int]:
        has_value = [name in values for name in _PATH_PARAMETER.findall(route)]
        return not any(has_value), has_value.count(False)

    # Prefer a route with known parameters: its answer shows what the first message did.
    path = min(routes, key=rank, default="/debug/shards")
    path = _PATH_PARAMETER.sub(
        lambda match: quote(values.get(match[1], match[1].upper()), safe=""), path
    )
    return f"curl {shlex.quote(f'{address}{path}')}"


def _shard_of(declaration: Declaration, samples: Mapping[str, MessageSample]) -> str:
    """Return the shard that consumes the first sample with a key: its state shows the sample's effect."""
    for source in declaration.sources:
        if source.key is not None and source.name in samples:
            return f"shard-{fnv32a(samples[source.name].key.encode()) % source.partitions:03d}"
    return "shard-000"


def _fields_of(samples: Mapping[str, MessageSample]) -> dict[str, str]:
    """Return the fields of the first sample that are text or numbers, by name."""
    for sample in samples.values():
        fields: dict[str, object] = msgspec.json.decode(sample.line)
        return {name: str(value) for name, value in fields.items() if isinstance(value, str | int)}
    return {}


def _journals_text(journals: DeclaredJournals) -> str:
    partitions = f"{journals.partitions} partition{'s' if journals.partitions > 1 else ''}"
    key = "no key" if journals.key is None else "by key"
    return f"{journals.name}: {partitions} of {journals.message_type}, {key}"
