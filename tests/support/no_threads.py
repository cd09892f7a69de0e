"""A machine that starts no thread."""

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def no_thread_starts() -> Iterator[None]:
    """Ask for stacks that the system refuses. Only Linux is sure to refuse them."""
    usual_bytes = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(usual_bytes)
