"""How a training is spread over ranks: the sizes of `[parallel]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rollbook.store.config import Positive, Table
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json


class ParallelConfig(Table):
    """How a training is spread over its ranks, which `--ranks` or a launcher starts. The ranks that
    these sizes leave over are data-parallel copies, each of which takes a part of every batch."""

    tensor: Positive = 1
    """Ranks that share each matrix (arXiv:1909.08053): must divide key-value heads and widths."""
    pipeline: Positive = 1
    """Ranks that share the layers, as stages of equal depth (arXiv:2104.04473)."""
    context: Positive = 1
    """Ranks that share each sample; more than 1 is not built."""
    expert: Positive = 1
    """Data-parallel ranks that share the experts of each layer (arXiv:2006.16668)."""
    expert_tensor: Positive | None = None
    """Ranks that share each matrix of an expert: as many as `tensor`, or 1; absent: as many."""
    sequence: bool = False
    """Ranks that share each matrix share the tokens between them, too, in norms and residuals
    (arXiv:2205.05198): less memory; a mixture of experts needs it where `tensor` is above 1."""
    distributed_optimizer: bool = False
    """Data-parallel ranks share the optimizer's state (arXiv:1910.02054): each steps a part of the weights
    and gathers the others. Steps are the same, and checkpoints too; a rank needs less memory."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait of one rank for another within a step: then the step fails, and names who was waited
    for."""

    @model_validator(mode="after")
    def _built(self) -> ParallelConfig:
        if self.context > 1:
            raise ValueError(
                f"context {self.context}: attention without TransformerEngine takes whole samples; "
                "leave it 1, and share matrices (tensor) or layers (pipeline) instead"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence: it goes with tensor above 1, whose ranks share the tokens")
        if self.expert_tensor not in (None, 1, self.tensor):
            raise ValueError(
                f"expert_tensor {self.expert_tensor}: choose 1, or as many as tensor ({self.tensor})"
            )
        return self

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def fewest(self) -> int:
        """The fewest ranks that it works with."""
        sharing = self.tensor // (self.expert_tensor or self.tensor)
        return self.model_ranks * -(-self.expert // sharing)

    def copies(self, ranks: int) -> int:
        """Data-parallel copies on so many ranks.

        Raises:
            ConfigError: the sizes do not divide them.
        """
        copies, left = divmod(ranks, self.model_ranks)
        if left or not copies:
            raise ConfigError(
                f"{ranks} ranks cannot be shared by tensor = {self.tensor} times pipeline = {self.pipeline}: "
                f"start a multiple of {self.model_ranks} (--ranks), or change [parallel]"
            )
        sharing = copies * self.tensor // (self.expert_tensor or self.tensor)
        if sharing % self.expert:
            raise ConfigError(
                f"expert = {self.expert} does not divide the {sharing} ranks that can share experts: "
                "start more ranks, or share the experts among fewer"
            )
        return copies

    def described(self, ranks: int) -> Json:
        """The layout as in a step's fingerprint; sizes that were added later are left out if they
        are 1."""
        layout: Json = {"data": self.copies(ranks), "tensor": self.tensor, "pipeline": self.pipeline}
        if self.expert > 1:
            layout["expert"] = self.expert
        if self.expert_tensor is not None and self.expert_tensor != self.tensor:
            layout["expert_tensor"] = self.expert_tensor
        if self.sequence:
            layout["sequence"] = True
        if self.distributed_optimizer:
            layout["distributed_optimizer"] = True
        return layout


def recorded_parallel(recorded: Json) -> tuple[ParallelConfig, int]:
    """The layout of a recorded step, and how many ranks it had."""
    sizes = {key: value for key, value in recorded.items() if key != "data"}
    parallel = ParallelConfig(**sizes)
    return parallel, int(recorded.get("data", 1)) * parallel.model_ranks
