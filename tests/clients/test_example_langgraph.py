"""examples/langgraph: an agent of LangGraph, not a line of it changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.examples.played import CLIENTS, Played, lines_of_ours, play
from tests.fakes.models.habits import call

pytestmark = pytest.mark.timeout(600)

SAYINGS = (
    *(call("price", item="lamp"), call("stock", item="chair"), call("price", item="sofa")),
    *("They cost 120.", "0", "I do not know."),
)


@pytest.fixture(scope="module")
def played(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The rollouts of one task, and a step."""
    command = f'["{CLIENTS}/bin/python", "examples/langgraph/agent.py", "{{prompt}}"]'
    settings = ["limit=1", 'agent.isolation="session"', f"agent.command={command}"]
    return play(tmp_path_factory.mktemp("langgraph"), "langgraph", ["rollouts"], SAYINGS, *settings)


def test_its_tools_are_called_and_its_answers_scored(played: Played) -> None:
    """A conversation is one path, with what the tools gave."""
    progress = played.said["rollouts"]
    assert progress["done"] == 4
    rows = played.asked("""
        SELECT count(DISTINCT trajectory), count(DISTINCT "group"), min(fidelity), bool_and(reward IN (0, 1))
        FROM trajectories""")
    assert rows == [(4, 1, "exact", True)]
    assert played.tool_results() <= {"40", "0", "There is no such item."}


def test_its_step_replays_bit_for_bit(played: Played) -> None:
    """Of the one group."""
    assert "step 0: bit for bit" in played.replayed
    assert len(played.taken()) == 4


def test_no_line_is_changed() -> None:
    """It knows nothing of Rollbook."""
    assert lines_of_ours("langgraph/agent.py") == []
