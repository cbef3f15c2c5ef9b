"""Maps weights between Hugging Face's names and Megatron-core's (local layer spec), in both directions.

The plan lists every Megatron tensor with the Hugging Face tensors it is made of. The mapping is a bijection
on the real rows, so weights survive the round trip bit for bit, split over tensor-parallel ranks or not.
Experts have the names of files, one tensor per expert and projection.

The experts of a layer fused into one tensor are taken apart and put together too. Qwen3-MoE, as transformers
5 holds it in memory: [expert, out, in], gate above up. Files of gpt-oss: weights [expert, in, out] and biases
[expert, out], gate and up in turns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rollbook.engines.weights.digests import Tensors
from rollbook.store.errors import ModelError
from rollbook.train.model.shape import Experts, ModelShape

Kind = Literal["replicated", "vocab", "qkv", "gate_up", "row", "column"]
"""How a Megatron tensor is made, and split over tensor-parallel ranks.

`replicated`: one tensor, whole on every rank. `vocab`: rows, zero rows added at the end. `qkv`: per
key-value group the rows of its query heads, its key head, its value head; split by groups. `gate_up`:
gate's rows, then up's; each split on its own. `row`: split by columns, as its input is. `column`: split by
rows, as its output is.
"""


@dataclass(frozen=True, slots=True)
class Weight:
    """One Megatron tensor of the whole model.

    `shapes` are those of the Hugging Face tensors. `layer` is the layer it is in, or goes with:
    the embedding goes with the first, the final norm and the output with the last. `expert` is
    the number of its expert; None for all other tensors.
    """

    megatron: str
    huggingface: tuple[str, ...]
    kind: Kind
    shapes: tuple[tuple[int, ...], ...]
    layer: int
    expert: int | None = None


@functools.lru_cache(maxsize=8)
def plan(shape: ModelShape) -> tuple[Weight, ...]:
    """Every weight, in the order in which weights are streamed.

    That is: embedding, layers from the first, final norm, output. Within a layer: input norm, query, key
    and value (then their biases), query and key norm, attention output, second norm, and gate, up, down;
    with experts the router, then gate, up, down of expert 0, of expert 1, and so on. A norm of what attention
    or the feed-forward layer gives comes after its weights.
    """
    vocab, last = (shape.vocab, shape.hidden), shape.layers - 1
    weights = [_entry("embedding.word_embeddings", "model.embed_tokens", "vocab", vocab, 0)]
    for layer in range(shape.layers):
        weights += [*_attention(shape, layer), *_feed_forward(shape, layer)]
    weights.append(_entry("decoder.final_layernorm", "model.norm", "replicated", (shape.hidden,), last))
    if shape.scores:
        head = (shape.scores, shape.hidden)
        weights.append(_entry("output_layer", "score", "replicated", head, last))
    elif not shape.tied:
        weights.append(_entry("output_layer", "lm_head", "vocab", vocab, last))
    return tuple(weights)


def _entry(
    megatron: str,
    huggingface: str,
    kind: Kind,
    dims: tuple[int, ...],
    layer: int,
    expert: int | None = None,
    *,
    field: str = "weight",
) -> Weight:
    return Weight(f"{megatron}.{field}", (f"{huggingface}.{field}",), kind, (dims,), layer, expert)


def _attention(shape: ModelShape, layer: int) -> Iterator[Weight]:
    target, source = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention = source + "self_attn."
    size, hidden = shape.head_dim, shape.hidden
    rows = (shape.heads * size, shape.kv_heads * size, shape.kv_heads * size)
    yield _entry(target + "input_layernorm", source + "input_layernorm", "replicated", (hidden,), layer)
    for field, tail in (("weight", (hidden,)), ("bias", ())):
        if field == "weight" or shape.qkv_bias:
            yield Weight(
                f"{target}self_attention.linear_qkv.{field}",
                tuple(f"{attention}{x}_proj.{field}" for x in "qkv"),
                "qkv",
                tuple((count, *tail) for count in rows),
                layer,
            )
    for x in "qk" if shape.qk_norm else "":
        name = f"{target}self_attention.{x}_layernorm"
        yield _entry(name, f"{attention}{x}_norm", "replicated", (size,), layer)
    output = (target + "self_attention.linear_proj", attention + "o_proj")
    yield _entry(*output, "row", (hidden, rows[0]), layer)
    if shape.biases:
        yield _entry(*output, "replicated", (hidden,), layer, field="bias")
    if shape.sinks:
        name = target + "self_attention.core_attention.softmax_offset"
        yield Weight(name, (attention + "sinks",), "column", ((shape.heads,),), layer)
    if shape.output_norms:
        name = target + "self_attention_output_norm"
        yield _entry(name, source + "post_attention_layernorm", "replicated", (hidden,), layer)


def _feed_forward(shape: ModelShape, layer: int) -> Iterator[Weight]:
    target, source = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    second = source + ("pre_feedforward_layernorm" if shape.output_norms else "post_attention_layernorm")
    yield _entry(target + "pre_mlp_layernorm", second, "replicated", (shape.hidden,), layer)
    if shape.experts is None:
        yield from _gated(target + "mlp", source + "mlp", shape.hidden, shape.ffn, layer)
        if shape.output_norms:
            last = source + "post_feedforward_layernorm"
            yield _entry(target + "mlp_output_norm", last, "replicated", (shape.hidden,), layer)
        return
    router = (target + "mlp.router", source + ("mlp.router" if shape.biases else "mlp.gate"))
    yield _entry(*router, "replicated", (shape.experts.count, shape.hidden), layer)
    if shape.biases:
        yield _entry(*router, "replicated", (shape.experts.count,), layer, field="bias")
    for expert in range(shape.experts.count):
        inner = f"{target}mlp.experts.local_experts.{expert}"
        outer = f"{source}mlp.experts.{expert}"
        sizes = (shape.hidden, shape.experts.ffn, layer)
        yield from _gated(inner, outer, *sizes, expert=expert, biases=shape.biases)


def _gated(
    target: str,
    source: str,
    hidden: int,
    ffn: int,
    layer: int,
    *,
    expert: int | None = None,
    biases: bool = False,
) -> Iterator[Weight]:
    both, down = (f"{source}.gate_proj", f"{source}.up_proj"), f"{source}.down_proj"
    for field in ("weight", "bias") if biases else ("weight",):
        names = (f"{both[0]}.{field}", f"{both[1]}.{field}")
        dims = (ffn, hidden) if field == "weight" else (ffn,)
        yield Weight(f"{target}.linear_fc1.{field}", names, "gate_up", (dims, dims), layer, expert)
    yield _entry(f"{target}.linear_fc2", down, "row", (hidden, ffn), layer, expert)
    if biases:
        yield _entry(f"{target}.linear_fc2", down, "replicated", (hidden,), layer, expert, field="bias")


# Both ways --------------------------------------------------------------------------------------------


def weight_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor, in the order of the stream."""
    empty = ((name, torch.empty(dims, device="meta")) for name, dims in _shapes(shape).items())
    return {name: tuple(tensor.shape) for name, tensor in fuse_experts(empty, shape)}


def _shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The same, with one tensor for every expert and projection, whatever the files hold."""
    pairs = (zip(w.huggingface, w.shapes, strict=True) for w in plan(shape))
    return {name: dims for pair in pairs for name, dims in pair}


def stream_weights(
    tensors: Mapping[str, torch.Tensor], shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron's tensors (one rank) under Hugging Face's names, one at a time, in the order of `plan`.

    Queries, keys and values are copies, made when their turn comes, and so are experts that files fuse; all
    others are views of `tensors`.
    """
    each = (zip(w.huggingface, parts(w, [tensors[w.megatron]], shape), strict=True) for w in plan(shape))
    yield from fuse_experts((named for pair in each for named in pair), shape)


def checked(tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> Mapping[str, torch.Tensor]:
    """The tensors by the names of `plan`, with fused experts split (as views).

    Raises:
        ModelError: one is missing, or not of the config's shape.
    """
    tensors = split_fused(tensors, shape)
    for name, dims in (weight_shapes(shape) | _shapes(shape)).items():
        if name not in tensors:
            raise ModelError(f"the weights do not fit their config.json: {name} is missing")
        expect(name, tensors[name], dims)
    return tensors


# One tensor -------------------------------------------------------------------------------------------


def shard(
    weight: Weight, tensors: Mapping[str, torch.Tensor], shape: ModelShape, rank: int = 0, size: int = 1
) -> torch.Tensor:
    """The Megatron tensor of tensor-parallel rank `rank` of `size`, from whole Hugging Face
    tensors."""
    whole = [tensors[name] for name in weight.huggingface]
    if weight.kind == "replicated":
        return whole[0]
    if weight.kind == "row":
        return whole[0].chunk(size, dim=1)[rank]
    if weight.kind == "vocab":
        return _vocab_rows(whole[0], shape.padded_vocab // size, rank)
    mine = [tensor.chunk(size)[rank] for tensor in whole]
    if weight.kind == "column":
        return mine[0]
    if weight.kind == "gate_up":
        return torch.cat(mine)
    grouped = [t.view(shape.kv_heads // size, -1, *t.shape[1:]) for t in mine]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _vocab_rows(embedding: torch.Tensor, rows: int, rank: int) -> torch.Tensor:
    """The rank's rows of the embedding; rows beyond the vocabulary are zeros."""
    mine = embedding[rank * rows : (rank + 1) * rows]
    missing = rows - mine.shape[0]
    if not missing:
        return mine
    return torch.cat([mine, mine.new_zeros(missing, *mine.shape[1:])])


def parts(weight: Weight, shards: Sequence[torch.Tensor], shape: ModelShape) -> Iterator[torch.Tensor]:
    """The Hugging Face tensors of one Megatron tensor, each made when it is asked for.

    Args:
        shards: what the tensor-parallel ranks hold, in their order.
    """
    for i, dims in enumerate(weight.shapes):
        if weight.kind == "replicated":
            yield shards[0]
        elif weight.kind == "row":
            yield _joined(shards, 1)
        elif weight.kind == "column":
            yield _joined(shards)
        elif weight.kind == "gate_up":
            yield _joined([s.chunk(2)[i] for s in shards])
        elif weight.kind == "vocab":
            rows = shards[0].shape[0]
            yield _joined([s[: max(shape.vocab - r * rows, 0)] for r, s in enumerate(shards)])
        else:
            yield _joined([_grouped(s, shape, len(shards))[i] for s in shards]).reshape(dims)


def _grouped(packed: torch.Tensor, shape: ModelShape, size: int) -> tuple[torch.Tensor, ...]:
    """Views of the queries, keys and values in a packed tensor, each [groups, rows of a group,
    ...]."""
    heads = (shape.heads // shape.kv_heads, 1, 1)
    groups = packed.view(shape.kv_heads // size, sum(heads) * shape.head_dim, *packed.shape[1:])
    return groups.split([count * shape.head_dim for count in heads], dim=1)


def _joined(pieces: Iterable[torch.Tensor], dim: int = 0) -> torch.Tensor:
    pieces = list(pieces)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What fused tensors hold of every expert."""


def prefix_of(layer: int) -> str:
    """The prefix of the names of a layer's experts."""
    return f"model.layers.{layer}.mlp.experts."


def expect(name: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> None:
    """Check the shape of a tensor.

    Raises:
        ModelError: it is another.
    """
    if tuple(tensor.shape) != dims:
        actual = tuple(tensor.shape)
        raise ModelError(f"the weights do not fit their config.json: {name} is {actual}, not {dims}")


def fused_shapes(shape: ModelShape, experts: Experts) -> dict[str, tuple[int, ...]]:
    """Shape of every fused tensor of a layer."""
    count, ffn, hidden = experts.count, experts.ffn, shape.hidden
    if not shape.fused_experts:
        return {"gate_up_proj": (count, 2 * ffn, hidden), "down_proj": (count, hidden, ffn)}
    return {
        "gate_up_proj": (count, hidden, 2 * ffn),
        "gate_up_proj_bias": (count, 2 * ffn),
        "down_proj": (count, ffn, hidden),
        "down_proj_bias": (count, hidden),
    }


def split_fused(tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> Mapping[str, torch.Tensor]:
    """The tensors, with fused ones split into one per expert and projection, as views.

    Raises:
        ModelError: a fused one is not of the config's shape.
    """
    experts = shape.experts
    if experts is None:
        return tensors
    apart: Tensors = {}
    for layer in range(shape.layers):
        prefix = prefix_of(layer)
        for fused, dims in fused_shapes(shape, experts).items():
            if prefix + fused not in tensors:
                continue
            expect(prefix + fused, tensors[prefix + fused], dims)
            names, field = _named(fused)
            for expert, stacked in enumerate(tensors[prefix + fused]):
                for name, tensor in zip(names, _split(stacked, len(names), shape), strict=True):
                    apart[f"{prefix}{expert}.{name}.{field}"] = tensor
    return {**tensors, **apart}


def _named(fused: str) -> tuple[tuple[str, ...], str]:
    """The projections in a fused tensor, and whether it is their weight or bias."""
    return PARTS[fused.removesuffix("_bias")], "bias" if fused.endswith("_bias") else "weight"


def _split(stacked: torch.Tensor, count: int, shape: ModelShape) -> Iterable[torch.Tensor]:
    if not shape.fused_experts:
        return stacked.chunk(count)
    return [stacked[..., i::count].T for i in range(count)]


def fuse_experts(
    stream: Iterable[tuple[str, torch.Tensor]], shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream under the names of files: where these fuse experts, the fused tensors come in
    place of a layer's experts, after the last of them."""
    experts = shape.experts
    if experts is None or not shape.fused_experts:
        yield from stream
        return
    held: Tensors = {}
    for name, tensor in stream:
        before, of_experts, _ = name.partition(".mlp.experts.")
        if not of_experts:
            yield name, tensor
            continue
        held[name] = tensor
        if len(held) == 6 * experts.count:  # weight and bias of three projections
            yield from _fused(held, before + of_experts, shape, experts)
            held = {}


def _fused(
    held: Tensors, prefix: str, shape: ModelShape, experts: Experts
) -> Iterator[tuple[str, torch.Tensor]]:
    for fused, dims in fused_shapes(shape, experts).items():
        names, field = _named(fused)
        fused_tensor = held[f"{prefix}0.{names[0]}.{field}"].new_empty(dims)
        for expert, stacked in enumerate(fused_tensor):
            for name, into in zip(names, _split(stacked, len(names), shape), strict=True):
                into.copy_(held[f"{prefix}{expert}.{name}.{field}"])
        yield prefix + fused, fused_tensor
