"""Batches: padding, masks, advantages and the digests of the stages before the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook.store.fold.trajectory import fold
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.algorithms.sft import Sft
from rollbook.train.batches.batch import build_batch, partition
from rollbook.train.batches.experience import experience_of, trained_masks
from rollbook.train.select.samples import Sample, all_samples

SFT = Sft(name="sft")
GRPO = Grpo(name="grpo")


@pytest.fixture
def samples() -> list[Sample]:
    """Three samples of lengths 4, 6 and 3, of one group; the last is a teacher's."""
    records = [
        *fabric.records("a", [fabric.T([1, 2], [3, 4], logprobs=[-1.0, -2.0])], group="g", reward=0.0),
        *fabric.records("b", [fabric.T([5], [6] * 5, logprobs=-3.0, temperature=0.5)], group="g", reward=2.0),
        *fabric.records("c", [fabric.T([7], [8, 9], logprobs=None)], group="g", reward=1.0),
    ]
    return all_samples(fold(fabric.events(records)).values())


@given(st.integers(1, 40), st.none() | st.integers(1, 50))
def test_partition_holds_each_sample_once_in_order(count: int, size: int | None) -> None:
    """One rank; micro-batches of the wanted size, the last one smaller, every position once."""
    (rank,) = partition(count, size)
    assert [i for part in rank for i in part] == list(range(count))
    assert {len(part) for part in rank[:-1]} <= {size or count}
    assert 1 <= len(rank[-1]) <= (size or count)


def test_padding_and_masks(samples: list[Sample]) -> None:
    """Each micro-batch is as long as its longest sample; padding is 0, masked, at temperature 1."""
    batch = build_batch(experience_of(samples, SFT), partition(3, 2))
    first, second = batch.micro_batches
    assert first.tokens.tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 6, 6, 6, 6]]
    assert first.loss_mask.astype(int).tolist() == [[0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert first.rollout_logprobs.tolist() == [[0, 0, -1, -2, 0, 0], [0, -3, -3, -3, -3, -3]]
    assert first.temperatures.tolist() == [[1] * 6, [1, 0.5, 0.5, 0.5, 0.5, 0.5]]
    assert first.advantages.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert second.tokens.tolist() == [[7, 8, 9]]
    assert second.rollout_logprobs.tolist() == [[0, 0, 0]], "NaN of a teacher never reaches the model"
    assert batch.trained_tokens == 2 + 5 + 2


def test_grpo_weighs_by_advantage(samples: list[Sample]) -> None:
    """Rewards 0, 2, 1 have standard deviation 1: advantages -1, 1, 0 on every token of their sample."""
    batch = build_batch(experience_of(samples, GRPO), partition(3, None))
    assert batch.rewards.tolist() == [0.0, 2.0, 1.0]
    assert batch.experience.advantages.values == pytest.approx([-1, 1, 0], abs=1e-5)
    (micro,) = batch.micro_batches
    assert micro.advantages[:, 1] == pytest.approx([-1, 1, 0], abs=1e-5)


def test_a_first_token_is_never_trained(samples: list[Sample]) -> None:
    """Nothing precedes a sample's first token, so it has no loss even where it was sampled."""
    mask = samples[0].loss_mask.copy()
    mask[0] = True
    (micro,) = build_batch(
        experience_of([replace(samples[0], loss_mask=mask)], SFT), partition(1, None)
    ).micro_batches
    assert micro.loss_mask.tolist() == [[False, False, True, True]]


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        ("tokens", {"samples"}),
        ("loss_mask", {"samples"}),
        ("temperatures", {"samples"}),
        ("versions", {"samples"}),
        ("logprobs", {"old_logprobs"}),
        ("reward", {"rewards", "advantages"}),
        ("partition", {"samples"}),
        ("group", {"advantages"}),
    ],
)
def test_a_change_names_its_own_stage(samples: list[Sample], change: str, stages: set[str]) -> None:
    """Each input of a step is in the digest of one stage (and of those computed from it)."""
    before = build_batch(experience_of(samples, GRPO), partition(3, None)).digests()
    parts, changed = partition(3, None), list(samples)
    if change == "partition":
        parts = partition(3, 2)
    elif change == "reward":
        changed[1] = replace(samples[1], reward=3.0)
    elif change == "group":
        changed[1] = replace(samples[1], group="another")
    else:
        array = getattr(samples[1], change).copy()
        array[-1] = not array[-1] if array.dtype == bool else array[-1] + 1
        changed[1] = replace(samples[1], **{change: array})
    after = build_batch(experience_of(changed, GRPO), parts).digests()
    assert {stage for stage in before if before[stage] != after[stage]} == stages


def test_order_is_part_of_a_batch(samples: list[Sample]) -> None:
    """The same samples in another order are another batch; built again, the same one."""
    first, again = (build_batch(experience_of(samples, SFT), partition(3, 2)).digests() for _ in range(2))
    turned = build_batch(experience_of(samples[::-1], SFT), partition(3, 2)).digests()
    assert first == again
    assert turned["samples"] != first["samples"]
    assert turned["old_logprobs"] != first["old_logprobs"]


def test_rewards_of_unrewarded_samples_are_nan(samples: list[Sample]) -> None:
    """SFT takes samples without a reward; their place holds NaN, and digests stay equal."""
    unrewarded = [replace(s, reward=None) for s in samples]
    batches = [build_batch(experience_of(unrewarded, SFT), partition(3, None)) for _ in range(2)]
    assert np.isnan(batches[0].rewards).all()
    assert batches[0].digests() == batches[1].digests()


def test_samples_of_which_nothing_is_left_do_not_count(samples: list[Sample]) -> None:
    """A sample whose tokens are all rejected is none that a mean over samples is taken of."""
    masks = trained_masks(samples)
    emptied = (np.zeros_like(masks[0]), *masks[1:])
    batch = build_batch(experience_of(samples, SFT, masks=emptied), partition(3, 2))
    assert (batch.trained_samples, batch.trained_tokens) == (2, 5 + 2)
    assert build_batch(experience_of(samples, SFT), partition(3, 2)).trained_samples == 3
