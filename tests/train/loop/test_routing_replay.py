"""Trainings of a mixture of experts that send tokens where the engine sent them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.models import mixtures
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import SampleDropped, StepCommitted, StepFailed, StepPlanned
from rollbook.store.events.routed_experts import ExpertIds, pack
from rollbook.store.sql.query import connect

Stores = Callable[..., Store]
EACH = pytest.mark.parametrize("family", mixtures.FAMILIES)
HOT = 0.8


@functools.cache
def _sampled(family: str, seed: int, own: bool) -> tuple[list[int], ExpertIds, Any]:
    """Tokens that an engine sent to the model's own experts, or to random ones; these; and the logprobs of
    transformers."""
    _, model = mixtures.mixture(family)
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, mixtures.VOCAB, 12 + seed % 3).tolist()
    experts = mixtures.own_choice(model, ids) if own else mixtures.other_choice(ids, seed)
    return ids, experts, mixtures.logprobs(model, ids, experts, HOT).detach().numpy()


def _trajectory(family: str, name: str, seed: int, *, own: bool, **options: Any) -> list[Any]:
    """Two turns."""
    ids, experts, logprobs = _sampled(family, seed, own)
    turns = [
        fabric.T(ids[:3], ids[3:7], None, logprobs[2:6], 0, HOT, experts=pack(experts[:6], 0)),
        fabric.T(ids[7:9], ids[9:], 0, logprobs[8:], 0, HOT, experts=pack(experts[6:-1], 6)),
    ]
    records: list[Any] = fabric.records(name, turns, **options)
    return records


def _recorded(log: Store, family: str, groups: int = 6, *, own: bool = False) -> Store:
    records = []
    for g in range(groups):
        for i in range(4):
            options = {"group": f"g{g}", "reward": i / 2}
            records += _trajectory(family, f"g{g}.{i}", 10 * g + i, own=own, **options)
    fabric.append(log, records)
    return log


def _settings(family: str, **changes: Any) -> Any:
    options = {"model": str(mixtures.mixture(family)[0]), "routing_replay": True, "steps": 1}
    return fabric.config(fabric.GRPO, **options | changes)


@pytest.mark.more_but("qwen3_moe")
@EACH
def test_the_engine_s_logprobs_are_the_trainer_s(store: Store, family: str) -> None:
    """The gap is what is left of float32; by the trainer's own routing it is not. All is replayed."""
    fabric.train(_recorded(store, family), _settings(family))
    [plan], [done] = records_of(store, StepPlanned), records_of(store, StepCommitted)
    assert plan.routing_replay
    assert done.metrics["engine_logprob_gap"] < 1e-5
    assert done.metrics["own_routing_logprob_gap"] > 0.05
    assert done.metrics["routing_replayed"] == 1.0
    query = "SELECT routing_replayed, own_routing_logprob_gap > 0.05 FROM metrics"
    assert connect(store.path).execute(query).fetchall() == [(1.0, True)]
    assert replay_step(store, 0).bit_for_bit


@pytest.mark.more_but("qwen3_moe")
@EACH
def test_without_it_nothing_is_replayed(store: Store, family: str) -> None:
    """The same records and the same engine: the gap is that of the trainer's own routing."""
    fabric.train(_recorded(store, family), _settings(family, routing_replay=False))
    [plan], [done] = records_of(store, StepPlanned), records_of(store, StepCommitted)
    assert not plan.routing_replay
    assert done.metrics["engine_logprob_gap"] > 0.05
    assert "routed_experts" not in done.digests
    assert not done.metrics.keys() & {"own_routing_logprob_gap", "routing_replayed"}


@pytest.mark.more_but("gpt_oss")
@EACH
def test_the_own_choice_is_a_step_without_replay(tmp_path: Path, family: str) -> None:
    """Every digest of the step is the same, and there is one more: what was replayed."""
    digests = []
    for replayed in (True, False):
        log = _recorded(rb.open(tmp_path / f"{replayed}", create=True), family, 2, own=True)
        fabric.train(log, _settings(family, routing_replay=replayed))
        digests.append(records_of(log, StepCommitted)[0].digests)
    assert digests[0].keys() - digests[1].keys() == {"routed_experts"}
    assert {stage: digests[0][stage] for stage in digests[1]} == digests[1]


HOW = {
    "padded": {},
    "packed": {"micro_batch_size": None, "tokens_per_micro_batch": 30},
    "recomputed": {"recompute": True},
    "bfloat16, packed, recomputed": {
        "micro_batch_size": None,
        "tokens_per_micro_batch": 30,
        "recompute": True,
        "dtype": "bfloat16",
    },
}


@pytest.mark.more_but("padded-qwen3_moe")
@EACH
@pytest.mark.parametrize("how", HOW)
def test_steps_replay_bit_for_bit(store: Store, family: str, how: str) -> None:
    """With the trainer's old logprobs and a reference, over a restart, mini-batches too. Of the reference's
    pass nothing is replayed, so that it differs from the policy's although the weights are equal."""
    log = _recorded(store, family)
    algorithm = {"name": "grpo", "groups": 2, "group_size": 4, "kl": 0.1, "old": "trainer", "mini_batches": 2}
    for steps in (2, 4):
        fabric.train(log, _settings(family, algorithm=algorithm, steps=steps, **HOW[how]))
    for step in range(4):
        result = replay_step(log, step)
        assert result.bit_for_bit, result.differs_in
        assert result.stages["routed_experts"].verdict == "equal"
    first = records_of(log, StepCommitted)[0].metrics
    assert first["kl"] > 0.01
    assert first["old_kl"] < (1e-3 if "bfloat16" in how else 1e-9)


def _odd(experts: ExpertIds, fault: str) -> dict[str, Any]:
    if fault == "layers":
        return pack(experts[:, :1], 0)
    if fault == "topk":
        return pack(experts[..., :2], 0)
    ids = experts.copy()
    ids[2, 1, 0] = mixtures.EXPERTS if fault == "expert" else ids[2, 1, 1]
    return pack(ids, 0)


FAULTS = {"layers": "1 of 3", "topk": "2 of 2", "expert": "expert 8", "twice": "one expert twice"}


@pytest.mark.more_but("expert-cut")
@pytest.mark.parametrize("source", ["cut", "tail"])
@pytest.mark.parametrize("fault", FAULTS)
def test_records_that_do_not_fit_are_dropped(store: Store, fault: str, source: str) -> None:
    """By a rule, before the plan, and the others of the group are trained on; a replay sees the same."""
    log = _recorded(store, "qwen3_moe", 1)
    experts = mixtures.other_choice([0] * 6)
    bad = [fabric.T((1, 2, 3), (4, 5, 6), experts=_odd(experts[:5], fault))]
    for name in ("bad", "good"):
        turns = bad if name == "bad" else [fabric.T((1, 2, 3), (4, 5, 6), experts=pack(experts[:5], 0))]
        fabric.append(log, fabric.records(name, turns, group="odd", reward=1.0))
    for i in range(2):
        fabric.append(log, fabric.records(f"plain{i}", group="odd", reward=0.0))
    fabric.train(log, _settings("qwen3_moe"), source)
    [plan], [drop] = records_of(log, StepPlanned), records_of(log, SampleDropped)
    trained = {ref["trajectory_id"] for ref in plan.samples}
    assert {"good", "plain0", "plain1"} == {name for name in trained if not name.startswith("g0")}
    assert (drop.trajectory_id, drop.rule) == ("bad", "misrouted")
    assert drop.detail["record"].startswith("turn bad.0: ")
    assert FAULTS[fault] in drop.detail["record"]
    assert records_of(log, StepFailed) == []
    share = records_of(log, StepCommitted)[0].metrics["routing_replayed"]
    assert 0.8 < share < 1.0
    assert replay_step(log, 0).bit_for_bit


@pytest.mark.parametrize("source", ["cut", "tail"])
def test_a_model_without_experts(recorded: Stores, source: str) -> None:
    """An error before anything is written, and so for a reward model."""
    log = recorded()
    before = log.head()
    with pytest.raises(ConfigError, match=r"routing_replay: the model has no experts"):
        fabric.train(log, fabric.config(fabric.GRPO, routing_replay=True), source)
    assert {lane: count for lane, count in log.head().items() if count} == before
    rewarding = {"name": "reward_model", "batch_size": 4}
    with pytest.raises(ConfigError, match=r"routing_replay: .* trains a reward model"):
        fabric.config(fabric.GRPO, routing_replay=True, micro_batch_size=4, algorithm=rewarding)


def test_a_training_that_was_cut_off_goes_on(store: Store) -> None:
    """What ran is run again to the same bits, out of the log; a change of the key is another training."""
    log = _recorded(store, "qwen3_moe")
    with fabric.killed_at(2):
        fabric.train(log, _settings("qwen3_moe", steps=3, checkpoint_every=9))
    fabric.train(log, _settings("qwen3_moe", steps=3, checkpoint_every=9))
    assert [plan.step for plan in records_of(log, StepPlanned)] == [0, 1, 2, 2]
    phases = {plan.phase for plan in records_of(log, StepPlanned)}
    assert len(phases) == 1


@pytest.mark.more
def test_a_critic_chooses_for_itself(tmp_path: Path) -> None:
    """Its values, losses and gradients are those of a step without replay; the policy's logprobs are not."""
    digests = []
    for replayed in (True, False):
        log = _recorded(rb.open(tmp_path / f"{replayed}", create=True), "qwen3_moe", 2)
        algorithm = {"name": "ppo", "groups": 8}
        fabric.train(log, _settings("qwen3_moe", routing_replay=replayed, algorithm=algorithm))
        assert replay_step(log, 0).bit_for_bit
        digests.append(records_of(log, StepCommitted)[0].digests)
    for stage in ("values", "value_losses", "critic_gradients"):
        assert digests[0][stage] == digests[1][stage]
    assert digests[0]["logprobs"] != digests[1]["logprobs"]
