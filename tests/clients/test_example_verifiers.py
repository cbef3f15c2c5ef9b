"""examples/arithmetic as an environment of verifiers: groups, rewards by name, statuses are ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.examples.played import CLIENTS, EXAMPLES, Played, lines_of_ours, play
from tests.fakes.models.habits import call

pytestmark = pytest.mark.timeout(600)

SAYINGS = (
    *(call("calc", a=37, op="+", b=58), call("calc", a=60, op="-", b=18)),
    *("The answer is 95.", "42", "I do not know."),
)
ENVIRONMENT = CLIENTS / "verifiers"


@pytest.fixture(scope="module")
def played(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The rollouts of two sums, and a step."""
    folder = tmp_path_factory.mktemp("verifiers")
    words = ["sums_env", "--env.agent.harness.id", "sums_env", "--env.agent.runtime.type", "subprocess"]
    settings = [
        f"agent.command={[f'{ENVIRONMENT}/bin/vf-eval', *words]}",
        f'agent.environment.PYTHONPATH="{folder}/examples/arithmetic"',
        f'agent.environment.PATH="{ENVIRONMENT}/bin:{os.environ["PATH"]}"',
        'tasks="range:2"',
    ]
    return play(folder, "arithmetic", ["verifiers"], SAYINGS, *settings)


def test_its_rollouts_are_groups_of_ours(played: Played) -> None:
    """Each is a trajectory that was opened in its group, on one path of exact tokens."""
    assert played.said["verifiers"]["done"] == 8
    rows = played.asked("""
        SELECT t."group", count(*), min(t.fidelity), min(l.status), max(l.status)
        FROM launches l JOIN trajectories t USING (trajectory_id) GROUP BY ALL ORDER BY ALL""")
    assert [row[:3] for row in rows] == [(f"verifiers.0.{task}", 4, "exact") for task in (0, 1)]
    assert played.tool_results() <= {"95", "42"}


def test_its_rewards_keep_their_names_and_weights(played: Played) -> None:
    """The sum is the trajectory's."""
    rows = played.asked("""
        SELECT t.reward, sum(r.reward) FILTER (source = 'correct'), sum(r.reward) FILTER (source = 'brief')
        FROM trajectories t JOIN rewards r USING (trajectory_id) GROUP BY trajectory_id, t.reward""")
    assert len(rows) == 8
    for total, correct, brief in rows:
        assert correct in (0, 1)
        assert brief <= 0
        assert total == pytest.approx(correct + 0.001 * brief)


def test_its_step_replays_bit_for_bit(played: Played) -> None:
    """Of two groups."""
    assert "step 0: bit for bit" in played.replayed
    assert len(played.taken()) == 8


def test_no_line_is_changed() -> None:
    """Neither of the environment nor of its agent."""
    assert lines_of_ours("arithmetic/agent.py") == []
    for file in (EXAMPLES / "arithmetic" / "sums_env").glob("*.py"):
        assert "rollbook" not in file.read_text().lower()
