"""Low-rank adapters: the keys of `[lora]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from rollbook.store.config import Table
from rollbook.store.events import Json

OfLayer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Target = Literal[OfLayer, "lm_head"]
TARGETS: tuple[Target, ...] = get_args(OfLayer)
"""The matrices of a layer, as transformers and PEFT call them, in the order of the model."""
LM_HEAD: Target = "lm_head"
"""The matrix behind the last layer, which gives the logits of the vocabulary."""


class LoraConfig(Table):
    """Train low-rank factors beside the policy's matrices, and leave its own weights as they are
    (arXiv:2106.09685): in place of a matrix W [out, in], W + alpha / rank * B A is served, with
    B [out, rank] and A [rank, in]. Gradients and optimizer state exist only for the factors."""

    rank: Annotated[int, Field(ge=1, le=256)] = 16
    """The inner width of the factors."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the product, divided by `rank`."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] | None = None
    """The matrices with factors; absent: all of each layer, and of a mixture of experts those of
    attention. The output, `lm_head`, has factors only where it is named, and a training from the log
    takes it only of a model whose output is not its embedding (`tie_word_embeddings` false)."""

    @property
    def scale(self) -> float:
        """The factor by which the product of the factors is multiplied."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class LoraTraining:
    """A training of low-rank factors, as manifests of steps and of checkpoints have it.

    Attributes:
        seed: of the factors' initial values.
        base_version: of the policy; its weights stay as they are beside the factors.
    """

    config: LoraConfig
    seed: int
    base_version: int

    @property
    def described(self) -> Json:
        """Its values in a manifest."""
        description: Json = self.config.model_dump(mode="json")
        return description | {"seed": self.seed, "base_version": self.base_version}


def recorded_lora(recorded: Json) -> LoraTraining:
    """The training that a manifest describes."""
    config = {key: recorded[key] for key in LoraConfig.model_fields if key in recorded}
    targets = config.pop("targets", None)
    return LoraTraining(
        LoraConfig(**config, targets=None if targets is None else tuple(targets)),
        int(recorded["seed"]),
        int(recorded["base_version"]),
    )
