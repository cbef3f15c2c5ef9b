"""A client's model beside the base that it is made from: what it takes of memory, and what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric

pytest.importorskip("torch")

import torch

from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.store.errors import ModelError, ReplayError
from rollbook.train.config.lora import LoraConfig
from rollbook.train.ranks.backend import AdamSettings, TrainablePolicy
from rollbook.train.tenants.base import Base, load_base
from rollbook.train.tenants.model import ClientModel
from rollbook.train.tenants.operations import GRADIENTS
from rollbook.train.tenants.states import read_state, write_state, write_trained
from rollbook.train.tenants.wire import Datum, Pass

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


WORDS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [20, 21, 22, 23, 24, 25, 26, 27], [30, 31]]


def _pass(*words: list[int], forward_only: bool = False) -> Pass:
    """Tokens, each of which is to be followed by the next."""
    data = tuple(
        Datum(np.array(w[:-1], np.int32), {"target_tokens": np.array(w[1:], np.int64)}, (), ()) for w in words
    )
    return Pass("m", 1, data, "cross_entropy", {}, forward_only)


def test_a_whole_model_is_transformers_under_adamw(base: Base) -> None:
    """Losses of ten steps, two passes each, with weight decay and clipping; the weights after them; the base
    stays as it was, and an adapter beside it."""
    from transformers import AutoModelForCausalLM

    before = digest_tensors(base.policy.own_weights())
    whole, adapter = (ClientModel(base.policy, base.how, lora, 0) for lora in (None, LORA))
    factors = adapter.digests()
    peer = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    adam = torch.optim.AdamW(peer.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(10):
        adam.zero_grad()
        for words in (WORDS[:2], WORDS[2:]):
            _, metrics = whole.run_pass(_pass(*words), {})
            losses = [_loss(peer, own) for own in words]
            torch.stack(losses).sum().backward()
            assert metrics["loss:sum"] == pytest.approx(float(sum(losses)), rel=1e-5)
        norm = float(torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0))
        stepped = whole.step(AdamSettings(0.01, (0.9, 0.95), 1e-8, 0.1, 1.0))
        assert stepped["gradient_norm:mean"] == pytest.approx(norm, rel=1e-4)
        adam.step()
    theirs, [trained] = dict(peer.named_parameters()), whole.state("weights").parts.values()
    assert trained.keys() == read_weights(base.folder).keys()
    assert max(float((tensor - theirs[name]).abs().max()) for name, tensor in trained.items()) < 1e-4
    assert digest_tensors(base.policy.own_weights()) == before
    assert adapter.digests() == factors


def _loss(model: Any, words: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([words[:-1]])).logits[0]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(words[1:]), reduction="sum")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_model_comes_back_from_its_files(base: Base, tmp_path: Path, dtype: str) -> None:
    """With the bits that it had, also between two passes of a step; without the optimizer its weights alone.
    What is saved to sample from is a model that transformers loads."""
    from transformers import AutoModelForCausalLM

    own = load_base("tiny", base.folder, device="cpu", dtype=dtype, threads=1, recompute=False)
    whole, other = (ClientModel(own.policy, own.how, None, 0) for _ in range(2))
    settings = AdamSettings(0.01, (0.9, 0.95), 1e-8, 0.1, 1.0)
    whole.run_pass(_pass(*WORDS), {})
    whole.step(settings)
    whole.run_pass(_pass(*WORDS[:2]), {})
    digests = whole.digests()
    written = write_state(tmp_path, "run", 3, whole, own)
    state = read_state(tmp_path, written, digests)
    other.load(state)
    for model in (whole, other):
        model.run_pass(_pass(*WORDS[2:]), {})
        model.step(settings)
    assert other.digests() == whole.digests() != digests
    other.load(state.weights_alone())
    assert other.digests()["weights"] == digests["weights"]
    assert other.digests()["optimizer"] != digests["optimizer"]
    folder = tmp_path / write_trained(tmp_path, "run", 4, whole, own)
    assert digest_tensors(read_weights(folder)) == whole.digests()["weights"]
    peer = AutoModelForCausalLM.from_pretrained(folder)
    assert str(peer.dtype) == f"torch.{dtype}"
    with pytest.raises(ReplayError, match="weights is another than what was written"):
        read_state(tmp_path, written, digests | {"weights": "0"})


def test_an_adapter_is_not_loaded_into_a_whole_model(base: Base) -> None:
    """Nor the other way round; both are told what to do, and stay as they are."""
    whole, adapter = (ClientModel(base.policy, base.how, lora, 0) for lora in (None, LORA))
    for here, there in ((whole, adapter), (adapter, whole)):
        digests = here.digests()
        with pytest.raises(ModelError, match="make a model from them"):
            here.load(there.state())
        assert here.digests() == digests


def test_gradients_that_come_back_are_where_the_model_is(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were on the disk, or in the host's memory: the next pass adds to them."""
    here = ClientModel(base.policy, base.how, LORA, 1)
    here.run_pass(_pass(*WORDS), {})
    held = here.state().on_host()
    monkeypatch.setattr(TrainablePolicy, "device", torch.device("meta"))
    here.load(held)
    gradients = here.state(GRADIENTS).parts[GRADIENTS]
    assert gradients.keys() == held.parts[GRADIENTS].keys() != set()
    assert all(gradient.is_meta for gradient in gradients.values())
