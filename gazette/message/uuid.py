"""Message UUIDs: producer, clock and transaction flags in a version 1 UUID.

Stage 11 of the byte path. Pure. A UUID is 16 bytes. JSON and CSV carry its canonical text. ``C`` is
the 64-bit clock:

    0..3    bits  4..35 of C
    4..5    bits 36..51 of C
    6..7    0x1 (version), then bits 52..63 of C
    8..9    0b10 (variant), then bits 0..3 of C, then 10 bits of flags
    10..15  the producer

Plain functions handle one UUID, and are the specification. `parse_columns` and `texts_to_bytes`
handle many at once, with equal results. A `UuidForm` is the representation of a UUID in a type of message.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from binascii import unhexlify
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from gazette.errors import Invalid
from gazette.lazy_numpy import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

ProducerId: TypeAlias = bytes
"""Six bytes, unique to one publisher. A shard has a new one after each promotion."""

UUID_BYTES: Final = 16
PRODUCER_BYTES: Final = 6
NIL_UUID: Final = bytes(UUID_BYTES)
"""UUID of a message outside of exactly-once processing: the message always commits, without deduplication."""
NIL_PRODUCER: Final = bytes(PRODUCER_BYTES)

OUTSIDE_TXN: Final = 0x0
"""Flags of a message that is committed at once, outside of transactions."""
CONTINUE_TXN: Final = 0x1
"""Flags of a message that is pending until its producer acknowledges it."""
ACK_TXN: Final = 0x2
"""Flags of a message that commits, or rolls back, its producer's pending messages in the journal."""
FLAGS_MAX: Final = 0x3FF
FOREIGN_UUID: Final = FLAGS_MAX + 1
"""Flags that stand for a UUID that no publisher of Gazette made: its version is not 1, or its variant is
another. Its message counts as a message without a UUID."""

ANOTHER_PLACE: Final = (
    "If the field is your own, rename it, or name another place for the UUIDs of messages, such as "
    "_meta.uuid (docs/publishing.md)."
)
"""Hint of errors about a foreign value in the place of a UUID."""

CLOCK_MAX: Final = (1 << 64) - 1
TICK: Final = 160
"""Difference of clocks for a microsecond: bits 4 and up count 100 ns, bits 0 to 3 are a sequence."""

# Units of 100 ns from the epoch of UUIDs (1582-10-15) to the epoch of Unix.
_EPOCH_SHIFT: Final = 122_192_928_000_000_000
_TIME_MAX: Final = (CLOCK_MAX - TICK) >> 4
"""Greatest time of a message, in units of 100 ns. A UUID can hold one tick more."""
_VERSION_MASK: Final = 0xF000
_VERSION: Final = 0x1000
_VARIANT: Final = 0b10
_THREE_DIGITS_MASK: Final = 0xFFF << 4
_THREE_DIGITS: Final = {number << 4: f"{number:03x}" for number in range(0x1000)}
"""Text of the last three digits of the first group of a UUID, by the part of a clock that they stand for."""
_FLAG_NAMES: Final = {
    OUTSIDE_TXN: "OUTSIDE_TXN",
    CONTINUE_TXN: "CONTINUE_TXN",
    ACK_TXN: "ACK_TXN",
    FOREIGN_UUID: "FOREIGN_UUID",
}
_CANONICAL = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_BARE = re.compile(r"[0-9a-fA-F]{32}", re.ASCII)
_TEXT_CHARS: Final = 36
_TEXT_STEP: Final = _TEXT_CHARS + 1
_DASHES: Final = (8, 13, 18, 23)
# For fewer UUIDs, a loop over the plain functions is faster than setting up arrays.
_COLUMNS_MIN: Final = 6


class Entropy(Protocol):
    """The method of ``random.Random`` that this module uses."""

    def getrandbits(self, k: int, /) -> int: ...


class ParsedUuid(NamedTuple):
    producer: ProducerId
    clock: int
    flags: int


class UuidColumns(NamedTuple):
    """Parts of many UUIDs: lists of equal length."""

    producers: list[ProducerId]
    clocks: list[int]
    flags: list[int]
    is_run: bool = False
    """True if all are of one producer, outside of transactions, with rising clocks. False if not known."""
    has_foreign: bool = False
    """True if some flags are `FOREIGN_UUID`."""


class UuidArrays(NamedTuple):
    """Parts of many UUIDs: arrays of ``uint64``. A producer is the number of its six bytes."""

    producers: npt.NDArray[np.uint64]
    clocks: npt.NDArray[np.uint64]
    flags: npt.NDArray[np.uint64]


class Clock:
    """A 64-bit clock that only moves forward: units of 100 ns since 1582-10-15, then four bits of sequence.

    Thread-safe. Each message moves the clock by a microsecond. So above a million messages a second, the
    clock runs ahead of the wall clock. Then `update` does nothing until the wall clock catches up.
    """

    __slots__ = ("_value", "lock")

    def __init__(self, value: int = 0) -> None:
        self._value = value
        self.lock = threading.Lock()
        """Lock that guards the value. Hold it while you take ticks from a `UuidMint`."""

    @property
    def value(self) -> int:
        return self._value

    def update(self, unix_ns: int) -> None:
        """Move forward to a wall time. Ignore a time that is not later."""
        with self.lock:
            self._update(unix_ns)

    def tick(self) -> int:
        """Move forward by a microsecond, and return the new value."""
        with self.lock:
            return self._tick()

    def _update(self, unix_ns: int) -> None:
        value = clock_at(unix_ns)
        if value > self._value:
            self._value = value

    def _tick(self) -> int:
        self._value = value = (self._value + TICK) & CLOCK_MAX
        return value


class UuidMint:
    """Source of the UUIDs of one producer, each a tick after the former UUID.

    Not thread-safe: hold the lock of ``clock`` until the message has its place in a journal. Publishers call
    `text` hundreds of thousands of times a second. So it keeps the digits that change rarely: all but three.
    """

    __slots__ = ("_base", "_clock", "_head", "_tails", "producer")

    def __init__(self, producer: ProducerId, clock: Clock) -> None:
        self.producer = producer
        self._clock = clock
        self._base = -1 - CLOCK_MAX
        """Clock of the kept texts, with zeros for the three digits that change."""
        self._head = ""
        """Text before the three digits that change."""
        self._tails: dict[int, str] = {}
        """By flags, the text after the three digits that change."""

    def observe(self, unix_s: float) -> None:
        """Move the clock forward to a wall time in seconds. Ignore a time that is not later."""
        self._clock._update(int(unix_s * 1e9))

    def raw(self, flags: int) -> bytes:
        return build_uuid(self.producer, self._clock._tick(), flags)

    def text(self, flags: int) -> str:
        clock = self._clock
        # `_new_text` has checked the other digits: the clock is valid with any three digits here.
        value = clock._value + TICK
        try:
            text = f"{self._head}{_THREE_DIGITS[value - self._base]}{self._tails[flags]}"
        except KeyError:
            return self._new_text(clock._tick(), flags)
        clock._value = value
        return text

    def _new_text(self, value: int, flags: int) -> str:
        text = uuid_text(build_uuid(self.producer, value, flags))
        base = value & ~_THREE_DIGITS_MASK
        if base != self._base:
            self._base, self._head, self._tails = base, text[:5], {}
        self._tails[flags] = text[8:]
        return text


def clock_at(unix_ns: int) -> int:
    """Return the clock at a Unix time in nanoseconds. Its sequence bits are zero.

    Clamp times before 1582 or after 5236 to the first or last clock, since bounds may be any time.
    """
    time = unix_ns // 100 + _EPOCH_SHIFT
    # Publishers call this once per message: a comparison takes a quarter of the time of `min` and `max`.
    if 0 <= time <= _TIME_MAX:
        return time << 4
    return 0 if time < 0 else _TIME_MAX << 4


def clock_unix_ns(clock: int) -> int:
    """Return the Unix time of a clock, in nanoseconds. Drop its sequence bits."""
    return ((clock >> 4) - _EPOCH_SHIFT) * 100


def clock_span(nanoseconds: int) -> int:
    """Convert a duration in nanoseconds to a difference of clocks."""
    return (nanoseconds // 100) << 4


AGE_STEPS: Final = 24
"""Least number of checkpoints without a message of a producer after which it is forgotten."""


def checkpoint_clock(acks: Iterable[int], now_ns: int, horizon: int) -> int:
    """Return the time of a checkpoint of a journal: the clock of its newest acknowledgement.

    Leave out a clock more than ``horizon`` after the Unix time ``now_ns``: a machine whose clock is years
    ahead must not make other producers look old. Return 0 if no clock remains.
    """
    latest = clock_at(now_ns) + horizon
    return max((clock for clock in acks if clock <= latest), default=0)


def new_producer_id(entropy: Entropy) -> ProducerId:
    """Return a random producer. The multicast bit is set, so that no network card has this address."""
    return ((entropy.getrandbits(48)) | (1 << 40)).to_bytes(PRODUCER_BYTES, "big")


def other_producer(producer: ProducerId) -> ProducerId:
    """Return a second producer, which differs in one bit, for the publisher of ``producer``."""
    return bytes((producer[0] ^ 0x02, *producer[1:]))


def flags_text(flags: int) -> str:
    return _FLAG_NAMES.get(flags) or f"Flags({flags:#x})"


def build_uuid(producer: ProducerId, clock: int, flags: int) -> bytes:
    """Return the 16 bytes of a UUID. Raise `Invalid` if a part does not fit its bits."""
    if not 0 <= flags <= FLAGS_MAX:
        raise Invalid(f"invalid flags ({flags:#x}; expected at most {FLAGS_MAX:#x})", path="flags")
    if len(producer) != PRODUCER_BYTES:
        raise Invalid(f"invalid producer length ({len(producer)}; expected 6)", path="producer")
    if not 0 <= clock <= CLOCK_MAX:
        raise Invalid(f"invalid clock ({clock:#x}; expected 64 bits)", path="clock")
    high = (
        ((clock >> 4) & 0xFFFFFFFF) << 32 | ((clock >> 36) & 0xFFFF) << 16 | 0x1000 | (clock >> 52)
    )
    low = 0x8000 | (clock & 0xF) << 10 | flags
    return high.to_bytes(8, "big") + low.to_bytes(2, "big") + producer


_NO_UUID: Final = ParsedUuid(NIL_PRODUCER, 0, OUTSIDE_TXN)
_FOREIGN: Final = ParsedUuid(NIL_PRODUCER, 0, FOREIGN_UUID)


def parse_uuid(uuid: bytes) -> ParsedUuid:
    """Return the parts of a UUID. For a UUID that no publisher of Gazette made, the flags are `FOREIGN_UUID`.

    All parts of the nil UUID are zero. Raise `Invalid` if ``uuid`` is not 16 bytes long.
    """
    if len(uuid) != UUID_BYTES:
        raise Invalid(f"invalid length of UUID ({len(uuid)}; expected {UUID_BYTES})", path="uuid")
    high = int.from_bytes(uuid[:8], "big")
    low = int.from_bytes(uuid[8:10], "big")
    if high & _VERSION_MASK != _VERSION or low >> 14 != _VARIANT:
        return _FOREIGN if any(uuid) else _NO_UUID
    clock = (
        (high & 0xFFF) << 52  # without the version, which is no part of the clock
        | ((high >> 16) & 0xFFFF) << 36
        | (high >> 32) << 4
        | (low >> 10) & 0xF
    )
    return ParsedUuid(bytes(uuid[10:]), clock, low & FLAGS_MAX)


def is_ours(uuid: bytes) -> bool:
    """Return True for the nil UUID, and for a UUID with flags that publishers write."""
    return parse_uuid(uuid).flags <= ACK_TXN


def uuid_text(uuid: bytes) -> str:
    """Return the canonical text of a UUID: lower case, 8-4-4-4-12."""
    digits = uuid.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def parse_text(text: str) -> bytes:
    """Return the 16 bytes of a UUID's text.

    Accept the forms of Go's ``uuid.Parse``: canonical, with the prefix ``urn:uuid:``, in braces,
    and 32 digits without dashes. Raise `Invalid` for any other text.
    """
    digits = text
    if len(text) == _TEXT_CHARS + 9 and text[:9].lower() == "urn:uuid:":
        digits = text[9:]
    elif len(text) == _TEXT_CHARS + 2 and text[0] == "{" and text[-1] == "}":
        digits = text[1:-1]
    if _CANONICAL.fullmatch(digits) is None and _BARE.fullmatch(text) is None:
        raise Invalid(f"invalid UUID ({text[:64]!r})", path="uuid", hint=ANOTHER_PLACE)
    return bytes.fromhex(digits.replace("-", ""))


def texts_to_bytes(texts: Sequence[str]) -> bytes:
    """Return the concatenated bytes of many texts. An empty text is the nil UUID.

    Raise `Invalid`, which does not say the index, if a text is not a UUID.
    """
    count = len(texts)
    joined = ",".join(texts)
    commas = "," * (count - 1)
    # If the joined texts have commas only where UUIDs end, each text has as many characters as a UUID.
    if (
        len(joined) == count * _TEXT_STEP - 1
        and joined[_TEXT_CHARS::_TEXT_STEP] == commas
        and joined.count(",") == count - 1
    ):
        dashes = "-" * count
        if all(joined[position::_TEXT_STEP] == dashes for position in _DASHES):
            try:
                parsed = unhexlify(joined.encode().translate(None, b"-,"))
            except ValueError:
                parsed = b""
            # The result is too short if dashes stand in place of digits.
            if len(parsed) == count * UUID_BYTES:
                return parsed
    return b"".join([parse_text(text) if text else NIL_UUID for text in texts])


class _Producers(dict[int, ProducerId]):
    """Producers by the number of their bytes. Each is made once."""

    def __missing__(self, number: int) -> ProducerId:
        self[number] = producer = number.to_bytes(PRODUCER_BYTES, "big")
        return producer


def parse_columns(uuids: bytes) -> UuidColumns:
    """Parse each 16 bytes of ``uuids`` as `parse_uuid` does, into columns. For at least `_COLUMNS_MIN` UUIDs,
    equal producers are the same object, and so are fast to compare."""
    if len(uuids) < _COLUMNS_MIN * UUID_BYTES:
        parsed = [
            parse_uuid(uuids[pos : pos + UUID_BYTES]) for pos in range(0, len(uuids), UUID_BYTES)
        ]
        few_flags = [uuid[2] for uuid in parsed]
        return UuidColumns(
            [uuid[0] for uuid in parsed],
            [uuid[1] for uuid in parsed],
            few_flags,
            has_foreign=FOREIGN_UUID in few_flags,
        )
    producers, clocks, flags = parse_arrays(uuids)
    if bool((producers == producers[0]).all()):
        names = [int(producers[0]).to_bytes(PRODUCER_BYTES, "big")] * len(producers)
        rising = clocks[0] and (clocks[1:] > clocks[:-1]).all()
        is_run = bool(rising and not flags.any())
        has_foreign = not rising and FOREIGN_UUID in flags  # Foreign UUIDs all have the clock 0.
    else:
        names = list(map(_Producers().__getitem__, producers.tolist()))
        is_run, has_foreign = False, FOREIGN_UUID in flags
    return UuidColumns(names, clocks.tolist(), flags.tolist(), is_run, has_foreign)


def parse_arrays(uuids: bytes) -> UuidArrays:
    """Parse each 16 bytes of ``uuids`` as `parse_uuid` does, into arrays."""
    words = np.frombuffer(uuids, dtype=">u8").astype(np.uint64)
    high, low = words[0::2], words[1::2]
    u64 = np.uint64
    clocks = (
        ((high & u64(0xFFF)) << u64(52))
        | (((high >> u64(16)) & u64(0xFFFF)) << u64(36))
        | ((high >> u64(32)) << u64(4))
        | ((low >> u64(58)) & u64(0xF))
    )
    flags = (low >> u64(48)) & u64(FLAGS_MAX)
    producers = low & u64((1 << 48) - 1)
    ours = (high & u64(_VERSION_MASK) == u64(_VERSION)) & (low >> u64(62) == u64(_VARIANT))
    if not ours.all():
        others = ~ours
        producers[others] = clocks[others] = 0
        flags[others] = np.where(high[others] | low[others], u64(FOREIGN_UUID), u64(OUTSIDE_TXN))
    return UuidArrays(producers, clocks, flags)


match_published: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-[89ab][048c]0[012]-[0-9a-f]{12}"
).fullmatch
"""Matches the UUID texts that publishers write: version 1, our variant, known flags."""


class UuidForm(ABC):
    """The representation of a UUID in a type of message: text in JSON, 16 bytes in Protobuf."""

    @abstractmethod
    def join(self, values: list[Any]) -> bytes:
        """Return the joined bytes of the UUIDs in ``values``; an empty or absent value is the nil UUID. Raise
        `Invalid` for a malformed value."""

    def read_all(self, get: Callable[[Any], Any], messages: Iterable[Any]) -> bytes:
        """Return the joined bytes of the values that ``get`` reads from messages: see `join`."""
        return self.join(list(map(get, messages)))

    @abstractmethod
    def of_bytes(self, uuid: bytes) -> Any:
        """Return the value to assign to the attribute."""

    @abstractmethod
    def mint(self, mint: UuidMint, flags: int) -> Any:
        """Return the value of a new UUID."""

    @abstractmethod
    def is_free(self, value: Any) -> bool:
        """Return True if a publisher may replace a value: it is empty, or a publisher wrote it."""


class TextForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        try:
            return texts_to_bytes(values)
        except TypeError:
            return texts_to_bytes([_text_of(value) for value in values])

    def of_bytes(self, uuid: bytes) -> str:
        return uuid_text(uuid)

    def mint(self, mint: UuidMint, flags: int) -> str:
        return mint.text(flags)

    def is_free(self, value: Any) -> bool:
        if not isinstance(value, str):
            return value is None
        if not value or match_published(value):
            return True
        try:
            return is_ours(parse_text(value))
        except Invalid:
            return False


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise Invalid(f"{str(value)[:64]} is not the text of a UUID", path="uuid", hint=ANOTHER_PLACE)


class ObjectForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        try:
            return b"".join([value.bytes if value is not None else NIL_UUID for value in values])
        except (AttributeError, TypeError):
            other = next(value for value in values if not isinstance(value, UUID | None))
        raise Invalid(f"{str(other)[:64]!r} is not a UUID", path="uuid", hint=ANOTHER_PLACE)

    def of_bytes(self, uuid: bytes) -> UUID:
        return UUID(bytes=uuid)

    def mint(self, mint: UuidMint, flags: int) -> UUID:
        return UUID(bytes=mint.raw(flags))

    def is_free(self, value: Any) -> bool:
        return value is None or (isinstance(value, UUID) and is_ours(value.bytes))


class BytesForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        values = [value or NIL_UUID for value in values]
        if values and set(map(len, values)) != {UUID_BYTES}:
            raise Invalid(
                f"invalid length of UUID (expected {UUID_BYTES} bytes)",
                path="uuid",
                hint=ANOTHER_PLACE,
            )
        return b"".join(values)

    def of_bytes(self, uuid: bytes) -> bytes:
        return uuid

    def mint(self, mint: UuidMint, flags: int) -> bytes:
        return mint.raw(flags)

    def is_free(self, value: Any) -> bool:
        return not value or (
            isinstance(value, bytes) and len(value) == UUID_BYTES and is_ours(value)
        )
