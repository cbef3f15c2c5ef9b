"""examples/arithmetic: a program and a class on the same tasks, a GRPO step on each, replayed bit for bit."""

from __future__ import annotations

import ast
import sys

import pytest
from tests.examples.played import EXAMPLES, Played, lines_of_ours, play
from tests.fakes.models.habits import call

from rollbook.store.fold.trajectory import fold
from rollbook.train.select.samples import samples_of

CALLS = [
    call("calc", a=a, op=op, b=b) for a, op, b in ((37, "+", 58), (60, "-", 18), (58, "+", 37), (60, "+", 18))
]
SAYINGS = (*CALLS, "The answer is 95.", "42", "I do not know.")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Both rollouts, and two steps."""
    settings = ["limit=2", 'agent.isolation="session"']
    return play(tmp_path_factory.mktemp("arithmetic"), "arithmetic", ["program", "class"], SAYINGS, *settings)


def test_both_ways_give_the_same_log(played: Played) -> None:
    """Groups of four of each task, exact tokens with their versions, and rewards."""
    outputs = played.said
    for name in ("program", "class"):
        assert (outputs[name]["done"], outputs[name]["rewarded"]) == (8, 8)
        assert outputs[name]["by_status"].keys() <= {"done", "truncated"}
    rows = played.asked("""
        SELECT rollout, t."group", count(*), min(t.fidelity), min(t.min_version)
        FROM launches l JOIN trajectories t USING (trajectory_id) GROUP BY ALL ORDER BY ALL""")
    assert [(row[0], row[1].split(".")[-1]) for row in rows] == [
        (name, task) for name in ("class", "program") for task in ("minus", "plus")
    ]
    assert {row[2:] for row in rows} == {(4, "exact", 0)}
    parts = played.asked("SELECT DISTINCT source FROM rewards ORDER BY 1")
    assert parts == [("agent",), ("brief",), ("correct",)]
    assert played.asked("SELECT count(DISTINCT reward) > 1 FROM trajectories") == [(True,)]


def test_both_ways_call_the_calculator(played: Played) -> None:
    """Its results are what the policy is shown."""
    shown = played.asked("""
        SELECT DISTINCT split_part(trajectory, '.', 1), m ->> 'content'
        FROM (SELECT trajectory, unnest(new_messages::JSON[]) AS m FROM turns) WHERE m ->> 'role' = 'tool'""")
    assert {way for way, _ in shown} == {"program", "class"}
    assert {result for _, result in shown} <= {"95", "42", "78"}


def test_each_component_is_a_reward_to_train_on(played: Played) -> None:
    """By `reward_source`, beside the sum."""
    programs = [t for t in fold(played.log.events()).values() if t.opened.name.startswith("program")]
    for trajectory in programs:
        [[whole], [correct], [brief]] = [
            list(samples_of(trajectory, source)) for source in ("agent", "correct", "brief")
        ]
        assert correct.reward in (0.0, 1.0)
        assert whole.reward == correct.reward + brief.reward
    assert len(programs) == 8


def test_its_steps_replay_bit_for_bit(played: Played) -> None:
    """Two groups each."""
    assert "step 0: bit for bit" in played.replayed
    assert len(played.taken()) == 16


def test_the_program_knows_nothing_of_rollbook() -> None:
    """It is of Python's own library, and no longer than 60 lines."""
    assert lines_of_ours("arithmetic/agent.py") == []
    text = (EXAMPLES / "arithmetic" / "agent.py").read_text()
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name.partition(".")[0] for node in imported for alias in node.names}
    assert names <= sys.stdlib_module_names
    assert len(text.splitlines()) <= 60
