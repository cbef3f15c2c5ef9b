"""Without descriptors a sealed file is not read, and not called damaged."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from rollbook.store import Event, Store
from rollbook.store.errors import CorruptionError, ShortageError
from rollbook.store.sealed import parquet
from rollbook.store.sealed.seal import closed_segments, seal_segments
from rollbook.store.sealed.unit import TURNS, current_units
from rollbook.store.settings import AppendSettings, SealSettings


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EMFILE, ShortageError), (errno.ENOMEM, ShortageError), (errno.EIO, CorruptionError)],
)
def test_what_is_short_is_said(
    store: Store, story: dict[str, list[Event]], monkeypatch: pytest.MonkeyPatch, number: int, kind: type
) -> None:
    """What comes back by itself is told from what does not."""
    lane, events = next(iter(story.items()))
    with store.writer(lane, AppendSettings(segment_bytes=1)) as writer:
        for event in events:
            writer.append([event]).result(30)
    seal_segments(store.path, lane, closed_segments(store.path, lane), SealSettings())
    [unit, *_] = current_units(store.path, lane)

    def fails(*_: Any) -> Any:
        raise OSError(number, "it is said")

    monkeypatch.setattr(parquet, "place", fails)
    with pytest.raises(kind):
        parquet.read_file(store.path, unit, TURNS)
