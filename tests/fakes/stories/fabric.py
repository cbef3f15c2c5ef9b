"""What the tests of training and of replay are made of: fabricated trajectories, a tiny model, stores.

Loaded by the conftest of both folders, so that a session trains its store once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.fakes.stories.records import step_planned, turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import (
    CheckpointWritten,
    Record,
    RewardAssigned,
    StepCommitted,
    StepPlanned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnFailed,
    VersionSpan,
    token_ids,
)
from rollbook.store.fold.trajectory import prompt_sha256

ROOT = Path(__file__).parents[3]
VOCAB = 100
EVERY_STEPS_STAGES = (
    *("input_weights", "input_optimizer", "rng", "samples", "old_logprobs", "rewards", "advantages"),
    *("logprobs", "losses", "gradients", "optimizer", "weights"),
)
"""The stages of a step that needs no other policy's logprobs, in order."""
RUN = "demo"


@dataclass(frozen=True)
class T:
    """A turn to fabricate. `parent` is an index among the trajectory's turns; `prompt` its delta.

    `logprobs` of None is a teacher's; a number is every token's. `version` of None leaves no span. `experts`
    are packed as the log has them.
    """

    prompt: Sequence[int] = (1, 2)
    completion: Sequence[int] = (3, 4)
    parent: int | None = None
    logprobs: Any = -1.0
    version: int | None = 0
    temperature: float = 1.0
    delivered: bool = True
    failed: bool = False
    experts: dict[str, Any] = field(default_factory=dict)


def records(
    name: str,
    turns: Sequence[T] = (T(),),
    *,
    group: str | None = None,
    split: str = "train",
    reward: float | None = None,
    finished: bool = True,
    success: bool | None = None,
    labels: dict[str, Any] | None = None,
    status: str = "completed",
) -> list[Any]:
    """The records of one trajectory; its id is `name`, its turns' ids `name.0`, `name.1`..."""
    result: list[Record] = [TrajectoryOpened(name, name, group, None, split, labels or {})]
    whole: dict[int, list[int]] = {}
    for i, turn in enumerate(turns):
        parent = None if turn.parent is None else f"{name}.{turn.parent}"
        result.append(turn_requested(name, f"{name}.{i}", parent_turn_id=parent))
        sent = [*(whole[turn.parent] if turn.parent is not None else []), *turn.prompt]
        if turn.failed:
            result.append(TurnFailed(name, f"{name}.{i}", "gone"))
            continue
        whole[i] = [*sent, *turn.completion]
        result.append(_completed(name, f"{name}.{i}", turn, sent))
        if turn.delivered:
            result.append(TurnDelivered(name, f"{name}.{i}", "sent"))
    if reward is not None:
        result.append(RewardAssigned(name, None, reward))
    if finished:
        result.append(TrajectoryFinished(name, status, success))
    return result


def _completed(name: str, turn_id: str, turn: T, sent: list[int]) -> TurnCompleted:
    count = len(turn.completion)
    logprobs = None if turn.logprobs is None else np.broadcast_to(np.float32(turn.logprobs), (count,)).copy()
    spans = () if turn.version is None else (VersionSpan("actor", turn.version, 0, count),)
    return turn_completed(
        name,
        turn_id,
        policy_version=turn.version,
        prompt_ids=token_ids(turn.prompt),
        completion_ids=token_ids(turn.completion),
        logprobs=logprobs,
        version_spans=spans,
        prompt_length=len(sent),
        prompt_sha256=prompt_sha256(token_ids(sent)),
        logprob_semantics={"temperature": turn.temperature},
        routed_experts=turn.experts,
    )


def events(items: Iterable[Record], run: str = RUN) -> list[Event]:
    """The records in envelopes."""
    return [Event(record, run) for record in items]


def append(log: Store, items: Iterable[Record], lane: str = "serve", run: str = RUN) -> None:
    """Append records to a lane, durably."""
    with log.writer(lane) as writer:
        writer.append(events(items, run)).result(30)


# A tiny model -------------------------------------------------------------------------------------


def tiny_config(*, tied: bool = True, **changes: Any) -> Any:
    """A Qwen3 configuration: 2 layers, hidden 32, grouped queries, a vocabulary that needs padding."""
    from transformers import Qwen3Config

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
    }
    return Qwen3Config(**(values | {"tie_word_embeddings": tied} | changes))


def make_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Any:
    """Write a tiny model whose every weight is random, norms too; the transformers model."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_config(tied=tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(5)
    model.save_pretrained(folder)
    return model.eval()


@functools.cache
def model_folder() -> Path:
    """The tied tiny model, made once."""
    folder = scratch() / "model"
    make_model(folder)
    return folder


@functools.cache
def untied_folder() -> Path:
    """A tiny model whose output has weights of its own, made once."""
    folder = scratch() / "untied"
    make_model(folder, tied=False)
    return folder


@functools.cache
def _scratch_holder() -> Any:
    return tempfile.TemporaryDirectory(prefix="rollbook-train-tests-")


def scratch() -> Path:
    """A folder that is gone with the session."""
    return Path(_scratch_holder().name)


# Stores -------------------------------------------------------------------------------------------


def teacher_records(count: int, name: str = "teach") -> list[Any]:
    """Conversations of two turns that count on from their first token, without logprobs or versions."""
    result: list[Record] = []
    for i in range(count):
        start = 5 + (7 * i) % 80
        first = T([1, start], [start + 1, start + 2, 2], None, None, None)
        then = T([3, start + 2], [start + 3, start + 4, 2][: 2 + i % 2], 0, None, None)
        result += records(f"{name}{i}", [first, then], group=f"{name}{i}", split="teacher")
    return result


def rollout_records(groups: int, size: int, *, first: int = 0, version: int = 0) -> list[Any]:
    """Groups of rollouts with logprobs and rewards that differ; every third is a branching forest."""
    result: list[Record] = []
    for g in range(first, first + groups):
        for i in range(size):
            rng = np.random.default_rng([g, i])
            turns = [_rollout(rng, None, version), _rollout(rng, 0, version)]
            if i % 3 == 0:
                turns.append(_rollout(rng, 0, version))
            result += records(f"g{g}.{i}", turns, group=f"g{g}", reward=float((i + g) % size) / 2)
    return result


def _rollout(rng: Any, parent: int | None, version: int) -> T:
    count = int(rng.integers(2, 6))
    logprobs = rng.uniform(-5, -3, count).astype(np.float32)
    return T(rng.integers(4, VOCAB, 3), rng.integers(4, VOCAB, count), parent, logprobs, version, 0.8)


def record_store(path: Path, teachers: int = 18, groups: int = 6, size: int = 4) -> Store:
    """A new store with teacher conversations, groups of rollouts, and an evaluation."""
    log = rb.open(path, create=True)
    items = teacher_records(teachers) + rollout_records(groups, size)
    append(log, items + records("held-out", split="eval", reward=1.0))
    return log


SFT: dict[str, Any] = {
    "run": RUN,
    "steps": 9,
    "seed": 3,
    "micro_batch_size": 4,
    "checkpoint_every": 4,
    "algorithm": {"name": "sft", "batch_size": 6},
    "recipe": {"splits": ["teacher"]},
    "optimizer": {
        "lr": 1e-2,
        "min_lr": 1e-3,
        "warmup_steps": 2,
        "decay": "WSD",
        "wsd_decay_steps": 3,
        "weight_decay": 0.01,
    },
}
GRPO: dict[str, Any] = {
    "run": RUN,
    "steps": 3,
    "seed": 3,
    "micro_batch_size": 5,
    "checkpoint_every": 2,
    "idle_timeout_s": 5.0,
    "algorithm": {"name": "grpo", "groups": 2, "group_size": 4},
    "optimizer": {"lr": 1e-3, "warmup_steps": 2, "weight_decay": 0.01},
}


def config(values: dict[str, Any], **changes: Any) -> Any:
    """A TrainConfig of the tiny model."""
    from rollbook.train.config.config import parse_config

    return parse_config({"model": str(model_folder())} | values | changes, "test")


def toml(settings: Any) -> str:
    """A configuration as the text of a CONFIG file."""
    lines: list[str] = []
    for key, value in sorted(settings.as_json().items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            lines += [f"[{key}]", *(f"{k} = {_literal(v)}" for k, v in value.items() if v is not None)]
        elif value is not None:
            lines.append(f"{key} = {_literal(value)}")
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def train(
    log: Store,
    settings: Any,
    source: str = "cut",
    *,
    as_of: str = "head",
    lane: str = "train",
    abandon_after: int | None = None,
    ranks: int = 1,
) -> None:
    """`rollbook train` in this process."""
    from rollbook.cli.train.training import run_train

    run_train(settings, log.path, source, as_of, lane, abandon_after, ranks)


def computed(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a step that its replay has too: without what it took of time and memory."""
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "_gib"))}


@functools.cache
def trained_path() -> Path:
    """A store with 9 SFT steps (checkpoints at 0, 4, 8, 9), then 3 of GRPO (11, 12). Copy it; never write."""
    path = scratch() / "trained"
    log = record_store(path)
    train(log, config(SFT))
    train(log, config(GRPO))
    return path


@contextlib.contextmanager
def killed_at(step: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """A training in this context ends by the error, as its process might, before this step runs; it must."""
    import pytest

    from rollbook.train.loop import trainer

    run_step = trainer.run_step

    def killed(policy: Any, settings: Any, batch: Any, **options: Any) -> Any:
        if settings.version == step:
            raise error
        return run_step(policy, settings, batch, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollbook.train.loop.trainer.run_step", killed)
        with pytest.raises(error):
            yield


def steps_of(log: Store, run: str = RUN) -> Any:
    """The run's history."""
    from rollbook.store.fold.history import fold_history

    return fold_history(log.events(), run, "actor")


def planned(step: int, version: int, phase: str = "p", *, attempt: int = 1, turns: Sequence[str] = ()) -> Any:
    """A manifest, as far as a history reads it."""
    samples = [{"trajectory_id": t.split(".")[0], "turn_id": t} for t in turns]
    return step_planned(
        step, attempt=attempt, policy_version=version, phase=phase, samples=samples, partition=[[[0]]]
    )


def committed(step: int, version: int, *, attempt: int = 1) -> Any:
    """The results of a step that made `version`."""
    return StepCommitted(step, attempt, "actor", version, {}, {})


def checkpoint(version: int, phase: str | None = "p", optimizer: str | None = "o") -> Any:
    """A checkpoint; without an optimizer digest it holds only weights."""
    return CheckpointWritten("actor", version, f"c/{version}", f"w{version}", optimizer, phase, 1)


# Processes ----------------------------------------------------------------------------------------


def start_cli(*arguments: object) -> subprocess.Popen[str]:
    """`rollbook ...` in a process of its own, its stdout and stderr piped."""
    from tests.fakes.processes.warm import TORCH, WarmProcess

    return WarmProcess(
        [sys.executable, "-m", "rollbook", *map(str, arguments)],
        modules=TORCH,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def batch_of(plan: StepPlanned, samples: dict[str, Any]) -> Any:
    """The batch of a manifest whose algorithm needs no other policy's logprobs."""
    from rollbook.train.algorithms.registry import recorded_algorithm
    from rollbook.train.batches.batch import build_batch
    from rollbook.train.batches.experience import experience_of

    ordered = [samples[ref["turn_id"]] for ref in plan.samples]
    return build_batch(experience_of(ordered, recorded_algorithm(plan.algorithm)), plan.partition)
