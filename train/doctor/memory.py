"""Whether a model can be read, and what its training takes of the memory that there is."""

from __future__ import annotations

from math import prod

from rollbook.store.errors import ModelError
from rollbook.train.config.config import TrainConfig
from rollbook.train.data.recipe import ModelLimits
from rollbook.train.doctor.check import Check, Verdict
from rollbook.train.megatron.shape import ModelShape, shape_to_train
from rollbook.train.megatron.weight_names import weight_shapes

STATE_BYTES = 16
"""Of a parameter in training: weight, gradient and Adam's two moments, each float32."""
LOGIT_BYTES = 16
"""Of a logit while a micro-batch runs: itself, its logprob, their gradients."""


def model_and_memory(config: TrainConfig, longest: int, memory: int) -> list[Check]:
    """The checks `model` and, if it can be read, `memory`.

    Args:
        longest: tokens of the longest sample; memory: bytes of this machine.
    """
    try:
        shape = shape_to_train(config.model, config.algorithm.head_width)
    except ModelError as error:
        return [Check("model", "red", str(error), "model")]
    said = f"{shape.family}, {parameters(shape):,} parameters"
    return [Check("model", "green", said), _memory(config, shape, longest, memory)]


def limits_of(config: TrainConfig) -> ModelLimits | None:
    """What the model can be given; None where it cannot be read."""
    try:
        shape = shape_to_train(config.model, config.algorithm.head_width)
    except ModelError:
        return None
    return ModelLimits(shape.vocab, shape.context)


def parameters(shape: ModelShape) -> int:
    """How many numbers the model's weights are."""
    return sum(prod(dims) for dims in weight_shapes(shape).values())


def _memory(config: TrainConfig, shape: ModelShape, longest: int, memory: int) -> Check:
    needs = config.algorithm.needs
    models = 1 + ("values" in needs)
    state = parameters(shape) * (STATE_BYTES * models + 8 * ("reference" in needs))
    most, key = config.tokens_per_micro_batch, "tokens_per_micro_batch"
    if most is None:
        demand = config.algorithm.demand
        samples, key = config.micro_batch_size or demand.groups * demand.group_size, "micro_batch_size"
        tokens, pass_of = samples * longest, f"{samples} samples of {longest} tokens"
    else:
        tokens = max(most, longest)
        pass_of = f"at most {tokens} tokens, all trained,"
    logits = tokens * shape.outputs * LOGIT_BYTES
    share = (state + logits) / memory
    said = (
        f"{state / 2**30:.2f} GiB of state and {logits / 2**30:.2f} GiB of logits ({pass_of} in a forward "
        f"pass), of {memory / 2**30:.1f} GiB"
    )
    verdict: Verdict = "red" if share > 1 else "yellow" if share > 0.7 else "green"
    return Check("memory", verdict, said, key)
