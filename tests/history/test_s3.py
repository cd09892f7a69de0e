"""Histories in a bucket, read without brokers: what is there, and how errors of the bucket are reported."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import pytest

from gazette.blobs.s3.store import S3Store
from gazette.errors import NotAllowed, NotFound, Unavailable
from gazette.history.first_pass import fold_by_threads
from gazette.history.rows import read_rows
from gazette.protocol.fragment import Codec, FragmentStoreUrl
from gazette.testing.stored import write_journal
from tests.backfill.cluster import history
from tests.blobs.s3_endpoint import FaultProxy, store_url

pytest.importorskip("pyspark")

from gazette.history.snapshot_builder import take_snapshot
from gazette.history.spark.source.options import ReadOptions
from gazette.history.spark.source.schema import row_format, table_schema
from tests.facts import is_advised, raises

JOURNAL = "words/part-000"


class Bucket:
    """A journal of several fragments in a bucket, and the same in a directory."""

    def __init__(self, proxy: FaultProxy, root: Path) -> None:
        self.url = store_url(proxy.endpoint, "/fragments/")
        self.directory = f"file://{root}/fragments"
        lines = history(random.Random(4), 200)
        contents = [b"".join(lines[at : at + 40]) for at in range(0, len(lines), 40)]
        fragments = write_journal(root, "file:///fragments/", JOURNAL, contents, Codec.GZIP)
        store = S3Store(FragmentStoreUrl.parse(self.url))
        for fragment in fragments:
            path = fragment.content_path()
            store.put(path, io.BytesIO((root / "fragments" / path).read_bytes()))
        self.paths = [fragment.content_path() for fragment in fragments]

    def rows(self, store: str = "", **options: str) -> list[dict[str, Any]]:
        """Return rows as ``format("gazette")`` reads them with such options."""
        given = {
            "store": store or self.url,
            "journal": JOURNAL,
            "maxPartitionBytes": "1",
            **options,
        }
        parsed = ReadOptions.parse(given)
        with parsed.access.open() as opened:
            snapshot = take_snapshot(opened, parsed.selection)
            format = row_format(parsed, table_schema(parsed)[0], snapshot.shapes)
            folded = fold_by_threads(opened, snapshot, run_bytes=1)
            return [
                row
                for run in folded.runs
                for batch in read_rows(opened, run, format)
                for row in batch.to_pylist()
            ]


@pytest.fixture
def bucket(s3_proxy: FaultProxy, tmp_path: Path) -> Bucket:
    return Bucket(s3_proxy, tmp_path)


def test_rows_are_those_of_a_directory(bucket: Bucket, s3_proxy: FaultProxy) -> None:
    """Through hiccups: an overloaded bucket, a connection that breaks, one that trickles."""
    expected = bucket.rows(bucket.directory)
    assert len(expected) > 50
    assert bucket.rows() == expected
    s3_proxy.fail("GET", "list-type", status=503, code="SlowDown", times=1)
    s3_proxy.fail("GET", os.path.basename(bucket.paths[1]), status=500, code="InternalError")
    s3_proxy.fail("GET", os.path.basename(bucket.paths[2]), truncate=200)
    s3_proxy.fail("GET", os.path.basename(bucket.paths[3]), trickle=100)
    assert bucket.rows(fields="word string") == expected
    assert all(fault.times == 0 for fault in s3_proxy.faults)


def test_errors_of_the_bucket_are_reported(bucket: Bucket, s3_proxy: FaultProxy) -> None:
    # Case: the fields are given, so that the first request is the listing.
    s3_proxy.fail("GET", "list-type", status=403, code="AccessDenied", times=99)
    with pytest.raises(NotAllowed, match="AccessDenied") as raised:
        bucket.rows(fields="word string")
    assert is_advised(raised.value)
    assert "list" in raised.value.hint
    s3_proxy.heal()
    s3_proxy.fail(part=os.path.basename(bucket.paths[2]), status=403, code="AccessDenied", times=99)
    with pytest.raises(NotAllowed, match="AccessDenied"):
        bucket.rows(fields="word string")
    s3_proxy.heal()

    # Case: a fragment is removed between the listing and the reading.
    s3_proxy.fail(part=os.path.basename(bucket.paths[2]), status=404, code="NoSuchKey", times=99)
    with raises(NotFound, "file"):
        bucket.rows(fields="word string")
    s3_proxy.heal()

    # Case: there is no such bucket, or no server answers.
    with pytest.raises(NotAllowed, match="NoSuchBucket"):
        bucket.rows(bucket.url.replace("the-bucket", "another-bucket"), fields="word string")
    s3_proxy.fail("GET", "list-type", status=503, code="SlowDown", times=99)
    with pytest.raises(Unavailable, match="SlowDown"):
        bucket.rows(fields="word string")
