"""The part of each parameter that a rank's optimizer steps: all of it, or with a distributed
optimizer a slice.

Megatron's own ways of saving a distributed optimizer either know one layout alone, or lose what
lies behind padding. Here each slice knows which numbers of its parameter it has, so that the
whole can be put together in any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from rollbook.train.model.reshard import Piece


def main_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The tensor that an optimizer steps for a whole parameter: the parameter, or the float32
    weights that Megatron keeps of a narrower one."""
    main: torch.Tensor = getattr(parameter, "main_param", parameter)
    return main


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerSlice:
    """The part of a parameter that is stepped.

    Attributes:
        tensor: the optimizer's own, of which torch's `optimizer` has the state.
        start, end: the range of the flattened parameter that it is.
        narrow: whether the parameter is of a narrower type than what is stepped.
    """

    parameter: torch.nn.Parameter
    tensor: torch.Tensor
    optimizer: Any
    start: int
    end: int
    narrow: bool

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Moments and step count; empty before the first step."""
        state: dict[str, torch.Tensor] = self.optimizer.state.get(self.tensor, {})
        return state

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of this part, before clipping."""
        return self.own(cast(Any, self.parameter).main_grad)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of numbers that are laid out as the parameter, laid out as the optimizer's own."""
        return whole.reshape(-1)[self.start : self.end].view(self.tensor.shape)

    def piece(self, numbers: torch.Tensor) -> Piece:
        """Numbers laid out as the optimizer's own, as a piece of the parameter; or a single number."""
        if not numbers.dim():
            return Piece.all_of(numbers)
        return Piece(tuple(self.parameter.shape), self.start, numbers.detach().reshape(-1))


def stepped_of(module: torch.nn.Module, optimizers: Sequence[Any]) -> dict[str, OptimizerSlice]:
    """The slices of a module that Megatron's optimizers step, by the parameter's name."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    slices = [part for optimizer in optimizers for part in _all_of(optimizer, names)]
    return {names[part.parameter]: part for part in slices}


def _all_of(optimizer: Any, names: dict[torch.nn.Parameter, str]) -> Iterator[OptimizerSlice]:
    inner = optimizer.optimizer
    if hasattr(optimizer, "model_param_group_index_map"):
        for parameter, (group, at) in optimizer.model_param_group_index_map.items():
            tensor = inner.param_groups[group]["params"][at]
            slice_ = optimizer._get_model_param_range_map(parameter)["param"]
            narrow = parameter.dtype != tensor.dtype
            yield OptimizerSlice(parameter, tensor, inner, slice_.start, slice_.end, narrow)
        return
    ours = {tensor for group in inner.param_groups for tensor in group["params"]}
    for parameter in names:
        if (tensor := main_of(parameter)) in ours:
            yield OptimizerSlice(parameter, tensor, inner, 0, parameter.numel(), tensor is not parameter)
