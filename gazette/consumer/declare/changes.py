"""The changes that make a cluster match a declaration. They delete no journal or shard. No IO.

Missing journals and shards are created. In existing ones, only fields that the declaration or a given setting
determines are changed. Other fields, which an operator may have set, stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeVar

from gazette.consumer.declare.declaration import Declaration, DeclaredJournals
from gazette.consumer.declare.specs import (
    SpecSettings,
    dead_letter_specs,
    log_spec,
    partition_specs,
    shard_specs,
)
from gazette.errors import Conflict, NotAllowed
from gazette.labels import (
    CONTENT_TYPE,
    DECLARED_BY,
    MESSAGE_KEY,
    MESSAGE_KEY_TYPE,
    MESSAGE_PARTITIONS,
    MESSAGE_TIME,
    MESSAGE_TYPE,
    MESSAGE_UUID,
)
from gazette.message.key_rule import KeyRule
from gazette.message.uuid_place import DEFAULT_PLACE
from gazette.protocol.ids import JournalName, Revision
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.protocol.text import duration

SpecT = TypeVar("SpecT", JournalSpec, ShardSpec)

MORE_PARTITIONS: Final = "--more-partitions"
CHANGED_KEY: Final = "--changed-key"
PAGE: Final = "docs/declaring.md"


class ExistingJournal(Protocol):
    """An existing journal, such as a `gazette.client.journals.ListedJournal`."""

    @property
    def spec(self) -> JournalSpec: ...
    @property
    def mod_revision(self) -> Revision: ...


class ExistingShard(Protocol):
    """An existing shard, such as a `gazette.client.shards.ListedShard`."""

    @property
    def spec(self) -> ShardSpec: ...
    @property
    def mod_revision(self) -> Revision: ...


@dataclass(frozen=True, slots=True)
class DeclaredChange(Generic[SpecT]):
    """One specification to put. It replaces the revision ``revision``, or is created if that is 0."""

    spec: SpecT
    revision: Revision
    text: str
    """Description of the change for users."""


@dataclass(frozen=True, slots=True)
class DeclaredChanges:
    """All changes, journals before the shards that read them."""

    journals: tuple[DeclaredChange[JournalSpec], ...]
    shards: tuple[DeclaredChange[ShardSpec], ...]
    unchanged: int
    """Number of journals and shards that need no change."""

    def lines(self, *, shards: bool = True) -> list[str]:
        """Return a line for each change (``shards``: also of shards), and a last line for all that stays."""
        lines = [_line("journal", change.spec.name, change) for change in self.journals]
        if shards:
            lines += [_line("shard", change.spec.id, change) for change in self.shards]
        return [*lines, f"= {self.unchanged} unchanged"]


def changes_of(
    declaration: Declaration,
    settings: SpecSettings,
    journals: Iterable[ExistingJournal],
    shards: Iterable[ExistingShard],
    *,
    given: Collection[str] = (),
    more_partitions: bool = False,
    changed_key: bool = False,
) -> DeclaredChanges:
    """Return the changes that a cluster with these journals and shards needs.

    ``given`` names the fields of ``settings`` that the user has given, which also change existing
    specifications. All other fields apply to new specifications only. ``more_partitions`` permits more
    partitions of journals with keys. ``changed_key`` permits another key. Raise ``NotAllowed`` for refused
    changes, and ``Conflict`` if the log of an existing shard is absent.
    """
    existing = {journal.spec.name: journal for journal in journals}
    existing_shards = {shard.spec.id: shard for shard in shards}
    journal_changes: list[DeclaredChange[JournalSpec]] = []
    unchanged = 0
    published = {output.name for output in declaration.outputs}
    for declared in declaration.journals:
        _check_count(declared, existing, more_partitions)
        # Remove a key only from journals to which this application publishes, or whose key it has declared.
        # Any other source keeps the key that its publishing application has declared.
        drops_key = declared.key is None and (
            declared.name in published or _has_declared(declared, existing, MESSAGE_KEY)
        )
        if not changed_key and (declared.key is not None or drops_key):
            _check_key(declared, existing)
        for spec in partition_specs(declared, settings):
            current = existing.get(spec.name)
            change = _journal_change(declared, spec, current, given, drops_key=drops_key)
            journal_changes += [change] if change is not None else []
            unchanged += change is None
    for spec in dead_letter_specs(declaration, settings):
        letter_change = _other_change(spec, existing.get(spec.name), given)
        journal_changes += [letter_change] if letter_change is not None else []
        unchanged += letter_change is None
    shard_changes: list[DeclaredChange[ShardSpec]] = []
    for wanted in shard_specs(declaration, settings):
        current_shard = existing_shards.get(wanted.id)
        shard_change = _shard_change(wanted, current_shard, given)
        shard_changes += [shard_change] if shard_change is not None else []
        unchanged += shard_change is None
        # An existing shard keeps its log, even under another name: the log has its state.
        log = wanted.recovery_log if current_shard is None else current_shard.spec.recovery_log
        if log and log not in existing and current_shard is not None:
            raise _lost_log(wanted.id, log)
        if log:
            log_change = _other_change(log_spec(log, settings), existing.get(log), given)
            journal_changes += [log_change] if log_change is not None else []
            unchanged += log_change is None
    _check_shards(declaration, existing_shards)
    return DeclaredChanges(tuple(journal_changes), tuple(shard_changes), unchanged)


def partitions_of(declared: DeclaredJournals, journals: Iterable[JournalName]) -> list[JournalName]:
    """Return the journals that are partitions of a source or output, ordered by name."""
    prefix = f"{declared.name}/part-"
    return sorted(name for name in journals if name.startswith(prefix))


def _check_count(
    declared: DeclaredJournals, existing: Mapping[str, ExistingJournal], more_partitions: bool
) -> None:
    """Raise ``NotAllowed`` if the cluster has more partitions than declared, or partitions of other names.

    Raise ``NotAllowed`` also if the cluster has fewer partitions (but some) and a key is declared, unless
    ``more_partitions``: keys would move."""
    present = partitions_of(declared, existing)
    count, wanted = len(present), declared.partitions
    foreign = sorted(set(present) - set(declared.journals))
    if count > wanted:
        raise NotAllowed(
            f"{declared.name} has {count} partitions, and the declaration says {wanted}: partitions "
            "are never removed, since they hold messages",
            hint=f"Declare partitions={count}. To have fewer, declare another name, and publish "
            "to that one.",
        )
    if foreign:
        raise NotAllowed(
            f"{declared.name} has a partition {foreign[0]}, which the declaration does not make",
            hint=f"Partitions are named {declared.name}/part-000 and so on. Declare another name.",
        )
    if 0 < count < wanted and declared.key is not None and not more_partitions:
        # A key stays in its partition if its hash has the same remainder for both counts.
        moved = round(100 * (1 - count / math.lcm(count, wanted)))
        raise NotAllowed(
            f"{declared.name} has {count} partitions, and the declaration says {wanted}: about {moved} % "
            "of the keys would move to other partitions, so to shards whose state does not have them",
            hint=f"Keep partitions={count}. Or give {MORE_PARTITIONS}, and then rebuild the state of "
            f"the shards from history ({PAGE} says how).",
        )


def _check_key(declared: DeclaredJournals, existing: Mapping[str, ExistingJournal]) -> None:
    """Raise ``NotAllowed`` if present messages were mapped by another key."""
    for name in partitions_of(declared, existing):
        labels = existing[name].spec.labels
        former, wanted = KeyRule.of_labels(labels), declared.key
        # Journals that an older version has created have no such labels.
        if former is None and not labels.values_of(MESSAGE_PARTITIONS):
            continue
        if _mapped_by(former) == _mapped_by(wanted):
            continue
        raise NotAllowed(
            f"messages of {name} are mapped {_described(former)}, and the declaration says "
            f"{_described(wanted)}: messages of one key would be in several partitions",
            hint=f"Declare the former key. Or give {CHANGED_KEY}, and then rebuild the state of the shards "
            f"from history ({PAGE} says how).",
        )


def _mapped_by(rule: KeyRule | None) -> tuple[str, str] | None:
    return None if rule is None else (rule.key, rule.key_type)


def _described(rule: KeyRule | None) -> str:
    return "at random" if rule is None else f"by {rule} of type {rule.key_type}"


def _journal_change(
    declared: DeclaredJournals,
    wanted: JournalSpec,
    current: ExistingJournal | None,
    given: Collection[str],
    *,
    drops_key: bool,
) -> DeclaredChange[JournalSpec] | None:
    """Return the change of a partition; None if it needs no change. Raise ``NotAllowed`` if its messages
    could not be read any more, since the content type or the place of the UUID differs."""
    if current is None:
        return DeclaredChange(wanted, 0, _new_journal(wanted))
    spec = current.spec
    framing, declared_framing = spec.labels.value_of(CONTENT_TYPE) or "", declared.content_type
    if framing != declared_framing:
        raise NotAllowed(
            f"{spec.name} holds {framing or 'bytes without a content-type'}, and the declaration says "
            f"{declared_framing}: messages that it has could not be read",
            hint=f"Declare content_type={framing!r}, or another name.",
        )
    _check_uuid_place(declared, spec)
    changed = replace(spec, labels=_labels(declared, spec.labels, drops_key=drops_key))
    # Keep a retention that is not declared here: another application may declare it.
    if declared.retention_ns:
        fragment = replace(changed.fragment, retention_ns=declared.retention_ns)
        changed = replace(changed, fragment=fragment)
    return _difference(current, _with_given(changed, wanted, given))


def _other_change(
    wanted: JournalSpec, current: ExistingJournal | None, given: Collection[str]
) -> DeclaredChange[JournalSpec] | None:
    """Return the change of a recovery log or a dead-letter journal: only fields that the user has given."""
    if current is None:
        return DeclaredChange(wanted, 0, _new_journal(wanted))
    return _difference(current, _with_given(current.spec, wanted, given))


def _with_given(spec: JournalSpec, wanted: JournalSpec, given: Collection[str]) -> JournalSpec:
    """Return ``spec`` with the fields of ``wanted`` that the user has given."""
    fragment = spec.fragment
    for name, field in _FRAGMENT_FIELDS.items():
        if name in given:
            fragment = replace(fragment, **{field: getattr(wanted.fragment, field)})
    replication = wanted.replication if "replication" in given else spec.replication
    return replace(spec, fragment=fragment, replication=replication)


def _difference(
    current: ExistingJournal, changed: JournalSpec
) -> DeclaredChange[JournalSpec] | None:
    if changed == current.spec:
        return None
    text = _journal_difference(current.spec, changed)
    return DeclaredChange(changed, current.mod_revision, text)


def _check_uuid_place(declared: DeclaredJournals, spec: JournalSpec) -> None:
    """Raise ``NotAllowed`` for a new place of the UUID: present messages have their UUID in another place."""
    former, wanted = spec.labels.value_of(MESSAGE_UUID) or "", declared.uuid or DEFAULT_PLACE
    if not former and declared.names_uuid and spec.labels.value_of(MESSAGE_TYPE):
        former = DEFAULT_PLACE  # Older versions knew only this place.
    if not former or former == wanted:
        return
    raise NotAllowed(
        f"messages of {spec.name} have their UUID in {former}, and the declaration says {wanted}: those "
        "that are there would count like messages without one",
        hint=f"Declare uuid={former!r}, or another name. If they do have it in {wanted}, label the journal "
        f"{MESSAGE_UUID}={wanted} by `gazctl journals edit`.",
    )


def _has_declared(
    declared: DeclaredJournals, existing: Mapping[str, ExistingJournal], label: str
) -> bool:
    """Return True if an earlier declaration of this application has set ``label`` of the journals."""
    names = partitions_of(declared, existing)
    record = declared.record_of(label)
    return any(record in existing[name].spec.labels.values_of(DECLARED_BY) for name in names)


def _labels(declared: DeclaredJournals, labels: LabelSet, *, drops_key: bool) -> LabelSet:
    """Return ``labels`` with the declared labels. With ``drops_key``, remove the key, even one that another
    application has declared. If no time is declared now, remove a time that only this application has
    declared. Keep all other labels.
    """
    if drops_key:
        labels = _without_records(labels, _records_of(labels, MESSAGE_KEY))
        labels = labels.without(MESSAGE_KEY).without(MESSAGE_KEY_TYPE)
    if not declared.message_time:
        labels = _without_time(declared, labels)
    for label in declared.labels.labels:
        if label.name == DECLARED_BY:
            labels = labels.with_added(label.name, label.value)
        # The number of partitions matters only for a key. Without a key, update the label, but do not add it.
        elif label.name != MESSAGE_PARTITIONS or declared.key or labels.values_of(label.name):
            labels = labels.with_value(label.name, label.value)
    return labels


def _without_time(declared: DeclaredJournals, labels: LabelSet) -> LabelSet:
    """Return ``labels`` without a time that only this application has declared. If another application has
    declared the time, too, remove only the record of this application."""
    own_record, records = declared.record_of(MESSAGE_TIME), _records_of(labels, MESSAGE_TIME)
    if own_record not in records:
        return labels
    is_shared = len(records) > 1
    return _without_records(labels if is_shared else labels.without(MESSAGE_TIME), [own_record])


def _records_of(labels: LabelSet, label: str) -> list[str]:
    """Return the values of `DECLARED_BY` that say which applications have declared a label."""
    name = f"/{label.rpartition('/')[2]}"
    return [value for value in labels.values_of(DECLARED_BY) if value.endswith(name)]


def _without_records(labels: LabelSet, records: Collection[str]) -> LabelSet:
    kept = [value for value in labels.values_of(DECLARED_BY) if value not in records]
    labels = labels.without(DECLARED_BY)
    for value in kept:
        labels = labels.with_added(DECLARED_BY, value)
    return labels


_FRAGMENT_FIELDS: Final = {
    "stores": "stores",
    "fragment_bytes": "length",
    "flush_interval_ns": "flush_interval_ns",
    "refresh_interval_ns": "refresh_interval_ns",
}
"""Fields of `FragmentSpec`, by the corresponding fields of `SpecSettings`."""


def _shard_change(
    wanted: ShardSpec, current: ExistingShard | None, given: Collection[str]
) -> DeclaredChange[ShardSpec] | None:
    """Return the change of a shard; None if it needs no change. Raise ``NotAllowed`` if the shard would lose
    a source. Raise it also if the shard would get or lose a recovery log, and so lose its state."""
    if current is None:
        names = ", ".join(source.journal for source in wanted.sources)
        return DeclaredChange(wanted, 0, f"reads {names}; {wanted.hot_standbys} hot standbys")
    spec = current.spec
    former = {source.journal: source for source in spec.sources}
    lost = sorted(set(former) - {source.journal for source in wanted.sources})
    if lost:
        raise NotAllowed(
            f"{spec.id} reads {lost[0]}, which the declaration does not have: without it the shard "
            "would forget how far it has read",
            hint="Declare it, or take it out by `gazctl shards edit`.",
        )
    if bool(spec.recovery_log) != bool(wanted.recovery_log):
        has = "has" if spec.recovery_log else "does not have"
        raise NotAllowed(
            f"{spec.id} {has} a recovery log, and the declaration says otherwise: its state would be "
            "left behind",
            hint=f"Set recovery_logs = {bool(spec.recovery_log)} in the application.",
        )
    changed = replace(
        spec,
        sources=tuple(former.get(s.journal, ShardSource(s.journal)) for s in wanted.sources),
    )
    for name in ("hot_standbys", "max_txn_duration_ns"):
        if name in given:
            changed = replace(changed, **{name: getattr(wanted, name)})
    if changed == spec:
        return None
    return DeclaredChange(changed, current.mod_revision, _shard_difference(spec, changed))


def _check_shards(declaration: Declaration, held: Mapping[str, ExistingShard]) -> None:
    """Raise ``NotAllowed`` if a shard of another name reads a source: two shards would consume it."""
    declared = {f"shard-{index:03d}" for index in range(declaration.shards)}
    journals = {name for source in declaration.sources for name in source.journals}
    for name, shard in sorted(held.items()):
        shared = sorted(journals & {source.journal for source in shard.spec.sources})
        if name not in declared and shared and not shard.spec.disable:
            raise NotAllowed(
                f"shard {name} reads {shared[0]} already, and is not of this declaration: the "
                "application would consume its messages twice",
                hint="Change shards that YAML made by YAML, or delete them first (`gazctl shards edit`).",
            )


def _lost_log(shard: str, log: str) -> Conflict:
    return Conflict(
        f"the recovery log {log} of {shard} does not exist, though the shard does",
        hint="Restore the journal (docs/operating.md). A new one would begin with an empty state.",
    )


def _new_journal(spec: JournalSpec) -> str:
    parts = [f"{spec.replication} replicas", f"in {spec.fragment.stores[0]}"]
    if spec.fragment.retention_ns:
        parts.append(f"kept {_duration(spec.fragment.retention_ns)}")
    return ", ".join(parts)


def _journal_difference(before: JournalSpec, after: JournalSpec) -> str:
    texts = _differences(before, after, ("replication",))
    texts += _differences(before.fragment, after.fragment, tuple(_SHOWN))
    dropped = [store for store in before.fragment.stores if store not in after.fragment.stores]
    if dropped:
        texts.append(f"fragments in {', '.join(dropped)} are not read any more")
    names = {label.name for label in (*before.labels.labels, *after.labels.labels)}
    for name in sorted(names):
        old, new = (", ".join(spec.labels.values_of(name)) for spec in (before, after))
        if old != new:
            texts.append(f"{name} {old or 'unset'} → {new or 'unset'}")
    return "; ".join(texts)


_SHOWN: Final = {
    "length": "fragment length",
    "stores": "stores",
    "refresh_interval_ns": "refresh interval",
    "retention_ns": "retention",
    "flush_interval_ns": "flush interval",
}
"""Names of fields of `FragmentSpec` for users."""


def _shard_difference(before: ShardSpec, after: ShardSpec) -> str:
    texts = _differences(before, after, ("hot_standbys", "max_txn_duration_ns"))
    former = {source.journal for source in before.sources}
    added: Sequence[str] = [s.journal for s in after.sources if s.journal not in former]
    return "; ".join([*texts, *(f"reads {name} as well" for name in added)])


def _differences(before: Any, after: Any, names: Sequence[str]) -> list[str]:
    return [
        f"{_SHOWN.get(name, name.removesuffix('_ns').replace('_', ' '))} "
        f"{_value(name, getattr(before, name))} → {_value(name, getattr(after, name))}"
        for name in names
        if getattr(before, name) != getattr(after, name)
    ]


def _value(name: str, value: Any) -> str:
    if name == "retention_ns" and not value:
        return "forever"
    if name.endswith("_ns"):
        return _duration(value)
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _duration(ns: int) -> str:
    return duration.format_go_duration(ns)


def _line(kind: str, name: str, change: DeclaredChange[Any]) -> str:
    return f"{'~' if change.revision else '+'} {kind} {name}  {change.text}"
