"""Checks that refuse callbacks of the wrong kind, such as coroutine functions.

Callbacks are plain functions, called on the shard's thread. A call of a coroutine or generator function
runs no line of its body: messages would be lost, and the checkpoint would pass them. So `require_callbacks`
refuses these functions when the application starts. `require_none` refuses their results.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from gazette.consumer.contract.error_cause import error_text
from gazette.errors import GazetteError, Invalid
from gazette.runtime.user_code import place_of_error, without_callers

APPLICATION: Final = (
    "message_type_of",
    "uuid_place_of",
    "message_time_of",
    "poison_policy",
    "new_store",
    "new_view",
    "consume_message",
    "consume_messages",
    "consume_table",
    "on_timer",
    "begin_transaction",
    "finalize_transaction",
    "finished_transaction",
    # Callbacks of a `MessageProducer`:
    "start_reading",
    "read_through",
)
_GENERATORS: Final = ("replay",)
"""Callbacks that may be generator functions: they return an iterator."""
_COROUTINES: Final = ("initialize",)
"""Callbacks that run on the event loop."""
_LAYERS_MAX: Final = 64

_HINT: Final = (
    "Define it with a plain `def`. It is called on the shard's own thread and may block. To "
    "await something there, run it to its end, for example with asyncio.run()."
)


class ApplicationFailed(GazetteError):
    """Error of an application's callback: its shard fails. ``__cause__`` is the callback's exception."""

    default_hint = (
        "Correct the application and restart it; nothing of the failed transaction took "
        "effect. `gazctl shards unassign --failed` retries without a restart."
    )


def application_failed(callback: str, error: BaseException, **facts: Any) -> ApplicationFailed:
    """Return the error for the exception of a callback. The error names the line of the user's code.

    Cut our own calls from the traceback of ``error``, so that it begins with the user's code.
    """
    text = f"{callback} raised {type(error).__name__}"
    detail = error_text(error)
    if detail != type(error).__name__:
        text = f"{text}: {detail}"
    if place := place_of_error(error):
        facts = {"line": place, **facts}
    error.__traceback__ = without_callers(error.__traceback__)
    return ApplicationFailed(text, **facts)


def require_callbacks(application: Any) -> None:
    """Raise ``Invalid`` for a callback that is no plain function, and for one that nothing would call."""
    if hasattr(application, "consume_table") and not hasattr(application, "table_meta"):
        raise Invalid(
            f"{type(application).__name__} defines consume_table, which nothing would call",
            hint="Derive it from gazette.TableApplication.",
        )
    for name in APPLICATION:
        _require(application, name)
    for name in _GENERATORS:
        _require(application, name, allowed=("a generator function",))
    for name in _COROUTINES:
        _require(application, name, allowed=("a coroutine function",))


def require_instance(callback: str, value: object, kind: type, methods: Sequence[str] = ()) -> None:
    """Check that ``callback`` returned an object of class ``kind``, whose ``methods`` are plain functions.

    Raise ``ApplicationFailed`` for another value, and ``Invalid`` if a method is no plain function.
    """
    if value is None:
        raise ApplicationFailed(
            f"{callback} returned None",
            hint=f"Return a {kind.__name__}: a return statement may be missing.",
        )
    if not isinstance(value, kind):
        _close(value)
        raise ApplicationFailed(f"{callback} returned {_kind_name(value)}, not a {kind.__name__}")
    for name in methods:
        _require(value, name)


def require_none(callback: str, result: object, **facts: Any) -> None:
    """Raise ``ApplicationFailed`` unless ``result``, of a callback that returns nothing, is None.

    Before that, close a coroutine or generator, and cancel a future of ``concurrent.futures``.
    """
    if result is None:
        return
    lazy = _is_lazy(result)
    _close(result)
    if lazy:
        raise ApplicationFailed(
            f"{callback} returned {_kind_name(result)}, which nothing runs",
            hint=_HINT,
            **facts,
        )
    raise ApplicationFailed(
        f"{callback} returned {_kind_name(result)}; expected None",
        hint="Remove the returned value. Use the store and the publisher for the effects of a "
        "message.",
        **facts,
    )


def require_result(callback: str, result: Any, **facts: Any) -> Any:
    """Return ``result``. Raise ``ApplicationFailed`` for a coroutine or an asynchronous generator."""
    if inspect.iscoroutine(result) or inspect.isasyncgen(result):
        require_none(callback, result, **facts)
    return result


def require_plain(function: Callable[..., Any], parameters: Sequence[str]) -> None:
    """Raise ``Invalid`` unless a function is plain and takes these parameters."""
    name = f"{function.__module__}.{function.__qualname__}"
    _require_kind(function, name, ())
    _require_parameters(function, name, parameters)


def _require_parameters(callback: Any, full_name: str, expected: Sequence[str]) -> None:
    """Raise ``Invalid`` if a callback cannot be called with these arguments, by position."""
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):
        return  # A callable of C may not say its parameters.
    try:
        signature.bind(*expected)
    except TypeError as error:
        raise Invalid(
            f"callback {full_name} takes ({', '.join(signature.parameters)}), and is called with "
            f"({', '.join(expected)})",
            hint=f"Define it with the parameters ({', '.join(expected)}), in this order.",
        ) from error


def _require(owner: Any, name: str, allowed: tuple[str, ...] = ()) -> None:
    """Check a callback, if ``owner`` has it. Raise ``Invalid`` for wrong parameters, and unless it is a plain
    function or of a kind in ``allowed``."""
    if not hasattr(type(owner), name) and not hasattr(owner, name):
        return
    owner_type = type(owner)
    full_name = f"{owner_type.__module__}.{owner_type.__qualname__}.{name}"
    callback = getattr(owner, name)
    if not callable(callback):
        raise Invalid(
            f"callback {full_name} is {_kind_name(callback)}, which cannot be called",
            hint="Define it as a method.",
        )
    _require_kind(callback, full_name, allowed)
    # The class that introduces the callback declares its parameters.
    introducing = next((base for base in reversed(owner_type.__mro__) if name in vars(base)), None)
    if introducing is not None and introducing is not owner_type:
        declared = inspect.signature(vars(introducing)[name]).parameters
        _require_parameters(callback, full_name, [*declared][1:])  # Without ``self``.


def _require_kind(callback: Any, full_name: str, allowed: tuple[str, ...]) -> None:
    """Raise ``Invalid`` if a callback is, or wraps, a function of a kind that is not in ``allowed``."""
    for layer in _layers(callback):
        kind = _function_kind(layer)
        if kind is None or kind in allowed:
            continue
        behind = "" if layer is callback or _is_method_of(callback, layer) else " behind a wrapper"
        hint = _HINT
        if allowed == ("a coroutine function",):
            hint = "Define it with `async def`, without yield."
        raise Invalid(
            f"callback {full_name} is {kind}{behind}: calling it would do nothing", hint=hint
        )


def _is_method_of(callback: Any, layer: Any) -> bool:
    return getattr(callback, "__func__", None) is layer


def _function_kind(function: Any) -> str | None:
    """Return the kind of a function that does not run when it is called; None for a plain function."""
    if inspect.iscoroutinefunction(function):
        return "a coroutine function"
    if inspect.isasyncgenfunction(function):
        return "an asynchronous generator function"
    if inspect.isgeneratorfunction(function):
        return "a generator function"
    return None


def _layers(callback: Any) -> Iterator[Any]:
    """Yield a callable, and the callables that it wraps: partials, methods, decorators and ``__call__``."""
    waiting, seen = [callback], set[int]()
    while waiting and len(seen) < _LAYERS_MAX:
        layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        if isinstance(layer, functools.partial | functools.partialmethod):
            waiting.append(layer.func)
        for name in ("__func__", "__wrapped__"):
            if (inner := getattr(layer, name, None)) is not None:
                waiting.append(inner)
        if not isinstance(layer, type) and not inspect.isroutine(layer):
            waiting.append(inspect.getattr_static(type(layer), "__call__", None))


def _is_lazy(result: Any) -> bool:
    """Return True for a result that has still to run: a coroutine, a generator, or a future."""
    return (
        inspect.isawaitable(result)
        or inspect.isgenerator(result)
        or inspect.isasyncgen(result)
        or isinstance(result, concurrent.futures.Future)
    )


def _close(result: Any) -> None:
    """Close a coroutine or the like that nothing will run. Otherwise Python would warn of it later."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
    elif isinstance(result, concurrent.futures.Future):
        result.cancel()


def _kind_name(value: object) -> str:
    if value is None:
        return "None"
    if inspect.iscoroutine(value):
        return "a coroutine"
    if inspect.isasyncgen(value):
        return "an asynchronous generator"
    if inspect.isgenerator(value):
        return "a generator"
    return f"an object of type {type(value).__name__}"


async def initialized(application: Any, service: Any) -> None:
    """Await ``Application.initialize``. Raise ``ApplicationFailed`` for a plain function."""
    result: object = application.initialize(service)
    if not inspect.isawaitable(result):
        raise ApplicationFailed(
            f"initialize returned {_kind_name(result)}, which cannot be awaited",
            hint="Define it with `async def`.",
        )
    require_result("initialize", await result)
