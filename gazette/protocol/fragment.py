"""Fragments of a journal: their span, digest, name, and blob store."""

from __future__ import annotations

import posixpath
import re
import struct
import sys
from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from gazette.errors import Invalid
from gazette.protocol.ids import (
    NAME_BYTES_MAX,
    JournalName,
    Offset,
    validate_journal_name,
    validate_path_component,
)
from gazette.protocol.pb import broker_pb2
from gazette.protocol.text.validation import within

ZERO_SUM: Final = bytes(20)
"""Sum of a fragment without content. This is not the SHA-1 of an empty string."""

_OFFSET_MAX: Final = (1 << 63) - 1
SUM: Final = struct.Struct(">QQI")
"""Layout of a sum's 20 bytes: the three integers that are its parts in the protocol."""
_HEX = re.compile(r"[0-9a-fA-F]*")
_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_HOST = re.compile(r"(?:[^\[\]:%]*|\[[0-9a-fA-F:.]+\])(?::[0-9]*)?")
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_FSSPEC = re.compile(r"fsspec\+.+")
_HEX_INT = re.compile(r"\+?[0-9a-fA-F]+")


class Codec(IntEnum):
    """Compression of a fragment's bytes in a blob store."""

    INVALID = 0
    """Not set. Permitted only in partial specifications."""
    NONE = 1
    GZIP = 2
    ZSTANDARD = 3
    SNAPPY = 4
    GZIP_OFFLOAD_DECOMPRESSION = 5
    """Stored as gzip, which the store decompresses on reads."""

    @property
    def extension(self) -> str:
        """File name extension that we write."""
        return _EXTENSIONS[self]

    def validate(self) -> None:
        if self is Codec.INVALID:
            raise Invalid(f"invalid value ({self.name})")

    @classmethod
    def from_pb(cls, value: int) -> Codec:
        """Return the codec of a number. Raise ``Invalid`` for an unknown number."""
        try:
            return cls(value)
        except ValueError:
            raise Invalid(f"invalid value ({value})") from None

    @classmethod
    def from_extension(cls, extension: str) -> Codec:
        """Return the codec of a present or former extension, in any case. Raise ``Invalid`` for others."""
        codec = _CODECS.get(extension.lower())
        if codec is None:
            raise Invalid(f"unrecognized compression extension: {extension}")
        return codec


_EXTENSIONS: Final = {
    Codec.NONE: ".raw",
    Codec.GZIP: ".gz",
    Codec.ZSTANDARD: ".zst",
    Codec.SNAPPY: ".sz",
    Codec.GZIP_OFFLOAD_DECOMPRESSION: "",
}
_BY_NUMBER: Final[dict[int, Codec]] = {codec.value: codec for codec in Codec}
_CODECS: Final = {extension: codec for codec, extension in _EXTENSIONS.items()} | {
    ".gzip": Codec.GZIP,
    ".zstandard": Codec.ZSTANDARD,
    ".snappy": Codec.SNAPPY,
    ".gzod": Codec.GZIP_OFFLOAD_DECOMPRESSION,
}


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous span ``[begin, end)`` of a journal.

    Two fragments are equal only if all fields are. ``sum`` is the SHA-1 of the uncompressed bytes.
    ``mod_time`` is in Unix seconds, and zero for a fragment that is not in a blob store.
    """

    journal: JournalName
    begin: Offset
    end: Offset
    sum: bytes = ZERO_SUM
    codec: Codec = Codec.NONE
    backing_store: str = ""
    mod_time: int = 0
    path_postfix: str = ""

    @property
    def length(self) -> int:
        """Bytes of content."""
        return self.end - self.begin

    def content_name(self) -> str:
        """Return the base name of the fragment in a blob store."""
        return f"{self.begin:016x}-{self.end:016x}-{self.sum.hex()}{self.codec.extension}"

    def content_path(self) -> str:
        """Return the path below the root of a blob store: journal, postfix and content name.

        Raise ``Invalid`` if the path would leave the journal's own directory.
        """
        parts = [part for part in (self.journal, self.path_postfix, self.content_name()) if part]
        path = posixpath.normpath("/".join(parts))
        if not path.startswith(f"{self.journal}/"):
            raise Invalid(f"cannot traverse outside the journal ({path})", path="PathPostfix")
        return path

    @classmethod
    def parse(cls, journal: JournalName, relative_path: str) -> Fragment:
        """Parse the path of a fragment below its journal's directory. Raise ``Invalid`` for a path that is
        not the name of a fragment."""
        postfix, slash, base = relative_path.rpartition("/")
        if slash and postfix in ("", "."):
            raise Invalid(f"wrong Fragment format: {relative_path}")
        dot = base.rfind(".")
        name, extension = (base[:dot], base[dot:]) if dot >= 0 else (base, "")
        fields = name.split("-")
        if len(fields) != 3:
            raise Invalid(f"wrong Fragment format: {name}")
        fragment = cls(
            journal=journal,
            begin=_parse_offset("Begin", fields[0]),
            end=_parse_offset("End", fields[1]),
            sum=_parse_sum(fields[2]),
            codec=Codec.from_extension(extension),
            path_postfix=sys.intern(postfix),  # A million fragments share few postfixes.
        )
        fragment.validate()
        return fragment

    def validate(self) -> None:
        # A listing validates a million fragments: enter `within` only for parts that are rare or wrong.
        try:
            validate_journal_name(self.journal)
        except Invalid as error:
            raise error.within("Journal") from error.__cause__
        if self.begin > self.end:
            raise Invalid(f"expected Begin <= End (have {self.begin}, {self.end})")
        if self.codec is Codec.INVALID:
            with within("CompressionCodec"):
                self.codec.validate()
        if self.path_postfix:
            with within("PathPostfix"):
                validate_path_component(self.path_postfix, 0, NAME_BYTES_MAX)

    def to_pb(self) -> broker_pb2.Fragment:
        part1, part2, part3 = SUM.unpack(self.sum)
        return broker_pb2.Fragment(
            journal=self.journal,
            begin=self.begin,
            end=self.end,
            sum=broker_pb2.SHA1Sum(part1=part1, part2=part2, part3=part3),
            compression_codec=self.codec.value,  # type: ignore[arg-type]
            backing_store=self.backing_store,
            mod_time=self.mod_time,
            path_postfix=self.path_postfix,
        )

    @classmethod
    def from_pb(cls, pb: broker_pb2.Fragment) -> Fragment:
        codec = _BY_NUMBER.get(pb.compression_codec)
        if codec is None:
            with within("CompressionCodec"):
                codec = Codec.from_pb(pb.compression_codec)
        return cls(
            journal=pb.journal,
            begin=pb.begin,
            end=pb.end,
            sum=SUM.pack(pb.sum.part1, pb.sum.part2, pb.sum.part3),
            codec=codec,
            backing_store=pb.backing_store,
            mod_time=pb.mod_time,
            path_postfix=pb.path_postfix,
        )


def _parse_offset(context: str, text: str) -> Offset:
    if _HEX_INT.fullmatch(text) is None:
        raise Invalid(f'parsing "{text}": invalid syntax', path=context)
    offset = int(text, 16)
    if offset > _OFFSET_MAX:
        raise Invalid(f'parsing "{text}": value out of range', path=context)
    return offset


def _parse_sum(text: str) -> bytes:
    if _HEX.fullmatch(text) is None or len(text) % 2:
        raise Invalid(f'parsing "{text}": invalid hexadecimal', path="Sum")
    if len(text) != 2 * len(ZERO_SUM):
        raise Invalid(f"invalid SHA1Sum length: {text}")
    return bytes.fromhex(text)


def parse_url(text: str) -> tuple[SplitResult, str]:
    """Split a URL. Return its parts, and its ``host:port`` without a user. The URL may be relative. Raise
    ``Invalid`` for an invalid URL."""
    if _CONTROL.search(text):
        raise Invalid(f"invalid control character in URL ({text!r})")
    try:
        url = urlsplit(text)
    except ValueError as error:
        raise Invalid(f"{error} ({text})") from error
    host = url.netloc.rpartition("@")[2]
    if _HOST.fullmatch(host) is None:
        raise Invalid(f"invalid host or port ({text})")
    if _BAD_ESCAPE.search(url.path):
        raise Invalid(f"invalid URL escape ({text})")
    return url, host


@dataclass(frozen=True, slots=True)
class FragmentStoreUrl:
    """Root of a blob store: ``s3://bucket/prefix/?query``, ``file:///prefix/`` and others.

    The schemes are those of the protocol, and two of our own. ``memory://name/prefix/`` is a store
    within one process, for tests. ``fsspec+<protocol>://host/prefix/`` is a file system of fsspec.
    ``path`` is unescaped, and ends in ``/``.
    """

    scheme: str
    host: str
    path: str
    query: str = ""

    @classmethod
    def parse(cls, text: str) -> FragmentStoreUrl:
        """Parse the URL of a store. The store itself interprets query arguments.

        Raise ``Invalid`` for an unknown scheme, and for a URL without a part that its scheme needs.
        """
        url, host = parse_url(text)
        if not url.scheme:
            raise Invalid(f"not absolute ({text})")
        if url.scheme in ("s3", "gs", "azure"):
            if not host:
                raise Invalid(f"missing bucket ({text})")
        elif url.scheme == "azure-ad":
            account, _, container = url.path.removeprefix("/").partition("/")
            if not host:
                raise Invalid(f"missing tenant ID ({text})")
            if not account:
                raise Invalid(f"missing storage account ({text})")
            if not container.partition("/")[0]:
                raise Invalid(f"missing storage container ({text})")
        elif url.scheme == "file":
            if host:
                raise Invalid(f"file scheme cannot have host ({text})")
        elif url.scheme != "memory" and not _FSSPEC.fullmatch(url.scheme):
            raise Invalid(
                f"invalid scheme ({url.scheme})",
                hint="Schemes are file, s3, gs, azure, azure-ad, memory and fsspec+NAME: docs/stores.md.",
            )
        return cls(url.scheme, host, _store_path(url.path), url.query)


def _store_path(escaped: str) -> str:
    """Return the unescaped path of a store. Raise ``Invalid`` unless it begins and ends with ``/``, and stays
    within the store."""
    try:
        path = unquote(escaped, errors="strict")
    except UnicodeDecodeError:
        raise Invalid(f"path component is not UTF-8 ({escaped})") from None
    if not (path.startswith("/") and path.endswith("/")):
        raise Invalid(f"path component doesn't end in '/' ({path})")
    if ".." in path.split("/") or "\x00" in path:
        raise Invalid(f"cannot traverse outside the store ({path})")
    return path
