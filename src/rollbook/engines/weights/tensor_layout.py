"""Where a checkpoint's tensors lie in an engine.

An engine merges some tensors (SGLang: `qkv_proj` is the rows of q, k and v), pads vocabularies and splits
tensors among its tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from rollbook.engines.weights.rank_checksums import RankChecksums
from rollbook.store.errors import EngineError

VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of embeddings to a multiple of this, with zeros; times the ranks if those need it."""

_EXPERT = re.compile(r"(?P<mlp>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_PARTS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)} | {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
MERGED = frozenset({"qkv_proj", "gate_up_proj", "w13_weight", "w2_weight"})
"""What SGLang calls tensors that several of a model's are merged into."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where a checkpoint's tensor lies: the engine's tensor, and which of its parts it is, from 0."""

    tensor: str
    part: int


def part_of(name: str, held: frozenset[str]) -> TensorPart | None:
    """Where a tensor lies in an engine that holds tensors of these names; None if it has no place there."""
    if name in held:
        return TensorPart(name, 0)
    merged = _merged(name)
    return merged[1] if merged is not None and merged[1].tensor in held else None


def place_of(name: str, merged: Collection[str]) -> TensorPart:
    """Where a tensor lies in an engine that merges tensors into those named here (some of `MERGED`)."""
    merged_place = _merged(name)
    return TensorPart(name, 0) if merged_place is None or merged_place[0] not in merged else merged_place[1]


def merged_in(names: Iterable[str], held: frozenset[str]) -> list[str] | None:
    """The tensors of `MERGED` that an engine has if it holds tensors of these names for a model's `names`.

    None if `place_of` does not give the names that it holds.
    """
    names = list(names)
    merged = sorted({f[0] for name in names if (f := _merged(name)) is not None and f[1].tensor in held})
    return merged if {place_of(name, merged).tensor for name in names} == held else None


def _merged(name: str) -> tuple[str, TensorPart] | None:
    """The engine's tensor that this one may be merged into, and its place in there."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        number, part = int(expert["expert"]), expert["part"]
        if part == "down_proj":
            return "w2_weight", TensorPart(f"{expert['mlp']}.w2_weight", number)
        return "w13_weight", TensorPart(f"{expert['mlp']}.w13_weight", 2 * number + (part == "up_proj"))
    module, _, kind = name.rpartition(".")
    parent, _, projection = module.rpartition(".")
    if projection not in _PARTS:
        return None
    merged, number = _PARTS[projection]
    return merged, TensorPart(f"{parent}.{merged}.{kind}", number)


def shard(
    name: str, tensor: torch.Tensor, rank: int, size: int, head_dim: int, *, padded: bool = True
) -> torch.Tensor:
    """A rank's part of a tensor, as SGLang's loaders cut it.

    If there are fewer key and value heads than ranks, several ranks hold the same one.
    """
    projection = name.split(".")[-2] if "." in name else name
    if padded and projection in ("embed_tokens", "lm_head"):
        tensor = _padded(tensor, size)
    if size == 1:
        return tensor
    if projection in ("k_proj", "v_proj") and tensor.shape[0] // head_dim < size:
        heads = tensor.shape[0] // head_dim
        head = rank * heads // size
        return tensor[head * head_dim : (head + 1) * head_dim]
    if projection in _BY_ROWS:
        return tensor.chunk(size, 0)[rank]
    return tensor.chunk(size, 1)[rank] if projection in _BY_COLUMNS and tensor.dim() > 1 else tensor


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """An embedding, padded with zero rows as SGLang does."""
    rows = tensor.shape[0]
    missing = -rows % VOCABULARY_MULTIPLE
    if (rows + missing) % size:
        missing = -rows % (VOCABULARY_MULTIPLE * size)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def check_layout(url: str, ranks: Sequence[RankChecksums], names: Iterable[str]) -> None:
    """Check that every tensor of a model has its place in an engine, and every place its tensors.

    Raises:
        EngineError: it holds another model, or the names are fused; the first that differ are
            named.
    """
    names = list(names)
    for rank in ranks:
        held = frozenset(rank.tensors)
        places = {name: part_of(name, held) for name in names}
        homeless = sorted(name for name, place in places.items() if place is None)
        if homeless:
            raise EngineError(
                f"engine {url} holds no tensor that {homeless[0]} goes into ({len(homeless)} of {len(names)} "
                "have no place), and would skip it silently; is it another model's, or are the names fused?"
            )
        empty = sorted(held - {place.tensor for place in places.values() if place is not None})
        if empty:
            raise EngineError(
                f"engine {url} holds {empty[0]}, which the model has not ({len(empty)} of {len(held)}): it "
                "serves another model"
            )
