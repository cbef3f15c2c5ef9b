"""An engine's report on the tensors that it holds: `/weights_checker`'s answer, and a digest of it.
Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.store.errors import EngineError
from rollbook.store.events import Json

QUESTION: Json = {"action": "checksum", "selector": "target"}
"""Of the model itself: a draft model of speculative decoding samples nothing, and no sync brings it."""


@dataclass(frozen=True, slots=True)
class RankChecksums:
    """One tensor-parallel rank's tensors: name in the engine -> checksum, 16 hexadecimal digits."""

    tp_rank: int
    tp_size: int
    tensors: dict[str, str]


def read_ranks(reply: Any, url: str) -> list[RankChecksums]:
    """Every rank's checksums, from what `/weights_checker` answers to `QUESTION`.

    Raises:
        EngineError: it is no such answer, or names no tensor.
    """
    try:
        ranks = [
            RankChecksums(
                rank["parallelism_info"][0]["tp_rank"],
                rank["parallelism_info"][0]["tp_size"],
                dict(rank["checksums"]),
            )
            for rank in reply["ranks"]
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"engine {url}: /weights_checker gives no checksums: {error!r}") from error
    if not any(rank.tensors for rank in ranks):
        raise EngineError(f"engine {url}: /weights_checker names no tensor, so nothing can be compared")
    return ranks


def ranks_digest(ranks: Sequence[RankChecksums]) -> str:
    """sha256 (hex) over all that an engine holds: equal only for the same weights, cut among as many ranks.

    Each tensor is a line "rank/ranks name checksum", the lines sorted. Data-parallel copies count once.
    """
    lines = {f"{r.tp_rank}/{r.tp_size} {name} {value}\n" for r in ranks for name, value in r.tensors.items()}
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
