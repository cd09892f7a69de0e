"""Options of a RocksDB store's column families.

Options that the application gives take precedence. A family without given options gets the options of the
last opening: RocksDB writes options beside its files, so they are in the recovery log.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from gazette.errors import Invalid
from gazette.recoverylog.rocksdb.native import CONFIG_FILE, DEFAULT

Compression = Literal["none", "snappy", "lz4", "lz4hc", "zlib", "zstd"]

MANIFEST_BYTES: Final = 128 << 10
WAL_BYTES: Final = 64 << 20
"""Bytes of all WALs above which RocksDB flushes: a new owner replays about as many at most."""

FORMAT_VERSION: Final = 5
"""Form of new tables. Debian's RocksDB 7.8 reads it, but not form 6, the binding's default."""

_OPTIONS_FILE: Final = re.compile(r"OPTIONS-\d+")
_BLOOM_FILTER: Final = re.compile(r"filter_policy=bloomfilter\b.*")
_DEFAULT_FORMAT: Final = re.compile(r"\bformat_version=6\b")

_RECORDABLE: Final = {
    "allow_mmap_writes": "false",
    "manual_wal_flush": "false",
    "recycle_log_file_num": "0",
    "two_write_queues": "false",
    "unordered_write": "false",
    "use_direct_io_for_flush_and_compaction": "false",
    "wal_compression": "kNoCompression",
}
"""Options on which recording relies, as RocksDB writes them."""

_UNRECORDABLE: Final = frozenset({"set_cf_paths", "set_db_paths"})
"""Calls whose effect is not in the options that RocksDB writes."""


@dataclass(frozen=True, slots=True)
class RocksDBOptions:
    """Options of a column family. They may differ at each opening.

    ``tune`` is called with the ``rocksdict.Options``, to set other options. Options on which recording
    relies are set after ``tune``, or refused (``Invalid``). New tables have the form `FORMAT_VERSION`.
    Raises ``Invalid`` for values out of range, and for an unknown compression.
    """

    write_buffer_bytes: int = 16 << 20
    """Size in bytes at which a memtable is flushed."""
    table_bytes: int = 16 << 20
    """Approximate bytes of a table."""
    cache_bytes: int = 64 << 20
    """Bytes of the cache of uncompressed blocks of this column family."""
    compression: Compression = "lz4"
    bloom_bits_per_key: float = 10.0
    """Bits of the bloom filter for each key; 0 for no filters."""
    min_blob_bytes: int | None = None
    """Least size in bytes of a value that goes into a blob file. None: all values are in tables."""
    background_jobs: int = 2
    """Threads for flushes and compactions. Only the default column family's value has an effect."""
    tune: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        least = {"write_buffer_bytes": 1, "table_bytes": 1, "background_jobs": 1}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < least.get(field.name, 0):
                raise Invalid(
                    f"invalid value ({value}; expected >= {least.get(field.name, 0)})",
                    path=f"RocksDBOptions.{field.name}",
                )
        if self.compression not in get_args(Compression):
            raise Invalid(
                f"unknown compression {self.compression!r}",
                path="RocksDBOptions.compression",
                hint=f"Known are {', '.join(get_args(Compression))}.",
            )


Families = Mapping[str, RocksDBOptions | None]
"""Column families by name; None for the options of the last opening, or the defaults."""


def named_families(given: Mapping[str, RocksDBOptions] | Iterable[str]) -> Families:
    """Return the families of ``column_families``. Raise ``Invalid`` for wrong names, types or options."""
    # Refuse a single text: its characters would become names of families.
    if isinstance(given, str | bytes | bytearray) or not isinstance(given, Iterable):
        raise _no_families(given)
    names: Any = list(given)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise _no_families(wrong[0])
    families: Families = given if isinstance(given, Mapping) else dict.fromkeys(names)
    for name, options in families.items():
        if not name:
            raise Invalid("a column family needs a name", path="column_families")
        if name == DEFAULT:
            raise Invalid("give the options of the default column family as `options`")
        require_options(f"column_families[{name}]", options)
    return families


def _no_families(given: object) -> Invalid:
    return Invalid(
        f"a {type(given).__name__} is given, and not names of column families",
        path="column_families",
        hint='Give a list of names, such as ["counts"], or a dict of RocksDBOptions by name.',
    )


def require_options(path: str, given: object) -> None:
    """Raise ``Invalid`` unless an argument is `RocksDBOptions` or None."""
    if given is not None and not isinstance(given, RocksDBOptions):
        raise Invalid(
            f"not options of a column family ({type(given).__name__})",
            path=path,
            hint="Use RocksDBOptions.",
        )


def require_count(path: str, given: object) -> None:
    """Raise ``Invalid`` unless an argument is a number of bytes above 0."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise Invalid(
            f"{given!r:.40} is no number of bytes (expected >= 1)",
            path=path,
            hint="Give an integer, such as 1 << 20.",
        )


@dataclass(frozen=True, slots=True)
class OpenedWith:
    """rocksdict's options with which a database is opened: its own, and the options of each column family."""

    database: Any
    families: dict[str, Any]


def recorded_options(native: Any, path: str, cache: Any) -> OpenedWith | None:
    """Return the options with which a database was last opened; None unless rocksdict made it.

    Another RocksDB may have options that rocksdict lacks. The file of options has neither the cache of blocks
    nor the bits of bloom filters: replace them by ``cache`` and the default bits.
    """
    config = Path(path, CONFIG_FILE)
    texts = [file for file in Path(path).iterdir() if _OPTIONS_FILE.fullmatch(file.name)]
    if not texts or not config.exists():  # Only rocksdict writes this file.
        return None
    newest = max(texts, key=lambda file: int(file.name.partition("-")[2]))
    bits = RocksDBOptions().bloom_bits_per_key
    with tempfile.TemporaryDirectory(prefix="options-", dir=Path(path).parent) as scratch:
        # RocksDB reads its own text of a filter as "no filter": write the default bits instead.
        text = _BLOOM_FILTER.sub(f"filter_policy=bloomfilter:{bits:g}:false", newest.read_text())
        # Former versions used rocksdict's default form of tables.
        text = _DEFAULT_FORMAT.sub(f"format_version={FORMAT_VERSION}", text)
        Path(scratch, newest.name).write_text(text)
        shutil.copyfile(config, Path(scratch, CONFIG_FILE))
        load = native.Options.load_latest
        return OpenedWith(*load(scratch, native.Env(), ignore_unknown_options=True, cache=cache))


def options_to_open(
    native: Any, path: str, options: RocksDBOptions | None, named: Families, *, exists: bool
) -> OpenedWith:
    """Return the options for opening a database: of ``named`` families, and of all other families in it.

    Errors of RocksDB and of ``tune`` reach the caller.
    """
    defaults = RocksDBOptions()
    cache = native.Cache(defaults.cache_bytes)
    recorded = recorded_options(native, path, cache) if exists else None

    def of(name: str, given: RocksDBOptions | None) -> Any:
        if given is None and recorded is not None and name in recorded.families:
            return recorded.families[name]
        return native_options(native, given or defaults)

    names = dict.fromkeys(native.Rdict.list_cf(path)) if exists else {}
    families = {name: of(name, named.get(name)) for name in {**names, **named} if name != DEFAULT}
    families[DEFAULT] = of(DEFAULT, options)
    if options is None and recorded is not None:
        database = recorded.database
    else:
        # The options of the whole database are the options of the default family.
        database = native_options(native, options or defaults)
        database.set_max_background_jobs((options or defaults).background_jobs)
    _make_recordable(native, database)
    return OpenedWith(database, families)


def native_options(native: Any, options: RocksDBOptions) -> Any:
    """Return the options of one column family for rocksdict."""
    result = native.Options(raw_mode=True)
    result.set_write_buffer_size(options.write_buffer_bytes)
    # A write that RocksDB delays stops the whole process: make that rare. While memtables wait for
    # their flush, writes fail instead (see `RocksDBStore._write`).
    result.set_max_write_buffer_number(6)
    result.set_level_zero_slowdown_writes_trigger(1 << 30)
    result.set_level_zero_stop_writes_trigger(128)
    result.set_soft_pending_compaction_bytes_limit(0)
    result.set_hard_pending_compaction_bytes_limit(0)
    result.set_target_file_size_base(options.table_bytes)
    result.set_compression_type(getattr(native.DBCompressionType, options.compression)())
    table = native.BlockBasedOptions()
    table.set_block_cache(native.Cache(options.cache_bytes))
    table.set_format_version(FORMAT_VERSION)
    if options.bloom_bits_per_key:
        table.set_bloom_filter(options.bloom_bits_per_key, False)
    result.set_block_based_table_factory(table)
    if options.min_blob_bytes is not None:
        result.set_enable_blob_files(True)
        result.set_min_blob_size(options.min_blob_bytes)
        result.set_blob_file_size(options.table_bytes)
        result.set_enable_blob_gc(True)
    if options.tune is not None:
        options.tune(_Tuned(result))
    return result


class _Tuned:
    """The options that ``tune`` gets, which refuse calls whose effect RocksDB does not report."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        if name in _UNRECORDABLE:
            raise Invalid(
                f"a RocksDB with {name} cannot be recorded: its files would be elsewhere",
                hint=f"Do not call {name} in RocksDBOptions.tune; give the shard's directory more room.",
            )
        return getattr(self._options, name)


def _make_recordable(native: Any, database: Any) -> None:
    """Set options on which recording relies, and bounds of the log. This overrides ``tune``."""
    database.create_if_missing(True)
    database.create_missing_column_families(True)
    database.set_max_total_wal_size(WAL_BYTES)
    database.set_max_manifest_file_size(MANIFEST_BYTES)
    database.set_keep_log_file_num(1)
    database.set_recycle_log_file_num(0)
    database.set_wal_ttl_seconds(0)
    database.set_wal_size_limit_mb(0)
    database.set_wal_recovery_mode(native.DBRecoveryMode.point_in_time())
    database.set_allow_mmap_writes(False)
    database.set_use_direct_io_for_flush_and_compaction(False)
    database.set_unordered_write(False)


def check_recordable(text: str, *, has_wal: bool) -> None:
    """Raise ``Invalid`` for options, as RocksDB wrote them, by which files cannot be recorded."""
    actual = dict(line.strip().split("=", 1) for line in text.splitlines() if "=" in line)
    for name, value in _RECORDABLE.items():
        if actual.get(name, value) != value:
            raise Invalid(
                f"a RocksDB with {name}={actual[name]} cannot be recorded",
                hint=f"Leave {name} at {value} in RocksDBOptions.tune.",
            )
    if not has_wal:
        raise Invalid(
            "RocksDB writes its WAL elsewhere, so it cannot be recorded",
            hint="Do not call set_wal_dir in RocksDBOptions.tune.",
        )
