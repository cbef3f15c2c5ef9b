"""What a rollout batch is trained with beside its tokens: advantages, and the scores that models
gave its tokens.

It is computed once for a rollout batch, before its first optimizer step, and shared by all of
its steps. Tokens of samples lie one after the other, [P]; only trained ones count, and never the
first of a path, which nothing precedes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rollbook.store.digest import digest_arrays
from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.parts import check_advantages, check_shape
from rollbook.train.algorithms.rollouts import Advantages, Floats, GroupPeers, Ints, Rollouts, Singles
from rollbook.train.select.sample_ref import numbered
from rollbook.train.select.samples import Sample

Bools = npt.NDArray[np.bool_]
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The values that models give each trained token, float32 [P]; None where the algorithm does
    not ask.

    `batch_score` is the mean score of the samples by a reward model, before the step.
    """

    old_logprobs: Singles | None = None
    reference_logprobs: Singles | None = None
    values: Singles | None = None
    batch_score: float | None = None

    def cut(self, at: Ints | Bools) -> Scores:
        """The scores of some tokens."""
        all_of = (self.old_logprobs, self.reference_logprobs, self.values)
        old, reference, own = (None if values is None else values[at] for values in all_of)
        return Scores(old, reference, own, self.batch_score)


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """The samples of a rollout batch, or of some of it, with all that their loss is computed from.

    Attributes:
        rewards: float64 [N].
        advantages: of samples or of tokens.
        scores: of models.
        weights: float64 [P], of the correction; None without one.
        masks: bool [T] of each sample: its trained tokens.
        ends: int64 [N + 1], where each sample's tokens end in [P]; the first is 0.
        left_out: int64 [N], tokens of each sample that the correction rejected and that are counted nowhere.
    """

    samples: tuple[Sample, ...]
    rewards: Floats
    advantages: Advantages
    scores: Scores
    weights: Floats | None
    masks: tuple[Bools, ...]
    ends: Ints
    left_out: Ints

    def part(self, positions: Sequence[int]) -> Experience:
        """The experience of some of its samples, in this order."""
        if list(positions) == list(range(len(self.samples))):
            return self
        pieces = [np.arange(self.ends[i], self.ends[i + 1]) for i in positions]
        at = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        values = self.advantages
        cut = np.asarray(positions, np.int64) if not values.per_token else at
        return Experience(
            samples=tuple(self.samples[i] for i in positions),
            rewards=self.rewards[np.asarray(positions, np.int64)],
            advantages=Advantages(
                values.values[cut],
                values.per_token,
                None if values.returns is None else values.returns[at],
            ),
            scores=self.scores.cut(at),
            weights=None if self.weights is None else self.weights[at],
            masks=tuple(self.masks[i] for i in positions),
            ends=np.cumsum([0, *(len(piece) for piece in pieces)]),
            left_out=self.left_out[np.asarray(positions, np.int64)],
        )

    @property
    def margins(self) -> Floats:
        """By how much each sample was recorded as better, float64 [N]; 0 where no margin was
        recorded."""
        return np.array([sample.margin or 0.0 for sample in self.samples], np.float64)

    def of(self, values: npt.NDArray[_T], at: int) -> npt.NDArray[_T]:
        """The part of values [P] that belongs to a sample's tokens."""
        return values[self.ends[at] : self.ends[at + 1]]

    def digests(self) -> Json:
        """Digests of the stages that come before the loss; each holds what the others do not."""
        advantages = self.advantages
        digests = {
            "rewards": digest_arrays({"rewards": self.rewards}),
            "advantages": digest_arrays(
                self._by_sample(advantages.values)
                if advantages.per_token
                else {"advantages": advantages.values}
            ),
            "old_logprobs": digest_arrays({f"{i}": s.logprobs for i, s in enumerate(self.samples)}),
        }
        if any(sample.margin is not None for sample in self.samples):
            digests["margins"] = digest_arrays({"margins": self.margins})
        if self.scores.batch_score is not None:
            digests["batch_score"] = digest_arrays({"batch_score": np.array([self.scores.batch_score])})
        optional = {
            "proximal_logprobs": self.scores.old_logprobs,
            "reference_logprobs": self.scores.reference_logprobs,
            "values": self.scores.values,
            "returns": advantages.returns,
            "importance_weights": self.weights,
        }
        return digests | {
            stage: digest_arrays(self._by_sample(values))
            for stage, values in optional.items()
            if values is not None
        }

    def _by_sample(self, values: npt.NDArray[np.floating]) -> dict[str, npt.NDArray[np.floating]]:
        return {f"{i}": np.ascontiguousarray(self.of(values, i)) for i in range(len(self.samples))}


def trained_masks(samples: Sequence[Sample], oldest: int | None = None) -> tuple[Bools, ...]:
    """The trained tokens of each sample, bool [T]: those with loss, except the first of the path.

    Args:
        oldest: tokens of versions before this one are masked; None: no token is.
    """
    masks = (_without_first(sample.loss_mask) for sample in samples)
    if oldest is None:
        return tuple(masks)
    return tuple(
        mask & ((s.versions >= oldest) | (s.versions < 0)) for mask, s in zip(masks, samples, strict=True)
    )


def age_weights(
    samples: Sequence[Sample], masks: Sequence[Bools], version: int, decay: float
) -> Floats | None:
    """`decay` to the power of each trained token's age in versions, float64 [P]; None for a decay of 1.

    Tokens of unknown versions count as new.

    Args:
        version: of the trainer.
    """
    if decay == 1:
        return None
    versions = np.concatenate(
        [np.zeros(0, np.int64), *(s.versions[mask] for s, mask in zip(samples, masks, strict=True))]
    )
    return np.asarray(decay ** np.where(versions >= 0, version - versions, 0).astype(np.float64))


def _without_first(mask: Bools) -> Bools:
    if not len(mask) or not mask[0]:
        return mask
    trained = mask.copy()
    trained[0] = False
    return trained


def experience_of(
    samples: Sequence[Sample],
    algorithm: Algorithm,
    scores: Scores | None = None,
    masks: tuple[Bools, ...] | None = None,
    token_weights: Floats | None = None,
    others: GroupPeers | None = None,
) -> Experience:
    """The experience of a rollout batch. Pure.

    Args:
        scores: what the algorithm needs of models, of the trained tokens.
        masks: the trained tokens of each sample; absent: all that have loss.
        token_weights: float64 [P], of the recipe; they multiply the correction's.
        others: further members of the samples' groups, which they are compared with.

    Raises:
        TrainError: a part of the algorithm gives another shape than is asked of it.
    """
    scores = scores or Scores()
    masks = trained_masks(samples) if masks is None else masks
    lengths = np.array([np.count_nonzero(mask) for mask in masks], np.int64)
    rewards = np.array([np.nan if s.reward is None else s.reward for s in samples], np.float64)
    rollout = np.concatenate(
        [np.zeros(0, np.float32), *(s.logprobs[mask] for s, mask in zip(samples, masks, strict=True))]
    )
    old = rollout if scores.old_logprobs is None else scores.old_logprobs
    named = f"algorithm {algorithm.algorithm_name!r}"
    weights = algorithm.weights(np.subtract(old, rollout, dtype=np.float64), lengths)
    if weights is not None:
        check_shape(f"{named}: weights", weights, rollout.shape)
    if token_weights is not None:
        weights = token_weights if weights is None else weights * token_weights
    rollouts = _rollouts(samples, masks, lengths, rewards, old, scores, others)
    experience = Experience(
        samples=tuple(samples),
        rewards=rewards,
        advantages=check_advantages(named, algorithm.advantages(rollouts), rollouts),
        scores=scores,
        weights=weights,
        masks=masks,
        ends=np.concatenate([[0], np.cumsum(lengths)]),
        left_out=np.zeros(len(lengths), np.int64),
    )
    return experience if weights is None or algorithm.counts_rejected else _without_rejected(experience)


def _rollouts(
    samples: Sequence[Sample],
    masks: Sequence[Bools],
    lengths: Ints,
    rewards: Floats,
    old: Singles,
    scores: Scores,
    others: GroupPeers | None,
) -> Rollouts:
    """The input of the algorithm's advantages.

    Args:
        lengths: int64 [N], trained tokens of each; rewards: float64 [N]; old: float32 [P], logprobs of the
            policy that ratios are taken to.
    """
    return Rollouts(
        rewards=rewards,
        groups=numbered([s.trajectory_id if s.group is None else f"{s.run}/{s.group}" for s in samples]),
        trajectories=numbered([s.trajectory_id for s in samples]),
        lengths=lengths,
        truncated=np.array([s.truncated for s in samples], np.bool_),
        turn_rewards=_turn_rewards(samples, masks),
        old_logprobs=old,
        reference_logprobs=scores.reference_logprobs,
        values=scores.values,
        number_turns=partial(_turns, samples, masks),
        others=others,
    )


def _without_rejected(experience: Experience) -> Experience:
    """The experience without the tokens of weight 0, which then count nowhere in the loss."""
    assert experience.weights is not None
    kept = experience.weights > 0
    masks = []
    for i, mask in enumerate(experience.masks):
        left = mask.copy()
        left[np.flatnonzero(mask)] = experience.of(kept, i)
        masks.append(left)
    values, left = experience.advantages, np.array([int(mask.sum()) for mask in masks], np.int64)
    return Experience(
        samples=experience.samples,
        rewards=experience.rewards,
        advantages=Advantages(
            values.values[kept] if values.per_token else values.values,
            values.per_token,
            None if values.returns is None else values.returns[kept],
        ),
        scores=experience.scores.cut(kept),
        weights=experience.weights[kept],
        masks=tuple(masks),
        ends=np.concatenate([[0], np.cumsum(left)]),
        left_out=np.diff(experience.ends) - left,
    )


def _turn_rewards(samples: Sequence[Sample], masks: Sequence[Bools]) -> Floats | None:
    """The reward of each turn at its last trained token, float64 [P]; None where no turn has one."""
    if not any(sample.rewards for sample in samples):
        return None
    return np.concatenate([_of_turns(s, mask) for s, mask in zip(samples, masks, strict=True)])


def _turns(samples: Sequence[Sample], masks: Sequence[Bools]) -> Ints:
    """The number of each trained token's turn in its sample's path, int64 [P]."""
    numbers = [range(len(sample.turn_ends)) for sample in samples]
    counts = [
        np.count_nonzero(mask[start:end])
        for sample, mask in zip(samples, masks, strict=True)
        for start, end in pairwise((0, *sample.turn_ends))
    ]
    return np.repeat(np.fromiter(chain.from_iterable(numbers), np.int64), np.array(counts, np.int64))


def _of_turns(sample: Sample, mask: Bools) -> Floats:
    placed = np.zeros(len(sample), np.float64)
    for turn_id, end in zip(sample.turn_ids, sample.turn_ends, strict=True):
        if mask[end - 1]:  # else the turn belongs to another sample, or is not trained
            placed[end - 1] = sample.rewards.get(turn_id, 0.0)
    return placed[mask]
