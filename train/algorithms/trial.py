"""A trial of an algorithm on a made-up batch, so that a fault in any of its parts shows before a
step is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollbook.store.errors import RollbookError, TrainError
from rollbook.train.algorithms.algorithm import Algorithm, LossInputs, ScoreInputs
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.parts import check_advantages, check_shape
from rollbook.train.algorithms.rollouts import Advantages, Rollouts

if TYPE_CHECKING:
    import torch

LENGTHS = (3, 1, 4, 2, 2, 3)
"""Trained tokens of the samples: two groups of two trajectories, of which the first two have two samples."""
GROUPS, TRAJECTORIES = np.array([0, 0, 1, 1, 0, 1]), np.array([0, 1, 2, 3, 0, 2])
REWARDS = np.array([1.0, 0.0, 0.5, 2.0])
"""Of the trajectories."""


def try_out(algorithm: Algorithm) -> None:
    """Call each part of an algorithm once.

    Raises:
        TrainError: a part gives another shape than is asked of it, gives no gradient, or fails.
    """
    try:
        advantages = _estimated(algorithm)
        total = _score_loss(algorithm) if algorithm.head_width else _token_loss(algorithm, advantages)
        if not total.requires_grad:
            raise TrainError(
                f"algorithm {algorithm.algorithm_name!r}: its loss has no gradient; compute it from "
                "`inputs.logprobs`, not from a copy without one"
            )
    except RollbookError:
        raise
    except Exception as error:  # code of one's own ran
        raise TrainError(
            f"algorithm {algorithm.algorithm_name!r} failed on a batch made up to try it: {error!r}"
        ) from error


def _estimated(algorithm: Algorithm) -> Advantages:
    """Its advantages for six samples; its correction is tried, too."""
    lengths, count = np.array(LENGTHS), sum(LENGTHS)
    tokens = np.linspace(-1.0, 1.0, count)
    rollouts = Rollouts(
        rewards=REWARDS[TRAJECTORIES],
        groups=GROUPS,
        trajectories=TRAJECTORIES,
        lengths=lengths,
        truncated=np.arange(len(lengths)) == 1,
        turn_rewards=np.where(np.arange(count) % 4 == 0, 0.25, 0.0),
        old_logprobs=(tokens - 2).astype(np.float32),
        reference_logprobs=(tokens[::-1] - 2).astype(np.float32),
        values=tokens.astype(np.float32) if "values" in algorithm.needs else None,
        number_turns=lambda: np.arange(count) // 2,
    )
    what = f"algorithm {algorithm.algorithm_name!r}"
    advantages = check_advantages(what, algorithm.advantages(rollouts), rollouts)
    if "values" in algorithm.needs and advantages.returns is None:
        raise TrainError(f"{what} needs values, and gave no returns for the critic to learn")
    weights = algorithm.weights(tokens, lengths)
    if weights is not None:
        check_shape(f"{what}: weights", weights, (count,))
    return advantages


def _token_loss(algorithm: Algorithm, advantages: Advantages) -> torch.Tensor:
    """Its loss of a micro-batch of two samples of up to three tokens."""
    import torch

    shape = (2, 3)
    logprobs = torch.linspace(-3.0, -1.0, 6).reshape(shape).requires_grad_()
    mask = torch.tensor([[True, True, True], [False, True, True]])
    near = logprobs.detach() + torch.linspace(-0.5, 0.5, 6).reshape(shape)
    weights = algorithm.weights(near[mask].double().numpy(), np.array([3, 2]))
    inputs = LossInputs.whole(
        logprobs,
        near,
        torch.full(shape, float(advantages.values[0])),
        mask,
        behaviour=near - 0.1 if "old" in algorithm.needs else near,
        weights=None if weights is None else torch.ones(shape),
        reference_logprobs=near.flip(-1),
        entropy=-logprobs if "entropy" in algorithm.needs else None,
        values=near if "values" in algorithm.needs else None,
    )
    what = f"algorithm {algorithm.algorithm_name!r}"
    losses = check_shape(f"{what}: loss", algorithm.loss(inputs), shape)
    algorithm.measures(inputs)
    algorithm.clipped(inputs)
    if "values" in algorithm.needs:
        check_shape(f"{what}: value_loss", algorithm.value_loss(logprobs, near, near.flip(-1)), shape)
    return _total(algorithm, torch.where(mask, losses, 0.0), mask, inputs.totals)


def _score_loss(algorithm: Algorithm) -> torch.Tensor:
    """Its loss of a pair's scores."""
    import torch

    scores = torch.linspace(-1.0, 1.0, 2 * algorithm.head_width).reshape(2, -1).requires_grad_()
    none = torch.zeros(2)
    mean = 0.5 if "batch_score" in algorithm.needs else None
    losses = algorithm.score_loss(ScoreInputs(scores, none, none, mean))
    check_shape(f"algorithm {algorithm.algorithm_name!r}: score_loss", losses, (2,))
    return _total(algorithm, losses, torch.ones(2, 1, dtype=torch.bool), Totals(2, 2))


def _total(algorithm: Algorithm, losses: torch.Tensor, mask: torch.Tensor, totals: Totals) -> torch.Tensor:
    """The loss of a batch of one micro-batch."""
    what = f"algorithm {algorithm.algorithm_name!r}"
    total = check_shape(f"{what}: the sum of a micro-batch's losses", algorithm.add(losses, mask), ())
    divisor = algorithm.divisor(totals)
    if not isinstance(divisor, int | float):
        raise TrainError(f"{what}: its divisor is a {type(divisor).__name__}, not a number")
    return total / max(divisor, 1)
