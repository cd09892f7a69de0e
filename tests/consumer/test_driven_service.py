"""What `AppDriver` gives an application before its shard: ``initialize``, and journals with labels."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gazette.config.schema import setting
from gazette.consumer.query.shard_route import shard_route
from gazette.errors import Invalid, NotAllowed
from gazette.labels import CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE, MESSAGE_TYPE
from gazette.message.mapping import modulo_mapping
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.testing.app_driver import AppDriver
from tests.consumer.apps import SOURCE, Tally, Word
from tests.facts import raises

OUTPUTS = ("out/part-000", "out/part-001")
LABELS = {name: {MESSAGE_TYPE: "Output"} for name in OUTPUTS}


@dataclass(frozen=True, slots=True)
class Flags:
    suffix: str = setting("!", "what is put behind each word")


def word_of(message: Any) -> str:
    return str(message.word)


class Spreads(Tally):
    """Publishes to partitions that it finds by their label, and by settings."""

    config_groups: ClassVar[Mapping[str, type]] = {"spreads": Flags}

    def __init__(self) -> None:
        super().__init__()
        self.initialized = 0
        self.seen: list[Any] = []

    async def initialize(self, service: Any) -> None:
        assert asyncio.get_running_loop().is_running()
        self.initialized += 1
        self.suffix = service.config(Flags).suffix
        outputs = service.partitions(LabelSelector.parse(f"{MESSAGE_TYPE} = Output"))
        await outputs.ready()
        self.mapping = modulo_mapping(outputs, word_of)
        service.add_route("/shards/{shard}/count", Api(service).count)
        self.service = service

    def message_type_of(self, journal: Any) -> type[Any]:
        self.seen.append(journal)
        return Word

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        publisher.publish_uncommitted(self.mapping, Word(word=envelope.message.word + self.suffix))


class Api:
    def __init__(self, service: Any) -> None:
        self.service = service

    @shard_route()
    def count(self, store: Any, request: Any) -> int:
        return len(store.state)


def published(driver: AppDriver[Any]) -> list[str]:
    return sorted(one.word for name in OUTPUTS for one in driver.committed(name, Word))


def test_initialize_is_called_before_each_life_of_the_shard(tmp_path: Path) -> None:
    application = Spreads()
    with AppDriver(application, tmp_path, [SOURCE], journal_labels=LABELS) as driver:
        assert application.initialized == 0
        driver.publish(SOURCE, *(Word(word=f"w{i}") for i in range(9)))
        driver.run()
        assert published(driver) == [f"w{i}!" for i in range(9)]
        assert all(driver.committed(name, Word) for name in OUTPUTS)
        assert application.initialized == 1
        assert [path for path, *_ in application.service.routes] == ["/shards/{shard}/count"]
        driver.crash()
        driver.run()
        assert application.initialized == 2


def test_settings_are_those_that_are_given(tmp_path: Path) -> None:
    config = {"spreads": Flags("?")}
    with AppDriver(Spreads(), tmp_path, [SOURCE], journal_labels=LABELS, config=config) as driver:
        driver.publish(SOURCE, Word(word="a"))
        driver.run()
        assert published(driver) == ["a?"]


def test_a_source_has_the_labels_that_it_is_given(tmp_path: Path) -> None:
    application = Spreads()
    labels = LABELS | {SOURCE: {MESSAGE_TYPE: "Word"}}
    with AppDriver(application, tmp_path, [SOURCE], journal_labels=labels) as driver:
        driver.run()
        expected = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), (MESSAGE_TYPE, "Word"))
        assert application.seen[0].labels == expected
    labels[SOURCE] = {CONTENT_TYPE: CONTENT_PROTO_FIXED}
    with (
        AppDriver(Spreads(), tmp_path / "two", [SOURCE], journal_labels=labels) as driver,
        pytest.raises(Invalid),
    ):
        driver.run()  # A JSON message has no such framing.


def test_what_a_driver_cannot_offer_is_an_error_by_name(tmp_path: Path) -> None:
    class Asks(Tally):
        async def initialize(self, service: Any) -> None:
            service.client.reader()

    with (
        AppDriver(Asks(), tmp_path, [SOURCE]) as driver,
        raises(NotAllowed, says="service.client"),
    ):
        driver.run()
    with AppDriver(Asks(), tmp_path / "two", [SOURCE], initialize=False) as driver:
        driver.publish(SOURCE, Word(word="a"))
        driver.run()
        assert driver.store.read() == {"a": 1}
