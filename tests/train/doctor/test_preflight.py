"""Preflight: each check on a configuration that breaks it, and none red on a sound one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.store import Store
from rollbook.train.doctor.preflight import STATE_BYTES, parameters, preflight
from rollbook.train.megatron.shape import read_shape

MEMORY = 8 << 30


def _verdicts(
    fabric: Any, log: Store, source: str = "cut", memory: int = MEMORY, **changes: Any
) -> dict[str, str]:
    config = fabric.config(fabric.GRPO, **changes)
    return {check.name: check.verdict for check in preflight(config, log, log.head(), source, memory)}


def test_a_sound_configuration(fabric: Any, recorded: Callable[..., Store]) -> None:
    """Nothing is red or yellow."""
    found = _verdicts(fabric, recorded())
    assert set(found.values()) == {"green"}
    assert list(found) == ["model", "memory", "batch", "kl", "staleness", "data", "rewards", "evaluation"]


def _algorithm(**keys: Any) -> dict[str, Any]:
    return {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4} | keys}


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({"model": "/nowhere"}, "model", "red"),
        ({"memory": 1 << 18}, "memory", "red"),
        (_algorithm(groups=2, group_size=2), "batch", "yellow"),
        (_algorithm(groups=1), "batch", "yellow"),
        ({"source": "tail"}, "staleness", "yellow"),
        (
            {"source": "tail", "steps": 4, "recipe": {"max_staleness": 1}} | _algorithm(epochs=4),
            "staleness",
            "red",
        ),
        (_algorithm(groups=7), "data", "red"),
        (_algorithm(groups=7) | {"source": "tail"}, "data", "yellow"),
        ({"recipe": {"min_reward": 99.0}}, "data", "red"),
        ({"evaluation": {"source_runs": ["none"]}}, "evaluation", "yellow"),
        (
            {"evaluation": {"source_runs": ["none"]}, "algorithm": {"name": "sft", "batch_size": 2}},
            "evaluation",
            "red",
        ),
        ({"recipe": {"reward_source": "judge"}}, "rewards", "red"),
    ],
)
def test_what_is_wrong_is_seen(
    fabric: Any, recorded: Callable[..., Store], changes: dict[str, Any], check: str, verdict: str
) -> None:
    """By its own check."""
    assert _verdicts(fabric, recorded(), **changes)[check] == verdict


def test_memory_counts_every_model(fabric: Any) -> None:
    """A parameter in training takes 16 bytes; a critic as many again."""
    count = parameters(read_shape(fabric.model_folder()))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(fabric.model_folder())
    assert count == sum(parameter.numel() for parameter in model.parameters())
    for name, models in (("grpo", 1), ("ppo", 2)):
        config = fabric.config(fabric.GRPO, algorithm={"name": name})
        [memory] = [c for c in preflight(config, None, {}, "cut", MEMORY) if c.name == "memory"]
        assert memory.said.startswith(f"{count * STATE_BYTES * models / 2**30:.2f} GiB of state")


def test_memory_of_a_forward_pass(fabric: Any, recorded: Callable[..., Store]) -> None:
    """Padded, samples times the longest; packed, the tokens that are named, or the longest sample."""
    log = recorded()
    said = {}
    for name, changes in {
        "padded": {"micro_batch_size": 5},
        "packed": {"micro_batch_size": None, "tokens_per_micro_batch": 1000},
        "less than one": {"micro_batch_size": None, "tokens_per_micro_batch": 1},
    }.items():
        config = fabric.config(fabric.GRPO, **changes)
        [memory] = [c for c in preflight(config, log, log.head(), "cut", MEMORY) if c.name == "memory"]
        said[name] = (memory.said.partition("(")[2].partition(" in a")[0], memory.lever)
    longest = int(said["padded"][0].split()[3])
    assert 5 < longest < 30
    assert said == {
        "padded": (f"5 samples of {longest} tokens", "micro_batch_size"),
        "packed": ("at most 1000 tokens, all trained,", "tokens_per_micro_batch"),
        "less than one": (f"at most {longest} tokens, all trained,", "tokens_per_micro_batch"),
    }


def test_the_command(
    fabric: Any, recorded: Callable[..., Store], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """Exit code 0 where nothing is red, else 1; a line for each check; without a store, what needs none."""
    log, path = recorded(), tmp_path / "c.toml"
    path.write_text(fabric.toml(fabric.config(fabric.GRPO)))
    code, out, _ = cli("preflight", path, "--store", log.path)
    assert code == 0
    assert "evaluation" in out
    code, out, _ = cli(
        "preflight", path, "--store", log.path, "--set", "recipe.reward_source=judge", "--json"
    )
    assert code == 1
    assert [c["name"] for c in orjson.loads(out) if c["verdict"] == "red"] == ["data", "rewards"]
    code, out, _ = cli("preflight", path, "--json")
    assert [c["name"] for c in orjson.loads(out)] == ["model", "memory", "batch", "kl", "staleness"]


def test_what_the_model_cannot_be_given_is_counted(fabric: Any, recorded: Callable[..., Store]) -> None:
    """Ids beyond its vocabulary and paths beyond its context, each by its rule."""
    log = recorded()
    long, odd = fabric.T([1] * 70, [20]), fabric.T([1], [fabric.VOCAB])
    for name, turn in (("long", long), ("odd", odd)):
        fabric.append(log, fabric.records(name, [turn], group=name, reward=1.0), lane=name)
    config = fabric.config(fabric.GRPO)
    [data] = [c for c in preflight(config, log, log.head(), "cut", MEMORY) if c.name == "data"]
    assert {"too_long 1", "outside_vocabulary 1"} <= set(data.said.partition("dropped: ")[2].split(", "))
