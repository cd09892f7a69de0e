"""The application to simulate: how it is made, its journals and shards, and the messages that it gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from gazette.consumer.application import Application, MessageProducer
from gazette.consumer.contract.callbacks import require_callbacks
from gazette.consumer.declare.declaration import declaration_of
from gazette.consumer.declare.source import Source, sources_of
from gazette.consumer.declare.specs import (
    SpecSettings,
    dead_letter_specs,
    journal_specs,
    log_specs,
    shard_specs,
)
from gazette.consumer.transaction.shard_timers import defines_timers
from gazette.errors import GazetteError, Invalid, NotAllowed
from gazette.labels import CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.journal_tree import JournalNode
from gazette.protocol.shard import ShardSpec
from gazette.protocol.shard_list import ShardList
from gazette.protocol.text import duration
from gazette.runtime.user_code import place_of_error
from gazette.testing.app_driver import DrivenShard
from gazette.testing.clock import ManualClock
from gazette.testing.memory_journals import MemoryAppends, MemoryJournals
from gazette.testing.simulation.fold import initialize, source_framing
from gazette.testing.simulation.load import MessageLoad

SHARDS_MAX: Final = 2
"""Greatest number of shards of one seed, which draws them from all shards."""
_SETTINGS: Final = SpecSettings(stores=("s3://simulated/",), replication=1, hot_standbys=0)
_FRAGMENT: Final = FragmentSpec(
    length=1 << 22,
    codec=Codec.NONE,
    stores=_SETTINGS.stores,
    refresh_interval_ns=5 * duration.MINUTE,
)

UserLoad = Callable[[random.Random], Iterable[Any]]
"""Yields messages, or pairs of a source (or the name of a source or journal) and a message."""


@dataclass(frozen=True, slots=True)
class DrawnMessage:
    """A message, and the function that maps it to its journal."""

    mapping: Callable[[Any], Any]
    message: Any

    @property
    def journal(self) -> str:
        """The journal that the message goes to."""
        return str(self.mapping(self.message).journal)


@dataclass(slots=True)
class Setup:
    """The application, and all else that is the same for each seed."""

    new_application: Callable[[], Application[Any]]
    journals: list[JournalSpec]
    shards: list[ShardSpec]
    load: UserLoad | None = None
    invariant: Callable[[Any], object] | None = None
    ignore: tuple[str, ...] = ()
    recorded: bool = False
    """True if results may depend on where transactions end."""
    backfill: type[Any] | None = None
    """The user's `Backfill`, by which states are rebuilt; None: nothing is rebuilt."""
    database: Any = None
    """The `SQLServer` with a database of its own for each run; None: a SQLStore is refused."""
    timeout_s: float = 120.0
    """Seconds of real time after which a seed that still runs has failed."""
    _application: Application[Any] = field(init=False)
    _skips_poison: bool | None = None
    """True if poison is skipped. None until it is known."""

    def __post_init__(self) -> None:
        """Raise ``Invalid`` or ``NotAllowed`` for an application that cannot be simulated."""
        self._application = application = self.new_application()
        require_callbacks(application)
        if isinstance(application, MessageProducer):
            raise NotAllowed(
                "an application that brings its own messages is not simulated",
                hint="Test it with gazette_driver.",
            )
        if not self.shards:
            raise Invalid(
                "there is no shard",
                path="shards",
                hint="Declare a Source in the application, or give YAML of journals and shards.",
            )
        for spec in self.shards:
            spec.validate()
        if missing := self.source_names - {spec.name for spec in self.journals}:
            raise Invalid(f"shards read {min(missing)}, which is no journal", path="shards")
        if self.load is None:
            self._loads()  # Refuse types of which no messages can be drawn before the first seed.
        self._prepare_tables()

    def _prepare_tables(self) -> None:
        """Load or compile the code for tables. Raise ``Invalid`` for messages without columns."""
        application = self._application
        journals = {spec.name: spec for spec in self.journals}
        for spec in self.shards:
            array_pass = application.array_pass(DrivenShard(application, spec))
            if array_pass is None:
                return
            for source in spec.sources:
                framing = source_framing(application, journals[source.journal])
                array_pass.new_decoder(source.journal, framing, 0)
            array_pass.prepare()

    @classmethod
    def of(
        cls,
        new_application: Callable[[], Application[Any]],
        journals: Path | None = None,
        shards: Path | None = None,
        **more: Any,
    ) -> Setup:
        """Return a setup with the journals and shards that the application declares, or those of YAML."""
        if (journals is None) != (shards is None):
            raise Invalid(
                "there is YAML for only one of journals and shards",
                path="shards" if shards is None else "journals",
                hint="Give both, or none for an application that declares its sources.",
            )
        if journals is None or shards is None:
            declaration = declaration_of(new_application())
            specs = [
                *journal_specs(declaration, _SETTINGS),
                *log_specs(declaration, _SETTINGS),
                *dead_letter_specs(declaration, _SETTINGS),
            ]
            shard_list = shard_specs(declaration, _SETTINGS)
        else:
            tree = JournalNode.parse(_text_of(journals)).push_down()
            specs = [node.spec for node in tree.journals()]
            entries = ShardList.parse(_text_of(shards)).push_down().shards
            shard_list = [entry.spec for entry in entries]
        specs = [replace(spec, replication=1, fragment=_FRAGMENT) for spec in specs]
        return cls(new_application, specs, shard_list, **more)

    @property
    def sources(self) -> list[JournalSpec]:
        """The journals that shards read, in order."""
        return [spec for spec in self.journals if spec.name in self.source_names]

    @property
    def outputs(self) -> list[str]:
        """The journals that are neither sources nor recovery logs."""
        inner = self.source_names | {spec.recovery_log for spec in self.shards}
        return [spec.name for spec in self.journals if spec.name not in inner]

    @property
    def source_names(self) -> frozenset[str]:
        """The names of the journals that shards read: their messages are no outputs."""
        return frozenset(source.journal for spec in self.shards for source in spec.sources)

    @property
    def has_timers(self) -> bool:
        """True if the application defines ``on_timer``."""
        return defines_timers(self._application)

    @property
    def rebuilds(self) -> bool:
        """True if states are rebuilt by a backfill.

        A replay fires timers at other times than a shard, and skips no poison: then states may differ.
        A state in a database is not rebuilt, since shards share the database.
        """
        may_differ = self.has_timers or self.skips_poison
        return self.backfill is not None and self.database is None and not may_differ

    @property
    def skips_poison(self) -> bool:
        """True if a policy of the application skips bytes that are no messages.

        Raise ``Invalid`` if the application raises.
        """
        if self._skips_poison is None:
            application = self.new_application()
            appends = MemoryAppends(MemoryJournals())
            try:
                if type(application).poison_policy is not Application.poison_policy:
                    initialize(application, ManualClock(), self.journals, appends)
                shards = [DrivenShard(application, spec) for spec in self.shards]
                policies = map(application.poison_policy, shards)
                self._skips_poison = any(policy is not None for policy in policies)
            except GazetteError:
                raise
            except Exception as error:
                what = f"poison_policy cannot be called: {type(error).__name__}: {error}"
                raise Invalid(what, path=place_of_error(error) or "poison_policy") from error
        return self._skips_poison

    def rehearse(self) -> None:
        """Make the stores of all shards once: copies of the database then have the tables that stores create.

        Raise ``Invalid`` if the application raises.
        """
        application, appends = self.new_application(), MemoryAppends(MemoryJournals())
        try:
            initialize(application, ManualClock(), self.journals, appends)
            for spec in self.shards:
                if not spec.recovery_log:
                    application.new_store(DrivenShard(application, spec), None).destroy()
        except GazetteError:
            raise
        except Exception as error:
            what = f"new_store cannot be called: {type(error).__name__}: {error}"
            raise Invalid(what, path=place_of_error(error) or "new_store") from error

    def draw(self, rng: random.Random, times: Sequence[float], epoch: float) -> list[DrawnMessage]:
        """Return a message for each of the times, or fewer if the user's load ends before.

        Raise ``Invalid`` for a load that fails or yields nothing.
        """
        if self.load is not None:
            return self._of_load(self.load, rng, len(times))
        loads = self._loads()
        sent = []
        for at in times:
            mapping, load = rng.choice(loads)
            sent.append(DrawnMessage(mapping, load.draw(rng, epoch + at)))
        return sent

    def _of_load(self, load: UserLoad, rng: random.Random, count: int) -> list[DrawnMessage]:
        try:
            drawn = [self._sent(each) for each in islice(load(rng), count)]
        except GazetteError:
            raise
        except Exception as error:
            what = f"load raises {type(error).__name__}: {error}"
            raise Invalid(what, path="load", hint=place_of_error(error)) from error
        if not drawn:
            raise Invalid("load yields no message", path="load", hint="Yield at least one.")
        return drawn

    def _loads(self) -> list[tuple[Callable[[Any], Any], MessageLoad]]:
        declared: list[Source[Any]] = sources_of(self._application)
        if declared:
            return [
                (
                    source,
                    MessageLoad(
                        message_type,
                        source.content_type,
                        source.uuid,
                        source.message_time,
                    ),
                )
                for source in declared
                for message_type in source.message_types
            ]
        application = self._application
        return [
            (
                self._fixed(spec),
                MessageLoad(
                    application.message_type_of(spec),
                    spec.labels.value_of(CONTENT_TYPE) or "",
                    application.uuid_place_of(spec),
                    application.message_time_of(spec),
                ),
            )
            for spec in self.sources
        ]

    def _fixed(self, spec: JournalSpec) -> Callable[[Any], Any]:
        place = self._application.uuid_place_of(spec)
        return fixed_mapping(spec.name, spec.labels.value_of(CONTENT_TYPE) or "", uuid=place)

    def _sent(self, drawn: Any) -> DrawnMessage:
        """Return a message that a user's load has yielded. Raise ``Invalid`` if it names no source."""
        declared: list[Source[Any]] = sources_of(self._application)
        target, message = drawn if isinstance(drawn, tuple) else (None, drawn)
        if isinstance(target, Source):
            return DrawnMessage(target, message)
        for source in declared:
            if target == source.name or (
                target is None and isinstance(message, source.message_types)
            ):
                return DrawnMessage(source, message)
        for spec in self.sources:
            if target == spec.name or (target is None and not declared):
                return DrawnMessage(self._fixed(spec), message)
        raise Invalid(
            f"load yields {drawn!r:.80}, which names no source",
            path="load",
            hint="Yield messages of the sources' types, or pairs of a source's name and a message.",
        )


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} cannot be read: {error}", path="gazette test") from error
