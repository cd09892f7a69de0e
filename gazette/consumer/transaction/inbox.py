"""The place from which programs of version 0.1.0 import `Feed`."""

from __future__ import annotations

from gazette.consumer.inbox import Feed as Feed
