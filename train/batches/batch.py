"""The batch of one optimizer step as aligned arrays, a pure function of its samples' experience; how a
rollout batch is divided into such batches, and a batch into forward passes of about equal work."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rollbook.store.digest import digest_arrays
from rollbook.store.events import Json
from rollbook.store.events.routed_experts import ExpertIds
from rollbook.train.algorithms.algorithm import Demand
from rollbook.train.algorithms.rollouts import Floats, Singles
from rollbook.train.batches.experience import Experience
from rollbook.train.select.routing import FREE, Mixture, experts_of
from rollbook.train.select.samples import Sample

Partition = list[list[list[int]]]
"""Data-parallel rank -> micro-batch -> positions of its samples in the batch."""


def micro_batches_of(parts: Partition) -> list[list[int]]:
    """The micro-batches of all data-parallel ranks, rank by rank."""
    return [part for rank in parts for part in rank]


def shares_of(parts: Partition) -> tuple[int, ...]:
    """How many micro-batches each data-parallel rank takes."""
    return tuple(map(len, parts))


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B samples padded to the longest (T), all [B, T]; tokens, versions int64, loss_mask bool, else
    float32.

    `rollout_logprobs` are the engine's: 0 where the mask is false, and everywhere for samples
    without logprobs. `versions` is -1 where no policy version sampled a token. `old_logprobs`,
    `reference_logprobs` and `weights` are None where the algorithm needs none; ratios are then
    taken to the engine's logprobs. `old_values` and `returns` are for the critic. `margins` and
    `rewards` are per sample, [B], and `batch_score` is of the whole batch: for reward models.
    `lengths`, int64 [B], are the samples' token counts where the model is given the micro-batch
    packed, without the padding; None: it is given [B, T]. `experts`, int16 [B, T, layers, topk],
    are the experts that each token is sent to, `FREE` where routers choose; None: they always
    do.
    """

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    rollout_logprobs: Singles
    temperatures: Singles
    advantages: Singles
    versions: npt.NDArray[np.int64]
    old_logprobs: Singles | None = None
    reference_logprobs: Singles | None = None
    weights: Singles | None = None
    old_values: Singles | None = None
    returns: Singles | None = None
    margins: Singles | None = None
    rewards: Singles | None = None
    batch_score: float | None = None
    lengths: npt.NDArray[np.int64] | None = None
    experts: ExpertIds | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The experience of a step's samples, and their micro-batches, rank by rank.

    Attributes:
        partition: the places of the samples of each micro-batch, by rank.
    """

    experience: Experience
    micro_batches: tuple[MicroBatch, ...]
    partition: Partition

    @property
    def shares(self) -> tuple[int, ...]:
        """How many micro-batches each rank has."""
        return shares_of(self.partition)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples, in order."""
        return self.experience.samples

    @property
    def rewards(self) -> Floats:
        """The reward of each, float64 [N]; NaN where it has none."""
        return self.experience.rewards

    @property
    def trained_tokens(self) -> int:
        """Tokens with loss, over the whole batch."""
        return int(sum(m.loss_mask.sum() for m in self.micro_batches))

    @property
    def trained_samples(self) -> int:
        """Samples with a token that has loss."""
        return int(sum(m.loss_mask.any(-1).sum() for m in self.micro_batches))

    def digests(self) -> Json:
        """Digests of the stages that come before the loss.

        Each stage holds what the others do not, so that a change names its own stage.
        """
        what = ("tokens", "loss_mask", "versions", "temperatures")
        arrays = {f"{i}.{name}": getattr(s, name) for i, s in enumerate(self.samples) for name in what}
        layout = {f"micro.{i}": m.tokens for i, m in enumerate(self.micro_batches)}
        routed = {f"micro.{i}": m.experts for i, m in enumerate(self.micro_batches) if m.experts is not None}
        digests = {"samples": digest_arrays(arrays | layout)}
        digests |= {"routed_experts": digest_arrays(routed)} if routed else {}
        return digests | self.experience.digests()


def partition(count: int, micro_batch_size: int | None, ranks: int = 1, unit: int = 1) -> Partition:
    """Samples in order, shared out evenly over the ranks; `micro_batch_size` (default: all) to a micro-batch.

    Args:
        unit: samples that lie together in one micro-batch, as the two of a pair do.
    """
    size = max((micro_batch_size or max(count, 1)) // unit, 1)
    shares = evenly(range(count // unit), ranks)
    return [
        [
            [at * unit + i for at in share[start : start + size] for i in range(unit)]
            for start in range(0, len(share), size)
        ]
        for share in shares
    ]


def packed_partition(
    samples: Sequence[Sample], most: int, work: Callable[[int], int], unit: int, ranks: int = 1
) -> Partition:
    """Ranks of about equal work, each with the same number of micro-batches of about equal work and
    at most `most` tokens. A longer sample is a micro-batch of its own.

    Args:
        work: of a forward pass over a sample of so many tokens.
        unit: samples that lie together in one micro-batch, as the two of a pair do.
    """
    starts = range(0, len(samples), unit)
    units = [[len(sample) for sample in samples[start : start + unit]] for start in starts]
    lengths, works = [sum(sizes) for sizes in units], [sum(map(work, sizes)) for sizes in units]
    return [
        [[at * unit + i for at in part for i in range(unit)] for part in parts]
        for parts in packs_of_ranks(lengths, works, most, ranks)
    ]


def build_batch(
    experience: Experience, parts: Partition, *, packed: bool = False, mixture: Mixture | None = None
) -> Batch:
    """The batch of ordered samples, each token weighed by its advantage.

    Args:
        packed: the model is given the samples of a micro-batch one after the other, without padding.
        mixture: of a model that replays the routing that the samples' turns record; None: it does not.
    """
    micro_batches = tuple(_collate(experience, part, packed, mixture) for part in micro_batches_of(parts))
    return Batch(experience, micro_batches, parts)


def collate_tokens(
    samples: Sequence[Sample],
    masks: Sequence[npt.NDArray[np.bool_]],
    *,
    packed: bool = False,
    mixture: Mixture | None = None,
) -> MicroBatch:
    """Samples as one micro-batch for a forward pass only: advantages are 0.

    Args:
        masks: the trained tokens of each sample, bool [T]; never the first, which nothing
            precedes.
        packed: the model is given the samples one after the other, without padding.
        mixture: of a model that replays the routing that the samples' turns record; None: it
            does not.
    """
    shape = (len(samples), max(len(s) for s in samples))
    # Arrays of a size are parts of one: the system gives a few large pieces of memory in less time.
    tokens, versions = np.empty((2, *shape), np.int64)
    rollout_logprobs, temperatures, advantages = np.empty((3, *shape), np.float32)
    loss_mask = np.empty(shape, np.bool_)
    advantages[:] = 0
    for row, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        for array, values, padding in (
            (tokens, sample.tokens, 0),
            (loss_mask, mask, False),
            (rollout_logprobs, sample.logprobs, 0.0),
            (temperatures, sample.temperatures, 1.0),
            (versions, sample.versions, -1),
        ):
            array[row, : len(values)] = values
            array[row, len(values) :] = padding
    micro = MicroBatch(
        tokens,
        loss_mask,
        rollout_logprobs,
        temperatures,
        advantages,
        versions,
        lengths=np.array([len(sample) for sample in samples], np.int64) if packed else None,
        experts=None if mixture is None else _experts(samples, shape, mixture),
    )
    if not np.isfinite(micro.rollout_logprobs).all():
        np.nan_to_num(micro.rollout_logprobs, copy=False, nan=0.0)
    return micro


def _experts(samples: Sequence[Sample], shape: tuple[int, int], mixture: Mixture) -> ExpertIds:
    placed = np.full((*shape, mixture.layers, mixture.topk), FREE, np.int16)
    for row, sample in enumerate(samples):
        placed[row, : len(sample)] = experts_of(sample, mixture)
    return placed


def without_experts(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches without recorded routing: the model's routers choose for themselves."""
    return [replace(micro, experts=None) for micro in micro_batches]


def _collate(experience: Experience, part: list[int], packed: bool, mixture: Mixture | None) -> MicroBatch:
    samples, masks = [experience.samples[i] for i in part], [experience.masks[i] for i in part]
    micro = collate_tokens(samples, masks, packed=packed, mixture=mixture)
    for row, i in enumerate(part):
        if not experience.advantages.per_token:
            micro.advantages[row, : len(experience.masks[i])] = experience.advantages.values[i]
    by_token = _spread(
        experience, part, micro, experience.advantages.values if experience.advantages.per_token else None
    )
    return replace(
        micro,
        advantages=micro.advantages if by_token is None else by_token,
        old_logprobs=_spread(experience, part, micro, experience.scores.old_logprobs),
        reference_logprobs=_spread(experience, part, micro, experience.scores.reference_logprobs),
        weights=_spread(experience, part, micro, experience.weights),
        old_values=_spread(experience, part, micro, experience.scores.values),
        returns=_spread(experience, part, micro, experience.advantages.returns),
        margins=experience.margins[part].astype(np.float32),
        rewards=experience.rewards[part].astype(np.float32),
        batch_score=experience.scores.batch_score,
    )


def _spread(
    experience: Experience, part: list[int], micro: MicroBatch, values: npt.NDArray[np.floating] | None
) -> Singles | None:
    """Values of trained tokens [P] at their places in a micro-batch, 0 elsewhere."""
    if values is None:
        return None
    placed = np.zeros(micro.tokens.shape, np.float32)
    for row, i in enumerate(part):
        placed[row, np.flatnonzero(experience.masks[i])] = experience.of(values, i)
    return placed


def in_sample_order(
    micro_batches: Sequence[MicroBatch], parts: Partition, values: Sequence[npt.NDArray[np.float32]]
) -> Singles:
    """The values of the trained tokens of all samples, in the order of samples, float32 [P].

    Args:
        values: of each micro-batch float32 [B, T - 1]; column t is of token t + 1.
    """
    by_sample: dict[int, Singles] = {}
    for micro, part, array in zip(micro_batches, micro_batches_of(parts), values, strict=True):
        by_sample |= zip(part, token_values(micro, array), strict=True)
    return np.concatenate([np.zeros(0, np.float32), *(by_sample[i] for i in sorted(by_sample))])


def token_values(micro: MicroBatch, values: npt.NDArray[np.float32]) -> list[Singles]:
    """For each sample of a micro-batch, the values of its trained tokens.

    Args:
        values: float32 [B, T - 1]; column t is of token t + 1.
    """
    masks = micro.loss_mask[:, 1:]
    return [row[mask] for row, mask in zip(values, masks, strict=True)]


def mini_batches(count: int, demand: Demand, seed: int) -> list[list[int]]:
    """Positions of the samples of each step on a rollout batch of `count` samples, in order.

    Each epoch is a permutation of all samples, decided by the seed and its number, in `demand.mini_batches`
    parts whose sizes differ by at most one; parts without a sample are left out. A single step takes all, in
    their order.
    """
    if demand.steps == 1:
        return [list(range(count))]
    parts: list[list[int]] = []
    for epoch in range(demand.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(count)
        parts += [part.tolist() for part in np.array_split(order, demand.mini_batches) if len(part)]
    return parts


T = TypeVar("T")


def balanced(work: Sequence[int], parts: int) -> list[list[int]]:
    """Distribute items over `parts` parts with about equal sums of work; parts may be empty.

    The largest differencing method (Karmarkar and Karp 1982): each item begins as a partition of
    its own, and the two partitions whose parts differ most are joined, the heaviest part of one
    with the lightest of the other. Ties are decided by index.

    Returns:
        The indexes of each part, in order; parts are sorted by their first index, empty ones
        last.
    """
    none: list[tuple[int, list[int]]] = [(0, [])] * (parts - 1)
    heap = [(-load, place, [(load, [place]), *none]) for place, load in enumerate(work)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, this = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        joined = [(a + b, [*held, *more]) for (a, held), (b, more) in zip(this, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(first, second), joined))
    bins = [sorted(places) for _, places in heap[0][2]] if heap else []
    bins += [[] for _ in range(parts - len(bins))]
    return sorted(bins, key=lambda places: (not places, places))


def evenly(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """The items in order, split into `parts` parts as equal in size as can be; the first ones are
    the larger."""
    each, more = divmod(len(items), parts)
    ends = [at * each + min(at, more) for at in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def packs(lengths: Sequence[int], work: Sequence[int], most: int, least: int = 1) -> list[list[int]]:
    """Distribute items over few parts of at most `most` tokens each, of about equal work; returns
    indexes.

    An item that is longer is a part of its own.

    Args:
        lengths: tokens of each item.
        least: number of parts, where there are so many items.
    """
    if not lengths:
        return []
    count = min(max(-(-sum(lengths) // most), least), len(lengths))
    while True:
        parts = [part for part in balanced(work, count) if part]
        fullest = max((sum(lengths[i] for i in part) for part in parts if len(part) > 1), default=0)
        if fullest <= most:
            return parts
        count = min(max(count + 1, count * fullest // most), len(lengths))


def packs_of_ranks(
    lengths: Sequence[int], work: Sequence[int], most: int, ranks: int
) -> list[list[list[int]]]:
    """Distribute items over ranks of about equal work, and each rank's over parts as `packs` does:
    the same number of parts on every rank that has so many items; returns indexes."""
    places = balanced(work, ranks) if ranks > 1 else [list(range(len(lengths)))]
    least, packed = 1, list[list[list[int]]]()
    while True:
        packed = [packs([lengths[i] for i in own], [work[i] for i in own], most, least) for own in places]
        fullest = max(map(len, packed), default=0)
        if all(
            len(parts) == fullest or len(parts) == len(own) for parts, own in zip(packed, places, strict=True)
        ):
            break
        least = fullest
    return [[[own[i] for i in part] for part in parts] for parts, own in zip(packed, places, strict=True)]
