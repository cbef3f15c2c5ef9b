"""The norm of Megatron's layers. Imported once Megatron's device is decided."""

from __future__ import annotations

from typing import Any

import torch


class Norm(torch.nn.RMSNorm):
    """Root mean square norm (arXiv:1910.07467), torch's own, made as Megatron makes its layers' parts.

    Megatron's wrapper of it refuses sequences that ranks share. There each rank has some of the tokens, so
    that the weight's gradient is a sum over ranks: it is marked for Megatron to sum it.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCentredNorm(Norm):
    """The norm of Gemma 3, which multiplies by 1 + its weight and is computed in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What `x` [..., hidden_size] is, normalized; of its type."""
        weight = 1.0 + self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)
