"""Fixtures of the tests of histories: a bucket."""

from tests.blobs.conftest import s3_proxy as s3_proxy
from tests.blobs.conftest import s3_target as s3_target
