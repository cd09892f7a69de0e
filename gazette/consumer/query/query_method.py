"""Methods of an application that answer queries: their checks, and their errors."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from gazette.consumer.contract.callbacks import (
    ApplicationFailed,
    application_failed,
    require_plain,
    require_result,
)
from gazette.errors import GazetteError, Invalid

log = logging.getLogger(__name__)
_HINT: Final = "Correct it, and restart the application. Its shard goes on."


def query_method(method: Callable[..., Any], parameters: Sequence[str]) -> Callable[..., Any]:
    """Return ``method`` wrapped, so that its errors name the line of the user's code.

    Raise ``Invalid`` if ``method`` is no plain function, or cannot be called with ``parameters``. The wrapped
    method logs an exception, and raises ``ApplicationFailed`` in its place. A `GazetteError` passes through.
    """
    require_plain(method, parameters)
    name = method.__qualname__

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return require_result(name, method(*arguments))
        except GazetteError:
            raise
        except Exception as error:
            failure = application_failed(name, error, hint=_HINT)
            log.exception("%(error)s", {"error": failure}, exc_info=error)
            raise failure from error

    return call


@contextlib.contextmanager
def answering(route: str) -> Iterator[None]:
    """Log an ``Invalid`` of the block, and raise ``ApplicationFailed`` in its place.

    In the block, only encode the answer. An answer that cannot be encoded is a fault of the application, and
    not of the client."""
    try:
        yield
    except Invalid as error:
        failure = ApplicationFailed(
            f"the answer of {route} cannot be encoded: {error}", route=route, hint=error.hint
        )
        log.error("%(error)s", {"error": failure})  # noqa: TRY400 - no line of the runtime is at fault.
        raise failure from error
