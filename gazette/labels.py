"""Well-known names of labels, and content types, in the spelling of the protocol."""

from __future__ import annotations

from typing import Final

CONTENT_TYPE: Final = "content-type"
"""Label of a journal with the framing of its messages."""
MESSAGE_TYPE: Final = "app.gazette.dev/message-type"
"""Label of a journal with the name of its messages' type."""
MESSAGE_KEY: Final = "app.gazette.dev/message-key"
"""Label of a journal with the field that is the key of messages, or ``function=`` and a function's name."""
MESSAGE_KEY_TYPE: Final = "app.gazette.dev/message-key-type"
"""Label of a journal with the name of the encoding of keys: see `gazette.message.keys`."""
MESSAGE_PARTITIONS: Final = "app.gazette.dev/message-partitions"
"""Label of a partition with the total number of partitions."""
MESSAGE_TIME: Final = "app.gazette.dev/message-time"
"""Label of a journal with the field that is the time of messages, then ``/`` and the field's unit."""
DECLARED_BY: Final = "app.gazette.dev/declared-by"
"""Label of a journal that names an application, and another label that this application has declared, as in
``shop/message-time``. A journal may have several. `apply` removes a label that is not declared any more.
"""
MESSAGE_SUBTYPE: Final = "app.gazette.dev/message-subtype"
MESSAGE_UUID: Final = "app.gazette.dev/message-uuid"
"""Label of a journal with the place of the UUID in messages: names joined by dots; ``uuid`` by default."""
TAG: Final = "app.gazette.dev/tag"
MANAGED_BY: Final = "app.gazette.dev/managed-by"
SOURCE_RESTART: Final = "app.gazette.dev/source-restart"
"""Label of a shard with the offset at which it begins in a source that was deleted and created again."""
INSTANCE: Final = "app.gazette.dev/instance"
REGION: Final = "app.gazette.dev/region"
FORMER_POSTFIX: Final = "app.gazette.dev/former-postfix-template"
"""Label of a journal with a former path postfix template, percent-encoded. A journal may have several."""
FOREIGN_FRAGMENTS: Final = "app.gazette.dev/foreign-fragments"
"""Label of a journal with a directory below the journal, percent-encoded, whose fragments do not belong to
it. A journal may have several such labels. ``.`` stands for all directories that no template explains.
"""

CONTENT_CSV: Final = "text/csv"
"""Content type: a row of CSV for each message."""
CONTENT_JSON_LINES: Final = "application/x-ndjson"
"""Content type: a line of JSON for each message."""
CONTENT_PROTO_FIXED: Final = "application/x-protobuf-fixed"
"""Content type: protobuf messages, each after its length."""
CONTENT_RECOVERY_LOG: Final = "application/x-gazette-recoverylog"
"""Content type: operations on the files of a shard."""

SINGLE_VALUED: Final = frozenset(
    {
        CONTENT_TYPE,
        INSTANCE,
        MANAGED_BY,
        MESSAGE_KEY,
        MESSAGE_KEY_TYPE,
        MESSAGE_PARTITIONS,
        MESSAGE_SUBTYPE,
        MESSAGE_TIME,
        MESSAGE_TYPE,
        MESSAGE_UUID,
        REGION,
    }
)
"""Labels that may have one value only."""

META_NAME: Final = "name"
"""Label that a selector sees on each journal. No journal stores it."""
META_PREFIX: Final = "prefix"
META_SHARD_ID: Final = "id"
"""Label that a selector sees on each shard. No shard stores it."""
