"""Where a checkpoint's tensors lie in an engine, and what their checksums must be there.

An engine merges some tensors (SGLang: `qkv_proj` is the rows of q, k and v), pads vocabularies and splits
tensors among its tensor-parallel ranks. Its checksum of a merged tensor is over the bytes of its parts in
order, so the expected one is computed as the parts pass by, and no second copy of the weights is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rollbook.ingest.engines.weights.rank_checksums import RankChecksums
from rollbook.ingest.engines.weights.tensor_checksums import Checksum
from rollbook.store.errors import EngineError

VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of embeddings to a multiple of this, with zeros; times the ranks if those need it."""

_EXPERT = re.compile(r"(?P<mlp>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_MERGED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)} | {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where a checkpoint's tensor lies: the engine's tensor, and which of its parts it is, from 0."""

    tensor: str
    part: int


def part_of(name: str, held: frozenset[str]) -> TensorPart | None:
    """Where a tensor lies in an engine that holds tensors of these names; None: nowhere."""
    if name in held:
        return TensorPart(name, 0)
    expert = _EXPERT.fullmatch(name)
    if expert:
        number, part = int(expert["expert"]), expert["part"]
        merged = f"{expert['mlp']}.{'w2_weight' if part == 'down_proj' else 'w13_weight'}"
        place = TensorPart(merged, number if part == "down_proj" else 2 * number + (part == "up_proj"))
        return place if merged in held else None
    module, _, kind = name.rpartition(".")
    parent, _, projection = module.rpartition(".")
    if projection in _MERGED:
        merged, part_number = _MERGED[projection]
        found = f"{parent}.{merged}.{kind}"
        return TensorPart(found, part_number) if found in held else None
    return None


def shard(
    name: str, tensor: torch.Tensor, rank: int, size: int, head_dim: int, *, padded: bool = True
) -> torch.Tensor:
    """A rank's part of a tensor, as SGLang's loaders cut it.

    Key and value heads that are fewer than the ranks are held by several of them.
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
    """An embedding with the rows of zeros that SGLang gives it."""
    rows = tensor.shape[0]
    missing = -rows % VOCABULARY_MULTIPLE
    if (rows + missing) % size:
        missing = -rows % (VOCABULARY_MULTIPLE * size)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def check_layout(url: str, ranks: Sequence[RankChecksums], names: Iterable[str]) -> None:
    """See that every tensor of a model has its place in an engine, and every place its tensors.

    Raises:
        EngineError: another model is there, or the names are fused; the first that differ are named.
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


@dataclass(slots=True)
class _Growing:
    """A checksum of an engine's tensor whose parts come one by one, in any order."""

    checksum: Checksum
    parts: int = 0
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, part: int, tensor: torch.Tensor) -> None:
        if part != self.parts:
            # A copy: what waits may lie in a buffer that is filled again before its turn comes.
            self.waiting[part] = tensor.clone()
            return
        self.checksum.update(tensor)
        self.parts += 1
        while (ready := self.waiting.pop(self.parts, None)) is not None:
            self.checksum.update(ready)
            self.parts += 1


class Expected:
    """What an engine's checksums must be after a sync, computed as tensors pass by.

    Engines that hold the same tensors, cut and hashed in the same way, share one.

    Args:
        ranks: the engine's checksums before the sync, for the names of its tensors.
        make: makes the kind of checksum that it computes.
        head_dim: of the model's attention.
        padded: whether it pads vocabularies, as SGLang does.
        dtype: that it holds tensors in; None: the one in which they are sent.
    """

    def __init__(
        self,
        ranks: Sequence[RankChecksums],
        make: Callable[[], Checksum],
        head_dim: int,
        *,
        padded: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._make, self._head_dim, self._padded, self._dtype = make, head_dim, padded, dtype
        self._ranks = list(ranks)
        self._names = [frozenset(rank.tensors) for rank in ranks]
        self._growing: list[dict[str, _Growing]] = [{} for _ in ranks]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor that is sent.

        Raises:
            EngineError: the engine has no place for it, and would pass over it without a word.
        """
        tensor = tensor.to(self._dtype or tensor.dtype)
        for rank, names, growing in zip(self._ranks, self._names, self._growing, strict=True):
            place = part_of(name, names)
            if place is None:
                text = f"holds no tensor that {name} goes into, and would skip it silently"
                raise EngineError(text + "; is it another model's, or are the names fused?")
            one = growing.setdefault(place.tensor, _Growing(self._make()))
            part = shard(name, tensor, rank.tp_rank, rank.tp_size, self._head_dim, padded=self._padded)
            one.add(place.part, part)

    def check(self, url: str, ranks: Sequence[RankChecksums]) -> None:
        """Compare with what the engine at `url` says now.

        Raises:
            EngineError: a tensor is not what was sent, or was never sent; the first is named.
        """
        if len(ranks) != len(self._ranks):
            text = f"engine {url}: {len(ranks)} ranks answer, {len(self._ranks)} did before the sync"
            raise EngineError(text)
        for rank, growing in zip(ranks, self._growing, strict=True):
            wanted = {name: one.checksum.hexdigest() for name, one in growing.items() if not one.waiting}
            wrong = sorted(n for n, value in wanted.items() if rank.tensors.get(n) != value)
            unsent = sorted(set(rank.tensors) - set(wanted))
            if wrong:
                text = f"{len(wrong)} of {len(wanted)} tensors are not those sent, such as {wrong[0]}"
            elif unsent:
                text = f"{len(unsent)} tensors were not sent whole, such as {unsent[0]}"
            else:
                continue
            raise EngineError(f"engine {url}, rank {rank.tp_rank}: verification failed: {text}")
