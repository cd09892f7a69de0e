"""Well-known label names and content types, as the protocol spells them."""

from __future__ import annotations

from typing import Final

CONTENT_TYPE: Final = "content-type"
MESSAGE_TYPE: Final = "app.gazette.dev/message-type"
MESSAGE_SUBTYPE: Final = "app.gazette.dev/message-subtype"
TAG: Final = "app.gazette.dev/tag"
MANAGED_BY: Final = "app.gazette.dev/managed-by"
INSTANCE: Final = "app.gazette.dev/instance"
REGION: Final = "app.gazette.dev/region"

CONTENT_CSV: Final = "text/csv"
CONTENT_JSON_LINES: Final = "application/x-ndjson"
CONTENT_PROTO_FIXED: Final = "application/x-protobuf-fixed"
CONTENT_RECOVERY_LOG: Final = "application/x-gazette-recoverylog"

SINGLE_VALUED: Final = frozenset(
    {CONTENT_TYPE, INSTANCE, MANAGED_BY, MESSAGE_SUBTYPE, MESSAGE_TYPE, REGION}
)
"""Labels that may carry one value only."""

META_NAME: Final = "name"
"""Added when a journal is matched; never stored."""
META_PREFIX: Final = "prefix"
META_SHARD_ID: Final = "id"
"""Added when a shard is matched; never stored."""
