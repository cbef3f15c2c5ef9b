"""Passes over datums of different lengths: one behind the other, each gives what it gives alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric

from rollbook.train.config.lora import LoraConfig
from rollbook.train.tenants.base import Base, load_base
from rollbook.train.tenants.model import ClientModel, Outputs
from rollbook.train.tenants.operations import FACTORS, GRADIENTS
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


def _ran(base: Base, *passes: Pass) -> tuple[list[Outputs], Any, list[tuple[int, ...]]]:
    """(outputs, gradients, the shapes that the model was given)"""
    here = ClientModel(base.policy, base.how, LoraConfig(rank=4), 0)
    factors = {name: torch.full_like(t, 0.01) for name, t in here.state(FACTORS).parts[FACTORS].items()}
    here._policy.load_adapter(factors)
    shapes: list[tuple[int, ...]] = []
    here._policy._parts.module.register_forward_pre_hook(lambda _, given: shapes.append((*given[0].shape,)))
    outputs = [output for sent in passes for output in here.run_pass(sent, {})[0]]
    return outputs, here.state(GRADIENTS).parts[GRADIENTS], shapes


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_pass_gives_what_its_datums_give_alone(base: Base, forward_only: bool) -> None:
    """Logprobs and gradients, to rounding."""
    sent = _sent(LENGTHS, forward_only=forward_only)
    outputs, gradients, _ = _ran(base, sent)
    alone, of_alone, _ = _ran(base, *(replace(sent, data=(datum,)) for datum in sent.data))
    for one, other in zip(outputs, alone, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-5)
    assert gradients.keys() == of_alone.keys()
    assert all(torch.allclose(gradients[name], of_alone[name], atol=1e-5) for name in gradients)
    assert bool(gradients) is not forward_only


def test_no_padding_is_computed(base: Base) -> None:
    """One row of all tokens."""
    assert _ran(base, _sent(LENGTHS))[2] == [(1, sum(LENGTHS))]


def test_as_many_datums_as_fit_are_a_pass(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their tokens; a longer one is alone."""
    monkeypatch.setattr("rollbook.train.tenants.model.PASS_TOKENS", 25)
    assert [shape[1] for shape in _ran(base, _sent((20, 5, 1, 30, 2)))[2]] == [25, 1, 30, 2]
