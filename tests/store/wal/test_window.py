"""The window of event ids: what it forgot is searched for, what it never saw is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollbook.store.wal.framer import EventWindow


def _window(log: dict[str, int], size: int) -> tuple[EventWindow, list[str]]:
    searched: list[str] = []

    def search(event_id: str) -> int | None:
        searched.append(event_id)
        return log.get(event_id)

    return EventWindow(search, size), searched


@given(
    ids=st.lists(st.text("abcdef", min_size=1, max_size=2), unique=True, max_size=30), size=st.integers(1, 8)
)
def test_every_id_is_found_once_it_is_held(ids: list[str], size: int) -> None:
    """Whatever the order of the ids, and however few are remembered, the window says what the log holds."""
    log: dict[str, int] = {}
    window, _ = _window(log, size)
    window.preload([], complete=True)
    for event_id in ids:
        assert window.find(event_id) is None
        log[event_id] = len(log)
        window.add({event_id: log[event_id]})
    assert [window.find(event_id) for event_id in ids] == list(range(len(ids)))


@given(
    jitter=st.lists(st.integers(0, 9), min_size=80, max_size=80),
    known=st.integers(50, 80),
    size=st.integers(40, 49),
)
def test_a_window_over_the_newest_events(jitter: list[int], known: int, size: int) -> None:
    """A lane opened anew finds every id, if ids rise but for a disorder of less than half the window."""
    ids = [f"{i + late:03}-{i:03}" for i, late in enumerate(jitter)]
    log = {event_id: seq for seq, event_id in enumerate(ids[:known])}
    window, _ = _window(log, size)
    window.preload(list(log.items())[-size:], complete=False)
    for event_id in ids[known:]:
        assert window.find(event_id) is None
        log[event_id] = len(log)
        window.add({event_id: log[event_id]})
    assert [window.find(event_id) for event_id in ids] == list(range(80))


def test_rising_ids_are_never_searched_for() -> None:
    """Ids made in order of time cost no look into the log, new ones and remembered ones."""
    window, searched = _window({}, 100)
    for i in range(1000):
        assert window.find(f"{i:04}") is None
        window.add({f"{i:04}": i})
    assert [window.find(f"{i:04}") for i in range(900, 1000)] == list(range(900, 1000))
    assert searched == []
    assert window.find("0100") is None
    assert searched == ["0100"]
