"""Messages in journals: UUIDs, framing, keys, mappings, publishers, and the sequencer of what was read.

``pygazette-client`` has this package, but its extra ``messages`` has what it needs. ``pygazette`` needs both.
"""

from importlib.util import find_spec

from gazette.errors import not_installed

for _package in ("msgspec", "numpy"):
    if find_spec(_package) is None:
        raise ImportError(
            not_installed("gazette.message", _package, "messages", distribution="pygazette-client")
        )
