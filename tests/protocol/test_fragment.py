"""Fragments, their names in both directions, and the URLs of the stores that hold them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.fragment import ZERO_SUM, Codec, Fragment, FragmentStoreUrl
from gazette.protocol.pb import broker_pb2

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SUM = bytes(range(1, 21))
SUM_HEX = "0102030405060708090a0b0c0d0e0f1011121314"
FRAGMENT = Fragment("a/journal", 1234567890, (1 << 63) - 1, SUM, Codec.GZIP, path_postfix="a=1/b=2")

codecs = st.sampled_from([codec for codec in Codec if codec is not Codec.INVALID])
offsets = st.integers(0, (1 << 63) - 1)
fragments = st.builds(
    lambda span, **fields: Fragment("a/journal", min(span), max(span), **fields),
    st.tuples(offsets, offsets),
    sum=st.binary(min_size=20, max_size=20),
    codec=codecs,
    backing_store=st.sampled_from(["", "s3://bucket/prefix/"]),
    mod_time=st.integers(0, 1 << 40),
    path_postfix=st.sampled_from(["", "a=1", "date=2019-11-19/hour=22"]),
)


@pytest.mark.parametrize(
    ("codec", "extension"),
    [
        (Codec.NONE, ".raw"),
        (Codec.GZIP, ".gz"),
        (Codec.ZSTANDARD, ".zst"),
        (Codec.SNAPPY, ".sz"),
        (Codec.GZIP_OFFLOAD_DECOMPRESSION, ""),
    ],
)
def test_names_by_codec(codec: Codec, extension: str) -> None:
    fragment = replace(FRAGMENT, codec=codec)
    name = f"00000000499602d2-7fffffffffffffff-{SUM_HEX}{extension}"
    assert fragment.content_name() == name
    assert fragment.content_path() == f"a/journal/a=1/b=2/{name}"
    assert Fragment.parse("a/journal", f"a=1/b=2/{name}") == fragment
    assert Fragment.parse("a/journal", name) == replace(fragment, path_postfix="")


@pytest.mark.parametrize(
    ("extension", "codec"),
    [
        (".raw", Codec.NONE),
        (".GZ", Codec.GZIP),
        (".gzip", Codec.GZIP),
        (".zstandard", Codec.ZSTANDARD),
        (".Snappy", Codec.SNAPPY),
        (".gzod", Codec.GZIP_OFFLOAD_DECOMPRESSION),
        ("", Codec.GZIP_OFFLOAD_DECOMPRESSION),
    ],
)
def test_extensions_that_are_read(extension: str, codec: Codec) -> None:
    assert Codec.from_extension(extension) is codec


@PROPERTY
@given(fragments)
def test_names_and_wire_forms_round_trip(fragment: Fragment) -> None:
    fragment.validate()
    path = fragment.content_path().removeprefix("a/journal/")
    assert Fragment.parse("a/journal", path) == replace(fragment, backing_store="", mod_time=0)
    wire = fragment.to_pb().SerializeToString()
    assert Fragment.from_pb(broker_pb2.Fragment.FromString(wire)) == fragment


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "wrong Fragment format: "),
        ("00-01", "wrong Fragment format: 00-01"),
        (f"00-01-02-{SUM_HEX}", f"wrong Fragment format: 00-01-02-{SUM_HEX}"),
        (f".partial-00-01-{SUM_HEX}.gz1234", f"wrong Fragment format: .partial-00-01-{SUM_HEX}"),
        (f"x-01-{SUM_HEX}.gz", 'Begin: parsing "x": invalid syntax'),
        (f"0x0-01-{SUM_HEX}.gz", 'Begin: parsing "0x0": invalid syntax'),
        (f"0_0-01-{SUM_HEX}.gz", 'Begin: parsing "0_0": invalid syntax'),
        (f"00- 1-{SUM_HEX}.gz", 'End: parsing " 1": invalid syntax'),
        (f"00-{'8' + 15 * '0'}-{SUM_HEX}.gz", "End: parsing "),
        ("00-01-zz.gz", 'Sum: parsing "zz": invalid hexadecimal'),
        (f"00-01-{SUM_HEX[1:]}.gz", "Sum: parsing "),
        ("00-01-0102.gz", "invalid SHA1Sum length: 0102"),
        (f"00-01-{SUM_HEX}.xyz", "unrecognized compression extension: .xyz"),
        (f"02-01-{SUM_HEX}.gz", "expected Begin <= End (have 2, 1)"),
        (f"a//b/00-01-{SUM_HEX}.gz", "PathPostfix: must be a clean path (a//b)"),
        (f"../00-01-{SUM_HEX}.gz", "PathPostfix: cannot traverse outside its parent (..)"),
        (f"../x/00-01-{SUM_HEX}.gz", "PathPostfix: cannot traverse outside its parent (../x)"),
        (f"/00-01-{SUM_HEX}.gz", "wrong Fragment format: /00"),
        (f"./00-01-{SUM_HEX}.gz", "wrong Fragment format: ./00"),
        (f"a b/00-01-{SUM_HEX}.gz", "PathPostfix: not a valid token (a b)"),
    ],
)
def test_paths_that_are_not_those_of_fragments(path: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        Fragment.parse("a/journal", path)
    assert str(caught.value).startswith(problem)


def test_offsets_of_any_width_are_read() -> None:
    fragment = Fragment.parse("a/journal", f"+1-FF-{SUM_HEX.upper()}.gz")
    assert (fragment.begin, fragment.end, fragment.sum) == (1, 255, SUM)


@pytest.mark.parametrize(
    ("fragment", "problem"),
    [
        (replace(FRAGMENT, journal="x"), "Journal: invalid length"),
        (replace(FRAGMENT, begin=5, end=4), "expected Begin <= End (have 5, 4)"),
        (replace(FRAGMENT, codec=Codec.INVALID), "CompressionCodec: invalid value (INVALID)"),
        (replace(FRAGMENT, path_postfix="/a"), "PathPostfix: cannot begin with '/' (/a)"),
        (replace(FRAGMENT, path_postfix="x" * 513), "PathPostfix: invalid length (513"),
    ],
)
def test_fragments_that_are_refused(fragment: Fragment, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        fragment.validate()
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("postfix", ["..", "../other", "../../etc", "a/../.."])
def test_a_content_path_never_leaves_its_journal(postfix: str) -> None:
    with pytest.raises(Invalid, match="cannot traverse outside the journal"):
        replace(FRAGMENT, path_postfix=postfix).content_path()


def test_the_sum_is_three_big_endian_numbers_and_always_on_the_wire() -> None:
    pb = FRAGMENT.to_pb()
    assert pb.sum.part1 == 0x0102030405060708
    assert pb.sum.part2 == 0x090A0B0C0D0E0F10
    assert pb.sum.part3 == 0x11121314
    empty = Fragment("a/journal", 0, 0)
    assert empty.sum == ZERO_SUM
    assert empty.length == 0
    assert empty.to_pb().HasField("sum")


def test_a_codec_from_the_future_is_refused() -> None:
    pb = FRAGMENT.to_pb()
    pb.compression_codec = 77  # type: ignore[assignment]
    with pytest.raises(Invalid, match=r"^CompressionCodec: invalid value \(77\)$"):
        Fragment.from_pb(pb)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        (
            "s3://bucket/pre/fix/?find=a&replace=b",
            ("s3", "bucket", "/pre/fix/", "find=a&replace=b"),
        ),
        ("gs://bucket/", ("gs", "bucket", "/", "")),
        ("azure://container/prefix/", ("azure", "container", "/prefix/", "")),
        ("azure-ad://tenant/account/container/", ("azure-ad", "tenant", "/account/container/", "")),
        ("file:///prefix/", ("file", "", "/prefix/", "")),
        ("memory://name/", ("memory", "name", "/", "")),
        ("s3://bucket/with%20space/", ("s3", "bucket", "/with space/", "")),
    ],
)
def test_store_urls(text: str, url: tuple[str, str, str, str]) -> None:
    parsed = FragmentStoreUrl.parse(text)
    assert (parsed.scheme, parsed.host, parsed.path, parsed.query) == url


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not absolute ()"),
        ("/path/", "not absolute (/path/)"),
        ("s3:///prefix/", "missing bucket (s3:///prefix/)"),
        ("s3://user@/prefix/", "missing bucket (s3://user@/prefix/)"),
        ("azure-ad:///account/container/", "missing tenant ID (azure-ad:///account/container/)"),
        ("azure-ad://tenant/", "missing storage account (azure-ad://tenant/)"),
        ("azure-ad://tenant", "missing storage account (azure-ad://tenant)"),
        ("azure-ad://tenant/account/", "missing storage container (azure-ad://tenant/account/)"),
        ("azure-ad://tenant/account", "missing storage container (azure-ad://tenant/account)"),
        ("file://host/prefix/", "file scheme cannot have host (file://host/prefix/)"),
        ("gcs://bucket/", "invalid scheme (gcs)"),
        ("s3://bucket/prefix", "path component doesn't end in '/' (/prefix)"),
        ("s3://bucket", "path component doesn't end in '/' ()"),
        ("file:prefix/", "path component doesn't end in '/' (prefix/)"),
        ("file:///../../etc/", "cannot traverse outside the store (/../../etc/)"),
        ("file:///a/%2e%2e/b/", "cannot traverse outside the store (/a/../b/)"),
        ("file:///a%00/", "cannot traverse outside the store (/a\\x00/)"),
        ("s3://bucket/%zz/", "invalid URL escape (s3://bucket/%zz/)"),
        ("s3://buc ket/", "invalid control character in URL ('s3://buc ket/')"),
        ("s3://bucket:port/", "invalid host or port (s3://bucket:port/)"),
        ("s3://[bucket/", "Invalid IPv6 URL (s3://[bucket/)"),
        ("s3://bucket/%ff/", "path component is not UTF-8 (/%ff/)"),
    ],
)
def test_store_urls_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        FragmentStoreUrl.parse(text)
    assert str(caught.value) == problem
