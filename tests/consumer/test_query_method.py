"""Methods that answer queries: what is refused when they are decorated, and what their errors say."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.query.all_shards import gather_route, list_route
from gazette.consumer.query.http_queries import HttpQueries
from gazette.consumer.query.query_method import query_method
from gazette.consumer.query.shard_route import shard_route
from gazette.consumer.query.shard_rpc import shard_rpc
from gazette.errors import Invalid, NotFound
from tests.facts import raises

DECORATORS: list[Any] = [
    shard_route("/a"),
    gather_route("/a", combine=len),
    list_route("/a"),
    shard_rpc(lambda channel: channel),
]


@pytest.mark.parametrize("decorate", DECORATORS)
def test_a_method_that_cannot_be_called_is_refused(decorate: Any) -> None:
    async def later(self: Any, store: Any, request: Any) -> None: ...

    def few(self: Any, request: Any) -> None: ...

    with raises(Invalid, says="later is a coroutine function: calling it would do nothing"):
        decorate(later)
    with raises(Invalid, says=r"few takes (self, request), and is called with (self, store, "):
        decorate(few)


def test_an_error_names_the_line_and_is_logged_with_the_users_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def count(self: Any, store: Any, request: Any) -> int:
        counts: dict[str, int] = {}
        return counts["words"]

    call = query_method(count, ("self", "store", "request"))
    with raises(ApplicationFailed, says="count raised KeyError: 'words' (line=") as caught:
        call(None, None, None)
    assert "test_query_method.py:" in str(caught.value)
    assert "transaction" not in caught.value.hint
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    text = logging.Formatter().format(record)
    assert "KeyError: 'words'" in text
    assert 'query_method.py", line' not in text.replace("test_query_method.py", "")


def test_errors_of_our_tree_and_returned_coroutines() -> None:
    def missing(self: Any, store: Any, request: Any) -> None:
        raise NotFound("no such word")

    async def value() -> int:
        return 1

    def lazy(self: Any, store: Any, request: Any) -> Any:
        return value()

    with raises(NotFound, says="no such word"):
        query_method(missing, ("self", "store", "request"))(None, None, None)
    with raises(ApplicationFailed, says="lazy returned a coroutine, which nothing runs"):
        query_method(lazy, ("self", "store", "request"))(None, None, None)


class Api:
    @shard_route("/a")
    def count(self, store: Any, request: Any) -> int:
        """Count."""
        return 1


def test_a_route_of_a_class_is_no_route_of_an_object() -> None:
    queries = HttpQueries(None)  # type: ignore[arg-type]
    with raises(Invalid, path="add_route"):
        queries.add("/a", Api.count, ["GET"])
    api = Api()
    queries.add("/a", api.count, ["GET"])
    assert api.count.instance is api
    assert api.count.__doc__ == "Count."
