"""Times as clients read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def as_time(us: int) -> str:
    """Microseconds since 1970 as an ISO 8601 time."""
    return (_EPOCH + timedelta(microseconds=us)).isoformat()


def as_us(time: datetime) -> int:
    """The other way."""
    return (time - _EPOCH) // timedelta(microseconds=1)
