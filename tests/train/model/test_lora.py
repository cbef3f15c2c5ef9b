"""Low-rank factors: what they come to, the same bits everywhere, and the numbers of PEFT."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.store.errors import ModelError
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.checkpoints.export import write_adapter
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import TARGETS, LoraConfig
from rollbook.train.model.lora import (
    check_factors,
    factors,
    fresh_factors,
    merged,
    merged_weight,
    targets_of,
)
from rollbook.train.model.model import Build
from rollbook.train.model.score_head import critic_shape
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import TrainablePolicy

CPU = torch.device("cpu")


def _random(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


# What they come to --------------------------------------------------------------------------------


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 256), st.floats(1e-3, 64), st.floats(1e-6, 10.0)
)
def test_the_product_is_that_of_float64(
    rows: int, columns: int, rank: int, scale: float, size: float
) -> None:
    """Within what is left of the factors: 2^-22 of the largest number of each."""
    weight, a, b = _random(rows, columns, 0), _random(rank, columns, 1), _random(rows, rank, 2, size)
    product = merged_weight(weight, a, b, scale)
    expected = weight.double() + scale * (b.double() @ a.double())
    most = scale * rank * 2**-21 * float(a.abs().max()) * float(b.abs().max())
    rounding = 2**-23 * float(expected.abs().max())
    assert float((product.double() - expected).abs().max()) <= most + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_the_same_however_it_is_computed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other threads, row by row, columns apart, the terms of the sums in another order: a plain float32
    product differs."""
    weight, a, b = (_random(r, c, i).to(dtype) for i, (r, c) in enumerate(((300, 200), (16, 200), (300, 16))))
    product = merged_weight(weight, a, b, 2.0)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            assert torch.equal(merged_weight(weight, a, b, 2.0), product)
    finally:
        torch.set_num_threads(threads)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(9))
    assert torch.equal(merged_weight(weight, a[order], b[:, order], 2.0), product)
    monkeypatch.setattr("rollbook.train.model.lora.AT_ONCE", 1)
    assert torch.equal(merged_weight(weight, a, b, 2.0), product)
    plain = [b.float() @ a.float(), b[:, order].float() @ a[order].float()]
    assert not torch.equal(*plain)


def test_factors_that_come_to_nothing_leave_the_bits() -> None:
    """At the beginning, and also the sign of a zero."""
    weight = torch.tensor([[-0.0, 1.0], [0.0, -2.0]])
    product = merged_weight(weight, torch.ones(1, 2), torch.zeros(2, 1), 2.0)
    assert torch.signbit(product).tolist() == [[True, False], [False, True]]
    folder = fabric.model_folder()
    shape, own = read_shape(folder), read_weights(folder)
    fresh = fresh_factors(shape, LoraConfig(), 3)
    assert digest_tensors(dict(merged(own.items(), fresh, shape, LoraConfig()))) == digest_tensors(own)
    assert digest_tensors(fresh) == digest_tensors(fresh_factors(shape, LoraConfig(), 3))
    assert digest_tensors(fresh) != digest_tensors(fresh_factors(shape, LoraConfig(), 4))
    bounds = {float(t.abs().max()) * math.sqrt(t.shape[1]) for t in fresh.values() if t.any()}
    assert max(bounds) <= 1
    assert min(bounds) > 0.9


def test_which_matrices(model_folders: Path) -> None:
    """All of a dense layer's; of experts none; and one that is not there is named."""
    dense, sparse = (read_shape(model_folders / name) for name in ("qwen3-tied", "qwen3_moe"))
    assert targets_of(dense, LoraConfig()) == TARGETS
    assert targets_of(sparse, LoraConfig()) == TARGETS[:4]
    assert targets_of(dense, LoraConfig(targets=("down_proj", "q_proj"))) == ("q_proj", "down_proj")
    with pytest.raises(ModelError, match=r"lora.targets up_proj: matrices of experts have no factors here"):
        targets_of(sparse, LoraConfig(targets=("q_proj", "up_proj")))
    assert targets_of(sparse, LoraConfig(targets=("lm_head", "v_proj"))) == ("v_proj", "lm_head")
    with pytest.raises(ModelError, match=r"lora.targets lm_head: the model gives scores .*: leave it out"):
        targets_of(critic_shape(dense), LoraConfig(targets=("q_proj", "lm_head")))


def test_factors_of_the_output(model_folders: Path) -> None:
    """They come last and go with the last layer; B has the vocabulary's rows, in Megatron those that fill it
    up, too."""
    shape, lora = read_shape(model_folders / "qwen3-tied"), LoraConfig(rank=4, targets=("q_proj", "lm_head"))
    *of_layers, a, b = factors(shape, lora)
    assert [factor.layer for factor in of_layers] == [0, 0, 1, 1]
    assert (a.megatron, a.huggingface, a.kind, a.shapes, a.layer) == (
        "output_layer.adapter.lm_head.A",
        ("base_model.model.lm_head.lora_A.weight",),
        "replicated",
        ((4, 32),),
        1,
    )
    assert (b.megatron, b.huggingface, b.kind, b.shapes, b.layer) == (
        "output_layer.adapter.lm_head.B",
        ("base_model.model.lm_head.lora_B.weight",),
        "vocab",
        ((shape.vocab, 4),),
        1,
    )
    fresh = fresh_factors(shape, lora, 3)
    bound = float(fresh[a.huggingface[0]].abs().max()) * math.sqrt(32)
    assert 0.9 < bound <= 1
    assert not fresh[b.huggingface[0]].any()
    policy = TrainablePolicy(shape, OptimizerConfig(), Build(4, CPU, 0, 1, lora=lora))
    given = {name: torch.ones_like(tensor) for name, tensor in fresh.items()}
    policy.load_adapter(given)
    held = policy.own_adapter()[b.megatron]
    assert held.shape == (shape.padded_vocab, 4)
    assert shape.padded_vocab > shape.vocab
    assert held[: shape.vocab].all()
    assert not held[shape.vocab :].any()
    assert digest_tensors(policy.adapter()) == digest_tensors(given)


def test_an_output_that_is_the_embedding_is_not_merged(model_folders: Path) -> None:
    """Its factors would be left out of the weights: they are refused at once, with the remedy. Those of an
    output of its own are in the weights."""
    lora = LoraConfig(rank=4, targets=("q_proj", "lm_head"))
    changed = {}
    for name in ("qwen3-tied", "qwen3-untied"):
        shape, own = read_shape(model_folders / name), read_weights(model_folders / name)
        policy = TrainablePolicy(shape, OptimizerConfig(), Build(4, CPU, 0, 1, lora=lora))
        policy.load_weights(own)
        policy.load_adapter({n: t + 0.1 for n, t in fresh_factors(shape, lora, 1).items()})
        if shape.tied:
            remedy = (
                r"lm_head: the model's output is its embedding .* untied; the adapter alone can be exported"
            )
            for stream in (policy.stream_weights, policy.weights_digest):
                with pytest.raises(ModelError, match=remedy):
                    stream()
        else:
            changed = {n for n, tensor in policy.stream_weights() if not torch.equal(tensor, own[n])}
    queries = {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)}
    assert changed == queries | {"lm_head.weight"}


def test_an_adapter_that_does_not_fit(model_folders: Path) -> None:
    """It is named, with both shapes."""
    shape, lora = read_shape(model_folders / "qwen3-tied"), LoraConfig(rank=4)
    fitting = fresh_factors(shape, lora, 0)
    check_factors(fitting, shape, lora)
    with pytest.raises(ModelError, match=r"down_proj.lora_A.weight is \(4, 64\), and should be \(8, 64\)"):
        check_factors(fitting, shape, LoraConfig(rank=8))


# As PEFT ------------------------------------------------------------------------------------------


def _micro() -> MicroBatch:
    rng = np.random.default_rng(0)
    shape = (3, 11)
    mask = rng.random(shape) < 0.7
    mask[:, 0] = False
    zeros, ones = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    return MicroBatch(rng.integers(0, 90, shape), mask, zeros, ones, ones, np.zeros(shape, np.int64))


def _loss(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Of logits [B, T, V] of all places, or [N, V] of those before a trained token."""
    at = _before_trained(logits, micro) if logits.dim() == 3 else logits
    tokens = torch.from_numpy(micro.tokens[:, 1:][micro.loss_mask[:, 1:]])
    return torch.nn.functional.cross_entropy(at, tokens)


def _before_trained(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    return logits[:, :-1][torch.from_numpy(micro.loss_mask[:, 1:])]


def _packed(micro: MicroBatch) -> MicroBatch:
    """The same samples, packed: the output computes only what is before a trained token."""
    return replace(micro, lengths=np.full(len(micro.tokens), micro.tokens.shape[1]))


TARGETS_TRIED = (None, ("q_proj", "v_proj"), ("k_proj", "o_proj"), ("q_proj", "lm_head"), ("lm_head",))


@pytest.mark.more_but(
    "None-*", "targets1-qwen3-tied", "targets2-gemma3", "targets3-qwen3-*tied", "targets4-qwen2"
)
@pytest.mark.parametrize("model", ["qwen3-tied", "qwen3-untied", "qwen2", "qwen3_moe", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("targets", TARGETS_TRIED)
def test_a_training_is_pefts(model_folders: Path, tmp_path: Path, model: str, targets: Any) -> None:
    """From the same factors: logits, losses of three steps of AdamW, one of them on packed samples, and the
    factors after them, which PEFT loads from files."""
    from peft import LoraConfig as PeftConfig
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    folder, lora = model_folders / model, LoraConfig(rank=4, alpha=8.0, targets=targets)
    shape = read_shape(folder)
    policy = TrainablePolicy(shape, OptimizerConfig(clip_grad=1.0), Build(4, CPU, 0, 1, lora=lora))
    policy.load_weights(read_weights(folder))
    begun = {n: t if t.any() else _random(*t.shape, 5, 0.1) for n, t in fresh_factors(shape, lora, 1).items()}
    policy.load_adapter(begun)
    wanted = list(targets_of(shape, lora))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peer = get_peft_model(plain, PeftConfig(r=4, lora_alpha=8.0, target_modules=wanted))
    theirs = {n.replace(".default", ""): p for n, p in peer.named_parameters() if p.requires_grad}
    assert theirs.keys() == begun.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(begun[name])
    adam = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    micro, base = _micro(), digest_tensors(policy.own_weights())
    for batch in (micro, _packed(micro), micro):
        (outputs,) = policy.forward_backward(
            (batch,), lambda logits, batch: (_loss(logits, batch), logits.detach())
        )
        logits = peer(torch.from_numpy(micro.tokens)).logits
        expected = logits if batch is micro else _before_trained(logits, micro)
        assert outputs.shape == expected.shape
        assert float((outputs - expected).abs().max()) < 2e-5
        adam.zero_grad()
        _loss(logits, micro).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0))
        assert policy.optimizer_step(0.01) == pytest.approx(norm, rel=1e-5)
        adam.step()
    for name, tensor in policy.adapter().items():
        assert float((tensor - theirs[name]).abs().max()) < 1e-4, name
    assert digest_tensors(policy.own_weights()) == base
    with torch.no_grad():
        trained = peer(torch.from_numpy(micro.tokens)).logits
    write_adapter(tmp_path, policy.adapter(), lora, str(folder))
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(fresh, tmp_path)(torch.from_numpy(micro.tokens)).logits
    assert float((loaded - trained).abs().max()) < 1e-4
    with policy.using(read_weights(folder)), peer.disable_adapter(), torch.no_grad():
        (own,) = policy.forward((micro,), lambda logits, _: logits.clone())
        assert float((own - peer(torch.from_numpy(micro.tokens)).logits).abs().max()) < 2e-5
