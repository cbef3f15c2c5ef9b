"""Passes over datums of different lengths: packed, they give what they give padded, without its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric

from rollbook.train.config.lora import LoraConfig
from rollbook.train.tenants.base import Base, load_base
from rollbook.train.tenants.model import ClientModel, Outputs
from rollbook.train.tenants.wire import Datum, Pass

pytestmark = pytest.mark.torch
LENGTHS = (3, 20, 1, 7)


@pytest.fixture(scope="module")
def base() -> Base:
    """A tiny model."""
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "recompute": False}
    return load_base("tiny", fabric.model_folder(), **options)  # type: ignore[arg-type]


def _sent(lengths: Sequence[int], *, forward_only: bool = False) -> Pass:
    rng = np.random.default_rng(1)
    data = []
    for length in lengths:
        ids = rng.integers(0, fabric.VOCAB, length + 1)
        weights = rng.random(length, np.float32)
        data.append(Datum(ids[:-1], {"target_tokens": ids[1:], "weights": weights}, (), ()))
    return Pass("m", 1, tuple(data), "cross_entropy", {}, forward_only)


def _ran(base: Base, sent: Pass, *, packed: bool) -> tuple[list[Outputs], Any, list[tuple[int, ...]]]:
    """(outputs, gradients, the shapes that the model was given)"""
    here = ClientModel(base.policy, base.how, LoraConfig(rank=4), 0)
    factors = {name: torch.full_like(t, 0.01) for name, t in here.state().adapter.items()}
    here._policy.load_adapter(factors)
    shapes: list[tuple[int, ...]] = []
    here._policy._parts.module.register_forward_pre_hook(lambda _, given: shapes.append((*given[0].shape,)))
    outputs, _ = here.run_pass(sent, {}, packed)
    return outputs, here.held().gradients, shapes


@pytest.mark.parametrize("forward_only", [False, True])
def test_packed_passes_give_what_padded_ones_give(base: Base, forward_only: bool) -> None:
    """Logprobs and gradients, to rounding."""
    sent = _sent(LENGTHS, forward_only=forward_only)
    packed, padded = (_ran(base, sent, packed=how) for how in (True, False))
    for one, other in zip(packed[0], padded[0], strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-5)
    assert packed[1].keys() == padded[1].keys()
    assert all(torch.allclose(packed[1][name], padded[1][name], atol=1e-5) for name in packed[1])
    assert bool(packed[1]) is not forward_only


def test_packed_passes_compute_no_padding(base: Base) -> None:
    """One row of all tokens, where padded ones are as long as the longest."""
    assert _ran(base, _sent(LENGTHS), packed=True)[2] == [(1, sum(LENGTHS))]
    assert _ran(base, _sent(LENGTHS), packed=False)[2] == [(len(LENGTHS), max(LENGTHS))]


def test_as_many_datums_as_fit_are_a_pass(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their tokens, of which padding are some only where it is computed; a longer one is alone."""
    monkeypatch.setattr("rollbook.train.tenants.model.PASS_TOKENS", 25)
    sent = _sent((20, 5, 1, 30, 2))
    assert [shape[1] for shape in _ran(base, sent, packed=True)[2]] == [25, 1, 30, 2]
    assert _ran(base, sent, packed=False)[2] == [(1, 20), (2, 5), (1, 30), (1, 2)]
