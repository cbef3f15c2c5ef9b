"""`rollbook score`: rewards by a reward model, and trainings that go by them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.events import PreferenceAdded, RewardAssigned, RunOpened, StepPlanned
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.train.reward_scores import RewardClassifier, RewardModel

Cli = Callable[..., tuple[int, str, str]]
GOOD, BAD = 60, 20
"""First sampled token of replies that are preferred, and of the others."""


def _rewards(log: Store, source: str) -> dict[str, float]:
    return {r.trajectory_id: r.reward for r in records_of(log, RewardAssigned) if r.source == source}


def _replies(name: str, **keys: Any) -> list[Any]:
    """Eight groups of four replies, of which the first two are good."""
    records = []
    for group in range(8):
        for i in range(4):
            turn = fabric.T([5, 6 + group % 3], [GOOD if i < 2 else BAD, 21 + (group + i) % 4])
            records += fabric.records(f"{name}{group}-{i}", [turn], group=f"{name}{group}", **keys)
    return records


def _several_paths(several: str, single: str) -> list[Any]:
    """A trajectory of two paths, the first of which is a good reply, and one of its second path alone."""
    last = fabric.T([5, 7], [BAD, 22])
    return [*fabric.records(several, [fabric.T([5, 6], [GOOD, 21]), last]), *fabric.records(single, [last])]


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a recorded run and a reward model trained on its preferences."""
    log = rb.open(tmp_path_factory.mktemp("rated") / "store", create=True)
    records = _replies("a")
    records += [PreferenceAdded(f"a{g}-{i}", f"a{g}-{i + 2}") for g in range(8) for i in (0, 1)]
    records += _replies("e", split="eval")
    records += [
        PreferenceAdded("e0-0", "e0-2"),
        PreferenceAdded("e0-1", "e0-3"),
        PreferenceAdded("e1-2", "e1-0"),
    ]
    fabric.append(log, records)
    trained = (("reward", "score"), ("uncertain", "mean_deviation"), ("sharded", "score"))
    for policy, head in trained:
        fabric.train(
            log,
            fabric.config(
                fabric.GRPO,
                policy=policy,
                steps=8,
                micro_batch_size=16,
                checkpoint_every=8,
                algorithm={"name": "reward_model", "batch_size": 8, "head": head},
                recipe={},
                optimizer={"lr": 0.01},
                evaluation={"every": 8},
                checkpoint={"sharded": policy == "sharded"},
            ),
        )
    return log.path


@pytest.fixture
def store(rated: Path, tmp_path: Path) -> Store:
    """A copy of it."""
    import shutil

    return rb.open(shutil.copytree(rated, tmp_path / "store"))


def _score(cli: Cli, log: Store, *more: object, policy: str = "reward", source: str = "judge") -> Any:
    model = log.path / f"checkpoints/demo/{policy}/v00000008"
    code, out, err = cli(
        "score", model, "--store", log.path, "--run", "demo", "--source", source, "--json", *more
    )
    assert code == 0, err
    return json.loads(out)


def test_rewards_are_in_the_order_of_the_preferences(cli: Cli, store: Store) -> None:
    """Every finished trajectory gets one, good replies the greater ones; and no second one."""
    assert _score(cli, store) == {"scored": 64, "already_there": 0, "left_out": {}}
    rewards = _rewards(store, "judge")
    good = [value for name, value in rewards.items() if name[-1] in "01"]
    bad = [value for name, value in rewards.items() if name[-1] in "23"]
    assert len(rewards) == 64
    assert min(good) > max(bad)
    head = store.head()
    assert _score(cli, store) == {"scored": 0, "already_there": 64, "left_out": {}}
    assert store.head() == head
    [opened] = [record for record in records_of(store, RunOpened) if record.command == "score"]
    assert (opened.config["source"], opened.config["temperature"]) == ("judge", 1.0)


def test_a_checkpoint_of_shards_scores_the_same(cli: Cli, store: Store) -> None:
    """Put together from its pieces, the model is the one that was written whole."""
    assert list(store.path.glob("checkpoints/demo/sharded/v00000008/shard-*"))
    for policy in ("reward", "sharded"):
        assert _score(cli, store, policy=policy, source=f"by {policy}")["scored"] == 64
    assert _rewards(store, "by sharded") == _rewards(store, "by reward")


def test_padding_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of many lengths have the scores that each has alone, in one forward pass or in several."""
    folder = store.path / "checkpoints/demo/uncertain/v00000008"
    model = RewardClassifier(RewardModel.of(folder), "cpu")
    paths = [np.arange(1, 1 + length, dtype=np.int32) for length in (30, 2, 17, 2, 9, 1)]
    alone = [score for path in paths for score in model.scores([path])]
    for most in (16384, 40, 1):
        monkeypatch.setattr("rollbook.train.reward_scores.BATCH_TOKENS", most)
        scores = model.scores(paths)
        assert [s.mean for s in scores] == pytest.approx([s.mean for s in alone], abs=1e-5)
        assert [s.deviation for s in scores] == pytest.approx([s.deviation for s in alone], abs=1e-5)
    assert len({round(s.mean, 4) for s in alone}) == 5


@pytest.mark.more_but("algorithm0")
@pytest.mark.parametrize(
    "algorithm", [{"name": "grpo", "groups": 4, "group_size": 4}, {"name": "ppo", "groups": 16}]
)
def test_a_policy_is_trained_by_them(cli: Cli, store: Store, algorithm: dict[str, Any]) -> None:
    """GRPO, and PPO with its critic, go by the source and make replies that were preferred likelier; their
    steps replay."""
    _score(cli, store, "--split", "train")
    has_critic = algorithm["name"] == "ppo"
    settings = fabric.config(
        fabric.GRPO,
        steps=2,
        algorithm=algorithm,
        recipe={"reward_source": "judge"},
        optimizer={"lr": 0.01},
        **({"critic": {"lr": 0.01}} if has_critic else {}),
    )
    fabric.train(store, settings)
    plans = [plan for plan in records_of(store, StepPlanned) if plan.policy == "actor"]
    assert [len(plan.samples) for plan in plans] == [16, 16]
    assert all(replay_step(store, step).bit_for_bit for step in (0, 1))
    connection = rb.connect(store.path)
    query = "select reward, value_loss from metrics where policy = 'actor' order by step"
    rows = connection.execute(query).fetchall()
    means = [row[0] for row in rows]
    assert [row[1] is not None for row in rows] == [has_critic] * 2
    rewards = _rewards(store, "judge")
    used = [[rewards[ref["trajectory_id"]] for ref in plan.samples] for plan in plans]
    assert means == pytest.approx([sum(values) / 16 for values in used])
    assert not any(name.startswith("e") for name in rewards), "--split train leaves the others"
    before, after = (_likelihood(store, version) for version in (0, 2))
    assert after[GOOD] - before[GOOD] > after[BAD] - before[BAD]


def _likelihood(log: Store, version: int) -> dict[int, float]:
    """Mean log-probability of the first tokens of good and of bad replies, by a version of the policy."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(log.path / f"checkpoints/demo/actor/v{version:08d}")
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6], [5, 7], [5, 8]])).logits[:, -1]
    logprobs = logits.log_softmax(-1).mean(0)
    return {token: float(logprobs[token]) for token in (GOOD, BAD)}


def test_what_cannot_be_scored(cli: Cli, store: Store) -> None:
    """It is left out by a reason, and the rest is scored by its last path."""
    records = fabric.records("long", [fabric.T([5] * 60, [7] * 10)], reward=1.0)
    records += fabric.records("odd", [fabric.T([5], [100])])
    records += fabric.records("silent", [fabric.T(delivered=False)])
    records += fabric.records("open", finished=False)
    records += _several_paths("branched", "single")
    fabric.append(store, records)
    erase_trajectory(store, "a0-0", "asked")
    counts = _score(cli, store)
    left = {"too_long": 1, "outside_vocabulary": 1, "nothing_sampled": 1, "erased": 1}
    assert counts == {"scored": 65, "already_there": 0, "left_out": left}
    rewards = _rewards(store, "judge")
    assert not {"long", "odd", "silent", "open", "a0-0"} & set(rewards)
    assert rewards["branched"] == pytest.approx(rewards["single"], abs=1e-5)


def test_penalty_and_temperature(cli: Cli, store: Store) -> None:
    """The lower bound of a distribution; a calibrated score is one divided by a number; and one source is of
    one model, made in one way."""
    _score(cli, store)
    _score(cli, store, "--calibrated", source="calibrated")
    plain, calibrated = _rewards(store, "judge"), _rewards(store, "calibrated")
    ratios = [plain[name] / calibrated[name] for name in plain]
    assert min(ratios) == pytest.approx(max(ratios))
    assert ratios[0] != pytest.approx(1.0)
    _score(cli, store, policy="uncertain", source="mean")
    _score(cli, store, "--penalty", 1, policy="uncertain", source="bound")
    mean, bound = _rewards(store, "mean"), _rewards(store, "bound")
    assert all(bound[name] < mean[name] for name in mean)

    def refused(*more: object) -> str:
        code, _, err = cli("score", *more, "--store", store.path, "--run", "demo", "--json")
        assert code == 2
        return err

    model = store.path / "checkpoints/demo/reward/v00000008"
    other = store.path / "checkpoints/demo/uncertain/v00000008"
    head = store.head()
    assert "has rewards of it with model_digest" in refused(other, "--source", "judge")
    assert "has rewards of it with temperature 1.0, not" in refused(
        model, "--source", "judge", "--calibrated"
    )
    assert "gives scores without a standard deviation" in refused(model, "--source", "x", "--penalty", 1)
    assert "fitted no temperature" in refused(other, "--source", "x", "--calibrated")
    assert store.head() == head


def test_a_model_that_gives_no_scores(cli: Cli, store: Store, tmp_path: Path) -> None:
    """A policy, a folder that is none, a run that is not there: each is named, and nothing is appended."""
    head = store.head()
    for model, run, words in (
        (fabric.model_folder(), "demo", "gives no scores: name a reward model"),
        (tmp_path / "none", "demo", "is not there: let the command name a Hugging Face model directory"),
        (store.path / "checkpoints/demo/reward/v00000008", "dem", "no run 'dem'; there are: demo"),
    ):
        code, _, err = cli("score", model, "--store", store.path, "--run", run, "--source", "judge")
        assert (code, words in err) == (2, True), err
    assert store.head() == head


def test_following_the_tail(cli: Cli, store: Store) -> None:
    """What finishes later is scored too, once."""
    late = [*_replies("late"), *_several_paths("branched", "single")]

    def finish() -> None:
        fabric.append(store, late, lane="later")

    timer = threading.Timer(0.5, finish)
    timer.start()
    counts = _score(cli, store, "--follow", 2)
    timer.join()
    assert counts == {"scored": 98, "already_there": 0, "left_out": {}}
    rewards = _rewards(store, "judge")
    assert len(rewards) == 98
    assert rewards["branched"] == pytest.approx(rewards["single"], abs=1e-5)
    assert _score(cli, store)["already_there"] == 98
