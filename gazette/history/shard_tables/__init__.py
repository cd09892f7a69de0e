"""Tables in callbacks: shards decode and sequence messages in arrays, for `TableApplication`."""

from gazette.errors import not_installed

try:
    import pyarrow as _  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed("TableApplication", "pyarrow", "tables") from error
