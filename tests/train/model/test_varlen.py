"""Attention by one kernel of variable lengths, which only GPUs have.

What stands in its place computes what the kernel is documented to, so all around it is held; torch's own
signatures are called without numbers.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric

from rollbook.engines.weights.digests import read_weights
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.environment import fingerprint, took_flash
from rollbook.train.model import varlen
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.model.varlen import Documents
from rollbook.train.ranks.backend import TrainablePolicy

CPU = torch.device("cpu")
NOTHING = torch.empty(0)


def _scores(
    query: torch.Tensor, key: torch.Tensor, documents: Documents, scale: float, before: int | None
) -> torch.Tensor:
    """[heads, P, P], minus infinity where a token is not seen."""
    scores = torch.einsum("qhw,khw->hqk", query.double(), key.double()) * scale
    seen = torch.zeros(scores.shape[1:], dtype=torch.bool)
    for start, end in pairwise(documents.ends.tolist()):
        for place in range(start, end):
            seen[place, start if before is None else max(start, place - before) : place + 1] = True
    return scores.masked_fill(~seen, float("-inf"))


def _forward(query: Any, key: Any, value: Any, documents: Documents, scale: float, before: int | None) -> Any:
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    scores = _scores(query, key, documents, scale, before)
    output = torch.einsum("hqk,khw->qhw", scores.softmax(-1), value.double())
    return output.to(query.dtype), scores.logsumexp(-1).float(), NOTHING, NOTHING


def _backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    sums: Any,
    state: Any,
    unused: Any,
    *how: Any,
) -> Any:
    """By the formulas of the paper's algorithm, from the output and the logarithms of sums alone."""
    documents, scale, before = how
    groups, shared = key.shape[1], query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(shared, 1).double() for tensor in (key, value))
    shares = (_scores(query, keys, documents, scale, before) - sums.double()[..., None]).exp()
    gradient, products = gradient.double(), (gradient.double() * output.double()).sum(-1).t()
    of_values = torch.einsum("hqk,qhw->khw", shares, gradient)
    of_scores = shares * (torch.einsum("qhw,khw->hqk", gradient, values) - products[..., None]) * scale
    of_query = torch.einsum("hqk,khw->qhw", of_scores, keys)
    of_keys = torch.einsum("hqk,qhw->khw", of_scores, query.double())
    summed = [t.view(len(t), groups, shared, -1).sum(2) for t in (of_keys, of_values)]
    return tuple(t.to(query.dtype) for t in (of_query, *summed))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The windows of the calls of what stands in the kernel's place; it takes float32 too."""
    calls: list[int | None] = []

    def forward(*given: Any) -> Any:
        calls.append(given[-1])
        return _forward(*given)

    monkeypatch.setattr(varlen, "_kernel", forward)
    monkeypatch.setattr(varlen, "_kernel_backward", _backward)
    monkeypatch.setattr("rollbook.train.model.layer.takes", lambda width, dtype: True)
    return calls


def _config(kind: str) -> Any:
    """A model with grouped keys; with windows that samples are longer than, and sinks."""
    if kind == "qwen3":
        return fabric.tiny_config()
    from transformers import GptOssConfig

    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 120}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    kinds = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 48, "rope_theta": 1e4}
    return GptOssConfig(**sizes, **heads, **experts, layer_types=kinds, rope_parameters=rope)


@pytest.fixture(scope="module", params=["qwen3", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, sinks too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(request.param)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("varlen") / str(request.param)
    model.save_pretrained(path)
    return path


def _passes(folder: Path, *, flash: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs and gradients of packed samples."""
    policy = TrainablePolicy(
        read_shape(folder), OptimizerConfig(), Build(1, CPU, 0, 1, recompute=flash, flash=flash)
    )
    policy.load_weights(read_weights(folder))
    lengths, shape = np.array([11, 1, 4, 7]), (4, 11)
    rng, mask = np.random.default_rng(0), np.arange(11) < lengths[:, None]
    zeros, ones = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    versions = np.zeros(shape, np.int64)
    tokens = rng.integers(0, 100, shape)
    micro = MicroBatch(tokens, mask, zeros, ones, ones, versions, lengths=lengths)
    weights = torch.from_numpy(rng.normal(size=(int(mask[:, 1:].sum()), policy.shape.outputs)))
    [outputs] = policy.forward_backward((micro,), lambda o, _: ((o * weights).sum(), o.detach().clone()))
    return outputs, {name: gradient.clone() for name, gradient in policy.gradients().items()}


def test_it_is_the_attention_of_samples_one_by_one(folder: Path, kernel: list[int | None]) -> None:
    """Outputs, and gradients of all weights: windows, sinks, shared keys, activations computed again."""
    expected, gradients = _passes(folder, flash=False)
    assert kernel == []
    outputs, others = _passes(folder, flash=True)
    assert set(kernel) == ({3, None} if folder.name == "gpt_oss" else {None})
    assert torch.allclose(outputs, expected, atol=2e-5)
    assert others.keys() == gradients.keys()
    assert ("softmax_offset" in " ".join(gradients)) == (folder.name == "gpt_oss")
    for name, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((others[name] - gradient).abs().max()) / scale < 2e-5, name


def test_the_trial_finds_what_is_wrong(kernel: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right passes, in bfloat16; other numbers, and other bits the second time, do not."""
    before = torch.are_deterministic_algorithms_enabled()
    assert varlen.trial(CPU, torch.bfloat16) is None
    assert kernel == [None, None, 6, 6, 6, 6]
    right = varlen._kernel_backward
    noise = torch.Generator().manual_seed(1)

    def differs(*given: Any) -> Any:
        query, *rest = right(*given)
        return query * (1 + 1e-2 * torch.rand(query.shape, generator=noise)).to(query.dtype), *rest

    monkeypatch.setattr(varlen, "_kernel_backward", differs)
    assert varlen.trial(CPU, torch.bfloat16) == "query has other bits the second time"
    monkeypatch.setattr(varlen, "_kernel_backward", lambda *given: tuple(2 * t for t in right(*given)))
    assert "differs by 1 of its greatest value" in str(varlen.trial(CPU, torch.bfloat16))
    assert torch.are_deterministic_algorithms_enabled() == before


def test_where_it_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    """Types that it does not take are not tried; what fails is said once, and samples go one by one."""
    assert not varlen.serves(CPU, torch.bfloat16)
    assert not varlen.serves(torch.device("cuda"), torch.float32)
    assert caplog.records == []
    varlen._tried.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not any(varlen._tried(CPU, torch.bfloat16) for _ in range(2))
    [record] = caplog.records
    begins = (
        "packed samples get their attention one by one on cpu: Could not run 'aten::_flash_attention_forward'"
    )
    assert record.message.startswith(begins)
    assert "\n" not in record.message


def test_signatures() -> None:
    """The calls are those of this torch, for tensors without numbers."""
    query, key = (torch.empty(23, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    for before in (None, 6):
        how = (Documents(ends, 11), 0.125, before)
        output, sums, *state = varlen._kernel(query, key, key, *how)
        assert (output.shape, sums.shape, sums.dtype) == (query.shape, (4, 23), torch.float32)
        gradients = varlen._kernel_backward(output, query, key, key, output, sums, *state, *how)
        assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]


def test_widths() -> None:
    """Those of the kernel."""
    taken = [w for w in range(1, 600) if varlen.takes(w, torch.bfloat16)]
    assert taken == list(range(8, 257, 8))
    assert not varlen.takes(64, torch.float32)


def test_the_fingerprint_says_it() -> None:
    """Only where it was taken, so that earlier fingerprints stay what they are."""
    took, without = (fingerprint(CPU, dtype="bfloat16", flash=flash) for flash in (True, False))
    assert took_flash(took)
    assert not took_flash(without)
    assert not took_flash({})
    took["flags"].pop("attention")
    assert took == without
