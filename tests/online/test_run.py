"""`rollbook run` with a real engine and agents that are programs, while its parts are killed.

ROLLBOOK_KILLS=100 kills that often, and ROLLBOOK_SEED makes a failed run again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.fakes.processes.online_run import Run

from rollbook.replay.stretch.stretch import history_of, prove_stretch
from rollbook.store.events import VOID, EvalFinished, LaunchStarted
from rollbook.testing.ledger import fold_ledger

pytestmark = [pytest.mark.torch, pytest.mark.crashes]
KILLS = int(os.environ.get("ROLLBOOK_KILLS", "6"))
SEED = int(os.environ.get("ROLLBOOK_SEED", random.SystemRandom().getrandbits(24)))
PARTS = ("serve", "train", "rollout")
EVALUATION = """
[evaluation]
tasks = "examples/arithmetic/tasks.jsonl"
every = 4
limit = 3
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run whose parts were killed at random moments, interrupted, and run to its end."""
    run, dice = Run(tmp_path_factory.mktemp("online"), more=EVALUATION), random.Random(SEED)
    child = run.start()
    try:
        child = run.await_steps(2, child)
        for _ in range(KILLS):
            time.sleep(dice.uniform(0.0, 4.0))
            for pid in run.pids(dice.choice(PARTS)):
                os.kill(pid, signal.SIGKILL)
            child = run.await_steps(1, child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(90) == 128 + signal.SIGTERM
        assert [run.pids(part) for part in PARTS] == [[], [], []]
        steps = (run.done() // 4 + 2) * 4
        child = run.start("--set", f"train.steps={steps}")
        assert child.wait(300) == 0, (run.folder / "run.log").read_text()[-3000:]
        yield run
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


@pytest.mark.timeout(2400)
def test_nothing_is_lost_or_doubled(killed: Run) -> None:
    """Each place has one trajectory that counts, however many attempts that took; groups are whole."""
    places = killed.sql(
        f"""SELECT rollout, epoch, l.task, sample, count(*) FILTER (t.status != '{VOID}'), count(*),
                   count(DISTINCT attempt)
            FROM launches l JOIN trajectories t USING (trajectory_id) GROUP BY ALL""",
    )
    doubled = [row for row in places if row[4] > 1 or row[5] != row[6]]
    assert doubled == [], f"seed {SEED}"
    # Others are too old, since a member was tried again, or no agent is known to have had them.
    trained = killed.sql(
        """WITH used AS (
               SELECT DISTINCT trajectory_id, true AS trained FROM samples WHERE status = 'committed'
               UNION ALL SELECT trajectory_id, false FROM drops WHERE rule = 'staleness'
               UNION ALL SELECT trajectory_id, false FROM turns
               WHERE status = 'completed' AND delivered IS NULL)
           SELECT t."group", count(DISTINCT trajectory_id), min(t.status), max(t.status)
           FROM used JOIN trajectories t USING (trajectory_id) WHERE t.status != 'void'
           GROUP BY ALL HAVING bool_or(trained)""",
    )
    assert trained, f"seed {SEED}"
    assert {row[1] for row in trained} <= {3, 4}, f"seed {SEED}"  # a member may have failed at its task
    assert Counter(row[1] for row in trained)[4] > len(trained) * 0.8
    assert {status for row in trained for status in row[2:]} <= {"completed", "failed"}
    used = killed.sql("SELECT turn_id FROM samples WHERE status = 'committed'")
    assert len(used) == len(set(used)), f"seed {SEED}"


def test_the_ledger_is_exact(killed: Run) -> None:
    """Every token is accounted for, and no launch is without its end."""
    assert not any(fold_ledger(killed.log().events()).unaccounted().values()), f"seed {SEED}"
    assert killed.sql("SELECT count(*) FROM launches WHERE ended IS NULL") == [(0,)]
    assert killed.sql("SELECT count(*) FROM trajectories WHERE finished IS NULL") == [(0,)]


def test_evaluations_are_of_their_version(killed: Run) -> None:
    """Each of its three tasks once, sampled by that version alone; also where something died meanwhile."""
    evaluations = [e.record for e in killed.log().events_of({EvalFinished.KIND})]
    assert [(evaluation.policy_version, evaluation.trajectories) for evaluation in evaluations] == [
        (version, 3) for version in range(0, evaluations[-1].policy_version + 1, 4)
    ]
    versions = [
        (evaluation.policy_version, evaluation.oldest_version, evaluation.newest_version)
        for evaluation in evaluations
    ]
    assert [span for span in versions if len(set(span)) > 1] == [], f"seed {SEED}"


def test_failures_of_the_infrastructure_are_none_of_agents(killed: Run) -> None:
    """What a killed proxy did to an agent: void, and tried again."""
    status = dict(killed.sql("SELECT status, count(*) FROM launches GROUP BY ALL"))
    assert set(status) <= {"done", "infra_error", "cancelled"}, status
    started = [e.record.owner for e in killed.log().events_of({LaunchStarted.KIND})]
    assert len(set(started)) >= 2


def test_a_step_is_replayed(killed: Run) -> None:
    """The last one, bit for bit."""
    history = history_of(killed.log(), None, "actor")
    last = max(history.steps)
    proof = prove_stretch(killed.log(), history, last, last)
    assert [step.replay is not None and step.replay.bit_for_bit for step in proof.steps] == [True]
