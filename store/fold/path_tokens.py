"""A root-to-leaf path of a trajectory as aligned arrays, for training and for exports. Pure.

Each sampled token belongs to exactly one path: that of the first leaf in turn order, which owns the turns
it shares with others; these hold them as masked context. Tokens are the stored ones, never re-tokenized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.store.events import TokenIds
from rollbook.store.fold.trajectory import Trajectory, Turn

NO_VERSION = -1
"""In `versions`: the token was not sampled, or by an engine without weights."""


@dataclass(frozen=True, slots=True, eq=False)
class PathTokens:
    """A path's turns and tokens, as arrays of one length T.

    Attributes:
        turns: from the root to the leaf.
        tokens: int32 [T].
        loss_mask: bool [T]; true where the token was sampled in this path, by a turn that was delivered.
        logprobs: float32 [T], natural log; 0 where the mask is false, NaN where the engine gave none.
        versions: int64 [T]; policy version that sampled the token, else -1.
        sampled: the turns that the mask is of, each with its place.
        ends: where the completion of each turn ends.
    """

    turns: tuple[Turn, ...]
    tokens: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    sampled: tuple[tuple[Turn, slice], ...]
    ends: tuple[int, ...]


def path_tokens(trajectory: Trajectory, before: str | None = None) -> Iterator[PathTokens]:
    """Every path of completed turns, leaves in turn order.

    Args:
        before: a leaf that owns all of its path, before the first one; None: there is none.

    Raises:
        CorruptionError: a prompt does not fold to the ids that were sent.
    """
    for turns, owned in trajectory.owned_paths(before):
        yield _tokens(trajectory, turns, owned)


def _tokens(trajectory: Trajectory, turns: tuple[Turn, ...], owned: tuple[bool, ...]) -> PathTokens:
    leaf = turns[-1]
    assert leaf.completed is not None
    tokens = np.concatenate([trajectory.prompt_ids(leaf), leaf.completed.completion_ids])
    loss_mask = np.zeros(len(tokens), np.bool_)
    logprobs = np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), NO_VERSION, np.int64)
    sampled: list[tuple[Turn, slice]] = []
    ends: list[int] = []
    for turn, own in zip(turns, owned, strict=True):
        done = turn.completed
        assert done is not None
        ends.append(done.prompt_length + len(done.completion_ids))
        if not own or not turn.delivered:
            continue
        start = done.prompt_length
        place = slice(start, start + len(done.completion_ids))
        loss_mask[place] = True
        logprobs[place] = np.nan if done.logprobs is None else done.logprobs
        for span in done.version_spans:
            versions[start + span.start : start + span.end] = span.version
        sampled.append((turn, place))
    return PathTokens(turns, tokens, loss_mask, logprobs, versions, tuple(sampled), tuple(ends))
