"""kill -9 of the proxy at any moment, with a hostile client beside honest ones."""

from __future__ import annotations

import pytest

from rollbook.bench.hostile.attack import TOKENS
from rollbook.bench.hostile.kills import kill_often
from rollbook.bench.hostile.stage import Stage

KILLS = 12


@pytest.mark.timeout(200)
def test_what_is_answered_is_there(stage: Stage) -> None:
    """What was acknowledged before any kill is in the log, whole, unchanged; none leaves a traceback."""
    kills: list[None] = []
    result = kill_often(stage, TOKENS, KILLS, seed=1, on_kill=lambda: kills.append(None))
    assert (result.kills, len(kills)) == (KILLS, KILLS)
    assert result.held.acks > 100
    assert (result.held.lost, result.held.changed, result.held.damage) == ([], [], [])
    assert (result.wrong, result.tally.wrong_200, result.tally.errors_500) == ([], [], [])
    assert result.tracebacks == []
    assert result.tally.answers.total() > 100
