"""Makes decoders of msgspec, one at a time: `json_decoder`, `msgpack_decoder`, `type_info`. Completes models.

msgspec stores facts about a class on the class, and another thread may see them while they are incomplete.
Then the process dies of a segmentation fault (msgspec 0.22; seen when Spark plans a read, with threads). So
this package shows a class to msgspec only here, before decoding. Any thread, and any forked child, may use
the decoders.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    import msgspec

T = TypeVar("T")

# Reentrant: annotations of a class may run code of an application.
_LOCK: Final = threading.RLock()
# A forked child has no other threads: it must get neither a lock of theirs nor an incomplete class.
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


def json_decoder(
    declared: type[T], *, float_hook: Callable[[str], Any] | None = None
) -> msgspec.json.Decoder[T]:
    """Return a decoder from JSON to a type. Raise ``TypeError`` or ``NameError`` for an unknown type."""
    import msgspec  # An installation of the client alone has no msgspec.

    with _LOCK:
        return msgspec.json.Decoder(declared, float_hook=float_hook)


def msgpack_decoder(declared: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return a decoder from MessagePack to a type. Errors: `json_decoder`."""
    import msgspec

    with _LOCK:
        return msgspec.msgpack.Decoder(declared)


def type_info(declared: Any) -> msgspec.inspect.Type:
    """Return msgspec's description of a type. This makes a decoder. Errors: `json_decoder`."""
    import msgspec.inspect

    with _LOCK:
        return msgspec.inspect.type_info(declared)


def complete_model(model: Any) -> None:
    """Have pydantic complete a model whose build is deferred, or which has forward references.

    Otherwise, pydantic completes it at the first use. Before 2.14, threads that did so at once got errors, or
    messages of the model's base class. A name that is still unknown changes nothing.
    """
    with _LOCK:
        model.model_rebuild(raise_errors=False, _types_namespace={})
