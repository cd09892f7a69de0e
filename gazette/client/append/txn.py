"""Programs of version 0.1.0 import `AppendTxn` from here."""

from __future__ import annotations

from gazette.client.append.service import AppendTxn as AppendTxn
