"""Routers that replay: the bits of the own choice, and what transformers makes of another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.models import mixtures

from rollbook.engines.weights.digests import read_weights
from rollbook.store.events.routed_experts import ExpertIds
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.routing import in_rows
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.step.predictions import Predictions, token_logprobs

EACH = pytest.mark.parametrize("family", mixtures.FAMILIES)
LENGTHS = (11, 7, 9)


def _policy(family: str, *, recompute: bool = False) -> TrainablePolicy:
    folder, _ = mixtures.mixture(family)
    how = Build(4, torch.device("cpu"), 0, 1, recompute=recompute)
    policy = TrainablePolicy(read_shape(folder), OptimizerConfig(), how)
    policy.load_weights(read_weights(folder))
    return policy


def _micro(seed: int = 0, *, packed: bool = False) -> MicroBatch:
    """Three samples of other lengths, every token trained."""
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    real = np.arange(shape[1]) < np.array(LENGTHS)[:, None]
    trained = real & (np.arange(shape[1]) > 0)
    floats = [np.zeros(shape, np.float32), np.full(shape, 0.9, np.float32), np.ones(shape, np.float32)]
    lengths = np.array(LENGTHS) if packed else None
    tokens = np.where(real, rng.integers(1, mixtures.VOCAB, shape), 0)
    return MicroBatch(tokens, trained, *floats, np.zeros(shape, np.int64), lengths=lengths)


def _with(micro: MicroBatch, of_sample: list[ExpertIds]) -> MicroBatch:
    experts = np.full((*micro.tokens.shape, mixtures.LAYERS, mixtures.TOPK), -1, np.int16)
    for row, ids in enumerate(of_sample):
        experts[row, : len(ids)] = ids
    return replace(micro, experts=experts)


def _samples(micro: MicroBatch) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(micro.tokens, LENGTHS, strict=True)]


def _loss_of(logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = Predictions(logits, micro).logprobs()[torch.from_numpy(micro.loss_mask[:, 1:])]
    return -logprobs.sum(), logprobs.detach().clone()


def _passed(policy: TrainablePolicy, *micro_batches: MicroBatch) -> list[torch.Tensor]:
    """Logprobs of each micro-batch's trained tokens, and all gradients."""
    logprobs = policy.forward_backward(micro_batches, _loss_of)
    return [*logprobs, *(gradient.clone() for gradient in policy.gradients().values())]


def _left(policy: TrainablePolicy) -> int:
    """What is kept for layers that will be computed again."""
    return sum(len(router.later) for router in policy._routing._routers.values())


def _equal(tensors: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, other, strict=True))


@EACH
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_own_choice_gives_the_same_bits(family: str, packed: bool, recompute: bool) -> None:
    """In whatever order it is recorded: logprobs and every gradient."""
    _, model = mixtures.mixture(family)
    policy, micro = _policy(family, recompute=recompute), _micro(packed=packed)
    rng = np.random.default_rng(1)
    own = [rng.permuted(mixtures.own_choice(model, ids), axis=-1) for ids in _samples(micro)]
    free = _passed(policy, micro)
    assert _equal(_passed(policy, _with(micro, own)), free)
    others = [mixtures.other_choice(ids) for ids in _samples(micro)]
    assert not _equal(_passed(policy, _with(micro, others)), free)


@EACH
@pytest.mark.parametrize("packed", [False, True])
def test_another_choice_is_that_of_transformers(family: str, packed: bool) -> None:
    """Logprobs, and the gradients of routers, whose weights are of the trainer's own logits; where nothing is
    recorded the router chooses."""
    _, model = mixtures.mixture(family)
    policy, micro = _policy(family), _micro(packed=packed)
    others = [mixtures.other_choice(ids, seed=at) for at, ids in enumerate(_samples(micro))]
    for ids in others:
        ids[3:5] = -1
    logprobs, *_ = _passed(policy, _with(micro, others))
    model.zero_grad()
    expected = [
        mixtures.logprobs(model, ids, experts, 0.9)
        for ids, experts in zip(_samples(micro), others, strict=True)
    ]
    (-torch.cat(expected).sum()).backward()
    assert float((logprobs - torch.cat(expected)).abs().max()) < 1e-5
    free = torch.cat([mixtures.logprobs(model, ids, None, 0.9) for ids in _samples(micro)])
    assert float((logprobs - free).abs().max()) > 0.01
    for layer, router in enumerate(mixtures.routers(model)):
        gradient = policy.gradients()[f"decoder.layers.{layer}.mlp.router.weight"]
        scale = float(router.weight.grad.abs().max())
        assert scale > 0.01
        assert float((gradient - router.weight.grad).abs().max()) < 1e-4 * scale


@EACH
def test_layers_that_run_again_replay_what_they_replayed(family: str) -> None:
    """Several micro-batches, one of them free, and passes without gradients between: with recomputation the
    same bits as without, and nothing is left over, also after a step that was cut off."""
    free = _micro(2)
    micro_batches = [
        _with(m, [mixtures.other_choice(i, 7) for i in _samples(m)]) for m in (_micro(), _micro(1))
    ]
    kept, again = _policy(family), _policy(family, recompute=True)

    def cut_off(logits: torch.Tensor, micro: MicroBatch) -> Any:
        raise KeyboardInterrupt

    again.forward(micro_batches, _loss_of)
    assert _left(again) == 0
    with pytest.raises(KeyboardInterrupt):
        again.forward_backward(micro_batches, cut_off)
    batches = [micro_batches[0], free, micro_batches[1]]
    assert _equal(_passed(again, *batches), _passed(kept, *batches))
    assert _left(again) == 0


def test_only_the_policy_that_is_given_experts_replays() -> None:
    """Not another policy of the process, nor other weights in the place of its own."""
    policy, critic, micro = _policy("qwen3_moe"), _policy("qwen3_moe"), _micro()
    routed = _with(micro, [mixtures.other_choice(ids) for ids in _samples(micro)])
    own = _passed(critic, micro)
    replayed = _passed(policy, routed)
    assert not _equal(own[:1], replayed[:1])
    assert _equal(_passed(critic, micro), own)
    with policy.using(read_weights(mixtures.mixture("qwen3_moe")[0])):
        (logits,) = policy.forward([micro], lambda logits, _: logits)
    tokens, temperatures = torch.from_numpy(micro.tokens), torch.from_numpy(micro.temperatures)
    logprobs = token_logprobs(logits, tokens, temperatures)[torch.from_numpy(micro.loss_mask[:, 1:])]
    assert torch.equal(logprobs, own[0])


def test_experts_lie_as_tokens_do() -> None:
    """Positions first, padded to a multiple; of a pack the samples one after the other in one row."""
    micro = _micro()
    routed = _with(micro, [np.full((n, 2, 3), row * 100 + n, np.int16) for row, n in enumerate(LENGTHS)])
    assert routed.experts is not None
    padded = in_rows(routed, 4)
    assert padded.shape == (12, 2, 3, 3)
    assert np.array_equal(padded[:11], routed.experts.transpose(1, 2, 0, 3))
    assert (padded[11:] == -1).all()
    packed = in_rows(replace(routed, lengths=np.array(LENGTHS)), 4)
    assert packed.shape == (28, 2, 1, 3)
    assert packed[:, 1, 0, 2].tolist() == [11] * 11 + [107] * 7 + [209] * 9 + [-1]
