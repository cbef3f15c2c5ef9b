"""Identifiers: UUIDv7, sortable by time and unique across lanes (RFC 9562, section 5.7)."""

from __future__ import annotations

import time

import uuid_utils


def new_id() -> str:
    """A fresh UUIDv7 in its canonical 36-character form."""
    return str(uuid_utils.uuid7())


def now_us() -> int:
    """Wall-clock microseconds since the Unix epoch. Data, never an order."""
    return time.time_ns() // 1000
