"""Finds the first non-finite number of a step, or that nothing is left to train, so that the step is not
committed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollbook.store.errors import AllRejectedError, NotFiniteError
from rollbook.train.batches.batch import Batch, Partition, micro_batches_of
from rollbook.train.select.samples import Sample


def check_batch(batch: Batch, *, exact: bool = True) -> None:
    """Check that there are trained tokens, and that their advantages and engine logprobs are finite.

    Args:
        exact: whether the algorithm uses these logprobs.

    Raises:
        AllRejectedError: there are none: a step would be one of weight decay alone.
        NotFiniteError: it names the stage and the first sample.
    """
    if not batch.trained_tokens:
        raise AllRejectedError(
            f"all tokens of the step's {len(batch.samples)} samples are masked, or were rejected by the "
            "correction: the step is not taken; widen algorithm.correction_low and correction_high, or see "
            "why engine and trainer differ (engine_logprob_gap)"
        )
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
            raise _error("advantages", where, batch.samples[at])
    if not exact:
        return
    for at, sample in enumerate(batch.samples):  # NaN stands for the missing logprobs of a teacher
        bad = np.flatnonzero(np.isinf(sample.logprobs) & sample.loss_mask)
        if len(bad):
            value = sample.logprobs[bad[0]]
            where = f"old_logprobs of token {bad[0]} of {_sample(batch, at)} is {value}"
            raise _error("old_logprobs", where, sample)


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
            at = micro_batches_of(parts)[micro][row]
            where = f"{stage} of token {column + 1} of {_sample(batch, at)} is {value}"
            raise _error(stage, where, batch.samples[at])


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
            at = micro_batches_of(parts)[micro][place[0]]
            where = f"{stage} of {_sample(batch, at)} is {float(tensor[tuple(place)])}"
            raise _error(stage, where, batch.samples[at])


class FiniteValues:
    """A `Look` that finds out whether each tensor of a stage is finite. What a device holds is known once
    `check` has waited for it: looking at one tensor after the other would wait for each."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._there: list[tuple[str, torch.Tensor]] = []
        """The name of each tensor on a device, and its least and its greatest value, [2]."""

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Look at a tensor.

        Raises:
            NotFiniteError: it is on the CPU, and not finite.
        """
        if not tensor.numel():
            return
        # The least and the greatest are NaN where one is: forty times as fast as looking at each.
        ends = torch.stack(tensor.aminmax())
        if tensor.device.type != "cpu":
            self._there.append((name, ends.float()))
        elif not torch.isfinite(ends).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise self._error(f"{bad} of {tensor.numel()} values of {name} are not finite")

    def check(self) -> None:
        """Wait for what devices hold.

        Raises:
            NotFiniteError: a tensor is not finite; it names the stage and the first of them.
        """
        if not self._there:
            return
        finite = torch.isfinite(torch.stack([ends for _, ends in self._there])).all(1).tolist()
        for (name, _), whole in zip(self._there, finite, strict=True):
            if not whole:
                raise self._error(f"values of {name} are not finite")

    def _error(self, what: str) -> NotFiniteError:
        return _error(self._stage, f"{self._stage}: {what}")


def _sample(batch: Batch, at: int) -> str:
    sample = batch.samples[at]
    return f"sample {sample.name} (turn {sample.leaf_turn_id})"


def _error(stage: str, where: str, sample: Sample | None = None) -> NotFiniteError:
    remedy = (
        "the run goes on from its last checkpoint, with a lower optimizer.lr or, by on_not_finite = 'skip', "
        "without the step's samples (by 'retake', without this one)"
    )
    message = f"{where}: the step is not committed, and nothing of it is published; {remedy}"
    return NotFiniteError(message, stage, None if sample is None else sample.leaf_turn_id)
