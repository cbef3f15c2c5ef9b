"""A real SGLang serves the service's samplers: many adapters in one batch, each as transformers computes it,
none before it is verified, and all of them again after the server was started anew."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sglang.conftest import PROMPT, TOLERANCE
from tests.sglang.server import SglangServer

pytest.importorskip("peft")

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollbook import store as rb
from rollbook.engines.engine import Generation, Prompt, Sampling
from rollbook.engines.model_files import PEFT_WEIGHTS
from rollbook.engines.sglang.adapters import SglangAdapters
from rollbook.engines.weights.digests import digest_tensors
from rollbook.service.journal import Journal
from rollbook.service.order import LANE, RUN
from rollbook.service.requests import Sample
from rollbook.service.sampling import Sampler
from rollbook.service.serve import sglang_engine
from rollbook.service.stop_texts import Texts
from rollbook.store import Event
from rollbook.store.errors import EngineError
from rollbook.store.events import (
    OperationAccepted,
    PolicyActivated,
    Record,
    SamplerOpened,
    SessionOpened,
    TurnCompleted,
    token_ids,
)
from rollbook.store.ids import new_id
from rollbook.train.config.lora import TARGETS, LoraConfig, Target
from rollbook.train.tenants import tinker_pb2
from rollbook.train.tenants.base import Base, load_base
from rollbook.train.tenants.model import ClientModel, State
from rollbook.train.tenants.states import write_trained

MOST = 5
OPTIONS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "16"),
    *("--max-loras-per-batch", "4", "--lora-target-modules", *TARGETS, "lm_head"),
    *("--prefill-max-requests", "1"),
)
ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
KINDS: dict[str, tuple[int, tuple[Target, ...]]] = {
    "few": (2, ("q_proj", "v_proj")),
    "layers": (8, TARGETS),
    "output": (4, ("down_proj", "lm_head")),
    "all": (16, (*TARGETS, "lm_head")),
    "attention": (3, ATTENTION),
}
"""Adapter -> (rank, its matrices)."""
messages: Any = tinker_pb2


@dataclass(slots=True)
class Saved:
    """An adapter as the service saves it; `model` is the trainer's, with its factors."""

    checkpoint: str
    folder: Path
    digest: str
    model: ClientModel


@dataclass(slots=True)
class Rig:
    """A server, a store with adapters, and the engine of a service in front of it."""

    server: SglangServer
    base: Base
    journal: Journal
    engine: SglangAdapters
    loop: asyncio.AbstractEventLoop
    saved: dict[str, Saved] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)

    def run(self, call: Any) -> Any:
        """Run a coroutine."""
        return self.loop.run_until_complete(call)

    @property
    def store(self) -> Path:
        """Where adapters are."""
        return self.journal.log.path

    def save(self, name: str, seed: int, rank: int, targets: tuple[Target, ...]) -> Saved:
        """An adapter with random factors, written as by the service."""
        lora = LoraConfig(rank=rank, targets=targets)
        model = ClientModel(self.base.policy, self.base.how, lora, seed)
        generator = torch.Generator().manual_seed(seed)
        factors = {
            n: torch.randn(t.shape, generator=generator) * 0.05
            for n, t in model.state().parts["adapter"].items()
        }
        model.load(State({"adapter": factors, "optimizer": {}, "gradients": {}}))
        checkpoint = write_trained(self.store, "run", seed, model, self.base)
        saved = Saved(checkpoint, self.store / checkpoint, digest_tensors(factors), model)
        self.saved[name] = saved
        return saved

    def load(self, name: str) -> None:
        """Have the server hold an adapter."""
        saved = self.saved[name]
        self.run(self.engine.load_adapter(saved.digest, saved.folder, saved.digest))

    def prompt(self, name: str, number: int) -> Prompt:
        """The prompt for an adapter, or for none."""
        adapter = self.saved[name].digest if name else ""
        return Prompt(token_ids(PROMPT), [], None, request_id=f"{name}-{number}-{new_id()}", adapter=adapter)

    def generate(self, *asked: tuple[str, Sampling]) -> list[Generation]:
        """Completions, all at once."""

        async def together() -> list[Generation]:
            calls = (self.engine.generate(self.prompt(n, at), s) for at, (n, s) in enumerate(asked))
            return list(await asyncio.gather(*calls))

        made: list[Generation] = self.run(together())
        return made

    def rows(self, name: str, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """The logprobs of all tokens behind each of these, by transformers and PEFT."""
        if name not in self.models:
            plain: Any = AutoModelForCausalLM.from_pretrained(self.base.folder, dtype=torch.float32)
            wrapped = PeftModel.from_pretrained(plain, self.saved[name].folder) if name else plain
            self.models[name] = wrapped.eval()
        with torch.no_grad():
            logits = self.models[name](torch.tensor([list(ids)])).logits[0]
        return (logits / temperature).log_softmax(-1)

    def logprobs(self, name: str, ids: Sequence[int], temperature: float = 1.0) -> Any:
        """Of these tokens from the second on."""
        rows = self.rows(name, ids, temperature)[:-1]
        return rows.gather(-1, torch.tensor(list(ids))[1:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def rig(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A server of the dense model, whose output is its embedding, and adapters of five kinds."""
    folder = tmp_path_factory.mktemp("service")
    server = SglangServer(models["dense"], folder, *OPTIONS)
    server.start()
    base = load_base("tiny", models["dense"], device="cpu", dtype="float32", threads=1, recompute=False)
    log = rb.open(folder / "store", create=True)
    loop = asyncio.new_event_loop()
    try:
        with log.writer(LANE) as writer:
            journal = Journal(log, writer)
            engine = sglang_engine(server.url, journal, base.folder, MOST)
            rig = Rig(server, base, journal, engine, loop)
            for seed, (name, (rank, targets)) in enumerate(KINDS.items(), start=1):
                rig.save(name, seed, rank, targets)
            server.ready()
            rig.run(engine.start(_activated))
            for name in KINDS:
                rig.load(name)
            yield rig
            rig.run(engine.close())
    finally:
        server.stop()
        loop.close()


async def _activated(*_: Any) -> None:
    """The base model stays as it is."""


def test_many_adapters_in_one_batch_are_each_as_pefts(rig: Rig) -> None:
    """Of other ranks and matrices, with the output and without, beside the base model: more than a batch may
    have at once. The likeliest tokens come with them, of the same temperature."""
    names = [*KINDS, "", "output", "all", "", "few"]
    asked = [(name, Sampling(16, 0.8, seed, stop_ids=(), top=3)) for seed, name in enumerate(names)]
    for (name, _), made in zip(asked, rig.generate(*asked), strict=True):
        ids = [*PROMPT, *made.completion_ids.tolist()]
        expected = rig.logprobs(name, ids, 0.8)[len(PROMPT) - 1 :]
        assert len(expected) == 16
        assert np.abs(made.logprobs - expected).max() < TOLERANCE
        assert made.top is not None
        values, tokens = rig.rows(name, ids, 0.8)[len(PROMPT) - 1 : -1].topk(3)
        assert np.abs(made.top.logprobs - values.numpy()).max() < TOLERANCE
        assert made.top.ids.tolist() == tokens.tolist()
    greedy = rig.generate(*((name, Sampling(16, 0.0, 1, stop_ids=())) for name in ("", *KINDS)))
    assert len({tuple(made.completion_ids.tolist()) for made in greedy}) == 1 + len(KINDS)


@pytest.mark.parametrize("name", ["", *KINDS])
def test_logprobs_of_prompts_are_as_pefts_and_the_trainers(rig: Rig, name: str) -> None:
    """With the likeliest tokens; the probe is the trainer's own."""
    adapter = rig.saved[name].digest if name else ""
    scores = rig.run(rig.engine.score(token_ids(PROMPT), adapter, 1.0, 4))
    assert np.isnan(scores.logprobs[0])
    assert np.abs(scores.logprobs[1:] - rig.logprobs(name, PROMPT)).max() < TOLERANCE
    values, tokens = rig.rows(name, PROMPT)[:-1].topk(4)
    assert scores.top.ids[1:].tolist() == tokens.tolist()
    assert np.abs(scores.top.logprobs[1:] - values.numpy()).max() < TOLERANCE
    if name:
        probe = rig.saved[name].model.probe()
        own = rig.run(rig.engine.score(probe.ids, adapter, 1.0, 0)).logprobs[1:]
        assert np.abs(own - probe.logprobs).max() < TOLERANCE


def test_stop_tokens_replace_the_models_own(rig: Rig) -> None:
    """None are those of the model; none at all, and it goes on to the full length; given ones end it, and
    where the model's own came before, it goes on behind them."""
    greedy = Sampling(24, 0.0, 1, stop_ids=())
    [free] = rig.generate(("layers", greedy))
    ids = free.completion_ids.tolist()
    assert (len(ids), free.finish_reason) == (24, "length")
    stop = ids[9]
    [ended] = rig.generate(("layers", Sampling(24, 0.0, 1, stop_ids=(stop,))))
    assert (ended.completion_ids.tolist(), ended.finish_reason) == (ids[: ids.index(stop) + 1], "stop")
    own = AutoModelForCausalLM.from_pretrained(rig.base.folder).generation_config.eos_token_id
    likely = Sampling(24, 0.0, 1, stop_ids=(rig.engine.vocabulary - 1,), logit_bias={str(own): 100.0})
    [past] = rig.generate(("layers", likely))
    assert past.completion_ids.tolist() == [own] * 24
    assert past.finish_reason == "length"
    [at_own] = rig.generate(("layers", Sampling(24, 0.0, 1, logit_bias={str(own): 100.0})))
    assert (at_own.completion_ids.tolist(), at_own.finish_reason) == ([own], "stop")


def test_wrong_factors_are_refused(rig: Rig, tmp_path: Path) -> None:
    """Others than the digest says; and such as the server applies otherwise than the trainer did: of another
    scale, or with factors that it leaves out."""
    saved, url = rig.saved["layers"], rig.server.url
    folder = tmp_path / "adapter"
    shutil.copytree(saved.folder, folder)
    with pytest.raises(EngineError, match="have the digest"):
        rig.run(rig.engine.load_adapter("other", folder, "0" * 64))
    config = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(config.replace('"lora_alpha": 32.0', '"lora_alpha": 33.0'))
    with pytest.raises(EngineError, match=f"{url} with the adapter of {folder} gives logprobs"):
        rig.run(rig.engine.load_adapter("scaled", folder, saved.digest))
    (folder / "adapter_config.json").write_text(config)
    fewer = {n: t for n, t in load_file(folder / PEFT_WEIGHTS).items() if "layers.2.mlp.down_proj" not in n}
    save_file(fewer, folder / PEFT_WEIGHTS)
    with pytest.raises(EngineError, match="does not apply these factors"):
        rig.run(rig.engine.load_adapter("fewer", folder, digest_tensors(fewer)))
    assert {one["id"] for one in rig.server.get("/v1/models")["data"] if one["parent"]} == {
        saved.digest for saved in rig.saved.values()
    }


def _sampled(rig: Rig, sampler: Sampler, number: int, name: str, **asked: Any) -> Any:
    """What the service answers to a request for two sequences of an adapter."""
    params = {"max_tokens": 8, "temperature": 0.7, "seed": number, "stop": []}
    sent = {
        "sampling_session_id": f"s1:sample:{name}",
        "seq_id": number,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": PROMPT}]},
        "sampling_params": params,
        "prompt_logprobs": True,
        "topk_sample_logprobs": 2,
    }

    async def whole() -> Any:
        rig.journal.start()
        request = (await sampler.accept(Sample.model_validate(sent | asked), None))["request_id"]
        return await rig.journal.result(request, None, 240)

    return rig.run(whole())


def test_a_service_samples_through_it_also_after_it_was_started_anew(rig: Rig) -> None:
    """Requests, answers and turns are as of every engine; adapters beyond the most make room; the log knows
    which weights the server held at each of its starts."""
    made = {"base_model": "tiny", "lora": {"rank": 4}, "seed": 0}
    create = OperationAccepted("s1:train:0:0", "s1:train:0", 0, "create_model", {}, "d", made)
    opened: list[Record] = [SessionOpened("s1", None, {}), create]
    for name, saved in rig.saved.items():
        known = f"s1:sample:{name}", "s1", "tiny", "s1:train:0", None, 3, saved.digest, saved.checkpoint
        opened.append(SamplerOpened(*known))
    rig.run(rig.journal.write([Event(record, run=RUN) for record in opened]))
    digest, texts = rig.base.digest, Texts.of(rig.base.folder)
    sampler = Sampler(rig.journal, rig.engine, "tiny", RUN, digest, texts, 2)
    rig.run(rig.engine.close())
    rig.run(sampler.start())
    assert not [one for one in rig.server.get("/v1/models")["data"] if one["parent"]]

    def check(number: int, name: str) -> None:
        ended = _sampled(rig, sampler, number, name)
        assert ended.error is None
        answer = messages.SampleResponse.FromString(base64.b64decode(ended.result["protobuf"]))
        prompt = np.frombuffer(answer.prompt_logprobs, "<f4")
        assert np.abs(prompt[1:] - rig.logprobs(name, PROMPT)).max() < TOLERANCE
        assert len(answer.sequences) == 2
        for sequence in answer.sequences:
            ids = [*PROMPT, *np.frombuffer(sequence.tokens, "<i4").tolist()]
            expected = rig.logprobs(name, ids, 0.7)[len(PROMPT) - 1 :]
            own = np.frombuffer(sequence.logprobs, "<f4")
            assert len(own) == 8
            assert np.abs(own - expected).max() < TOLERANCE
            values, _ = rig.rows(name, ids, 0.7)[len(PROMPT) - 1 : -1].topk(2)
            top = np.frombuffer(sequence.topk_sampled_logprobs.logprobs, "<f4").reshape(8, 2)
            assert np.abs(top - values.numpy()).max() < TOLERANCE

    for number, name in enumerate(["few", "layers", "all", "few"]):
        check(number, name)
    held = {one["id"] for one in rig.server.get("/v1/models")["data"] if one["parent"]}
    assert held == {rig.saved[name].digest for name in ("all", "few")}
    rig.server.stop()
    rig.server.start()
    rig.server.ready()
    check(10, "few")
    check(11, "output")
    events = list(rig.journal.log.events_of({TurnCompleted.KIND, PolicyActivated.KIND}))
    turns = [event.record for event in events if isinstance(event.record, TurnCompleted)]
    assert {(turn.policy_version, len(turn.completion_ids)) for turn in turns} == {(3, 8)}
    assert len(turns) == 12
    named = [event.record for event in events if isinstance(event.record, PolicyActivated)]
    assert len(named) == 2
    assert {(record.policy_version, record.weights_digest) for record in named} == {(0, rig.base.digest)}
    rig.run(sampler.stop())
