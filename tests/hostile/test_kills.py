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
    told: list[None] = []
    found = kill_often(stage, TOKENS, KILLS, seed=1, on_kill=lambda: told.append(None))
    assert (found.kills, len(told)) == (KILLS, KILLS)
    assert found.held.acks > 100
    assert (found.held.lost, found.held.changed, found.held.damage) == ([], [], [])
    assert (found.wrong, found.tally.wrong_200, found.tally.errors_500) == ([], [], [])
    assert found.tracebacks == []
    assert found.tally.answers.total() > 100
