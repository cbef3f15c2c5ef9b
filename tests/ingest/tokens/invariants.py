"""What holds of every trajectory, whatever its clients do: I1 to I10, each by its name."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollbook.store.events import Event
from rollbook.store.fold.trajectory import Trajectory, Turn, fold, prompt_sha256
from rollbook.train.select.samples import Sample, samples_of


def check_invariants(desk: Any, name: str = "t") -> list[Sample]:
    """Asserts all of them of one trajectory; its samples."""
    trajectory = desk.trajectory(name)
    done = [t for t in trajectory.turns.values() if t.completed is not None]
    samples = list(samples_of(trajectory))
    i1_arrays_of_a_turn_fit(done)
    i2_a_child_begins_with_its_parent(trajectory, done)
    i3_the_fold_is_what_was_sent(trajectory, done, desk.engine)
    i4_each_sampled_token_is_trained_once(done, samples)
    i5_the_masks_add_up(done, samples)
    i6_arrays_of_a_sample_fit(samples, desk.engine)
    i7_sampled_ids_are_verbatim(done, samples, desk.engine)
    i8_the_fold_does_not_depend_on_order(list(desk.store.events()))
    i9_prompts_leave_room(done, desk.tokenizer.context_length)
    i10_samples_know_their_trajectory(trajectory, samples)
    return samples


def i1_arrays_of_a_turn_fit(done: list[Turn]) -> None:
    """Ids, logprobs and versions of a completion are of one length, above 0."""
    for turn in done:
        completed = turn.completed
        assert len(completed.completion_ids) == len(completed.logprobs) > 0, "I1"
        at = 0
        for span in completed.version_spans:
            assert span.start == at < span.end, "I1"
            at = span.end
        assert at == len(completed.completion_ids), "I1"


def i2_a_child_begins_with_its_parent(trajectory: Trajectory, done: list[Turn]) -> None:
    """A turn's prompt begins with all of its parent's ids, bit for bit, and is longer."""
    for turn in done:
        parent = trajectory.parent(turn)
        assert (parent is None) == (turn.requested.root_reason is not None), "I2"
        if parent is not None:
            whole = np.concatenate([trajectory.prompt_ids(parent), parent.completed.completion_ids])
            prompt = trajectory.prompt_ids(turn)
            assert len(prompt) > len(whole), "I2"
            assert np.array_equal(prompt[: len(whole)], whole), "I2"


def i3_the_fold_is_what_was_sent(trajectory: Trajectory, done: list[Turn], engine: Any) -> None:
    """The prompt that the log folds to is the one the engine was sent."""
    for turn in done:
        folded, sent = trajectory.prompt_ids(turn), engine.seen[turn.turn_id].prompt
        assert np.array_equal(folded, sent), "I3"
        assert turn.completed.prompt_sha256 == prompt_sha256(sent), "I3"
        assert turn.completed.prompt_length == len(sent), "I3"


def i4_each_sampled_token_is_trained_once(done: list[Turn], samples: list[Sample]) -> None:
    """A delivered turn is trained in the first sample that holds it, whole; in all others it is context."""
    for turn in done:
        start = turn.completed.prompt_length
        place = slice(start, start + len(turn.completed.completion_ids))
        masks = [s.loss_mask[place] for s in samples if turn.turn_id in s.turn_ids]
        assert masks, "I4"
        assert masks[0].all() if turn.delivered else not masks[0].any(), "I4"
        assert not any(mask.any() for mask in masks[1:]), "I4"


def i5_the_masks_add_up(done: list[Turn], samples: list[Sample]) -> None:
    """As many tokens are trained as were sampled in turns that count."""
    sampled = sum(len(turn.completed.completion_ids) for turn in done if turn.delivered)
    assert sum(int(s.loss_mask.sum()) for s in samples) == sampled, "I5"


def i6_arrays_of_a_sample_fit(samples: list[Sample], engine: Any) -> None:
    """Arrays of one length; where nothing is trained there is neither logprob nor version."""
    for sample in samples:
        arrays = (sample.loss_mask, sample.logprobs, sample.versions, sample.temperatures)
        assert {len(a) for a in arrays} == {len(sample)}, "I6"
        assert not sample.logprobs[~sample.loss_mask].any(), "I6"
        assert (sample.versions[~sample.loss_mask] == -1).all(), "I6"
        assert (sample.versions[sample.loss_mask] >= 0).all(), "I6"
        assert (sample.temperatures[sample.loss_mask] == 0.5).all(), "I6"


def i7_sampled_ids_are_verbatim(done: list[Turn], samples: list[Sample], engine: Any) -> None:
    """Ids, logprobs and versions are the engine's, in the log and in every sample that holds the turn."""
    for turn in done:
        generation = engine.seen[turn.turn_id].generation
        assert np.array_equal(turn.completed.completion_ids, generation.completion_ids), "I7"
        assert np.array_equal(turn.completed.logprobs, generation.logprobs), "I7"
        assert turn.completed.version_spans == generation.version_spans, "I7"
        versions = np.concatenate([np.full(s.end - s.start, s.version) for s in generation.version_spans])
        start = turn.completed.prompt_length
        place = slice(start, start + len(generation.completion_ids))
        for sample in (s for s in samples if turn.turn_id in s.turn_ids):
            assert np.array_equal(sample.tokens[place], generation.completion_ids), "I7"
            if sample.loss_mask[place].any():
                assert np.array_equal(sample.logprobs[place], generation.logprobs), "I7"
                assert np.array_equal(sample.versions[place], versions), "I7"


def i8_the_fold_does_not_depend_on_order(events: list[Event]) -> None:
    """Folded again, or one trajectory after the other, the log gives the same samples."""
    apart = sorted(events, key=lambda e: str(getattr(e.record, "trajectory_id", "")))  # stable
    assert _digests(events) == _digests(events) == _digests(apart), "I8"


def _digests(events: list[Event]) -> dict[str, list[str]]:
    return {k: [s.digest() for s in samples_of(t)] for k, t in fold(events).items()}


def i9_prompts_leave_room(done: list[Turn], context: int) -> None:
    """Prompt and the most that may be sampled fit into the context."""
    for turn in done:
        assert turn.completed.prompt_length + turn.requested.sampling["max_new_tokens"] <= context, "I9"


def i10_samples_know_their_trajectory(trajectory: Trajectory, samples: list[Sample]) -> None:
    """Whoever adds up rewards can tell which samples are parts of one rollout."""
    opened = trajectory.opened
    for sample in samples:
        assert (sample.trajectory_id, sample.name) == (opened.trajectory_id, opened.name), "I10"
        assert (sample.group, sample.split) == (opened.group, opened.split), "I10"
        assert sample.reward == trajectory.reward(), "I10"
        assert sample.leaf_turn_id == sample.turn_ids[-1], "I10"
