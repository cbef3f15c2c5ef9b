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
from rollbook.engines.weights.peft import PREFIX
from rollbook.store.errors import ModelError
from rollbook.train.config.lora import LM_HEAD, TARGETS, LoraConfig, Target
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.weight_names import Kind, Weight

ADAPTED = ".adapter."
"""What Megatron's names of factors contain: of which module of a linear layer they are a part."""
EXACT_BITS = 52
"""Sums of whole numbers below 2 to the power of this are exact in float64, in whichever order."""
AT_ONCE = 1 << 22
"""Numbers of a weight that are computed at a time."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [out, in] of every layer, or the output's: Megatron's linear layer that it is in, and how that
    is split."""

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
    "lm_head": Matrix("output_layer", "lm_head"),
}
OF_EXPERTS: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")


def targets_of(shape: ModelShape, lora: LoraConfig) -> tuple[Target, ...]:
    """The matrices that have factors, in the order of the model: those of each layer, then the output.

    Raises:
        ModelError: one is a matrix of experts, or the output of a model that gives scores.
    """
    there = TARGETS if shape.experts is None else tuple(t for t in TARGETS if t not in OF_EXPERTS)
    wanted, choices = lora.targets or there, (*there, LM_HEAD)
    if LM_HEAD in wanted and shape.scores:
        raise ModelError(
            f"lora.targets {LM_HEAD}: the model gives scores in place of the logits of tokens: leave it out"
        )
    if odd := [target for target in wanted if target not in choices]:
        raise ModelError(
            f"lora.targets {', '.join(odd)}: matrices of experts have no factors here; choose among "
            f"{', '.join(choices)}"
        )
    return tuple(target for target in choices if target in wanted)


def check_merges(shape: ModelShape, lora: LoraConfig) -> None:
    """Check that the products of factors can be added to the model's weights.

    Raises:
        ModelError: the output has factors, and its weights are those of the embedding.
    """
    if shape.tied and LM_HEAD in targets_of(shape, lora):
        raise ModelError(
            f"lora.targets {LM_HEAD}: the model's output is its embedding (tie_word_embeddings), and has no "
            "weights of its own for these factors to be merged into: leave it out, or take a model that is "
            "untied; the adapter alone can be exported"
        )


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
        "lm_head": (shape.vocab, shape.hidden),
    }
    return sizes[target]


def linears(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[Target, ...]]:
    """Megatron's linear layers that have factors, by their names in a layer, and the matrices in
    each; without the output."""
    by_linear: dict[str, tuple[Target, ...]] = {}
    for target in _of_layers(shape, lora):
        linear = _MATRICES[target].linear
        by_linear[linear] = (*by_linear.get(linear, ()), target)
    return by_linear


def _of_layers(shape: ModelShape, lora: LoraConfig) -> tuple[Target, ...]:
    return tuple(target for target in targets_of(shape, lora) if target != LM_HEAD)


def matrices_in(linear: str) -> tuple[Target, ...]:
    """The matrices in one of Megatron's linear layers, in order."""
    return tuple(target for target, matrix in _MATRICES.items() if matrix.linear == linear)


def is_row(target: Target) -> bool:
    """Whether tensor-parallel ranks share the matrix by its inputs; otherwise they share it by its
    outputs."""
    return _MATRICES[target].row


@functools.lru_cache(maxsize=8)
def factors(shape: ModelShape, lora: LoraConfig) -> tuple[Weight, ...]:
    """Every factor, in the order of the stream: by layer, then the output's, and A before B."""
    places = [(layer, target) for layer in range(shape.layers) for target in _of_layers(shape, lora)]
    if LM_HEAD in targets_of(shape, lora):
        places.append((shape.layers - 1, LM_HEAD))
    return tuple(factor for place in places for factor in _of_matrix(shape, lora.rank, *place))


def _of_matrix(shape: ModelShape, rank: int, layer: int, target: Target) -> Iterator[Weight]:
    matrix, (rows, columns) = _MATRICES[target], size_of(shape, target)
    inner, outer = f"decoder.layers.{layer}.{matrix.linear}", f"model.layers.{layer}.{matrix.huggingface}"
    kinds: tuple[Kind, Kind] = ("row", "replicated") if matrix.row else ("replicated", "column")
    if target == LM_HEAD:
        inner, outer, kinds = matrix.linear, matrix.huggingface, ("replicated", "vocab")
    for x, kind, dims in zip("AB", kinds, ((rank, columns), (rows, rank)), strict=True):
        name = f"{PREFIX}{outer}.lora_{x}.weight"
        yield Weight(f"{inner}.adapter.{target}.{x}", (name,), kind, (dims,), layer)


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
    weights: Iterable[tuple[str, torch.Tensor]],
    adapter: Mapping[str, torch.Tensor],
    shape: ModelShape,
    lora: LoraConfig,
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's weights with the products of its factors added, one at a time, under Hugging Face's names.

    Raises:
        ModelError: at once; the output has factors, and its weights are those of the embedding.
    """
    check_merges(shape, lora)
    return _merged(weights, adapter, lora.scale)


def _merged(
    weights: Iterable[tuple[str, torch.Tensor]], adapter: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
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
