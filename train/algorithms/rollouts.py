"""The input of advantage estimators: rewards of samples, and what is known of each of their trained
tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupPeers:
    """K trajectories that are not trained on, but count in the group that a sample is compared with.

    Attributes:
        beside: int64 [K], the place of a sample of the same group.
        rewards: float64 [K]; lengths: int64 [K], tokens that could have been trained.
        truncated: bool [K], as of samples.
    """

    beside: Ints
    rewards: Floats
    lengths: Ints
    truncated: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """N samples; their trained tokens lie one after the other, P in all.

    Attributes:
        rewards: float64 [N]; NaN where a sample has none. Samples of one trajectory have the same.
        groups, trajectories: int64 [N], of each sample, numbered from 0 in the order of first samples.
        lengths: int64 [N], trained tokens of each sample.
        truncated: bool [N], whether a sample was cut off at its greatest length; None: none was.
        turn_rewards: float64 [P], the reward of a turn at its last token, 0 elsewhere; None: all are 0.
        old_logprobs: float32 [P], of the policy that ratios are taken to.
        reference_logprobs: float32 [P], of the reference policy; None where the algorithm needs none.
        values: float32 [P], the critic's; None where the algorithm needs none.
        number_turns: gives `turns`, which most algorithms do not ask for; None: each sample is one turn.
        others: further members of the samples' groups; None: there are none.
    """

    rewards: Floats
    groups: Ints
    trajectories: Ints
    lengths: Ints
    truncated: npt.NDArray[np.bool_] | None = None
    turn_rewards: Floats | None = None
    old_logprobs: Singles | None = None
    reference_logprobs: Singles | None = None
    values: Singles | None = None
    number_turns: Callable[[], Ints] | None = None
    others: GroupPeers | None = None

    @property
    def turns(self) -> Ints | None:
        """Of each token the number of its turn within its sample, int64 [P]; None: each sample is one."""
        return None if self.number_turns is None else self.number_turns()

    @property
    def last(self) -> Ints:
        """Where the last trained token of each sample is, int64 [N]; of those that have one."""
        return (np.cumsum(self.lengths) - 1)[self.lengths > 0]


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """float64 [N], one for a sample; or, with `per_token`, [P], one for a trained token.

    `returns` [P] are the critic's targets; None where there is none.
    """

    values: Floats
    per_token: bool = False
    returns: Floats | None = None
