"""The checksums that an engine must report: computed while weights are sent to it, or later from
the weights alone.

An engine's checksum of a merged tensor is over the bytes of its parts in order, so the expected
one is computed as the parts pass by, and no second copy of the weights is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from rollbook.engines.weights.rank_checksums import RankChecksums, ranks_digest
from rollbook.engines.weights.tensor_checksums import CHECKSUMS, Checksum
from rollbook.engines.weights.tensor_layout import MERGED, TensorPart, merged_in, part_of, place_of, shard
from rollbook.store.errors import EngineError, FormatError
from rollbook.store.events import Json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that an engine may hold weights in."""


@dataclass(frozen=True, slots=True)
class Holding:
    """How an engine holds tensors, whatever their names.

    Attributes:
        checksum: the kind that it computes, of `CHECKSUMS`.
        dtype: that it holds tensors in, of `DTYPES`.
        head_dim: of the model's attention.
        padded: whether it pads vocabularies, as SGLang does.
    """

    checksum: str
    dtype: str
    head_dim: int
    padded: bool = True


@dataclass(slots=True)
class _Growing:
    """An incremental checksum of an engine's tensor whose parts come one by one, in any order."""

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


@dataclass(slots=True)
class _Rank:
    """Incremental checksums of what a tensor-parallel rank holds."""

    rank: int
    size: int
    holding: Holding
    growing: dict[str, _Growing] = field(default_factory=dict)

    def add(self, place: TensorPart, name: str, tensor: torch.Tensor) -> None:
        """Add a whole tensor that belongs to this place."""
        holding = self.holding
        if place.tensor not in self.growing:
            self.growing[place.tensor] = _Growing(CHECKSUMS[holding.checksum]())
        part = shard(name, tensor, self.rank, self.size, holding.head_dim, padded=holding.padded)
        self.growing[place.tensor].add(place.part, part.to(DTYPES[holding.dtype]))

    def whole(self) -> dict[str, str]:
        """The checksums of all tensors without parts that still wait for an earlier one."""
        return {
            name: growing.checksum.hexdigest()
            for name, growing in self.growing.items()
            if not growing.waiting
        }


class Expected:
    """The checksums that an engine must report after a sync, computed as tensors pass by.

    Engines that hold the same tensors, cut and hashed in the same way, share one.

    Args:
        ranks: the engine's checksums before the sync, for the names of its tensors.
        holding: how it holds them.
    """

    def __init__(self, ranks: Sequence[RankChecksums], holding: Holding) -> None:
        self._ranks = [_Rank(rank.tp_rank, rank.tp_size, holding) for rank in ranks]
        self._names = [frozenset(rank.tensors) for rank in ranks]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that is sent.

        Raises:
            EngineError: the engine has no place for it, and would silently ignore it.
        """
        for rank, names in zip(self._ranks, self._names, strict=True):
            place = part_of(name, names)
            if place is None:
                text = f"holds no tensor that {name} goes into, and would skip it silently"
                raise EngineError(text + "; is it another model's, or are the names fused?")
            rank.add(place, name, tensor)

    def check(self, url: str, ranks: Sequence[RankChecksums]) -> None:
        """Compare with what the engine at `url` reports now.

        Raises:
            EngineError: a tensor differs from the one sent, or was never sent; the first is
                named.
        """
        if len(ranks) != len(self._ranks):
            text = f"engine {url}: {len(ranks)} ranks answer, {len(self._ranks)} did before the sync"
            raise EngineError(text)
        for rank, own in zip(ranks, self._ranks, strict=True):
            wanted = own.whole()
            wrong = sorted(n for n, value in wanted.items() if rank.tensors.get(n) != value)
            unsent = sorted(set(rank.tensors) - set(wanted))
            if wrong:
                text = f"{len(wrong)} of {len(wanted)} tensors are not those sent, such as {wrong[0]}"
            elif unsent:
                text = f"{len(unsent)} tensors were not sent whole, such as {unsent[0]}"
            else:
                continue
            raise EngineError(f"engine {url}, rank {rank.tp_rank}: verification failed: {text}")


def describe_holding(ranks: Sequence[RankChecksums], names: Iterable[str], holding: Holding) -> Json | None:
    """How an engine holds a model's tensors, in the form of `policy.activated` that
    `expected_ranks_digest` reads.

    Args:
        ranks: its checksums, for the names of its tensors.
        names: of the model's tensors.

    Returns:
        `holding` and the engine's `tp_size`, `tp_ranks` and `merged`; None where its tensors
        have other names than follow from those of the model, or not the same ones on all ranks.
    """
    held, sizes = {frozenset(rank.tensors) for rank in ranks}, {rank.tp_size for rank in ranks}
    if len(held) != 1 or len(sizes) != 1 or (merged := merged_in(names, *held)) is None:
        return None
    ranks_held = {
        "tp_size": sizes.pop(),
        "tp_ranks": sorted({rank.tp_rank for rank in ranks}),
        "merged": merged,
    }
    return asdict(holding) | ranks_held


def expected_ranks_digest(tensors: Iterable[tuple[str, torch.Tensor]], held: Json) -> str:
    """The `ranks_digest` of an engine that holds exactly these tensors.

    Args:
        tensors: all of a model's, by Hugging Face names, one at a time. None is kept, except
            parts of a merged tensor that come before their turn.
        held: how the engine holds them, as in `policy.activated`.

    Raises:
        FormatError: this release does not know the form, or it does not fit these tensors.
    """
    ranks, merged = _read(held)
    for name, tensor in tensors:
        place = place_of(name, merged)
        try:
            for rank in ranks:
                rank.add(place, name, tensor)
        except IndexError as error:
            text = f"{name} of shape {list(tensor.shape)} is not held by {len(ranks)} ranks: held is {held}"
            raise FormatError(f"{text}; were these weights of another model?") from error
    return ranks_digest([RankChecksums(filled.rank, filled.size, filled.whole()) for filled in ranks])


def _read(held: Json) -> tuple[list[_Rank], frozenset[str]]:
    """The ranks, still empty, and the merged tensors."""
    try:
        holding = Holding(held["checksum"], held["dtype"], held["head_dim"], held["padded"])
        size, merged = held["tp_size"], frozenset(held["merged"])
        ranks = [_Rank(rank, size, holding) for rank in held["tp_ranks"]]
        known = holding.checksum in CHECKSUMS and holding.dtype in DTYPES and merged <= MERGED
        known = known and holding.head_dim > 0 and all(rank.rank in range(size) for rank in ranks)
    except (KeyError, TypeError):
        known = False
    if not known:
        raise FormatError(
            f"an engine's tensors are held as {held}, which this release does not know: read the store with "
            "the release that wrote it, or a newer one"
        )
    return ranks, merged
