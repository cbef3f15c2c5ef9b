"""Low-rank factors beside a model's matrices: their names and shapes, their initial values, and the
weights with them merged. Pure.

Factors have PEFT's names, as weights have Hugging Face's, so that what is trained here can be
loaded there.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from rollbook.engines.weights.digests import Tensors
from rollbook.store.errors import ModelError
from rollbook.train.config.lora import TARGETS, LoraConfig, Target
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.weight_names import Weight

PREFIX = "base_model.model."
"""What PEFT's names of a model's parts begin with."""
ADAPTED = ".adapter."
"""What Megatron's names of factors contain: of which module of a linear layer they are a part."""
EXACT_BITS = 52
"""Sums of whole numbers below 2 to the power of this are exact in float64, in whichever order."""
AT_ONCE = 1 << 22
"""Numbers of a weight that are computed at a time."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [out, in] of every layer: Megatron's linear layer that it is in, and how that is split."""

    linear: str
    huggingface: str
    row: bool = False


_MATRICES: dict[Target, Matrix] = {
    "q_proj": Matrix("self_attention.linear_qkv", "self_attn.q_proj"),
    "k_proj": Matrix("self_attention.linear_qkv", "self_attn.k_proj"),
    "v_proj": Matrix("self_attention.linear_qkv", "self_attn.v_proj"),
    "o_proj": Matrix("self_attention.linear_proj", "self_attn.o_proj", row=True),
    "gate_proj": Matrix("mlp.linear_fc1", "mlp.gate_proj"),
    "up_proj": Matrix("mlp.linear_fc1", "mlp.up_proj"),
    "down_proj": Matrix("mlp.linear_fc2", "mlp.down_proj", row=True),
}
OF_EXPERTS: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")


def targets_of(shape: ModelShape, lora: LoraConfig) -> tuple[Target, ...]:
    """The matrices of each layer that have factors, in the order of the model.

    Raises:
        ModelError: one is a matrix of experts.
    """
    there = TARGETS if shape.experts is None else tuple(t for t in TARGETS if t not in OF_EXPERTS)
    wanted = lora.targets or there
    if odd := [target for target in wanted if target not in there]:
        raise ModelError(
            f"lora.targets {', '.join(odd)}: matrices of experts have no factors here; choose among "
            f"{', '.join(there)}"
        )
    return tuple(target for target in there if target in wanted)


def size_of(shape: ModelShape, target: Target) -> tuple[int, int]:
    """[out, in] of a matrix."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[Target, tuple[int, int]] = {
        "q_proj": (queries, shape.hidden),
        "k_proj": (keys, shape.hidden),
        "v_proj": (keys, shape.hidden),
        "o_proj": (shape.hidden, queries),
        "gate_proj": (shape.ffn, shape.hidden),
        "up_proj": (shape.ffn, shape.hidden),
        "down_proj": (shape.hidden, shape.ffn),
    }
    return sizes[target]


def linears(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[Target, ...]]:
    """Megatron's linear layers that have factors, by their names in a layer, and the matrices in
    each."""
    by_linear: dict[str, tuple[Target, ...]] = {}
    for target in targets_of(shape, lora):
        linear = _MATRICES[target].linear
        by_linear[linear] = (*by_linear.get(linear, ()), target)
    return by_linear


def matrices_in(linear: str) -> tuple[Target, ...]:
    """The matrices in one of Megatron's linear layers, in order."""
    return tuple(target for target, matrix in _MATRICES.items() if matrix.linear == linear)


def is_row(target: Target) -> bool:
    """Whether tensor-parallel ranks share the matrix by its inputs; otherwise they share it by its
    outputs."""
    return _MATRICES[target].row


@functools.lru_cache(maxsize=8)
def factors(shape: ModelShape, lora: LoraConfig) -> tuple[Weight, ...]:
    """Every factor, in the order of the stream: by layer, and A before B."""
    return tuple(
        factor
        for layer in range(shape.layers)
        for target in targets_of(shape, lora)
        for factor in _of_matrix(shape, lora.rank, layer, target)
    )


def _of_matrix(shape: ModelShape, rank: int, layer: int, target: Target) -> Iterator[Weight]:
    matrix, (rows, columns) = _MATRICES[target], size_of(shape, target)
    inner = f"decoder.layers.{layer}.{matrix.linear}.adapter.{target}"
    outer = f"{PREFIX}model.layers.{layer}.{matrix.huggingface}"
    a, b = (f"{outer}.lora_{x}.weight" for x in "AB")
    yield Weight(f"{inner}.A", (a,), "row" if matrix.row else "replicated", ((rank, columns),), layer)
    yield Weight(f"{inner}.B", (b,), "replicated" if matrix.row else "column", ((rows, rank),), layer)


def fresh_factors(shape: ModelShape, lora: LoraConfig, seed: int) -> Tensors:
    """Initial factors, float32: A uniform within 1 / sqrt(in), as PEFT's, and B 0, so that the
    model is unchanged. A pure function of the seed and each factor's name."""
    tensors: Tensors = {}
    for factor in factors(shape, lora):
        (name,), (dims,) = factor.huggingface, factor.shapes
        if factor.megatron.endswith(".B"):
            tensors[name] = torch.zeros(dims)
            continue
        own = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(own[:8], "little") >> 1)
        tensors[name] = (torch.rand(dims, generator=generator) * 2 - 1) / math.sqrt(dims[1])
    return tensors


def check_factors(tensors: Mapping[str, torch.Tensor], shape: ModelShape, lora: LoraConfig) -> None:
    """Check that tensors are all the factors of a model.

    Raises:
        ModelError: one is missing, too many, or of another shape.
    """
    expected = {factor.huggingface[0]: factor.shapes[0] for factor in factors(shape, lora)}
    actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if actual != expected:
        odd = sorted(n for n in expected | actual if expected.get(n) != actual.get(n))[0]
        raise ModelError(
            f"the adapter does not fit its [lora]: {odd} is {actual.get(odd, 'missing')}, and should be "
            f"{expected.get(odd, 'missing')}"
        )


# The weights that they come to ------------------------------------------------------------------------


def merged(
    weights: Iterable[tuple[str, torch.Tensor]], adapter: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's weights with the products of its factors added, one at a time, under Hugging Face's names."""
    for name, weight in weights:
        a = adapter.get(f"{PREFIX}{name.removesuffix('.weight')}.lora_A.weight")
        if a is None:
            yield name, weight
        else:
            b = adapter[f"{PREFIX}{name.removesuffix('.weight')}.lora_B.weight"]
            yield name, merged_weight(weight, a, b, scale)


def merged_weight(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """`weight + scale * b @ a`, the same bits on every device, for any number of threads and ranks.

    Factors are rounded to whole multiples of a small power of two (2^-22 of their largest number
    for rank 256 and below), so that all sums of their products are exact; after that each
    operation rounds once.

    Args:
        weight: [out, in]; a: [rank, in]; b: [out, rank].
    """
    if not b.any():  # also keeps the sign of zeros
        return weight
    bits = (EXACT_BITS - math.ceil(math.log2(a.shape[0]))) // 2
    (whole_a, unit_a), (whole_b, unit_b) = _as_whole_numbers(a, bits), _as_whole_numbers(b, bits)
    factor = scale * unit_a * unit_b
    result = torch.empty_like(weight)
    rows = max(AT_ONCE // weight.shape[1], 1)
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        product = (whole_b[part] @ whole_a).mul_(factor)
        result[part] = product.add_(weight[part]).float().to(weight.dtype)
    return result


def _as_whole_numbers(factor: torch.Tensor, bits: int) -> tuple[torch.Tensor, float]:
    """A factor as multiples of a power of two, none above 2^bits: the multiples, float64, and the unit."""
    wide = factor.detach().double()
    _, exponent = math.frexp(float(wide.abs().max()))
    unit = math.ldexp(1.0, exponent - bits)
    return (wide / unit).round_(), unit
