"""A client's model beside the base that it is made from: what it takes of memory, and what it computes."""

from __future__ import annotations

import pytest
from tests.fakes.stories import fabric

pytest.importorskip("torch")

import torch

from rollbook.train.config.lora import LoraConfig
from rollbook.train.tenants.base import Base, load_base
from rollbook.train.tenants.model import ClientModel

pytestmark = pytest.mark.torch
LORA = LoraConfig(rank=1, targets=("q_proj",))


@pytest.fixture(scope="module")
def base() -> Base:
    """The base model."""
    folder = fabric.model_folder()
    return load_base("tiny", folder, device="cpu", dtype="float32", threads=1, recompute=False)


def test_a_model_is_made_in_the_memory_of_its_factors(base: Base) -> None:
    """The base weights are never there twice, not even for a moment: all that is allocated on the way, also
    what is freed again, is a fraction of them."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        ClientModel(base.policy, base.how, LORA, 1)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert 0 < allocated < sum(tensor.nbytes for tensor in base.policy.own_weights().values()) / 4
