"""The embedded engine with low-rank adapters: many at once, each as PEFT computes it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollbook.engines.embedded.batching import likeliest
from rollbook.engines.embedded.engine import EmbeddedEngine
from rollbook.engines.engine import Generation, Prompt, Sampling
from rollbook.engines.weights.digests import digest_tensors
from rollbook.store.errors import EngineError
from rollbook.store.events import token_ids

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

PROMPT = token_ids([3, 7, 11, 2, 9, 40, 41])


def _adapter(model: Path, folder: Path, seed: int, rank: int, targets: list[str]) -> str:
    """Write an adapter with PEFT, far from the weights alone; its digest."""
    peft = pytest.importorskip("peft")  # seconds, which no other test needs to wait for
    torch.manual_seed(seed)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=rank, lora_alpha=32, target_modules=targets))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return digest_tensors(load_file(folder / "adapter_model.safetensors"))


class Served:
    """An engine on an event loop, with adapters `few`, `many` and `last`."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.loop = model, asyncio.new_event_loop()
        self.engine = EmbeddedEngine(model, adapters=True)
        self.folders = {name: folder / name for name in ("few", "many", "last")}
        wanted: list[tuple[str, int, int, list[str]]] = [
            ("few", 1, 2, ["q_proj", "v_proj"]),
            ("many", 2, 8, ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
            ("last", 3, 4, ["lm_head", "down_proj"]),
        ]
        self.digests = {n: _adapter(model, self.folders[n], seed, r, t) for n, seed, r, t in wanted}
        self.run(self.engine.start(_activated))
        for name, digest in self.digests.items():
            self.run(self.engine.load_adapter(name, self.folders[name], digest))

    def run(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    def generate(self, *asked: tuple[str, Sampling]) -> list[Generation]:
        async def all_at_once() -> list[Generation]:
            prompts = [Prompt(PROMPT, [], None, adapter=name) for name, _ in asked]
            samplings = [sampling for _, sampling in asked]
            return list(await asyncio.gather(*map(self.engine.generate, prompts, samplings)))

        result: list[Generation] = self.run(all_at_once())
        return result

    def logprobs(self, name: str, ids: Any, temperature: float = 1.0) -> np.ndarray:
        """Of tokens from the second on, by PEFT's own model."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        if name:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, self.folders[name]).eval()
        tokens = torch.tensor([[*map(int, ids)]])
        with torch.no_grad():
            rows = (model(tokens).logits[0, :-1] / temperature).log_softmax(-1)
        return rows.gather(-1, tokens[0, 1:, None])[:, 0].numpy()


async def _activated(*_: Any) -> None:
    """No log is kept."""


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tiny_model, tmp_path_factory.mktemp("adapters"))
    yield served
    served.run(served.engine.close())
    served.loop.close()


def test_many_adapters_in_one_batch_are_each_as_pefts(served: Served) -> None:
    """Logprobs of what was sampled are those of PEFT's model, for each adapter and for none."""
    asked = [(name, Sampling(12, 0.8, seed)) for seed, name in enumerate(["few", "", "many", "last", "few"])]
    texts = []
    for (name, _), made in zip(asked, served.generate(*asked), strict=True):
        ids = [*PROMPT.tolist(), *made.completion_ids.tolist()]
        expected = served.logprobs(name, ids, 0.8)[len(PROMPT) - 1 :]
        assert np.abs(made.logprobs - expected).max() < 1e-5
        texts.append(made.completion_ids.tolist())
    assert len({tuple(text) for text in texts}) == 5


def test_a_request_has_the_tokens_that_it_has_alone(served: Served) -> None:
    """Whatever else is in the batch."""
    asked = [(name, Sampling(16, 1.0, 5)) for name in ("many", "few", "", "last")]
    together = [g.completion_ids.tolist() for g in served.generate(*asked)]
    alone = [served.generate(one)[0].completion_ids.tolist() for one in asked]
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == 4


@pytest.mark.parametrize("name", ["", "many", "last"])
def test_scores_are_those_of_the_forward_pass(served: Served, name: str) -> None:
    """The first token has none; the likeliest are in order, and hold the token's own where it is one."""
    scores = served.run(served.engine.score(PROMPT, name, 1.0, 3))
    assert np.isnan(scores.logprobs[0])
    assert np.abs(scores.logprobs[1:] - served.logprobs(name, PROMPT)).max() < 1e-5
    assert np.isnan(scores.top.logprobs[0]).all()
    rest = scores.top.logprobs[1:]
    assert rest.shape == (len(PROMPT) - 1, 3)
    assert (np.diff(rest, axis=1) <= 0).all()
    ranked = served.run(served.engine.score(PROMPT, name, 1.0, served.engine.vocabulary))
    for place in range(1, len(PROMPT)):
        (rank,) = np.flatnonzero(ranked.top.ids[place] == PROMPT[place])
        assert ranked.top.logprobs[place][rank] == scores.logprobs[place]


def test_stop_tokens_of_a_request(served: Served) -> None:
    """They are kept and end it; without any it goes on past the model's own."""
    free = served.generate(("few", Sampling(24, 1.0, 3, stop_ids=())))[0]
    assert (len(free.completion_ids), free.finish_reason) == (24, "length")
    stop = int(free.completion_ids[9])
    at = free.completion_ids.tolist().index(stop)
    ended = served.generate(("few", Sampling(24, 1.0, 3, stop_ids=(stop,))))[0]
    assert ended.completion_ids.tolist() == free.completion_ids.tolist()[: at + 1]
    assert ended.finish_reason == "stop"


def test_top_k_of_one_is_greedy(served: Served) -> None:
    """And top-p of next to nothing too; the logprobs stay those of all tokens."""
    greedy, first, nucleus = served.generate(
        ("many", Sampling(8, 0.0, 1)),
        ("many", Sampling(8, 1.0, 1, top_k=1)),
        ("many", Sampling(8, 1.0, 2, top_p=1e-6)),
    )
    assert greedy.completion_ids.tolist() == first.completion_ids.tolist() == nucleus.completion_ids.tolist()
    ids = [*PROMPT.tolist(), *first.completion_ids.tolist()]
    assert np.abs(first.logprobs - served.logprobs("many", ids)[len(PROMPT) - 1 :]).max() < 1e-5


def test_an_adapter_of_narrow_factors_is_widened(served: Served, tmp_path: Path) -> None:
    """Those that a trainer in bfloat16 wrote: known by their digest, sampled from and scored as they are."""
    shutil.copytree(served.folders["many"], tmp_path / "narrow")
    file = tmp_path / "narrow" / "adapter_model.safetensors"
    narrow = {name: factor.bfloat16() for name, factor in load_file(file).items()}
    save_file(narrow, file, {"format": "pt"})
    served.run(served.engine.load_adapter("narrow", tmp_path / "narrow", digest_tensors(narrow)))
    served.engine._adapters.put("wide", {name: factor.float() for name, factor in narrow.items()}, 4.0)
    sampling = Sampling(16, 1.0, 5)
    one, other = served.generate(("narrow", sampling), ("wide", sampling))
    assert (one.completion_ids == other.completion_ids).all()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    ids = token_ids([*PROMPT, *one.completion_ids])
    scored = served.run(served.engine.score(ids, "narrow", 1.0, 0)).logprobs[len(PROMPT) :]
    np.testing.assert_allclose(scored, one.logprobs, atol=1e-5)
    for name in ("narrow", "wide"):
        served.run(served.engine.unload_adapter(name))


def test_an_adapter_that_is_another_is_not_served(served: Served, tmp_path: Path) -> None:
    """Its digest is that of what is in memory; one that fits no matrix is refused by name."""
    with pytest.raises(EngineError, match=r"its factors have the digest [0-9a-f]{16}, not 0000"):
        served.run(served.engine.load_adapter("odd", served.folders["few"], "0" * 64))
    with pytest.raises(EngineError, match="no adapter of PEFT's form"):
        served.run(served.engine.load_adapter("odd", tmp_path, "0" * 64))


@given(
    st.lists(st.floats(0.001, 1.0), min_size=2, max_size=12),
    st.integers(0, 12),
    st.floats(0.05, 1.0),
)
def test_what_is_kept_is_the_smallest_likeliest_part(values: list[float], top_k: int, top_p: float) -> None:
    """Against the definition, token by token."""
    row = torch.tensor([values], dtype=torch.float64)
    row /= row.sum()
    kept = likeliest(row, torch.tensor([float(top_k)]), torch.tensor([top_p]))[0]
    order = sorted(range(len(values)), key=lambda i: -row[0, i].item())
    few = order[: top_k or None]
    whole = sum(row[0, i].item() for i in few)
    bound, before, expected = torch.tensor(top_p).item() * whole, 0.0, set[int]()
    for i in few:
        if before < bound - 1e-12 or not expected or top_p == 1.0:
            expected.add(i)
        elif before < bound + 1e-12:
            return  # too near to a tie to be told
        before += row[0, i].item()
    assert {i for i, value in enumerate(kept.tolist()) if value > 0} == expected


def test_an_adapter_without_numbers_harms_its_own_requests_alone(served: Served, tmp_path: Path) -> None:
    """Those beside it in the same passes have the tokens that they have alone."""
    held = load_file(served.folders["many"] / "adapter_model.safetensors")
    served.engine._adapters.put("odd", {name: factor * float("nan") for name, factor in held.items()}, 1.0)
    asked = [(name, Sampling(12, 1.0, 5)) for name in ("odd", "few", "odd", "", "odd")]
    together = served.generate(*asked)
    for (name, sampling), made in zip(asked, together, strict=True):
        if name == "odd":
            assert np.isnan(made.logprobs).any()
        else:
            [alone] = served.generate((name, sampling))
            assert made.completion_ids.tolist() == alone.completion_ids.tolist()
    served.run(served.engine.unload_adapter("odd"))
