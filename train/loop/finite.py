"""Finds the first non-finite number of a step, so that the step is not committed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rollbook.store.errors import NotFiniteError
from rollbook.train.data.batch import Batch, Partition


def check_batch(batch: Batch, *, exact: bool = True) -> None:
    """Check that the advantages and engine logprobs of trained tokens are finite.

    Args:
        exact: whether the algorithm uses these logprobs.

    Raises:
        NotFiniteError: it names the stage and the first sample.
    """
    advantages = batch.experience.advantages
    for at in range(len(batch.samples)):
        own = (
            batch.experience.of(advantages.values, at)
            if advantages.per_token
            else advantages.values[at : at + 1]
        )
        if not np.isfinite(own).all():
            worst = own[~np.isfinite(own)][0]
            where = f"advantage {worst} of {_sample(batch, at)}, whose reward is {batch.rewards[at]}"
            raise _error("advantages", where)
    if not exact:
        return
    for at, sample in enumerate(batch.samples):  # NaN stands for the missing logprobs of a teacher
        bad = np.flatnonzero(np.isinf(sample.logprobs) & sample.loss_mask)
        if len(bad):
            value = sample.logprobs[bad[0]]
            where = f"old_logprobs of token {bad[0]} of {_sample(batch, at)} is {value}"
            raise _error("old_logprobs", where)


def check_tokens(stage: str, tensors: Sequence[torch.Tensor], batch: Batch, parts: Partition) -> None:
    """Check that a stage's values are finite.

    Args:
        tensors: of each micro-batch, [B, T - 1]: column t is of token t + 1.

    Raises:
        NotFiniteError: it names the stage, the first sample and its token.
    """
    for micro, tensor in enumerate(tensors):
        bad = torch.nonzero(~torch.isfinite(tensor))
        if len(bad):
            row, column = bad[0].tolist()
            value = float(tensor[row, column])
            sample = _sample(batch, parts[0][micro][row])
            raise _error(stage, f"{stage} of token {column + 1} of {sample} is {value}")


def check_samples(stage: str, tensors: Sequence[torch.Tensor], batch: Batch, parts: Partition) -> None:
    """Check that a stage's values are finite.

    Args:
        tensors: of each micro-batch, a row for each sample.

    Raises:
        NotFiniteError: it names the stage and the first sample.
    """
    for micro, tensor in enumerate(tensors):
        bad = torch.nonzero(~torch.isfinite(tensor))
        if len(bad):
            place = bad[0].tolist()
            sample = _sample(batch, parts[0][micro][place[0]])
            raise _error(stage, f"{stage} of {sample} is {float(tensor[tuple(place)])}")


def check_tensors(stage: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that every value of named tensors is finite.

    Raises:
        NotFiniteError: it names the stage and the first tensor.
    """
    for name, tensor in tensors:
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise _error(stage, f"{stage}: {bad} of {tensor.numel()} values of {name} are not finite")


def _sample(batch: Batch, at: int) -> str:
    sample = batch.samples[at]
    return f"sample {sample.name} (turn {sample.leaf_turn_id})"


def _error(stage: str, where: str) -> NotFiniteError:
    remedy = (
        "the run goes on from its last checkpoint, with a lower optimizer.lr or, by on_not_finite = 'skip', "
        "without the step's samples"
    )
    message = f"{where}: the step is not committed, and nothing of it is published; {remedy}"
    return NotFiniteError(message, stage)
