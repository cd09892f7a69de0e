"""The place from which programs of version 0.1.0 import `AppendTxn`."""

from __future__ import annotations

from gazette.client.append.service import AppendTxn as AppendTxn
