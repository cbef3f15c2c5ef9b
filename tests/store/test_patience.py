"""When somebody who waits says so, and in which words."""

from __future__ import annotations

from rollbook.store.patience import Patience, Waiting, waits


def test_a_wait_is_said_after_ten_seconds_and_each_minute() -> None:
    """Not sooner, and not more often."""
    patience = Patience(100.0)
    due = [now for now in range(100, 260) if patience.due(float(now))]
    assert due == [110, 170, 230]
    quick = Patience(0.0, after_s=1.0, again_s=2.0)
    assert [now for now in range(8) if quick.due(float(now))] == [1, 3, 5, 7]


def test_many_are_said_together() -> None:
    """How many have waited for ten seconds; one after the other, none of which waits long, is no wait."""
    waiting = Waiting()
    for now in range(60):
        waiting.begin(now, now)
        assert waiting.due(now) == 0
        assert not waiting.end(now)
    for who in "abc":
        waiting.begin(who, 100.0)
    waiting.begin("d", 105.0)
    assert [waiting.due(now) for now in (109.0, 110.0, 115.0, 169.0, 170.0)] == [0, 3, 0, 0, 4]
    assert waiting.oldest == 100.0
    assert [waiting.end(who) for who in "abcd"] == [False, False, False, True]


def test_the_words() -> None:
    """For what, for how long, and until when."""
    assert waits("3 of 8 groups", 12.4, 30.0, 0.0) == (
        "waiting for 3 of 8 groups (for 12 s, until 1970-01-01T00:00:30Z at most)"
    )
    assert waits("room", 12.4, None, 0.0) == "waiting for room (for 12 s, as long as it takes)"
