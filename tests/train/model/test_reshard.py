"""Weights leave one tensor at a time, and never as a second copy; which part of them a rank has."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.models.weight_maps import to_megatron
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollbook.engines.weights.digests import read_weights
from rollbook.store.errors import ModelError
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.reshard import RankLayout, check_layout, rank_weights
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.model.weight_names import plan
from rollbook.train.ranks.backend import TrainablePolicy

# One rank -----------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time, storages counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        inputs -= self._alive().keys()
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in inputs:
                self._made[id(tensor)] = weakref.ref(tensor)
        self.peak = max(self.peak, sum(self._alive().values()))
        return result

    def _alive(self) -> dict[int, int]:
        tensors = [t for t in (ref() for ref in self._made.values()) if t is not None]
        return {_place(t): t.untyped_storage().nbytes() for t in tensors}


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("model", ["qwen3-untied", "qwen3_moe", "gemma3"])
def test_streaming_holds_no_second_copy(model_folders: Path, model: str) -> None:
    """While weights stream, no more is alive than the copies of one packed tensor's parts."""
    folder = model_folders / model
    policy = TrainablePolicy(read_shape(folder), OptimizerConfig(), Build(1, torch.device("cpu"), 0, 1))
    policy.load_weights(read_weights(folder))
    packed = [t.nbytes for n, t in to_megatron(read_weights(folder), policy.shape).items() if "qkv" in n]
    with LiveBytes() as streamed:
        total = sum(tensor.nbytes for _, tensor in policy.stream_weights())
    with LiveBytes() as whole:
        held = policy.weights()
    assert 0 < streamed.peak <= packed[0] < total / 8
    assert whole.peak >= sum(packed), "the count sees copies that are kept"
    assert sum(t.nbytes for t in held.values()) == total


# Slices -------------------------------------------------------------------------------------------


def test_a_stage_has_its_own_layers(model_folders: Path) -> None:
    """Layers are counted from 0 in every stage; a tied model's embedding is in the first and the last."""
    shape, weights = read_shape(model_folders / "qwen3-tied"), read_weights(model_folders / "qwen3-tied")
    shape = replace(shape, layers=3)
    weights |= {n.replace("layers.1.", "layers.2."): t + 1 for n, t in weights.items() if "layers.1." in n}
    first, last = (dict(rank_weights(weights, shape, RankLayout((1, 2), stage))) for stage in (0, 1))
    whole = to_megatron(weights, shape)
    inner = [n.removeprefix("decoder.layers.0.") for n in whole if n.startswith("decoder.layers.0.")]
    embedding = "embedding.word_embeddings.weight"
    assert list(first) == [embedding, *(f"decoder.layers.0.{n}" for n in inner)]
    assert set(last) == {f"decoder.layers.{i}.{n}" for i in (0, 1) for n in inner} | {
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    assert all(torch.equal(last[f"decoder.layers.1.{n}"], whole[f"decoder.layers.2.{n}"]) for n in inner)
    assert torch.equal(last["output_layer.weight"], whole[embedding])


def test_tensor_ranks_have_their_groups(model_folders: Path) -> None:
    """A rank has the queries, keys and values of its own groups, its rows of gate and of up, its columns."""
    shape, weights = read_shape(model_folders / "qwen2"), read_weights(model_folders / "qwen2")
    ranks = [dict(rank_weights(weights, shape, RankLayout((2,), 0, 2, r))) for r in (0, 1)]
    layer, inner = "model.layers.1.", "decoder.layers.1."
    q, k, v = (weights[f"{layer}self_attn.{x}_proj.bias"] for x in "qkv")
    gate, up = (weights[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up"))
    for rank, held in enumerate(ranks):
        queries, head, half = slice(16 * rank, 16 * rank + 16), slice(8 * rank, 8 * rank + 8), 32 * rank
        expected = {
            "self_attention.linear_qkv.bias": torch.cat([q[queries], k[head], v[head]]),
            "mlp.linear_fc1.weight": torch.cat([gate[half : half + 32], up[half : half + 32]]),
            "self_attention.linear_proj.weight": weights[f"{layer}self_attn.o_proj.weight"][:, queries],
        }
        for name, tensor in expected.items():
            assert torch.equal(held[inner + name], tensor), (rank, name)
    rows = weights["lm_head.weight"]
    assert torch.equal(ranks[0]["output_layer.weight"], rows[:64])
    assert torch.equal(ranks[1]["output_layer.weight"][:61], rows[64:])
    assert not ranks[1]["output_layer.weight"][61:].any()


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (RankLayout((2,), tensor=4), "2 key-value heads cannot be split over 4 tensor-parallel ranks"),
        (RankLayout((1, 2)), r"2 layers cannot be \[1, 2\] per pipeline stage"),
        (RankLayout((2, 0)), "2 layers cannot be"),
        (RankLayout((2,), tensor=2, expert_tensor=3, sequence=True), "split over 3"),
    ],
)
def test_uneven_splits_are_refused(model_folders: Path, layout: RankLayout, reason: str) -> None:
    """A layout that would need padding is a ModelError that names the number and the ranks."""
    shape = read_shape(model_folders / "qwen3_moe")
    with pytest.raises(ModelError, match=reason):
        dict(rank_weights(read_weights(model_folders / "qwen3_moe"), shape, layout))


def test_experts_with_biases_are_not_split(model_folders: Path) -> None:
    """Nor is what is beside them; they go to stages and to ranks that share the experts."""
    shape = read_shape(model_folders / "gpt_oss")
    check_layout(shape, RankLayout((1, 1), spread=2))
    with pytest.raises(ModelError, match=r"gpt_oss on 2 tensor-parallel ranks.*leave tensor 1"):
        check_layout(shape, RankLayout((2,), tensor=2, expert_tensor=1, sequence=True))


def test_what_must_divide(model_folders: Path) -> None:
    """Rows of the vocabulary and the inner width are counted too; one rank takes any shape."""
    dense = ModelShape("qwen3", 2, 30, 63, 6, 6, 5, 120, 48, 1e-6, 1e4, False)
    check_layout(dense, RankLayout((2,)))
    for ranks, what in ((2, "63 intermediate_size"), (3, "128 rows of the padded vocabulary")):
        with pytest.raises(ModelError, match=f"{what} cannot be split over {ranks}"):
            check_layout(dense, RankLayout((2,), tensor=ranks))
    moe = read_shape(model_folders / "qwen3_moe")
    assert moe.experts is not None
    odd = replace(moe, experts=replace(moe.experts, ffn=23))
    check_layout(odd, RankLayout((2,), tensor=2, expert_tensor=1, sequence=True))
    with pytest.raises(ModelError, match="experts of width 23"):
        check_layout(odd, RankLayout((2,), tensor=2, expert_tensor=2, sequence=True))
    with pytest.raises(ModelError, match=r"must share the tokens, too: set parallel\.sequence = true"):
        check_layout(odd, RankLayout((2,), tensor=2, expert_tensor=1))
    assert {w.kind for w in plan(moe) if w.expert is not None} == {"gate_up", "row"}
