"""A client that breaks off a stream: what was sampled until then is recorded, and never trained."""

from __future__ import annotations

import numpy as np
import pytest
from tests.clients.conftest import Proxy, Run

from rollbook.train.select.samples import samples_of


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_cancelled_stream_aborts_the_turn(api: str, proxy: Proxy, run: Run) -> None:
    """The turn ends as aborted, holds the beginning of the reply, and counts as undelivered."""
    name = proxy.new_name()
    output = run("cancelled.py", api, at=proxy.base(name), ROLLBOOK_QUESTION="Answer slowly, please.")
    trajectory = proxy.trajectory(name, lambda t: all(turn.completed for turn in t.turns.values()))
    [turn] = trajectory.turns.values()
    done = turn.completed
    assert done is not None
    assert done.finish_reason == "abort"
    assert turn.delivered is None
    sampled = proxy.made(trajectory, turn)
    assert 0 < len(done.completion_ids) < len(sampled)
    assert np.array_equal(sampled[: len(done.completion_ids)], done.completion_ids)
    assert output.answer
    assert done.reply["content"].startswith(output.answer)
    assert [int(sample.loss_mask.sum()) for sample in samples_of(trajectory)] == [0]
