"""Names that no store can keep are refused before anything is acknowledged, and only these."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.blobs.file import FileStore
from gazette.blobs.path_limits import check_path, longest_path
from gazette.blobs.registry import BlobSettings, BlobStores
from gazette.errors import Invalid
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.ids import validate_journal_name
from gazette.testing.clock import ManualClock
from tests.facts import raises

COMPONENTS = st.one_of(
    st.text("ab1", min_size=1, max_size=8),
    st.builds(lambda char, count: char * count, st.sampled_from("aé漢"), st.integers(1, 260)),
)
NAMES = st.lists(COMPONENTS, min_size=1, max_size=4).map("/".join)
URLS = st.sampled_from(
    ["file:///", "file:///deep/er/", "file:///?find=a&replace=bbbbbbbb", f"file:///{'p' * 255}/"]
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@settings(max_examples=300)
@given(name=NAMES, text=URLS)
def test_what_is_refused_is_what_a_file_system_refuses(root: Path, name: str, text: str) -> None:
    try:
        validate_journal_name(name)
    except Invalid:
        return
    url, path = FragmentStoreUrl.parse(text), longest_path(name)
    store = FileStore(root, url)
    store.directory.mkdir(parents=True, exist_ok=True)
    try:
        check_path(url, path)
    except Invalid:
        with pytest.raises(Invalid):
            store.put(path, io.BytesIO())
    else:
        store.put(path, io.BytesIO())
        store.remove(path)


@pytest.mark.parametrize("scheme", ["s3://bucket", "gs://bucket", "azure://container"])
def test_keys_of_clouds_have_a_limit(scheme: str) -> None:
    """The prefix of the store counts, and no component has a limit of its own."""
    name = "n" * 512
    check_path(FragmentStoreUrl.parse(f"{scheme}/short/"), longest_path(name))
    with raises(Invalid, path="Name", limit_bytes=1024):
        check_path(FragmentStoreUrl.parse(f"{scheme}/{'p' * 400}/"), longest_path(name))


def test_files_that_stand_for_other_stores_have_limits_of_files(
    clock: ManualClock, tmp_path: Path
) -> None:
    path = longest_path("n" * 300)
    BlobStores(BlobSettings(), clock).check_path("s3://bucket/", path)
    stores = BlobStores(BlobSettings(file_root=tmp_path, file_only=True), clock)
    with raises(Invalid, limit_bytes=255):
        stores.check_path("s3://bucket/", path)
