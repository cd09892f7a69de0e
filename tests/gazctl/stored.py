"""Fragments that are in a store before any broker looks: a journal with a past."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from gazette.protocol.fragment import Fragment
from gazette.testing.broker import STORE, BrokerFixture


def path_of(broker: BrokerFixture, fragment: Fragment) -> Path:
    return broker.file_root / "fragments" / fragment.content_path()


def store(
    broker: BrokerFixture,
    journal: str,
    content: bytes,
    *,
    begin: int,
    mod_time: int,
    postfix: str = "",
) -> Fragment:
    """Store a fragment as if it was persisted at a time."""
    fragment = Fragment(
        journal,
        begin,
        begin + len(content),
        hashlib.sha1(content).digest(),
        backing_store=STORE,
        mod_time=mod_time,
        path_postfix=postfix,
    )
    path = path_of(broker, fragment)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (mod_time, mod_time))
    return fragment


def stored(broker: BrokerFixture) -> set[str]:
    """Return the paths of all fragments, without those that are being persisted."""
    root = broker.file_root / "fragments"
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and ".test" not in path.parts and not path.name.startswith(".")
    }
