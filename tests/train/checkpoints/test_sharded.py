"""Checkpoints in every way of writing them: what is read back is the same bit for bit, and training goes on
from it in another layout."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.engines.weights.digests import digest_tensors
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, RankError, ShortageError
from rollbook.store.events import CheckpointWritten, StepCommitted, StepPlanned
from rollbook.train.checkpoints.checkpoint import Checkpoint, read_checkpoint
from rollbook.train.checkpoints.shards import address_of

Stores = Callable[..., Store]
SGD_LIKE = {"lr": 1e-4, "eps": 1.0, "clip_grad": 0.0}
"""Adam whose steps are proportional to gradients: of one that is near zero its sign does not matter."""
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "sharded": {"sharded": True},
    "both": {"sharded": True, "overlap": True},
}
"""Beside the plain one, with which all are compared."""


@functools.cache
def _experts(folder: Path, family: str) -> str:
    """A tiny mixture of experts; files of GptOss hold those of a layer together."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    own: dict[str, Any] = {"num_local_experts": 4, "intermediate_size": 24, "sliding_window": 4}
    if family == "Qwen3Moe":
        own = {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
    config = getattr(transformers, f"{family}Config")(**size, **own, max_position_embeddings=64)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder / family)
    return str(folder / family)


def _trainings() -> dict[str, dict[str, Any]]:
    packed = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
    ppo = {"algorithm": {"name": "ppo", "groups": 2, "kl": 0.1}, "critic": SGD_LIKE}
    return {
        "sft": fabric.SFT,
        "grpo packed": fabric.GRPO | packed,
        "ppo": fabric.GRPO | ppo,
        "lora": fabric.SFT | {"lora": {"rank": 4}},
        "lora of the output": fabric.SFT
        | {"lora": {"rank": 4, "targets": ["o_proj", "lm_head"]}, "model": str(fabric.untied_folder())},
        "bfloat16": fabric.SFT | {"dtype": "bfloat16"},
        "experts": fabric.SFT | {"model": _experts(fabric.scratch(), "Qwen3Moe")},
        "fused experts": fabric.SFT | {"model": _experts(fabric.scratch(), "GptOss")},
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "distributed optimizer": (2, {"distributed_optimizer": True}),
    "distributed optimizer of 3": (3, {"distributed_optimizer": True}),
    "expert 2": (2, {"expert": 2}),
    "expert 2, distributed optimizer": (2, {"expert": 2, "distributed_optimizer": True}),
    "tensor 2, pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
}


def _tensors(held: Checkpoint) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by what and name."""
    parts = {
        what: getattr(held, what) or {} for what in ("weights", "optimizer", "critic", "critic_optimizer")
    }
    parts["adapter"] = {} if held.adapter is None else held.adapter.tensors
    return {f"{what} {name}": tensor for what, tensors in parts.items() for name, tensor in tensors.items()}


def _same_bits(first: Checkpoint, second: Checkpoint) -> None:
    ours, theirs = _tensors(first), _tensors(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def _last(log: Store) -> Checkpoint:
    return read_checkpoint(log.path / records_of(log, CheckpointWritten)[-1].path)


@pytest.fixture(scope="module")
def plain(recorded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Store]:
    """Trainings that write whole checkpoints while they wait, each made once: three steps, the last of them
    on one rank."""
    stores: dict[tuple[str, str], Store] = {}

    def trained(training: str, layout: str) -> Store:
        if (training, layout) not in stores:
            path = tmp_path_factory.mktemp("plain") / "store"
            log = stores[training, layout] = rb.open(shutil.copytree(recorded_path, path))
            _train(log, training, layout, {})
        return stores[training, layout]

    return trained


def _train(log: Store, training: str, layout: str, way: dict[str, Any]) -> None:
    values, (count, sizes) = _trainings()[training], LAYOUTS[layout]
    changes = {"steps": 2, "checkpoint_every": 1, "checkpoint": way, "parallel": sizes}
    # Factors begin with gradients of 0 for half of them: they need steps that count.
    changes["optimizer"] = {"lr": 1e-2} if "lora" in training else SGD_LIKE
    fabric.train(log, fabric.config(values | changes), ranks=count)
    fabric.train(log, fabric.config(values | changes | {"steps": 3, "parallel": {}}))


def _contract(log: Store, plain: Callable[..., Store], training: str, layout: str, way: str) -> None:
    """The checkpoints of two trainings that differ in how they write them alone are the same; so is the next
    step, from either, on one rank; the last steps of either layout replay. No checkpoint is recorded before
    its step, or late."""
    whole, count = plain(training, layout), LAYOUTS[layout][0]
    _train(log, training, layout, WAYS[way])
    assert [entry.digests for entry in records_of(log, StepCommitted)] == [
        entry.digests for entry in records_of(whole, StepCommitted)
    ]
    ours, theirs = records_of(log, CheckpointWritten), records_of(whole, CheckpointWritten)
    assert [entry.policy_version for entry in ours] == [0, 1, 2, 3]
    for first, second in zip(ours, theirs, strict=True):
        assert (first.path, first.weights_digest, first.optimizer_digest, first.phase) == (
            *(second.path, second.weights_digest, second.optimizer_digest, second.phase),
        )
        held = read_checkpoint(log.path / first.path)
        _same_bits(held, read_checkpoint(whole.path / second.path))
        assert digest_tensors(held.weights, tree=True) == first.weights_digest
        assert bool(held.optimizer) == (first.policy_version > 0)
    for record, ranks in ((ours[2], count), (ours[3], 1)):
        files = {file.name for file in (log.path / record.path).glob("shard-*")}
        sharded = {f"shard-{rank + 1:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)}
        assert files == (sharded if "sharded" in WAYS[way] else set())
    assert [replay_step(log, step).differs_in for step in (1, 2)] == [None, None]
    kinds = {StepCommitted: "step", CheckpointWritten: "checkpoint"}
    order = [
        (kinds[type(e.record)], e.record.policy_version) for e in log.events() if type(e.record) in kinds
    ]
    for version in (1, 2, 3):
        assert order.index(("step", version)) < order.index(("checkpoint", version))
    assert order.index(("checkpoint", 2)) < order.index(("step", 3)), "the last of a training is waited for"
    left = [path.name for path in (log.path / "checkpoints/demo/actor").iterdir()]
    assert sorted(left) == [f"v{version:08d}" for version in range(4)]


@pytest.mark.more_but("bfloat16-overlap")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", ["sft", "grpo packed", "ppo", "lora", "bfloat16"])
def test_one_rank(recorded: Stores, plain: Callable[..., Store], training: str, way: str) -> None:
    """Each training, written in each way."""
    _contract(recorded(), plain, training, "one", way)


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("training", "layout", "way"),
    [
        ("sft", "data 2", "overlap"),
        ("sft", "data 2", "sharded"),
        ("sft", "data 2", "both"),
        ("grpo packed", "tensor 2", "both"),
        ("ppo", "tensor 2", "sharded"),
        ("ppo", "distributed optimizer", "both"),
        ("lora", "tensor 2", "both"),
        ("lora", "distributed optimizer", "sharded"),
        ("lora of the output", "tensor 2", "both"),
        ("bfloat16", "distributed optimizer of 3", "both"),
        ("experts", "expert 2", "sharded"),
        ("experts", "expert 2, distributed optimizer", "both"),
        ("fused experts", "expert 2", "both"),
        ("sft", "tensor 2, pipeline 2", "both"),
    ],
)
def test_ranks(recorded: Stores, plain: Callable[..., Store], training: str, layout: str, way: str) -> None:
    """Each training over ranks; no way of writing depends on what is trained."""
    log = recorded()
    _contract(log, plain, training, layout, way)
    if layout == "distributed optimizer of 3":
        files = (log.path / "checkpoints/demo/actor/v00000002").glob("shard-*")
        starts = {address_of(name).start for file in files for name in load_file(file)}  # type: ignore[union-attr]
        assert len(starts) > 1, "no tensor lies on two ranks"


# What reads them ----------------------------------------------------------------------------------


def test_a_model_and_an_adapter_are_exported(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """The same files as of a whole checkpoint; transformers loads the model."""
    from transformers import AutoModelForCausalLM

    logs = {"plain": recorded("plain"), "sharded": recorded("sharded")}
    for name, log in logs.items():
        way = WAYS.get(name, {})
        fabric.train(log, fabric.config(fabric.SFT, steps=2, lora={"rank": 4}, checkpoint=way))
        for what in ("model", "adapter"):
            code, _, err = cli("export", what, "--store", log.path, "--to", tmp_path / f"{name}-{what}")
            assert code == 0, err
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors", "model/config.json"):
        ours, theirs = ((tmp_path / f"{name}-{file}").read_bytes() for name in ("sharded", "plain"))
        assert ours == theirs, file
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded-model").state_dict()
    weights = _last(logs["sharded"]).weights
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


@pytest.mark.more
def test_a_reference_and_going_back(recorded: Stores) -> None:
    """A later version is the reference, and training goes back to one, as with whole checkpoints."""
    logs = [recorded("plain"), recorded("sharded")]
    for log, way in zip(logs, ({}, WAYS["both"]), strict=True):
        changes = {"steps": 4, "checkpoint_every": 2, "checkpoint": way}
        fabric.train(log, fabric.config(fabric.SFT, **changes))
        fabric.train(log, fabric.config(fabric.SFT, **changes), abandon_after=2)
        algorithm = {"name": "grpo", "groups": 2, "group_size": 4, "kl": 0.1, "reference_version": 2}
        fabric.train(
            log, fabric.config(fabric.GRPO, steps=1, algorithm=algorithm, checkpoint=way), lane="more"
        )
    ends = [[record.digests for record in records_of(log, StepCommitted)] for log in logs]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 7
    _same_bits(_last(logs[1]), _last(logs[0]))


# Ranks that cannot write --------------------------------------------------------------------------

FOLLOW = """
import errno, os, runpy, sys
from pathlib import Path
from rollbook.train.checkpoints import shards
write, read = os.write, Path.read_text
def spoiled(fd, data):
    if "v00000002" in os.readlink(f"/proc/self/fd/{fd}"):
        SPOIL
    return write(fd, data)
def elsewhere(path, *given, **options):
    if ELSEWHERE and path.name == shards.WORD:
        raise FileNotFoundError(path)
    return read(path, *given, **options)
os.write, Path.read_text = spoiled, elsewhere
sys.argv = ["follow", *sys.argv[1:]]
runpy.run_module("rollbook.train.ranks.follow", run_name="__main__")
"""
"""A rank whose disk is full, breaks, or is another one, or which is killed while it writes version 2."""


def _spoiled(monkeypatch: pytest.MonkeyPatch, spoil: str = "pass", *, elsewhere: bool = False) -> None:
    program = FOLLOW.replace("SPOIL", spoil).replace("ELSEWHERE", str(elsewhere))
    monkeypatch.setattr("rollbook.train.ranks.launch.FOLLOW", ("-c", program))


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["sharded", "both"])
@pytest.mark.parametrize(
    ("spoil", "error", "reason"),
    [
        ("raise OSError(errno.ENOSPC, 'full')", ShortageError, "has no room for the checkpoint"),
        ("raise OSError(errno.EIO, 'broken')", RankError, r"rank 1 on \S+ failed: OSError\(5, 'broken'\)"),
        ("os.kill(os.getpid(), 9)", RankError, "rank 1 was ended by SIGKILL"),
    ],
)
def test_a_rank_that_cannot_write(
    recorded: Stores,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    spoil: str,
    error: type[Exception],
    reason: str,
) -> None:
    """It is named, nothing is left of that checkpoint, no step is lost, and the training goes on."""
    log = recorded()
    settings = fabric.config(fabric.SFT, steps=4, checkpoint_every=2, checkpoint=WAYS[way])
    with monkeypatch.context() as patch:
        _spoiled(patch, spoil)
        with pytest.raises(error, match=reason):
            fabric.train(log, settings, ranks=2)
    folder = log.path / "checkpoints/demo/actor"
    assert [path.name for path in folder.iterdir()] == ["v00000000"]
    assert [record.policy_version for record in records_of(log, CheckpointWritten)] == [0]
    assert len(records_of(log, StepCommitted)) >= 2
    fabric.train(log, settings, ranks=2)
    assert [record.policy_version for record in records_of(log, StepCommitted)] == [1, 2, 3, 4]


@pytest.mark.ranks
def test_a_rank_without_the_stores_disk(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named before a step is planned, with the remedy; without shards it needs no disk."""
    log = recorded()
    _spoiled(monkeypatch, elsewhere=True)
    message = rf"rank 1 on \S+ does not see .* {log.path}: .*or set checkpoint\.sharded = false"
    with pytest.raises(ConfigError, match=message):
        fabric.train(log, fabric.config(fabric.SFT, steps=1, checkpoint=WAYS["sharded"]), ranks=2)
    assert records_of(log, StepPlanned) == []
    assert [path.name for path in (log.path / "checkpoints/demo/actor").iterdir()] == ["v00000000"]
    fabric.train(log, fabric.config(fabric.SFT, steps=1), ranks=2)
    assert len(records_of(log, StepCommitted)) == 1


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_ranks")
def test_the_work_is_even(recorded: Stores) -> None:
    """Copies of the model take turns, and each number is written once."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=1, checkpoint=WAYS["sharded"]), ranks=2)
    folder = log.path / records_of(log, CheckpointWritten)[-1].path
    sizes = [file.stat().st_size for file in sorted(folder.glob("shard-*"))]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)
    held = read_checkpoint(folder)
    # Rows that pad the vocabulary are written too.
    numbers = sum(tensor.nbytes for tensor in _tensors(held).values())
    shards = [load_file(file) for file in folder.glob("shard-*")]
    assert numbers <= sum(tensor.nbytes for shard in shards for tensor in shard.values()) < 1.15 * numbers
