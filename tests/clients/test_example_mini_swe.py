"""examples/mini-swe: the program that people install, on a repository with a failing test, in a sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.examples.played import CLIENTS, Played, lines_of_ours, play
from tests.fakes.models.habits import call

pytestmark = pytest.mark.timeout(600)

FIX = r"""sed -i 's/"\\W"/"\\W+"/' slugs.py"""
SAYINGS = (
    *(call("bash", command=FIX), call("bash", command="python3 -m unittest -q")),
    *(call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"), "Let me think."),
)


@pytest.fixture(scope="module")
def played(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The rollouts of the one task, and a step."""
    path = f'agent.environment.PATH="{CLIENTS}/bin:{os.environ["PATH"]}"'
    readable = f'agent.readable=["{CLIENTS}"]'
    return play(tmp_path_factory.mktemp("mini-swe"), "mini-swe", ["rollouts"], SAYINGS, path, readable)


def test_the_repositorys_tests_are_the_reward(played: Played) -> None:
    """Half of them passed before."""
    assert played.said["rollouts"]["done"] == 4
    rows = played.asked("""
        SELECT count(*), bool_and(reward IN (0.5, 1)), min(fidelity),
               bool_and(l.isolation ->> 'level' = 'bwrap')
        FROM launches l JOIN trajectories t USING (trajectory_id)""")
    assert rows == [(4, True, "exact", True)]


def test_its_step_replays_bit_for_bit(played: Played) -> None:
    """Of the one group."""
    assert "step 0: bit for bit" in played.replayed
    assert len(played.taken()) == 4


def test_the_repository_is_as_it_was() -> None:
    """Each launch has a copy."""
    assert lines_of_ours("mini-swe/agent.sh") == []
