"""Trainings of low-rank factors: what is trained and what is left as it is, resumed and replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, ModelError
from rollbook.store.events import CheckpointWritten, StepCommitted, StepPlanned

Stores = Callable[..., Store]
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
TRAININGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4, "kl": 0.1}},
    "packed": {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4}} | PACKED,
    "bfloat16": {"dtype": "bfloat16"},
    "recomputed": {"recompute": True},
    "some": {"lora": {"rank": 3, "targets": ["q_proj", "v_proj", "up_proj"]}},
    "output": {"lora": {"rank": 3, "targets": ["q_proj", "lm_head"]}} | PACKED,
    "ppo": {"algorithm": {"name": "ppo", "groups": 8, "mini_batches": 2}, "critic": {"lr": 0.01}, "steps": 4},
}


class Killed(Exception):
    """The process ends here."""


@pytest.mark.more_but("grpo")
@pytest.mark.parametrize("name", TRAININGS)
def test_steps_replay(recorded: Stores, name: str) -> None:
    """Weights change, by the factors alone; each step is replayed bit for bit."""
    changes: dict[str, Any] = {"steps": 3, "checkpoint_every": 2} | LORA | TRAININGS[name]
    if name == "output":
        changes["model"] = str(fabric.untied_folder())
    log = recorded()
    fabric.train(log, fabric.config(fabric.GRPO, **changes))
    commits, plans = records_of(log, StepCommitted), records_of(log, StepPlanned)
    assert commits[0].metrics["gradient_norm"] > 0
    first, *_, last = records_of(log, CheckpointWritten)
    assert first.weights_digest == plans[0].input_digests["input_weights"]
    assert last.weights_digest == commits[-1].digests["weights"] != first.weights_digest
    state = load_file(log.path / last.path / "optimizer.safetensors")
    assert all(".adapter." in key for key in state)
    assert plans[0].lora["base_version"] == 0
    for step in range(len(commits)):
        result = replay_step(log, step)
        assert result.bit_for_bit, result.differs_in


@pytest.mark.more
def test_a_kill_changes_nothing(recorded: Stores) -> None:
    """A restart has the factors and their state, and so the bits of a run that never stopped."""
    whole, broken = recorded("whole"), recorded("broken")
    settings = fabric.config(fabric.SFT, steps=6, **LORA)
    fabric.train(whole, settings)
    with fabric.killed_at(5, Killed):
        fabric.train(broken, settings)
    fabric.train(broken, settings)
    assert [s.digests for s in records_of(broken, StepCommitted)] == [
        s.digests for s in records_of(whole, StepCommitted)
    ]


@pytest.mark.more
def test_before_and_after_other_trainings(recorded: Stores) -> None:
    """Factors begin beside the weights of the training before, and are in those of the next one; a training
    with other factors is another one."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=2))
    fabric.train(log, fabric.config(fabric.SFT, steps=2, **LORA))
    fabric.train(log, fabric.config(fabric.SFT, steps=2, lora={"rank": 2}))
    fabric.train(log, fabric.config(fabric.GRPO, steps=1))
    plans, commits = records_of(log, StepPlanned), records_of(log, StepCommitted)
    bases = [plan.lora and plan.lora["base_version"] for plan in plans]
    assert bases == [None, None, 2, 2, 4, 4, None]
    for before, after in zip(commits, plans[1:], strict=False):
        assert after.input_digests["input_weights"] == before.digests["weights"]
    assert [replay_step(log, step).differs_in for step in range(7)] == [None] * 7


@pytest.mark.more
def test_it_goes_back_and_on(recorded: Stores) -> None:
    """To a version of the same training, by `--abandon-after`; the factors are those of then."""
    log, straight = recorded("back"), recorded("straight")
    fabric.train(straight, fabric.config(fabric.SFT, steps=6, **LORA))
    fabric.train(log, fabric.config(fabric.SFT, steps=6, **LORA))
    fabric.train(log, fabric.config(fabric.SFT, steps=6, **LORA), abandon_after=4)
    again = records_of(log, StepCommitted)[-2:]
    expected = records_of(straight, StepCommitted)[-2:]
    assert [s.digests["weights"] for s in again] == [s.digests["weights"] for s in expected]
    assert records_of(log, StepPlanned)[-1].lora["base_version"] == 0
    last = records_of(log, StepPlanned)[-1].step
    assert replay_step(log, last).differs_in is None


def test_without_the_weights_that_factors_are_beside(recorded: Stores) -> None:
    """A training cannot go on, and says which version is missing."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=2, **LORA))
    base = log.path / records_of(log, CheckpointWritten)[0].path / "model.safetensors"
    original = base.read_bytes()
    base.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    with pytest.raises(ModelError, match="weights damaged"):
        fabric.train(log, fabric.config(fabric.SFT, steps=3, **LORA))
    base.write_bytes(original)
    fabric.train(log, fabric.config(fabric.SFT, steps=3, **LORA))
    assert len(records_of(log, StepCommitted)) == 3


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[1, 5, 6, 7, 2]])).logits
    return logits


@pytest.mark.parametrize("of_output", [False, True])
def test_peft_loads_it(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path, of_output: bool
) -> None:
    """The exported adapter beside the first model is the checkpoint, which has both in one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    log, out, lora = recorded(), tmp_path / "adapter", LORA
    if of_output:
        lora = {"lora": LORA["lora"] | {"targets": ["q_proj", "lm_head"]}}
        lora |= {"model": str(fabric.untied_folder())}
    fabric.train(log, fabric.config(fabric.SFT, steps=3, **lora))
    code, printed, _ = cli("export", "adapter", "--store", log.path, "--to", out, "--version", 3)
    assert code == 0
    assert printed.startswith(f"wrote {out}: the adapter of version 3 of policy actor, run demo (0.0")
    first, *_, last = records_of(log, CheckpointWritten)
    own, whole = (AutoModelForCausalLM.from_pretrained(log.path / r.path) for r in (first, last))
    before, expected = _logits(own), _logits(whole)
    assert float((expected - before).abs().max()) > 0.1
    if of_output:
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["target_modules"] == ["lm_head", "q_proj"]
        assert not torch.equal(own.lm_head.weight, whole.lm_head.weight)
    logits = _logits(PeftModel.from_pretrained(own, out))
    assert float((logits - expected).abs().max()) < 1e-5


def test_an_output_that_is_the_embedding(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """A training of its factors is refused before anything is written, by the model at its beginning and by
    the checkpoint at its return; and so is its plan."""
    log, lora = recorded(), {"targets": ["v_proj", "lm_head"]}
    wrong = fabric.config(fabric.SFT, lora=lora)
    refused = r"lora.targets lm_head: the model's output is its embedding .*: leave it out, or take a model"
    before = log.head()
    with pytest.raises(ModelError, match=refused):
        fabric.train(log, wrong)
    assert log.head() == before
    fabric.train(log, fabric.config(fabric.SFT, steps=1))
    with pytest.raises(ModelError, match=refused):
        fabric.train(log, wrong)
    file = tmp_path / "wrong.toml"
    file.write_text(fabric.toml(wrong))
    code, _, err = cli("train", file, "--store", log.path)
    assert code == 2
    assert "the adapter alone can be exported" in " ".join(err.split())


def test_there_is_no_adapter(
    trained: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Of a version whose weights were trained; nothing is left."""
    log = trained()
    code, _, err = cli("export", "adapter", "--store", log.path, "--to", tmp_path / "out")
    assert code == 2
    assert "has no adapter: it was trained without [lora]; `rollbook export model`" in " ".join(err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"lora": {"targets": ["embed_tokens"]}}, "lora.targets"),
        ({"lora": {}, "optimizer": {"name": "muon"}}, r"with \[lora\] take \"adamw\""),
        (
            {"lora": {}, "policy": "reward", "algorithm": {"name": "reward_model", "pairs": "rewards"}},
            "trains the head of a reward model",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], reason: str) -> None:
    """It is said before anything is read."""
    with pytest.raises(ConfigError, match=reason):
        fabric.config(fabric.SFT, **changes)
