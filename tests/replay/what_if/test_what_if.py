"""`rollbook replay what-if`: recorded steps by another rule, beside what was recorded of them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.replay.what_if.changes import Changes
from rollbook.replay.what_if.side_by_side import Differences
from rollbook.replay.what_if.what_if import Rescoring, WhatIf, WhatIfRequest, what_if, write_rewards
from rollbook.store import Store
from rollbook.store.errors import ConfigError, ReplayError, TrainError
from rollbook.store.events import PreferenceAdded, RewardAssigned
from rollbook.train.batches.manifest_batch import samples_at_cut
from rollbook.train.config.recipe import RecipeConfig

Cli = Callable[..., tuple[int, str, str]]
LINEAR = {"name": "grpo", "groups": 2, "group_size": 4, "surrogate": "reinforce"}
"""Without clips the loss is linear in the advantages."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The trained store with more steps: 12 without clips, of which a group was dropped; 13 and 14 on one
    rollout batch; 15 with a critic, 16 with low-rank factors, 17 and 18 on preferences. Nothing here writes
    to it."""
    held = rb.open(shutil.copytree(fabric.trained_path(), tmp_path_factory.mktemp("what-if") / "store"))
    records = fabric.rollout_records(2, 4, first=6, version=12)
    flat = [record for i in range(4) for record in fabric.records(f"flat.{i}", group="flat", reward=1.0)]
    fabric.append(held, flat + records)
    fabric.train(held, fabric.config(fabric.GRPO, seed=5, steps=1, algorithm=LINEAR))
    fabric.append(held, fabric.rollout_records(2, 4, first=8, version=13))
    two = fabric.GRPO["algorithm"] | {"mini_batches": 2}
    fabric.train(held, fabric.config(fabric.GRPO, seed=6, steps=2, algorithm=two))
    for first, name, more in ((10, "ppo", {}), (12, "grpo", {"lora": {"rank": 2}})):
        fabric.append(held, fabric.rollout_records(2, 4, first=first, version=15))
        own = {"name": name, "groups": 2, "group_size": 4}
        fabric.train(held, fabric.config(fabric.GRPO, seed=7, steps=1, algorithm=own, **more))
    fabric.append(held, [PreferenceAdded(f"g{i}.1", f"g{i}.2", 1.0, "a person") for i in range(3)])
    dpo = {"name": "dpo", "batch_size": 2}
    fabric.train(held, fabric.config(fabric.GRPO, seed=8, steps=2, micro_batch_size=2, algorithm=dpo))
    return held


def ask(log: Store, first: int, *overrides: str, last: int | None = None, **others: Any) -> WhatIf:
    """What if these keys were other ones."""
    options = {key: others.pop(key) for key in ("recipe", "source") if key in others}
    return what_if(
        log,
        WhatIfRequest(
            first, first if last is None else last, Changes(overrides=overrides, **options), **others
        ),
    )


def bits(log: Store) -> dict[Path, bytes]:
    """All files of a store."""
    return {file: file.read_bytes() for file in log.path.rglob("*") if file.is_file()}


# The same rule ------------------------------------------------------------------------------------


@pytest.mark.more_but("9-11", "12-12")
@pytest.mark.parametrize(
    ("first", "last"), [(5, 7), (9, 11), (12, 12), (13, 14), (15, 15), (16, 16), (17, 18)]
)
def test_the_same_rule_gives_the_same_bits(log: Store, first: int, last: int) -> None:
    """Supervised and GRPO steps, one with drops and two on one rollout batch: nothing differs at all."""
    before = bits(log)
    result = ask(log, first, last=last)
    assert result.proven
    assert [step.step for step in result.steps] == list(range(first, last + 1))
    for step in result.steps:
        assert step.metrics["recorded"] == step.metrics["other"] is not None
        assert (step.came, step.went) == ([], [])
        assert (
            step.let_go["recorded"]
            == step.let_go["other"]
            == ({"zero_variance": 4} if step.step == 12 else {})
        )
        assert all(sample.recorded == sample.other for sample in step.samples)
        assert (step.advantages.mean, step.advantages.flips) == (0.0, 0)
        assert step.gradients is not None
        each = [step.gradients.whole, *step.gradients.tensors]
        assert all(tensor.cosine == 1.0 or tensor.norms == (0.0, 0.0) for tensor in each)
        assert each[0].cosine == 1.0
        assert (step.kl, step.apart) == (0.0, 0.0)
    assert bits(log) == before, "nothing is written"


# Another rule -------------------------------------------------------------------------------------


def test_another_clip_changes_losses_alone(log: Store) -> None:
    """Of clipped tokens, whose gradient is zero with either bound."""
    [step] = ask(log, 10, "algorithm.clip_high=0.25").steps
    recorded, other = step.metrics["recorded"], step.metrics["other"]
    assert recorded is not None
    assert other is not None
    assert {name for name in recorded if recorded[name] != other[name]} == {"loss"}
    assert step.advantages == Differences(12, 0.0, 0, 1.0)
    assert step.gradients is not None
    assert step.gradients.whole.cosine == 1.0


def test_another_staleness_drops_what_is_older(log: Store) -> None:
    """Step 10 takes rollouts of version 0 with version 10; step 12 those of version 12 with version 12, and
    let go those of a group whose rewards are equal."""
    [step] = ask(log, 10, "recipe.max_staleness=9").steps
    assert (len(step.samples), len(step.went), step.let_go["other"]) == (12, 12, {"staleness": 12})
    assert {sample.why for sample in step.samples} == {"staleness"}
    assert (step.metrics["other"], step.gradients, step.kl) == (None, None, None)
    assert step.apart > 0, "the recorded side took its step"
    [step] = ask(log, 10, "recipe.max_staleness=10").steps
    assert (step.went, step.let_go["other"]) == ([], {})


def test_a_laxer_recipe_lets_samples_in(log: Store, tmp_path: Path) -> None:
    """A group that was dropped for its equal rewards comes in; a stricter one takes the worst out."""
    [step] = ask(log, 12, recipe=RecipeConfig(drop_zero_variance=False)).steps
    assert sorted(sample.trajectory for sample in step.came) == [f"flat.{i}" for i in range(4)]
    assert {sample.why for sample in step.came} == {"zero_variance"}
    assert {sample.other.advantage for sample in step.came if sample.other} == {0.0}
    assert step.went == []
    [step] = ask(log, 12, "recipe.min_reward=0.5").steps
    low = [s for s in step.samples if s.recorded is not None and (s.recorded.reward or 0) < 0.5]
    assert [s.turn_id for s in low] == [s.turn_id for s in step.went] != []
    assert {s.why for s in step.went} == {"min_reward"}


def test_epochs_keep_their_slice(log: Store) -> None:
    """A supervised step's other side is made of the samples that it took: none of another split is there."""
    [step] = ask(log, 5, 'recipe.splits=["train"]').steps
    assert {sample.why for sample in step.samples} == {"no_candidate"}
    [step] = ask(log, 5, "algorithm.batch_size=3").steps
    assert (step.came, step.went) == ([], [])


def test_a_pair_goes_whole(log: Store) -> None:
    """Of a pair of which one side is not kept the other one goes, too."""
    [step] = ask(log, 17, "recipe.min_reward=0.75").steps
    rewards = {s.trajectory: s.recorded.reward for s in step.samples if s.recorded is not None}
    for sample in step.samples:
        pair = [rewards[f"{sample.trajectory[:2]}.{i}"] for i in (1, 2)]
        own = rewards[sample.trajectory]
        due = "" if min(pair) >= 0.75 else "pair_broken" if own >= 0.75 else "min_reward"
        assert sample.why == due
    assert {sample.why for sample in step.samples} >= {"pair_broken", "min_reward"}


def test_a_critic_is_left_out_where_none_is_asked_for(log: Store) -> None:
    """The other side of a step of PPO may be one of GRPO."""
    [step] = ask(log, 15, "algorithm.name=grpo").steps
    assert step.metric("recorded", "value_loss") is not None
    assert step.metric("other", "value_loss") is None
    assert step.metric("other", "gradient_norm") is not None


def test_another_algorithm(log: Store) -> None:
    """Each gives other advantages, by hand: RLOO's is the reward less the mean of the other three's."""
    [step] = ask(log, 9, "algorithm.name=rloo").steps
    rewards = {
        s.trajectory: s.recorded.reward for s in step.samples if s.recorded and s.recorded.reward is not None
    }
    for sample in step.samples:
        others = [
            r
            for name, r in rewards.items()
            if name[:2] == sample.trajectory[:2] and name != sample.trajectory
        ]
        assert sample.other is not None
        assert sample.other.advantage == pytest.approx(rewards[sample.trajectory] - np.mean(others))
    [step] = ask(log, 10, "algorithm.name=dpo", 'algorithm.pairs="rewards"').steps
    assert step.let_go["other"] == {"several_paths": 8}
    assert (step.metric("other", "samples"), step.metric("other", "preference_accuracy")) == (4, 1.0)


def test_a_reference_is_read_from_its_checkpoint(log: Store) -> None:
    """One that the store has gives a KL; one that it has not is named, with those that there are."""
    [step] = ask(log, 10, "algorithm.kl=0.1", "algorithm.reference_version=8").steps
    assert step.metric("recorded", "kl") is None
    assert (step.metric("other", "kl") or 0) > 0
    with pytest.raises(TrainError, match=r"reference_version 7: .* \(it has: 0, 4, 8, 9, 11, 12"):
        ask(log, 10, "algorithm.kl=0.1", "algorithm.reference_version=7")


# Several steps ------------------------------------------------------------------------------------


def test_an_offline_run_goes_on_with_its_own_weights(log: Store, tmp_path: Path) -> None:
    """Twice the learning rate: the first step's losses are the same, later ones' differ, and the weights come
    apart; those that are written are the last ones."""
    from safetensors.torch import load_file

    out = tmp_path / "made"
    result = ask(log, 4, "optimizer.lr=0.02", "optimizer.min_lr=0.002", last=6, out=out)
    assert result.proven
    first, second, third = result.steps
    assert first.metric("recorded", "loss") == first.metric("other", "loss")
    assert second.metric("recorded", "loss") != second.metric("other", "loss")
    assert 0 < first.apart < third.apart
    assert (third.kl or 0) > 0
    again = tmp_path / "same"
    ask(log, 4, last=7, out=again)
    theirs = load_file(log.path / "checkpoints/demo/actor/v00000008/model.safetensors")
    ours, other = load_file(again / "model.safetensors"), load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys() == other.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs), "the same rule, the same weights"
    assert (out / "config.json").exists()


def test_steps_that_cannot_be_asked_about(log: Store) -> None:
    """Each says what to ask instead."""
    for first, last, words in (
        (8, 9, "another training begins with step 9"),
        (14, 14, "ask about step 13 with --to 14"),
        (17, 20, "no committed step 19"),
        (9, 7, "comes before step 9"),
        (99, 99, "no committed step 99"),
    ):
        with pytest.raises(ReplayError, match=words):
            ask(log, first, last=last)
    for override, words in (
        ("algorithm.name=ppo", "needs the values of a critic"),
        ("algorithm.mini_batches=2", "1 steps were taken on a rollout batch"),
        ("algorithm.name=reward_model", "it has another head"),
        ("algorithm.name=sft", ""),
    ):
        if words:
            with pytest.raises(ReplayError, match=words):
                ask(log, 10, override, *(['algorithm.pairs="rewards"'] if "model" in override else []))
        else:
            assert ask(log, 10, override).steps[0].metric("other", "samples") == 12


def test_keys_that_are_wrong(log: Store) -> None:
    """As in a CONFIG: what they may have meant is named."""
    for override, words in (
        ("algorithm.clip_hihg=1", "algorithm.clip_hihg: unknown key: did you mean clip_high?"),
        ("algorithm.max_staleness=1", r"unknown key: it belongs to \[recipe\]"),
        ("recipe.max_staleness=-1", "recipe.max_staleness: Input should be greater"),
        ("recipe.order=recorded", "is about samples that are gone over again"),
        ("lora.rank=2", "what may differ are keys of algorithm, recipe, optimizer"),
        ("clip_high=2", "write algorithm.KEY=VALUE"),
        ("algorithm.clip_high", "write key=value"),
    ):
        with pytest.raises(ConfigError, match=words):
            ask(log, 10, override)


def test_a_part_of_ones_own(log: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported since the user names it; the recorded side knows nothing of it."""
    (tmp_path / "own_parts.py").write_text("def nothing(of):\n    return of.rewards\n")
    monkeypatch.chdir(tmp_path)
    [step] = ask(log, 12, "algorithm.baseline=own_parts:nothing", "algorithm.deviation=none").steps
    assert "own_parts" in sys.modules
    assert all(s.other is not None and s.other.advantage == s.other.reward for s in step.samples)


def test_what_is_not_as_recorded_is_said(trained: Callable[..., Store], tamper: Tamper, cli: Cli) -> None:
    """A comparison with numbers that are not the recorded ones is exit code 1, and names the step."""
    log = trained()
    tamper.checkpoint(log, 9, "weights")
    code, out, _ = cli("replay", "what-if", 10, "--store", log.path, "--set", "algorithm.clip_high=0.3")
    assert code == 1
    assert "not proven step 9 is not as recorded" in out


# Rewards anew -------------------------------------------------------------------------------------


def opposite(row: dict[str, Any]) -> float:
    """The recorded reward with the other sign."""
    return -row["reward"]


def test_opposite_rewards_give_the_opposite_gradient(log: Store) -> None:
    """Advantages of another sign, and with a loss that is linear in them a cosine of -1."""
    rescoring = Rescoring("tests:opposite", "opposite", opposite)
    [step] = ask(log, 12, source="opposite", rescoring=rescoring).steps
    assert len(rescoring.rewards) == 8, "once for each trajectory, those that were let go too"
    for sample in step.samples:
        assert sample.recorded is not None
        assert sample.other is not None
        assert sample.recorded.reward == -(sample.other.reward or 0)
        assert sample.recorded.advantage == pytest.approx(-(sample.other.advantage or 0))
    assert step.rewards.correlation == pytest.approx(-1)
    assert step.advantages.flips == sum(s.recorded.advantage != 0 for s in step.samples if s.recorded)
    assert step.gradients is not None
    assert step.gradients.whole.cosine == pytest.approx(-1, abs=1e-6)


def test_rewards_are_recorded_beside_the_others(
    trained: Callable[..., Store], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQL has them; the same ones are recorded once, others only with --replace."""
    log = trained()
    (tmp_path / "new_rewards.py").write_text(
        'TIMES = 2\n\ndef twice(row):\n    print("called")\n    return TIMES * row["reward"]\n'
    )
    monkeypatch.chdir(tmp_path)
    command = ("replay", "what-if", 9, "--store", log.path, "--rescore", "new_rewards:twice", "--json")
    code, out, err = cli(*command, "--write")
    assert (code, json.loads(out)["written"]) == (
        0,
        {"source": "twice", "written": 8, "replaced": 0, "already": 0},
    )
    assert "called" in err
    query = "select trajectory_id, source, reward from rewards where trajectory_id = 'g0.3' order by source"
    with rb.connect(log.path) as connection:
        assert connection.execute(query).fetchall() == [("g0.3", "agent", 1.5), ("g0.3", "twice", 3.0)]
    assert json.loads(cli(*command, "--write")[1])["written"]["already"] == 8
    sys.modules["new_rewards"].TIMES = 3  # type: ignore[attr-defined]
    code, _, err = cli(*command, "--write")
    assert code == 2
    assert "8 trajectories have another reward of it" not in err, "a reward of 0 is 0 again"
    assert "6 trajectories have another reward of it" in err
    assert json.loads(cli(*command, "--write", "--replace")[1])["written"] == {
        "source": "twice",
        "written": 6,
        "replaced": 6,
        "already": 2,
    }
    assert log.trajectories(None, {"g0.3"})["g0.3"].reward("twice") == 4.5
    twice = "select reward, superseded from rewards where trajectory_id = 'g0.3' and source = 'twice'"
    with rb.connect(log.path) as connection:
        assert connection.execute(f"{twice} order by seq").fetchall() == [(3.0, True), (4.5, False)]
    assert cli(*command, "--write", "--source", "agent")[0] == 2


@pytest.mark.more
def test_recorded_rewards_are_trained_by_their_source(trained: Callable[..., Store]) -> None:
    """A training by their source goes by them, and the old steps replay bit for bit."""
    log = trained()
    rescoring = Rescoring(
        "m:f", "twice", opposite, {f"g{i}.{k}": 1.5 * k for i in range(2) for k in range(4)}
    )
    assert write_rewards(log, "demo", rescoring, "agent", replaces=False).written == 8
    assert all(replay_step(log, step).bit_for_bit for step in (9, 11))
    values = fabric.GRPO | {
        "run": "again",
        "steps": 1,
        "recipe": {"reward_source": "twice", "source_runs": ["demo"]},
    }
    fabric.train(log, fabric.config(values), lane="again")
    plan = fabric.steps_of(log, "again").steps[0].planned
    rewards = {s.trajectory_id: s.reward for s in samples_at_cut(log, plan, "again").values()}
    assert rewards["g0.3"] == 4.5


@pytest.mark.more_but("*None*")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda row: None, "it gave None: return a finite number"),
        (lambda row: float("nan"), "it gave nan"),
        (lambda row: row["nothing"], "it raised KeyError"),
    ],
)
def test_a_function_that_gives_no_reward(log: Store, function: Any, words: str) -> None:
    """The trajectory is named, with what it gave."""
    with pytest.raises(ConfigError, match=f"of trajectory g2.0 {words}"):
        ask(log, 10, source="f", rescoring=Rescoring("m:f", "f", function))


def test_only_what_a_function_gave_is_recorded(trained: Callable[..., Store]) -> None:
    """No event where there is nothing new, and none of the source that the step was trained on."""
    log = trained()
    rescoring = Rescoring("m:f", "judge", opposite, {"g0.0": 1.0, "g0.1": None})
    assert write_rewards(log, "demo", rescoring, "agent", replaces=False).written == 1
    before = log.head()
    assert write_rewards(log, "demo", rescoring, "agent", replaces=False).already == 1
    assert log.head() == before
    rewards = [e.record for e in log.events_of([RewardAssigned.KIND]) if e.lane == "rescore"]
    assert rewards == [RewardAssigned("g0.0", None, 1.0, "judge")]
    with pytest.raises(ConfigError, match="trained on rewards of this source"):
        write_rewards(log, "demo", rescoring, "judge", replaces=False)


# The command --------------------------------------------------------------------------------------


def test_what_the_command_prints(log: Store, cli: Cli, tmp_path: Path) -> None:
    """Both ways to ask give the same; several steps a line each; options that do not go together are 2."""
    command = (10, "--store", log.path, "--set", "algorithm.clip_high=0.25")
    code, out, _ = cli("replay", "what-if", *command)
    assert code == 0
    assert "gradients: cosine 1" in out
    assert cli("replay", "step", *command)[1] == out
    values = json.loads(cli("replay", "what-if", *command, "--json")[1])
    assert (values["proven"], values["run"], values["reran"]) == (True, "demo", [9])
    assert values["steps"][0]["gradients"]["whole"]["cosine"] == 1.0
    (tmp_path / "fresh.toml").write_text("max_staleness = 10\n")
    command = (10, "--store", log.path, "--recipe", tmp_path / "fresh.toml")
    code, out, _ = cli("replay", "what-if", *command, "--to", 11, "-o", tmp_path / "model")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[1][:6] == ["10", "12", "/", "12", "0", "0"]
    assert lines[2][:6] == ["11", "12", "/", "0", "0", "12"]
    assert (tmp_path / "model" / "model.safetensors").exists()
    code, _, err = cli("replay", "what-if", *command, "-o", tmp_path / "model")
    assert (code, "nothing is written over" in err) == (2, True)
    assert cli("replay", "what-if", *command, "--write")[0] == 2


@pytest.mark.more
def test_the_pages_commands_run(
    log: Store, root: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/what-if.md, from top to bottom, beside a store of that name; its query has the new rewards."""
    page = (root / "docs" / "what-if.md").read_text()
    [function] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [query] = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(function)
    (tmp_path / "fresh.toml").write_text("max_staleness = 10\n")
    shutil.copytree(log.path, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # another page's
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).split("\n")
    for line in filter(None, lines):
        code, out, err = cli(*shlex.split(line)[1:])
        assert (code, err) == (0, ""), err
        assert "gradients" in out or "recorded" in out
    with rb.connect("runs") as connection:
        assert {row[0]: row[1] for row in connection.execute(query).fetchall()}["shorter"] == 24
