"""Adapters at an SGLang server: what is asked of it, what is believed, and what is verified again."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from safetensors.torch import save_file
from tests.fakes.stories.weights import ToldWeights

from rollbook.engines.engine import Prompt, Sampling
from rollbook.engines.sglang.adapters import SglangAdapters, check_options, check_targets
from rollbook.engines.sglang.client import can_continue, join_parts
from rollbook.engines.sglang.protocol import part, read_scores, request_body, sampling_params, score_body
from rollbook.engines.weights.digests import digest_tensors
from rollbook.engines.weights.peft import PREFIX, Probe, read_probe, write_probe
from rollbook.store.errors import EngineError
from rollbook.store.events import token_ids
from rollbook.testing.asgi import serving

pytestmark = pytest.mark.torch

PROMPT = Prompt(token_ids([3, 7, 11]), [], None, request_id="r", adapter="a" * 64)
SAMPLING = Sampling(5, 0.7, 1)
OPTIONS: dict[str, Any] = {
    "version": "0.5.23",
    "dtype": "float32",
    "enable_lora": True,
    "lora_backend": "csgmv",
    "lora_target_modules": ["q_proj", "lm_head"],
    "max_req_input_len": 90,
}


# What is asked, and what answers mean ---------------------------------------------------------------


def test_a_request_names_its_adapter_and_the_likeliest_that_it_wants() -> None:
    """By `lora_path`, as SGLang calls an adapter's name; without either nothing is said of them."""
    body = request_body(PROMPT, replace(SAMPLING, top=3), stream=False)
    assert (body["lora_path"], body["top_logprobs_num"]) == ("a" * 64, 3)
    plain = request_body(replace(PROMPT, adapter=""), SAMPLING, stream=False)
    assert not {"lora_path", "top_logprobs_num"} & plain.keys()


def test_stops_of_a_request() -> None:
    """None: the model's own; none at all: they are ignored, which would be so of others too."""
    names = ("stop_token_ids", "ignore_eos")
    asked = [sampling_params(replace(SAMPLING, stop_ids=ids)) for ids in (None, (), (4, 9))]
    assert [{n: p[n] for n in names if n in p} for p in asked] == [
        {},
        {"ignore_eos": True},
        {"stop_token_ids": [4, 9]},
    ]


def _answer(ids: list[int], finish: dict[str, Any], **meta: Any) -> dict[str, Any]:
    logprobs = [[-0.5, i, None] for i in ids]
    known = {"output_token_logprobs": logprobs, "finish_reason": finish, "weight_version": "0"}
    return {"output_ids": ids, "meta_info": known | meta}


def test_what_ends_at_the_models_own_stop_goes_on_where_others_were_asked_for() -> None:
    """As a completion that was aborted does; at its full length it ended for that."""
    sampling = replace(SAMPLING, stop_ids=(4,))
    read = ToldWeights().version_of
    early = part(_answer([7, 2], {"type": "stop", "matched": 2}), PROMPT, "actor", None, read)
    ended = part(_answer([8, 4], {"type": "stop", "matched": 4}), PROMPT, "actor", None, read)
    text = part(_answer([8, 2], {"type": "stop", "matched": "x"}), PROMPT, "actor", None, read)
    assert [can_continue([p], sampling) for p in (early, ended, text)] == [True, False, False]
    assert not can_continue([early], replace(sampling, stop_ids=None))
    whole = join_parts(PROMPT, sampling, [early, ended], {})
    assert (whole.completion_ids.tolist(), whole.finish_reason) == ([7, 2, 8, 4], "stop")
    full = replace(sampling, max_new_tokens=2)
    assert not can_continue([early], full)
    assert join_parts(PROMPT, full, [early], {}).finish_reason == "length"


def test_the_likeliest_of_all_parts_are_told_together() -> None:
    """In the order of the tokens; a server that tells none is found out."""
    places = [[[-0.1, 7, None], [-2.0, 1, None]], [[-0.2, 5, None], [-1.0, 2, None]]]
    pieces = [
        part(
            _answer([i], {"type": "abort"}, output_top_logprobs=[place]),
            PROMPT,
            "actor",
            None,
            ToldWeights().version_of,
        )
        for i, place in zip((7, 2), places, strict=True)
    ]
    top = join_parts(PROMPT, replace(SAMPLING, top=2), pieces, {}).top
    assert top is not None
    assert top.ids.tolist() == [[7, 1], [5, 2]]
    assert top.logprobs.tolist() == np.float32([[-0.1, -2.0], [-0.2, -1.0]]).tolist()
    with pytest.raises(EngineError, match="the 3 likeliest tokens"):
        join_parts(PROMPT, replace(SAMPLING, top=3), pieces, {})


def test_scores_are_of_the_tokens_that_were_sent() -> None:
    """The first has none; an answer for other tokens is refused."""
    body = score_body(PROMPT.ids, "", 2)
    assert (body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]) == (0, 0)
    assert "lora_path" not in body
    meta = {
        "input_token_logprobs": [[None, 3, None], [-1.5, 7, None], [-2.5, 11, None]],
        "input_top_logprobs": [None, [[-0.1, 7, None], [-0.9, 1, None]], [[-0.2, 5, None]]],
    }
    scores = read_scores({"meta_info": meta}, PROMPT.ids, 2)
    assert np.isnan(scores.logprobs[0])
    assert scores.logprobs[1:].tolist() == [-1.5, -2.5]
    assert scores.top is not None
    assert scores.top.ids[1].tolist() == [7, 1]
    assert np.isnan(scores.top.logprobs).tolist() == [[True, True], [False, False], [False, True]]
    with pytest.raises(EngineError, match="not of the tokens that were sent"):
        read_scores({"meta_info": meta}, token_ids([3, 8, 11]), 0)


# Which servers and adapters are taken ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"enable_lora": None}, "start it with --enable-lora"),
        ({"max_loaded_loras": 2}, "sampler.adapters = 2"),
        ({"dp_size": 2}, "--dp-size 1"),
        ({"lora_backend": "torch_native"}, "--prefill-max-requests 1"),
        (
            {"lora_backend": "torch_native", "prefill_max_requests": 1, "enable_mixed_chunk": True},
            "--prefill-max-requests 1",
        ),
    ],
)
def test_servers_that_would_answer_wrongly_are_refused(changed: dict[str, Any], why: str) -> None:
    """With the flag that is missing."""
    check_options(OPTIONS, "http://e", 4)
    with pytest.raises(EngineError, match=why):
        check_options(OPTIONS | changed, "http://e", 4)


def test_a_backend_that_mixes_rows_up_is_taken_where_it_cannot() -> None:
    """Alone, or without factors of the output."""
    native = OPTIONS | {"lora_backend": "torch_native"}
    check_options(native | {"prefill_max_requests": 1}, "http://e", 4)
    check_options(native | {"lora_target_modules": ["q_proj"]}, "http://e", 4)


@pytest.mark.parametrize(
    ("matrices", "missing"),
    [
        (["q_proj"], "none of v_proj"),
        (["k_proj", "v_proj"], "none of q_proj"),
        (["up_proj", "down_proj"], "none of gate_proj"),
        (["q_proj", "v_proj"], None),
        (["gate_proj", "up_proj"], None),
        (["o_proj", "down_proj"], None),
    ],
)
def test_factors_that_are_merged_come_together(matrices: list[str], missing: str | None) -> None:
    """SGLang merges them as it reads; of a part that is missing its scheduler dies."""
    names = [f"{PREFIX}model.layers.0.x.{matrix}.lora_A.weight" for matrix in matrices]
    if missing is None:
        check_targets(names, Path("a"))
    else:
        with pytest.raises(EngineError, match=missing):
            check_targets(names, Path("a"))


# A server that is started anew ------------------------------------------------------------------------


class Fake:
    """The routes of a server: every token has the logprob that its adapter's probe begins with."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.loads: list[str] = []
        self.wrong, self.weights = 0.0, "0"
        self.app = FastAPI()
        for path, methods in (
            ("/model_info", ["GET"]),
            ("/server_info", ["GET"]),
            ("/v1/models", ["GET"]),
            ("/load_lora_adapter", ["POST"]),
            ("/unload_lora_adapter", ["POST"]),
            ("/generate", ["POST"]),
        ):
            self.app.add_api_route(path, getattr(self, path.rpartition("/")[2]), methods=methods)

    def restart(self) -> None:
        """Lose everything."""
        self.held, self.weights = {}, "default"

    async def model_info(self) -> Any:
        return {"weight_version": self.weights}

    async def server_info(self) -> Any:
        return OPTIONS

    async def models(self) -> Any:
        ids = [{"id": name, "root": root, "parent": "m"} for name, root in self.held.items()]
        return {"data": [{"id": "m", "root": "m", "parent": None}, *ids]}

    async def load_lora_adapter(self, request: Request) -> Any:
        body = await request.json()
        self.loads.append(body["lora_name"])
        self.held[body["lora_name"]] = body["lora_path"]
        return {"success": True}

    async def unload_lora_adapter(self, request: Request) -> Any:
        del self.held[(await request.json())["lora_name"]]
        return {"success": True}

    async def generate(self, request: Request) -> Any:
        body = await request.json()
        if (name := body.get("lora_path")) is not None and name not in self.held:
            return JSONResponse({"error": {"message": f"never been loaded: {name}"}}, 400)
        own = -1.0 if name is None else float(read_probe(Path(self.held[name])).logprobs[0]) + self.wrong
        if not body["sampling_params"]["max_new_tokens"]:
            entries = [[None if not at else own, i, None] for at, i in enumerate(body["input_ids"])]
            return {"meta_info": {"input_token_logprobs": entries, "weight_version": self.weights}}
        answer = _answer([1, 2], {"type": "length"}, weight_version=self.weights)
        answer["meta_info"]["output_token_logprobs"] = [[own, 1, None], [own, 2, None]]
        return answer


class Named(ToldWeights):
    """Only "0" and what is named here are known; `identify` names the weights so that they are."""

    def __init__(self, fake: Fake) -> None:
        self.fake, self.names = fake, itertools.count(1)
        self.known, self.same = {"0"}, True

    def version_of(self, name: str) -> int | None:
        return 0 if name in self.known else None

    async def identify(self, server: Any) -> int:
        if not self.same:
            raise EngineError("it holds other weights")
        self.fake.weights = f"start {next(self.names)}"
        self.known.add(self.fake.weights)
        return 0


class Served:
    """A fake server with an engine in front of it, and folders of adapters."""

    def __init__(self, url: str, fake: Fake, folder: Path) -> None:
        (folder / "config.json").write_text(
            json.dumps({"vocab_size": 40, "max_position_embeddings": 500, "dtype": "float32"})
        )
        self.fake, self.named, self.folder = fake, Named(fake), folder
        self.loop = asyncio.new_event_loop()
        self.engine = SglangAdapters(url, self.named, folder, most=4)

    def run(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    def start(self) -> None:
        async def activated(*_: Any) -> None:
            """No log is kept."""

        self.run(self.engine.start(activated))

    def adapter(self, logprob: float) -> tuple[str, Path, str]:
        """(name, folder, digest)"""
        folder = self.folder / str(logprob)
        folder.mkdir()
        factors = {
            f"{PREFIX}model.layers.0.o_proj.lora_{ab}.weight": torch.full((2, 2), logprob) for ab in "AB"
        }
        save_file(factors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
        write_probe(folder, Probe(token_ids([3, 4, 5]), np.full(2, logprob, np.float32), "float32"))
        digest = digest_tensors(factors)
        return digest, folder, digest

    def sampled(self, name: str) -> list[float]:
        prompt = replace(PROMPT, adapter=name)
        made = self.run(self.engine.generate(prompt, Sampling(2, 1.0, 1)))
        return [float(p) for p in made.logprobs]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    fake = Fake()
    with ExitStack() as stack:
        served = Served(stack.enter_context(serving(fake.app)), fake, tmp_path)
        yield served
        served.run(served.engine.close())
        served.loop.close()


def test_an_adapter_is_loaded_once_and_left(served: Served) -> None:
    """What an earlier service left is unloaded at the start, and nothing else is."""
    served.fake.held = {"b" * 64: "/old", "somebodys": "/theirs"}
    served.start()
    assert served.fake.held == {"somebodys": "/theirs"}
    assert served.engine.context_length == 91
    name, folder, digest = served.adapter(-2.0)
    for _ in range(2):
        served.run(served.engine.load_adapter(name, folder, digest))
    assert served.fake.loads == [name]
    assert served.sampled(name) == [-2.0, -2.0]
    served.run(served.engine.unload_adapter(name))
    assert served.fake.held == {"somebodys": "/theirs"}


def _restarted(served: Served) -> None:
    served.fake.restart()


def _dropped(served: Served) -> None:
    served.fake.held.clear()


@pytest.mark.parametrize("lost", [_restarted, _dropped])
def test_what_a_server_lost_is_verified_again(served: Served, lost: Callable[[Served], None]) -> None:
    """Its answers count only behind that: base weights and adapter, for sampling and for scores."""
    served.start()
    name, folder, digest = served.adapter(-2.0)
    served.run(served.engine.load_adapter(name, folder, digest))
    lost(served)
    assert served.sampled(name) == [-2.0, -2.0]
    assert served.fake.loads == [name, name]
    lost(served)
    assert served.run(served.engine.score(PROMPT.ids, name, 1.0, 0)).logprobs[1:].tolist() == [-2.0, -2.0]
    assert served.fake.loads == [name] * 3


def test_a_name_that_a_new_start_holds_already_is_compared_again(served: Served) -> None:
    """As from --lora-paths: it was verified at another start."""
    served.start()
    name, folder, digest = served.adapter(-2.0)
    served.run(served.engine.load_adapter(name, folder, digest))
    served.fake.restart()
    served.fake.held[name], served.fake.wrong = str(folder), 0.5
    with pytest.raises(EngineError, match=r"up to 0\.5 away"):
        served.sampled(name)


def test_other_base_weights_after_a_new_start_are_not_sampled_from(served: Served) -> None:
    """Nor at the first start."""
    served.start()
    served.named.same = False
    served.fake.restart()
    with pytest.raises(EngineError, match="it holds other weights"):
        served.sampled("")
    served.run(served.engine.close())
    with pytest.raises(EngineError, match="it holds other weights"):
        served.start()


@pytest.mark.parametrize("wrong", [0.0005, 0.002, float("nan")])
def test_answers_that_are_not_the_trainers_are_found_out(served: Served, wrong: float) -> None:
    """Beyond rounding; the adapter is not left there."""
    served.start()
    name, folder, digest = served.adapter(-2.0)
    served.fake.wrong = wrong if wrong == wrong else 0.0
    if wrong != wrong:
        write_probe(folder, Probe(token_ids([3, 4, 5]), np.array([-2.0, np.nan], np.float32), "float32"))
    if wrong == 0.0005:
        served.run(served.engine.load_adapter(name, folder, digest))
        return
    with pytest.raises(EngineError, match="does not apply these factors"):
        served.run(served.engine.load_adapter(name, folder, digest))
    assert (served.fake.loads, served.fake.held) == ([name], {})


def test_factors_of_another_digest_are_not_even_loaded(served: Served) -> None:
    """And an adapter without a probe cannot be verified."""
    served.start()
    name, folder, _ = served.adapter(-2.0)
    with pytest.raises(EngineError, match=r"have the digest [0-9a-f]{16}, not 0000"):
        served.run(served.engine.load_adapter(name, folder, "0" * 64))
    assert served.fake.loads == []
    (folder / "probe.json").unlink()
    with pytest.raises(EngineError, match="save the weights again"):
        served.run(served.engine.load_adapter(name, folder, name))
    assert served.fake.held == {}


def test_other_temperatures_of_given_tokens_are_refused(served: Served) -> None:
    """SGLang knows none."""
    with pytest.raises(EngineError, match=r"of temperature 1, not of 0\.7"):
        served.run(served.engine.score(PROMPT.ids, "", 0.7, 2))
