"""Whether a model can be read, and how much of the memory that there is its training takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollbook.engines.hub import model_folder
from rollbook.store.errors import ModelError
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.check import Check, Verdict
from rollbook.train.model.lora import check_merges
from rollbook.train.model.memory import Memory, Pass, Workload, memory_of, parameters
from rollbook.train.model.reshard import check_layout, stages_of
from rollbook.train.model.shape import ModelShape, shape_to_train


def model_and_memory(config: TrainConfig, longest: int, memory: int) -> list[Check]:
    """The checks `model` and, if it can be read, `memory`.

    Args:
        longest: tokens of the longest sample; memory: bytes of this machine.
    """
    try:
        shape = shape_to_train(model_folder(config.model, weights=False), config.algorithm.head_width)
    except ModelError as error:
        return [Check("model", "red", str(error), "model")]
    try:
        if config.lora is not None:
            check_merges(shape, config.lora)
    except ModelError as error:
        return [Check("model", "red", str(error), "lora.targets")]
    summary = f"{shape.family}, {parameters(shape):,} parameters"
    return [Check("model", "green", summary), _memory(config, shape, longest, memory)]


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a training needs.

    Attributes:
        stages: of one rank of each pipeline stage; all ranks of a stage need as much.
        passes: what a forward pass is given, in words; lever: the key that decides it.
    """

    stages: tuple[Memory, ...]
    passes: str
    lever: str

    def of_all(self, part: str, ranks: int) -> int:
        """Bytes of a part on so many ranks together."""
        return ranks // len(self.stages) * sum(getattr(stage, part) for stage in self.stages)


def need_of(config: TrainConfig, shape: ModelShape, longest: int, ranks: int) -> Need:
    """The memory that a training of a model of this shape needs.

    Args:
        longest: tokens of the longest sample.

    Raises:
        ConfigError: the ranks cannot be shared out as [parallel] says.
        ModelError: the model cannot be split so.
    """
    needs, sizes = config.algorithm.needs, config.parallel
    most, lever = config.tokens_per_micro_batch, "tokens_per_micro_batch"
    if most is None:
        demand = config.algorithm.demand
        samples, lever = config.micro_batch_size or demand.groups * demand.group_size, "micro_batch_size"
        forward_pass, passes = Pass(samples * longest, longest), f"{samples} samples of {longest} tokens"
    else:
        forward_pass = Pass(max(most, longest))
        passes = f"at most {forward_pass.tokens} tokens, all trained,"
    workload = Workload(
        getattr(torch, config.dtype),
        recompute=config.recompute,
        critic="values" in needs,
        reference="reference" in needs and not config.reference_apart,
        sharing=sizes.copies(ranks) if sizes.distributed_optimizer else 1,
        lora=config.lora,
    )
    stages = stages_of(shape, sizes)
    for stage in stages:
        check_layout(shape, stage)
    return Need(tuple(memory_of(shape, stage, forward_pass, workload) for stage in stages), passes, lever)


def _memory(config: TrainConfig, shape: ModelShape, longest: int, memory: int) -> Check:
    try:
        need = need_of(config, shape, longest, config.parallel.fewest)
    except ModelError as error:
        return Check("memory", "red", str(error), "parallel")
    parts = ("state", "activations", "logits")
    sizes = {part: need.of_all(part, config.parallel.fewest) for part in parts}
    share = sum(sizes.values()) / memory
    listed = [f"{size / 2**30:.2f} GiB of {part}" for part, size in sizes.items()]
    summary = (
        f"{listed[0]}, {listed[1]} and {listed[2]} ({need.passes} in a forward pass), of "
        f"{memory / 2**30:.1f} GiB"
    )
    verdict: Verdict = "red" if share > 1 else "yellow" if share > 0.7 else "green"
    return Check("memory", verdict, summary, need.lever)
