"""Messages in journals: UUIDs, framing, keys, mappings, publishers, and the sequencer of read messages.

``pygazette-client`` has this package, which needs msgspec and NumPy: the extra ``messages`` installs both.
"""

from importlib.util import find_spec

from gazette.errors import not_installed

for _package in ("msgspec", "numpy"):
    if find_spec(_package) is None:
        raise ImportError(
            not_installed("gazette.message", _package, "messages", distribution="pygazette-client")
        )
