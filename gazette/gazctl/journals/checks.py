"""Checks that the journals of shard specifications exist and suit the shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.errors import Invalid
from gazette.gazctl.context import Context
from gazette.gazctl.journals.lookup import journals_by_name
from gazette.labels import (
    CONTENT_CSV,
    CONTENT_JSON_LINES,
    CONTENT_PROTO_FIXED,
    CONTENT_RECOVERY_LOG,
    CONTENT_TYPE,
)
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.shard import ShardSpec

FRAMED: Final = frozenset({CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED})
"""Content types whose messages can be decoded."""
_SHOWN_MAX: Final = 20


async def verify_references(context: Context, client: Client, specs: Sequence[ShardSpec]) -> None:
    """Raise ``Invalid`` for absent or unsuitable journals, with a list of the first `_SHOWN_MAX` problems."""
    names = {split_journal_meta(source.journal)[0] for spec in specs for source in spec.sources}
    names |= {spec.recovery_log for spec in specs if spec.recovery_log}
    journals = await journals_by_name(context, client, names)
    problems = [problem for spec in specs for problem in problems_of(spec, journals)]
    if not problems:
        return
    shown = problems[:_SHOWN_MAX]
    if len(problems) > _SHOWN_MAX:
        shown.append(f"and {len(problems) - _SHOWN_MAX} more")
    raise Invalid(
        "journals do not suit the shards:\n  " + "\n  ".join(shown),
        hint="Create them with `gazctl journals apply`, or skip this check with --verify=false.",
    )


def problems_of(spec: ShardSpec, journals: dict[str, ListedJournal]) -> Iterable[str]:
    """Yield the problems of one shard's journals."""
    for source in spec.sources:
        name = split_journal_meta(source.journal)[0]
        listed = journals.get(name)
        if listed is None:
            yield f"{spec.id}: its source {name} does not exist"
            continue
        content_type = listed.spec.labels.value_of(CONTENT_TYPE) or ""
        if content_type not in FRAMED:
            yield (
                f"{spec.id}: messages of its source {name} cannot be decoded: label "
                f"{CONTENT_TYPE} is {content_type or 'not set'} (expected one of "
                f"{', '.join(sorted(FRAMED))})"
            )
    if spec.recovery_log:
        listed = journals.get(spec.recovery_log)
        if listed is None:
            yield f"{spec.id}: its recovery log {spec.recovery_log} does not exist"
        elif listed.spec.labels.value_of(CONTENT_TYPE) != CONTENT_RECOVERY_LOG:
            yield (
                f"{spec.id}: {spec.recovery_log} is not labeled as a recovery log"
                f" ({CONTENT_TYPE}={CONTENT_RECOVERY_LOG})"
            )
