"""Samples whose completions are exchanged."""

from __future__ import annotations

import numpy as np
from tests.fakes.stories import fabric

from rollbook.store.fold.trajectory import fold
from rollbook.train.batches.batch import micro_batches_of, packed_partition
from rollbook.train.batches.experience import Scores, trained_masks
from rollbook.train.batches.mismatched import mismatched, mismatched_parts
from rollbook.train.select.samples import Sample, all_samples
from rollbook.train.step.experiences import joined_scores


def _samples(*turns: tuple[list[int], list[int]]) -> list[Sample]:
    """A sample each, of a prompt and a completion."""
    records = [r for i, turn in enumerate(turns) for r in fabric.records(f"t{i}", [fabric.T(*turn)])]
    return all_samples(fold(fabric.events(records)).values())


def _mixed(samples: list[Sample], context: int = 99, unit: int = 1) -> list[tuple[list[int], list[int]]]:
    """Tokens of the mixed samples, and those of them that are trained."""
    mixed, masks = mismatched(samples, trained_masks(samples), context, unit)
    return [(s.tokens.tolist(), s.tokens[m].tolist()) for s, m in zip(mixed, masks, strict=True)]


THREE = (([1, 2], [10, 11, 12]), ([3], [20]), ([4, 5, 6], [30, 31]))


def test_each_prompt_is_completed_by_the_next_sample() -> None:
    """The last one by the first; what is trained is the other's completion alone."""
    samples = _samples(*THREE)
    assert _mixed(samples) == [
        ([1, 2, 20], [20]),
        ([3, 30, 31], [30, 31]),
        ([4, 5, 6, 10, 11, 12], [10, 11, 12]),
    ]
    mixed, masks = mismatched(samples, trained_masks(samples), 99)
    assert all(len(s.temperatures) == len(s) == len(m) for s, m in zip(mixed, masks, strict=True))


def test_what_a_tool_says_in_between_stays() -> None:
    """A completion reaches from the first trained token to the end, with the mask that it has."""
    turns = [fabric.T([1, 2], [10, 11]), fabric.T([7], [12], 0)]
    records = [*fabric.records("a", turns), *fabric.records("b", [fabric.T([3], [20])])]
    samples = all_samples(fold(fabric.events(records)).values())
    assert _mixed(samples) == [([1, 2, 20], [20]), ([3, 10, 11, 7, 12], [10, 11, 12])]


def test_what_is_too_long_is_cut() -> None:
    """To the model's context."""
    assert _mixed(_samples(*THREE), context=4)[2] == ([4, 5, 6, 10], [10])


def test_the_other_sample_of_a_pair_is_passed_over() -> None:
    """It may have the same prompt: a sample of the next pair follows."""
    four = _samples(*THREE, ([7], [40]))
    assert [trained for _, trained in _mixed(four, unit=2)] == [[30, 31], [40], [10, 11, 12], [20]]


def test_a_sample_without_a_trained_token_lends_none() -> None:
    """It is all prompt."""
    samples = _samples(*THREE[:2])
    masks = [np.zeros(5, np.bool_), trained_masks(samples)[1]]
    mixed, trained = mismatched(samples, masks, 99)
    assert [s.tokens.tolist() for s in mixed] == [[1, 2, 10, 11, 12, 20], [3]]
    assert [int(mask.sum()) for mask in trained] == [1, 0]


def test_the_divergence_that_they_estimate() -> None:
    """The mean log-ratio of all samples of a rollout batch, of which some may have been scored before others;
    never below 0."""
    first, second = Scores(mismatched=np.array([3.0])), Scores(mismatched=np.array([-1.0, -0.5]))
    assert (first.kl_reference, second.kl_reference, Scores().kl_reference) == (3.0, 0.0, None)
    both = joined_scores([first, second])
    assert both.kl_reference == 0.5
    assert both.cut(np.array([0])).kl_reference == 0.5, "a mini-batch has that of the whole"


def test_packed_ones_keep_to_the_tokens_of_the_batch() -> None:
    """Where many short prompts are completed by long samples, more micro-batches are made of them."""
    samples = _samples(*[([1], [10] * (1 if i % 2 else 9)) for i in range(12)], ([2] * 9, [3]))
    parts = packed_partition(samples, 20, int, 1, 2)
    mixed, _ = mismatched(samples, trained_masks(samples), 99)
    own = mismatched_parts(samples, mixed, parts)
    most = max(sum(len(samples[i]) for i in part) for part in micro_batches_of(parts))
    assert len(own) == 2
    assert sorted(i for part in micro_batches_of(own) for i in part) == list(range(13))
    assert max(sum(len(mixed[i]) for i in part) for part in micro_batches_of(own)) <= most <= 20
