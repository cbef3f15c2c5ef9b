"""What a CONFIG's model can be given."""

from __future__ import annotations

from rollbook.ingest.engines.hub import model_folder
from rollbook.store.errors import ModelError
from rollbook.train.config.config import TrainConfig
from rollbook.train.data.recipe import ModelLimits
from rollbook.train.megatron.shape import shape_to_train


def limits_of(config: TrainConfig) -> ModelLimits | None:
    """The model's vocabulary, context, and mixture of experts if routing is replayed; None where it cannot be
    read."""
    try:
        shape = shape_to_train(model_folder(config.model, weights=False), config.algorithm.head_width)
    except ModelError:
        return None
    return ModelLimits(shape.vocab, shape.context, shape.mixture if config.routing_replay else None)
