"""The trainer's stream: completed turns of a cut as flat arrays, straight out of the log's memory.

A turn gives the prompt ids that its event holds (a root's whole prompt, a child's only what its parent does
not hold) and then its completion ids; so the turns of an unbranched trajectory, put after each other, are its
sample. Nothing is decoded: token arrays are views of the mapped files until they are copied, once, into the
batch. No Python object is made per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollbook.store.cut import Cut
from rollbook.store.events import Logprobs, TokenIds, TurnCompleted
from rollbook.store.log.store import Store

_SCALARS = ("kind", "policy", "policy_version", "turn_id")
_ARRAYS = ("prompt_ids", "completion_ids", "logprobs")


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Turns one after the other. Turn i has the tokens `offsets[i] <= t < offsets[i + 1]`.

    Attributes:
        ids: token ids.
        logprobs: natural-log probability of each sampled token; 0 where a token was not sampled.
        loss_mask: 1 for sampled tokens, 0 for prompt tokens.
        offsets: as many as turns, and one more.
        turn_ids, versions: of each turn, its id and the policy version it was completed with.
    """

    ids: TokenIds
    logprobs: Logprobs
    loss_mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    turn_ids: list[str]
    versions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one record batch: views of their arrays, and what is kept of them."""

    prompts: list[TokenIds]
    completions: list[TokenIds]
    logprobs: list[Logprobs]
    turn_ids: list[str]
    versions: npt.NDArray[np.int64]

    def part(self, start: int, stop: int) -> _Rows:
        """Some of the rows."""
        at = slice(start, stop)
        return _Rows(
            *(self.prompts[at], self.completions[at], self.logprobs[at]),
            *(self.turn_ids[at], self.versions[at]),
        )


def packed(
    store: Store,
    cut: Cut | None = None,
    *,
    start: Cut | None = None,
    policy: str = "actor",
    min_version: int = 0,
    turns: int = 64,
) -> Iterator[Packed]:
    """Trainable turns of the cut (default: head), in the log's order, `turns` at a time (at the end less).

    Trainable is a completed turn of `policy` that has logprobs and whose version is at least `min_version`.

    Args:
        start: leave out what this cut holds.

    Raises:
        CutError: the cut holds more than the store.
        CorruptionError: acknowledged bytes are damaged.
        ValueError: `turns` is less than 1.
    """
    if turns < 1:
        raise ValueError(f"turns is {turns}: a batch needs at least 1")
    batches = (batch for _, batch in store.batches(cut, start))
    for rows in _regroup((_trainable(batch, policy, min_version) for batch in batches), turns):
        yield _pack(rows)


def _trainable(batch: pa.RecordBatch, policy: str, min_version: int) -> _Rows:
    """The batch's trainable rows."""
    # Read as Python values: for the rows of one batch that is faster than a row of Arrow's functions.
    kinds, policies, versions, turn_ids = (batch.column(name).to_pylist() for name in _SCALARS)
    at = [
        i
        for i, (kind, of, version) in enumerate(zip(kinds, policies, versions, strict=True))
        if kind == TurnCompleted.KIND and of == policy and version is not None and version >= min_version
    ]
    columns = [batch.column(name) for name in _ARRAYS]
    if any(column.null_count for column in columns):
        at = [i for i in at if all(column[i].is_valid for column in columns)]
    prompts, completions, logprobs = (_views(column, at) for column in columns)
    chosen = np.array([versions[i] for i in at], np.int64)
    return _Rows(prompts, completions, logprobs, [turn_ids[i] for i in at], chosen)


def _views(column: pa.ListArray, at: list[int]) -> list[Any]:
    """The lists in rows `at`, none of which is null, as views of the column's memory."""
    flat = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy().tolist()
    return [flat[offsets[i] : offsets[i + 1]] for i in at]


def _regroup(parts: Iterable[_Rows], count: int) -> Iterator[list[_Rows]]:
    """The same rows, `count` at a time."""
    group: list[_Rows] = []
    missing = count
    for rows in parts:
        begun, total = 0, len(rows.turn_ids)
        while begun < total:
            taken = min(missing, total - begun)
            group.append(rows if taken == total else rows.part(begun, begun + taken))
            begun, missing = begun + taken, missing - taken
            if missing == 0:
                yield group
                group, missing = [], count
    if group:
        yield group


def _pack(rows: list[_Rows]) -> Packed:
    prompts = [ids for part in rows for ids in part.prompts]
    completions = [ids for part in rows for ids in part.completions]
    sampled = [values for part in rows for values in part.logprobs]
    lengths = [
        length for pair in zip(map(len, prompts), map(len, completions), strict=True) for length in pair
    ]
    bounds = list(accumulate(lengths, initial=0))
    # Whole runs are copied, a prompt and a completion in turn: a scatter by index is several times slower.
    logprobs, mask = np.zeros(bounds[-1], np.float32), np.zeros(bounds[-1], np.uint8)
    for begin, end, values in zip(bounds[1::2], bounds[2::2], sampled, strict=True):
        logprobs[begin:end] = values
        mask[begin:end] = 1
    return Packed(
        ids=np.concatenate([ids for pair in zip(prompts, completions, strict=True) for ids in pair]),
        logprobs=logprobs,
        loss_mask=mask,
        offsets=np.array(bounds[::2], np.int64),
        turn_ids=[turn_id for part in rows for turn_id in part.turn_ids],
        versions=np.concatenate([part.versions for part in rows]),
    )
