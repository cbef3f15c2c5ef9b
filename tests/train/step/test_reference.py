"""A reference that the policy's newest version takes the place of, every so many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import CheckpointWritten, PolicyPublished, StepCommitted, StepPlanned
from rollbook.store.sql.query import connect
from rollbook.train.publish.publish import Checkpointer, Publisher

Stores = Callable[..., Store]
HELD = {"name": "grpo", "groups": 1, "group_size": 4, "kl": 0.5, "ref_update_interval": 2}


def _references(log: Store) -> list[int]:
    return [plan.algorithm["reference_version"] for plan in records_of(log, StepPlanned)]


def _renewed(log: Store) -> list[tuple[int, int | None]]:
    """The versions that became references, and those that were."""
    published = [p for p in records_of(log, PolicyPublished) if p.policy == "actor.reference"]
    return [(p.policy_version, p.parent_version) for p in published]


def test_every_two_steps(recorded: Stores) -> None:
    """From the next step on the policy is held to what it was then: the first step from there has no
    divergence."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.GRPO, algorithm=HELD, steps=5, checkpoint_every=50))
    assert _references(log) == [0, 0, 2, 2, 4]
    assert _renewed(log) == [(2, 0), (4, 2)]
    kl = [step.metrics["kl"] for step in records_of(log, StepCommitted)]
    assert [value < 1e-9 for value in kl] == [True, False, True, False, True]
    assert [replay_step(log, step).differs_in for step in range(5)] == [None] * 5
    used = [plan.input_digests["reference_weights"] for plan in records_of(log, StepPlanned)]
    held = {c.policy_version: c.weights_digest for c in records_of(log, CheckpointWritten)}
    assert used == [held[version] for version in (0, 0, 2, 2, 4)]
    with connect(log.path) as database:
        rows = database.sql(
            "SELECT policy_version, path, weights_digest FROM policies WHERE policy = 'actor.reference' "
            "ORDER BY ALL"
        ).fetchall()
    paths = {c.policy_version: c.path for c in records_of(log, CheckpointWritten)}
    assert rows == [(version, paths[version], held[version]) for version in (2, 4)]


@pytest.mark.more
def test_restarts_change_nothing(recorded: Stores) -> None:
    """Also where it stops as the reference is due, and where it is killed before that is written."""
    whole, broken, killed = recorded("whole"), recorded("broken"), recorded("killed")
    settings = fabric.config(fabric.GRPO, algorithm=HELD, steps=5)
    fabric.train(whole, settings)
    for steps in range(1, 6):
        fabric.train(broken, settings.model_copy(update={"steps": steps}))

    class Killed(Exception):
        """The process ends here."""

    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    for owner, name in ((Publisher, "publish"), (Checkpointer, "renew_reference")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, dies)
            with pytest.raises(Killed):
                fabric.train(killed, settings)
    fabric.train(killed, settings)
    digests = [step.digests for step in records_of(whole, StepCommitted)]
    for log in (broken, killed):
        assert _references(log) == [0, 0, 2, 2, 4]
        assert _renewed(log) == [(2, 0), (4, 2)]
        assert [step.digests for step in records_of(log, StepCommitted)] == digests


def test_within_a_rollout_batch_it_stays(recorded: Stores) -> None:
    """Of four steps on each batch, the interval ends in the middle of the first."""
    log = recorded()
    settings = HELD | {"epochs": 2, "mini_batches": 2, "ref_update_interval": 3}
    fabric.train(log, fabric.config(fabric.GRPO, algorithm=settings, steps=12))
    assert _references(log) == [0] * 4 + [4] * 4 + [8] * 4


def test_going_back(recorded: Stores) -> None:
    """Steps that are given up do not count."""
    log = recorded()
    settings = fabric.config(fabric.GRPO, algorithm=HELD, steps=4, checkpoint_every=1)
    fabric.train(log, settings)
    fabric.train(log, settings, abandon_after=1)
    plans = records_of(log, StepPlanned)
    assert [p.algorithm["reference_version"] for p in plans] == [0, 0, 2, 2, 0, 6, 6]
    assert [p.policy_version for p in plans[4:]] == [5, 6, 7]


def test_preferences(recorded: Stores) -> None:
    """The loss of pairs is held to it too: log 2 where policy and reference are one."""
    log = recorded()
    algorithm = {"name": "dpo", "pairs": "rewards", "group_size": 4, "batch_size": 1}
    algorithm |= {"ref_update_interval": 1}
    fabric.train(log, fabric.config(fabric.GRPO, algorithm=algorithm, steps=3, micro_batch_size=2))
    assert _references(log) == [0, 1, 2]
    assert [step.metrics["loss"] for step in records_of(log, StepCommitted)] == pytest.approx([0.693147] * 3)


def test_there_has_to_be_one() -> None:
    """Without a KL term nothing asks for a reference."""
    with pytest.raises(ConfigError, match="ref_update_interval is of the reference: set kl or reward_kl"):
        fabric.config(fabric.GRPO, algorithm=HELD | {"kl": 0.0})
