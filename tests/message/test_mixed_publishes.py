"""Committed and uncommitted messages of one publisher in one journal: readers get all of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from gazette import Application, Message
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.stores.sqlite import SQLiteStore
from gazette.testing.app_driver import AppDriver

SOURCE, TARGET = "words/part-000", "out/part-000"
TO_TARGET = fixed_mapping(TARGET, CONTENT_JSON_LINES)


class Word(Message):
    word: str = ""


class Echo(Application[SQLiteStore]):
    """Publishes each word within its transaction, and once more outside of it."""

    message_type = Word
    beside = False
    """True if another thread publishes outside of the transaction."""

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        word = envelope.message.word
        publisher.publish_uncommitted(TO_TARGET, Word(word=f"within {word}"))
        publisher.flush()

        def publish() -> None:
            publisher.publish_committed(TO_TARGET, Word(word=f"outside {word}"))

        if self.beside:
            thread = threading.Thread(target=publish)
            thread.start()
            thread.join()
        else:
            publish()


@pytest.mark.parametrize("beside", [False, True])
def test_a_message_outside_of_a_transaction_leaves_the_transaction_alone(
    tmp_path: Path, *, beside: bool
) -> None:
    application = Echo()
    application.beside = beside
    words = ["a", "b", "c"]
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        for word in words:
            driver.publish(SOURCE, Word(word=word))
        driver.run()
        driver.crash()
        driver.publish(SOURCE, Word(word="d"))
        driver.run()
        found = [message.word for message in driver.committed(TARGET, Word)]
    expected = [f"{place} {word}" for word in (*words, "d") for place in ("within", "outside")]
    assert sorted(found) == sorted(expected)
