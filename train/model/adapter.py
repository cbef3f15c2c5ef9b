"""Low-rank factors as part of Megatron's linear layers. Imported once Megatron's device is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn.functional import linear

from rollbook.train.config.lora import LM_HEAD, LoraConfig, Target
from rollbook.train.model.lora import ADAPTED, is_row, linears, matrices_in, size_of, targets_of
from rollbook.train.model.reshard import RankLayout
from rollbook.train.model.shape import ModelShape


class Factors(torch.nn.Module):
    """The factors of one matrix, or a rank's part of them: A [rank, in] and B [out, rank].

    Ranks that share a matrix by its outputs share B by rows and have all of A; those that share
    it by inputs share A by columns and have all of B. If they share sequences, too, the
    gradients of what all of them have are sums over ranks, which a mark tells Megatron.
    """

    def __init__(
        self, size: tuple[int, int], rank: int, dtype: torch.dtype, layout: RankLayout, *, row: bool
    ) -> None:
        super().__init__()
        rows, columns = size
        matrices = {
            "A": ((rank, columns // layout.tensor if row else columns), row, 1),
            "B": ((rows if row else rows // layout.tensor, rank), not row, 0),
        }
        for name, (dims, split, dim) in matrices.items():
            parameter: Any = torch.nn.Parameter(torch.zeros(dims, dtype=dtype))
            # By these Megatron counts what all ranks have once in the gradient's norm, and sums the rest.
            marks = {"partition_dim": dim if split else -1, "partition_stride": 1, "allreduce": True}
            marks |= {"tensor_model_parallel": split and layout.tensor > 1}
            marks |= {"sequence_parallel": layout.sequence and not split}
            vars(parameter).update(marks)
            self.register_parameter(name, parameter)


class Adapter(torch.nn.Module):
    """The factors of a linear layer's matrices, whose products are added to the layer's output.

    Attributes:
        active: whether they are added; else the layer gives its own output.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        by_target: dict[Target, Factors],
        shape: ModelShape,
        lora: LoraConfig,
        layout: RankLayout,
    ) -> None:
        super().__init__()
        self._targets, self._scale, self._layout = tuple(targets), lora.scale, layout
        self._widths = [size_of(shape, target)[0] // layout.tensor for target in targets]
        self._groups = shape.kv_heads // layout.tensor if "q_proj" in targets else 0
        self.active = True
        for target, factors in by_target.items():
            self.add_module(target, factors)

    def added(self, _: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> tuple[Any, Any]:
        """The layer's output, (output, bias), with the products added: a hook of its forward pass."""
        if not self.active:
            return output
        product = self._by_inputs(inputs[0]) if is_row(self._targets[0]) else self._by_outputs(inputs[0])
        return output[0] + self._scale * product, output[1]

    def _by_inputs(self, x: torch.Tensor) -> torch.Tensor:
        factors: Any = self.get_submodule(self._targets[0])
        inner = linear(x, factors.A)  # a sum over ranks, as narrow as the rank of the factors
        if self._layout.sequence:
            inner = reduce_scatter_to_sequence_parallel_region(inner)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner)
        return linear(inner, factors.B)

    def _by_outputs(self, x: torch.Tensor) -> torch.Tensor:
        if self._layout.sequence:
            x = gather_from_sequence_parallel_region(x)
        parts = [
            self._part(x, target, width) for target, width in zip(self._targets, self._widths, strict=True)
        ]
        if self._groups:  # query heads, key head and value head of each group lie together
            parts = [part.unflatten(-1, (self._groups, -1)) for part in parts]
            return torch.cat(parts, -1).flatten(-2)
        return torch.cat(parts, -1)

    def _part(self, x: torch.Tensor, target: Target, width: int) -> torch.Tensor:
        factors: Any = getattr(self, target, None)
        if factors is None:
            return x.new_zeros(*x.shape[:-1], width)
        inner = linear(x, factors.A)
        if not self._layout.sequence:  # what comes back to A and to x is a sum over ranks
            inner = copy_to_tensor_model_parallel_region(inner)
        return linear(inner, factors.B)


class OutputAdapter(torch.nn.Module):
    """The factors of the output layer, or a rank's part of them, whose product is added to the logits. B has
    the rows of Megatron's padded vocabulary, shared among ranks as those of the output itself.

    Every rank sees all tokens, or all of those whose logits are asked for, even where ranks share sequences
    (`packed.OutputPlaces`), and has all logits: so it has all of the gradients, too.

    Attributes:
        active: whether it is added; else the layer gives its own logits.
    """

    def __init__(self, shape: ModelShape, lora: LoraConfig, dtype: torch.dtype, layout: RankLayout) -> None:
        super().__init__()
        size, whole_sequences = (shape.padded_vocab, shape.hidden), replace(layout, sequence=False)
        self.add_module(LM_HEAD, Factors(size, lora.rank, dtype, whole_sequences, row=False))
        self._scale, self.active = lora.scale, True

    def added(self, _: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> tuple[Any, Any]:
        """The layer's output, (logits, None), with the product added: a hook of its forward pass."""
        if not self.active:
            return output
        factors: Any = self.get_submodule(LM_HEAD)
        inner = copy_to_tensor_model_parallel_region(linear(inputs[0], factors.A))
        product = gather_from_tensor_model_parallel_region(linear(inner, factors.B))
        return output[0] + self._scale * product, output[1]


AnyAdapter = Adapter | OutputAdapter


def adapt(module: Any, shape: ModelShape, lora: LoraConfig, layout: RankLayout) -> list[AnyAdapter]:
    """Add factors to the layers of a rank's GPTModel, and to its output if that is a target and the rank has
    it, and freeze all else; before the model is wrapped.

    Raises:
        ModelError: a target is a matrix of experts, or the output of a model that gives scores.
    """
    module.requires_grad_(False)
    adapters: list[AnyAdapter] = []
    dtype = module.config.params_dtype
    for layer in module.decoder.layers:
        for name, targets in linears(shape, lora).items():
            submodule = layer.get_submodule(name)
            factors = {
                target: Factors(size_of(shape, target), lora.rank, dtype, layout, row=is_row(target))
                for target in targets
            }
            adapters.append(_added_to(submodule, Adapter(matrices_in(name), factors, shape, lora, layout)))
    if layout.last and LM_HEAD in targets_of(shape, lora):
        adapters.append(_added_to(module.output_layer, OutputAdapter(shape, lora, dtype, layout)))
    if layout.first:  # else layers that are computed again in the backward pass have nothing to come back to
        module.embedding.register_forward_hook(_with_gradient)
    return adapters


def _added_to(layer: torch.nn.Module, adapter: AnyAdapter) -> AnyAdapter:
    layer.add_module(ADAPTED.strip("."), adapter)
    layer.register_forward_hook(adapter.added)
    return adapter


def _with_gradient(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
