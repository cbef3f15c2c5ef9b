"""A scripted SGLang of one or two tensor-parallel ranks: each keeps checksums of its part, cut here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.bench.scripted.weights import PADDED, VOCABULARY_MULTIPLE, HeldChecksums

BY_ROWS, BY_COLUMNS = ("q_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
SENT = "/update_weights_from_tensor"


class RankChecksums(HeldChecksums):
    """What one of the ranks holds.

    Attributes:
        skipped: a tensor that it passes over from now on.
    """

    def __init__(self, model: Path, dtype: str, rank: int, size: int, kv_heads: int) -> None:
        self.rank, self.size, self.kv_heads, self.skipped = rank, size, kv_heads, ""
        super().__init__(model, dtype)

    def take(self, tensors: Iterable[tuple[str, Any]], *, spoilt: bool = False) -> None:
        """Take its part of each of a checkpoint's tensors."""
        cut = [(name, self._part(name, tensor)) for name, tensor in tensors if name != self.skipped]
        super().take(cut, spoilt=spoilt)

    def _part(self, name: str, tensor: Any) -> Any:
        if self.size == 1:
            return tensor
        kind = name.split(".")[-2]
        rows, columns = tensor.shape[0], tensor.shape[-1]
        if kind in PADDED:  # of at most 128 rows, which two ranks share; HeldChecksums pads what is less
            return tensor[self.rank * VOCABULARY_MULTIPLE : (self.rank + 1) * VOCABULARY_MULTIPLE]
        if kind in ("k_proj", "v_proj"):
            held = max(self.kv_heads // self.size, 1)
            first = self.rank * self.kv_heads // self.size
            dim = rows // self.kv_heads
            return tensor[first * dim : (first + held) * dim]
        if kind in BY_ROWS:
            part = rows // self.size
            return tensor[self.rank * part : (self.rank + 1) * part]
        if kind in BY_COLUMNS and tensor.dim() > 1:
            part = columns // self.size
            return tensor[:, self.rank * part : (self.rank + 1) * part]
        return tensor


class Ranks:
    """All ranks together, in the place of the scripted server's own checksums."""

    def __init__(self, ranks: list[RankChecksums]) -> None:
        self.ranks = ranks

    def take(self, tensors: Iterable[tuple[str, Any]], *, spoilt: bool = False) -> None:
        """Each takes its part; `spoilt`: the last comes in wrong."""
        named = list(tensors)
        for rank in self.ranks:
            rank.take(named, spoilt=spoilt and rank is self.ranks[-1])


def spread(app: ScriptedSGLang, size: int, kv_heads: int) -> Ranks:
    """Have the server be of so many ranks, of a model with so many key and value heads."""
    options, routes = app.options, app.weights.routes
    assert options.weights is not None
    ranks = Ranks(
        [
            RankChecksums(Path(options.model_path), options.weights, rank, size, kv_heads)
            for rank in range(size)
        ]
    )
    app.weights.held = ranks  # type: ignore[assignment]
    from_tensor = routes[SENT]

    async def checker(body: Any) -> tuple[int, Any]:
        reports = [
            {"checksums": shard.checksums, "parallelism_info": [{"tp_rank": shard.rank, "tp_size": size}]}
            for shard in ranks.ranks
        ]
        return 200, {"success": True, "message": "Success.", "ranks": reports}

    async def one_payload(body: Any) -> tuple[int, Any]:
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == size
        return await from_tensor(body | {"serialized_named_tensors": payloads[:1]})

    routes["/weights_checker"], routes[SENT] = checker, one_payload
    return ranks
