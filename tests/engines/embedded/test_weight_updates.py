"""New weights for the embedded engine: sessions, tensors, checksums, and weights of no one version."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.conftest import Pace
from tests.fakes.proxies.in_process import InProcess

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollbook.engines.embedded.engine import EmbeddedEngine
from rollbook.engines.engine import Generation, Prompt, Sampling
from rollbook.engines.weights.digests import checksums, digest_tensors, read_weights
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store.errors import EngineError
from rollbook.store.events import PolicyActivated, token_ids

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
FUSED = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, Callable[[], Any]] = {
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "qwen3-untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=16)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **WINDOWS, head_dim=16)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SMALL, **WINDOWS, **FUSED, head_dim=16)),
}


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of an architecture, their weights far enough apart to be told from the logprobs."""
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = KINDS[request.param]()
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.ndim > 1:
                    tensor.normal_(0, 0.3)
        folders.append(tmp_path_factory.mktemp(f"{request.param}-{seed}"))
        model.save_pretrained(folders[-1])
    return folders[0], folders[1]


def sent(tensors: Any) -> list[str]:
    """Tensors as a client of SGLang sends them to one rank, storage inline."""
    return [base64.b64encode(pickle.dumps(list(tensors))).decode()]


def _post(served: Any, route: str, *, status: int = 200, **body: Any) -> Any:
    answer = served.post(f"/engine{route}", json=body)
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert content.get("success", True) is (status == 200)
    return content


def _info(served: Any) -> Any:
    return served.run(served.client.get("/engine/model_info")).json()


def _send(served: Any, tensors: Any, version: int | None = 1, **options: Any) -> Any:
    body = {} if version is None else {"weight_version": str(version)}
    return _post(
        served,
        "/update_weights_from_tensor",
        serialized_named_tensors=sent(tensors),
        **body,
        **options,
    )


def _generate(served: Any, tokens: int = 12) -> Generation:
    return served.run(
        served.engine.generate(Prompt(token_ids(range(5, 25)), (), None), Sampling(tokens, 1.0, 3))
    )


# Architectures ------------------------------------------------------------------------------------


@pytest.mark.more_but("gpt-oss")
def test_any_architecture_is_loaded_served_and_updated(
    pair: tuple[Path, Path],
    tiny_model: Path,
    in_process: Callable[..., InProcess],
    forward: Callable[..., np.ndarray],
) -> None:
    """From disk and from tensors; names, checksums and digests are those of the files."""
    first, second = pair
    served = in_process(EmbeddedEngine(first), load_chat_tokenizer(tiny_model))

    def check(model: Path) -> None:
        generation = _generate(served)
        expected = forward([(model, len(generation.completion_ids))], range(5, 25), generation.completion_ids)
        assert np.abs(generation.logprobs - expected).max() < 3e-5  # of -7: processors round otherwise
        reported = _post(served, "/weights_checker", action="checksum")
        tensors = read_weights(model)
        assert reported["ranks"][0]["checksums"] == {
            name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
            for name, tensor in tensors.items()
        }
        assert reported["digest"] == digest_tensors(tensors, tree=True)

    check(first)
    answer = _post(served, "/update_weights_from_disk", model_path=str(second), weight_version="1")
    assert answer["digest"] == digest_tensors(read_weights(second), tree=True)
    check(second)
    _post(served, "/begin_weight_update")
    items = list(read_weights(first).items())
    for start in range(0, len(items), 7):
        _send(served, items[start : start + 7], 2)
    _post(served, "/end_weight_update")
    check(first)
    assert served.engine.policy_version() == 2


def test_the_experts_of_a_mixture_have_the_names_of_the_files(tmp_path: Path) -> None:
    """In memory they are fused: without that this test would show nothing."""
    model = KINDS["qwen3-moe"]()
    model.save_pretrained(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict()
    engine = EmbeddedEngine(tmp_path)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in engine.weights.tensors
    assert set(engine.weights.tensors) == set(read_weights(tmp_path))


# Checksums ----------------------------------------------------------------------------------------


def test_the_form_of_the_checksums(renewed: InProcess, tiny_model: Path) -> None:
    """SGLang's: per tensor, per rank over sorted names, per engine; our own digest beside them."""
    answer = renewed.run(renewed.client.get("/engine/weights_checker")).json()
    assert (answer["success"], answer["message"]) == (True, "Success.")
    (rank,) = answer["ranks"]
    by_name = rank["checksums"]
    assert by_name == checksums(read_weights(tiny_model))
    assert "lm_head.weight" not in by_name  # it is tied
    text = "".join(name + by_name[name] for name in sorted(by_name))
    assert rank["per_gpu_checksum"] == hashlib.sha256(text.encode()).hexdigest()
    assert answer["per_engine_checksum"] == hashlib.sha256(rank["per_gpu_checksum"].encode()).hexdigest()
    (place,) = rank["parallelism_info"]
    assert place == {
        "role": "target",
        **{f"{kind}_rank": 0 for kind in ("tp", "dp", "pp")},
        **{f"{kind}_size": 1 for kind in ("tp", "dp", "pp")},
        "rank": 0,
        "size": 1,
    }
    assert "action" in _post(renewed, "/weights_checker", status=400, action="reset_tensors")["message"]


def test_server_info_names_the_engine_its_ranks_and_weights(renewed: InProcess, tiny_model: Path) -> None:
    """The kind, so that a client can tell it from SGLang, its ranks and its weights."""
    server = renewed.run(renewed.client.get("/engine/server_info")).json()
    assert (server["engine"], server["tp_size"], server["dp_size"], server["device"]) == (
        "rollbook-embedded",
        1,
        1,
        "cpu",
    )
    assert (server["weight_version"], server["paused"]) == ("0", None)
    info = _info(renewed)
    assert (info["model_path"], info["weights"], info["failure"]) == (str(tiny_model), "whole", None)


# Sessions -----------------------------------------------------------------------------------------


def test_the_rules_of_a_session(renewed: InProcess, other_model: Path) -> None:
    """One at a time; tensors only inside; disk needs none; one that brought nothing changes nothing."""
    tensors = read_weights(other_model).items()
    body = {"serialized_named_tensors": sent(tensors), "weight_version": "1"}
    assert (
        "begin_weight_update" in _post(renewed, "/update_weights_from_tensor", status=400, **body)["message"]
    )
    assert "begin_weight_update" in _post(renewed, "/end_weight_update", status=400)["message"]
    _post(renewed, "/begin_weight_update", selector="target")
    assert "already open" in _post(renewed, "/begin_weight_update", status=400)["message"]
    assert not renewed.engine.gate.open.is_set()
    _post(renewed, "/update_weights_from_disk", model_path=str(other_model), weight_version="4")
    _post(renewed, "/end_weight_update")
    assert renewed.engine.gate.open.is_set()
    assert renewed.engine.policy_version() == 4
    assert _generate(renewed).version_spans[0].version == 4


def test_a_session_lets_running_requests_end_and_holds_the_others(
    renewed: InProcess, tiny_model: Path, other_model: Path, forward: Callable[..., np.ndarray]
) -> None:
    """Without a pause an update from tensors drains, as one from disk does; the log says that it came."""
    prompt = Prompt(token_ids(range(5, 25)), (), None)

    async def post(route: str, **body: Any) -> None:
        answer = await renewed.client.post(f"/engine{route}", json=body)
        assert answer.status_code == 200, answer.text

    async def scenario() -> list[Generation]:
        early = asyncio.create_task(renewed.engine.generate(prompt, Sampling(60, 0.5, 1)))
        while not renewed.engine._live:
            await asyncio.sleep(0)
        await post("/begin_weight_update")
        assert early.done()
        late = asyncio.create_task(renewed.engine.generate(prompt, Sampling(20, 0.5, 1)))
        items = list(read_weights(other_model).items())
        for bucket in (items[:5], items[5:]):
            body = {"serialized_named_tensors": sent(bucket), "weight_version": "9"}
            await post("/update_weights_from_tensor", **body)
            await asyncio.sleep(0.02)
            assert not late.done()
        assert renewed.engine.policy_version() == 0
        await post("/end_weight_update")
        return [await early, await late]

    for generation, model, version in zip(
        renewed.run(scenario()), (tiny_model, other_model), (0, 9), strict=True
    ):
        assert [s.version for s in generation.version_spans] == [version]
        expected = forward(
            [(model, len(generation.completion_ids))], prompt.ids, generation.completion_ids, 0.5
        )
        assert np.abs(generation.logprobs - expected).max() < 1e-5
    renewed.settled()
    *_, last = (e.record for e in renewed.store.events() if isinstance(e.record, PolicyActivated))
    assert (last.policy_version, last.path) == (9, "tensors")
    assert last.weights_digest == digest_tensors(read_weights(other_model), tree=True)


def test_tensors_in_mid_generation(
    renewed: InProcess, pace: Pace, tiny_model: Path, other_model: Path, forward: Callable[..., np.ndarray]
) -> None:
    """Retracted, changed in buckets, continued: two spans, each with its weights' logprobs."""
    prompt = Prompt(token_ids(range(5, 25)), (), None)

    async def post(route: str, *, status: int = 200, **body: Any) -> None:
        answer = await renewed.client.post(f"/engine{route}", json=body)
        assert answer.status_code == status, answer.text

    async def scenario() -> Generation:
        running = asyncio.create_task(renewed.engine.generate(prompt, Sampling(200, 0.9, 1)))
        await pace.until(renewed, 10)
        await post("/pause_generation", mode="retract")
        await post("/begin_weight_update")
        items = list(read_weights(other_model).items())
        for bucket in (items[:5], items[5:]):
            await post(
                "/update_weights_from_tensor", serialized_named_tensors=sent(bucket), weight_version="1"
            )
            await post("/continue_generation", status=400)  # the weights are of two versions
        await post("/end_weight_update")
        await post("/continue_generation")
        pace.full()
        return await running

    generation = renewed.run(scenario())
    old, new = generation.version_spans
    assert (old.version, new.version, new.end) == (0, 1, len(generation.completion_ids))
    before = forward([(tiny_model, old.end)], prompt.ids, generation.completion_ids[: old.end], 0.9)
    after = forward([(other_model, new.end)], prompt.ids, generation.completion_ids, 0.9)[old.end :]
    assert np.abs(generation.logprobs - np.concatenate([before, after])).max() < 1e-5


def test_narrow_tensors_are_widened(renewed: InProcess, other_model: Path) -> None:
    """bfloat16 is renewed exactly, as float32."""
    narrow = {name: tensor.bfloat16() for name, tensor in read_weights(other_model).items()}
    _post(renewed, "/begin_weight_update")
    _send(renewed, narrow.items(), 41)
    _post(renewed, "/end_weight_update")
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    assert _post(renewed, "/weights_checker")["digest"] == digest_tensors(wide, tree=True)


Spoil = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
NORM = "model.norm.weight"
SPOILT: dict[str, Spoil] = {
    "'model.nrom.weight' is no tensor": lambda t: {"model.nrom.weight": t[NORM]},
    "is [3], not [96]": lambda t: {NORM: t[NORM][:3]},
    "is torch.float64": lambda t: {NORM: t[NORM].double()},
}


@pytest.mark.parametrize("message", SPOILT)
def test_tensors_that_do_not_fit(renewed: InProcess, other_model: Path, message: str) -> None:
    """A 400 that names them; nothing of the call is loaded, and the old weights go on answering."""
    before = _generate(renewed)
    tensors = read_weights(other_model)
    wrong = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]} | SPOILT[message](tensors)
    _post(renewed, "/begin_weight_update")
    body = {"serialized_named_tensors": sent(wrong.items()), "weight_version": "1"}
    assert message in _post(renewed, "/update_weights_from_tensor", status=400, **body)["message"]
    _post(renewed, "/end_weight_update")
    assert _info(renewed)["weights"] == "whole"
    after = _generate(renewed)
    assert np.array_equal(after.logprobs, before.logprobs)
    assert after.version_spans == before.version_spans


# Weights of no one version ------------------------------------------------------------------------


def _refuses(served: Any, what: str) -> None:
    with pytest.raises(EngineError, match=f"the weights are mixed: .*{what}"):
        _generate(served)
    info = _info(served)
    assert (info["weights"], info["weight_version"]) == ("mixed", "0")
    assert what in info["failure"]
    health = served.run(served.client.get("/healthz"))
    assert (health.status_code, what in health.json()["status"]) == (503, True)
    assert _post(served, "/weights_checker")["digest"] is None


@pytest.mark.parametrize("repair", ["disk", "tensors"])
def test_an_update_that_breaks_off_half_way(renewed: InProcess, other_model: Path, repair: str) -> None:
    """Some tensors are new: nothing is sampled from them until a whole update has come."""
    items = list(read_weights(other_model).items())
    _post(renewed, "/begin_weight_update")
    _send(renewed, items[:5])
    body = {"serialized_named_tensors": sent([("nothing", torch.zeros(2))])}
    _post(renewed, "/update_weights_from_tensor", status=400, **body)
    _refuses(renewed, "broke off after 5 of")
    _post(renewed, "/end_weight_update", status=400)
    _refuses(renewed, "ended after 5 of")
    if repair == "disk":
        _post(renewed, "/update_weights_from_disk", model_path=str(other_model), weight_version="2")
    else:
        _post(renewed, "/begin_weight_update")
        _send(renewed, items, 2)
        _post(renewed, "/end_weight_update")
    assert _info(renewed)["weights"] == "whole"
    assert _generate(renewed).version_spans[0].version == 2
    assert _post(renewed, "/weights_checker")["digest"] == digest_tensors(dict(items), tree=True)


def test_weights_are_named_once_they_are_verified(
    renewed: InProcess, pace: Pace, tiny_model: Path, other_model: Path, forward: Callable[..., np.ndarray]
) -> None:
    """Until then nothing is sampled from them, and no event names them."""
    prompt = Prompt(token_ids(range(5, 25)), (), None)

    async def post(route: str, *, status: int = 200, **body: Any) -> Any:
        answer = await renewed.client.post(f"/engine{route}", json=body)
        assert answer.status_code == status, answer.text
        return answer.text

    async def scenario() -> Generation:
        running = asyncio.create_task(renewed.engine.generate(prompt, Sampling(200, 0.9, 1)))
        await pace.until(renewed, 10)
        await post("/pause_generation", mode="retract")
        await post("/begin_weight_update")
        items = read_weights(other_model).items()
        await post("/update_weights_from_tensor", serialized_named_tensors=sent(items))
        await post("/update_weight_version", status=400, new_version="6", abort_all_requests=False)
        await post("/end_weight_update")
        assert "update_weight_version" in await post("/continue_generation", status=400)
        info = (await renewed.client.get("/engine/model_info")).json()
        assert (info["weights"], info["weight_version"], info["failure"]) == ("unnamed", "0", None)
        assert f'"digest":"{digest_tensors(dict(items), tree=True)}"' in await post("/weights_checker")
        await post("/update_weight_version", new_version="6", abort_all_requests=False)
        await post("/continue_generation")
        pace.full()
        return await running

    def activations() -> list[PolicyActivated]:
        renewed.settled()
        return [e.record for e in renewed.store.events() if isinstance(e.record, PolicyActivated)]

    earlier = len(activations())
    generation = renewed.run(scenario())
    assert [(a.policy_version, a.path) for a in activations()[earlier:]] == [(6, "tensors")]
    old, new = generation.version_spans
    assert (old.version, new.version) == (0, 6)
    before = forward([(tiny_model, old.end)], prompt.ids, generation.completion_ids[: old.end], 0.9)
    after = forward([(other_model, new.end)], prompt.ids, generation.completion_ids, 0.9)[old.end :]
    assert np.abs(generation.logprobs - np.concatenate([before, after])).max() < 1e-5


def test_a_directory_that_names_no_version(renewed: InProcess, other_model: Path) -> None:
    """Serving it at once would be under a wrong name: a 400; while paused it waits for its name."""
    refusal = _post(renewed, "/update_weights_from_disk", status=400, model_path=str(other_model))
    assert "weight_version" in refusal["message"]
    _post(renewed, "/pause_generation")
    _post(renewed, "/update_weights_from_disk", model_path=str(other_model), flush_cache=False)
    assert _info(renewed)["weights"] == "unnamed"
    _post(renewed, "/update_weight_version", new_version="3")
    _post(renewed, "/update_weight_version", new_version="3")
    _post(renewed, "/continue_generation")
    assert _generate(renewed).version_spans[0].version == 3


def test_naming_aborts_what_has_tokens_unless_told_otherwise(renewed: InProcess, pace: Pace) -> None:
    """SGLang's default; other tokens would be of another name."""

    async def scenario() -> Generation:
        prompt = Prompt(token_ids(range(5, 25)), (), None)
        running = asyncio.create_task(renewed.engine.generate(prompt, Sampling(200, 1.0, 1)))
        await pace.until(renewed, 5)
        await renewed.client.post("/engine/update_weight_version", json={"new_version": "8"})
        return await running

    generation = renewed.run(scenario())
    assert (generation.finish_reason, [s.version for s in generation.version_spans]) == ("abort", [0])
    assert renewed.engine.policy_version() == 8


def test_requests_that_stood_still_fail_with_mixed_weights(
    renewed: InProcess, pace: Pace, other_model: Path
) -> None:
    """Paused in place, half changed, continued: what would go on with both is an error instead."""
    items = list(read_weights(other_model).items())

    async def post(route: str, *, status: int = 200, **body: Any) -> None:
        answer = await renewed.client.post(f"/engine{route}", json=body)
        assert answer.status_code == status, answer.text

    async def scenario() -> None:
        prompt = Prompt(token_ids(range(5, 25)), (), None)
        running = asyncio.create_task(renewed.engine.generate(prompt, Sampling(200, 1.0, 1)))
        await pace.until(renewed, 1)
        await post("/pause_generation", mode="in_place")
        await post("/begin_weight_update")
        body = {"serialized_named_tensors": sent(items[:5]), "weight_version": "1", "flush_cache": False}
        await post("/update_weights_from_tensor", **body)
        await post("/end_weight_update", status=400)
        await post("/continue_generation")
        with pytest.raises(EngineError, match="mixed"):
            await asyncio.wait_for(running, 30)

    renewed.run(scenario())


# What is not served -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "route", ["init_weights_update_group", "update_weights_from_distributed", "update_weights_from_ipc"]
)
def test_other_ways_to_update_weights_are_refused(renewed: InProcess, route: str) -> None:
    """A 400 that says which ways there are."""
    assert "from disk or from tensors" in _post(renewed, f"/{route}", status=400, names=[])["message"]


def test_a_client_that_leaves_in_the_middle(renewed: InProcess, other_model: Path) -> None:
    """An update whose caller is gone goes on to its end."""

    async def scenario() -> None:
        update = asyncio.create_task(renewed.engine.updates.update_from_disk(other_model, 5))
        while renewed.engine.gate.open.is_set():
            await asyncio.sleep(0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        await asyncio.wait_for(renewed.engine.ready(), 20)

    renewed.run(scenario())
    assert renewed.engine.policy_version() == 5
    assert _generate(renewed).version_spans[0].version == 5


def test_a_version_is_one_set_of_weights(renewed: InProcess, other_model: Path) -> None:
    """Other weights under a version that the log has bound are refused, and not sampled from."""
    held = list(read_weights(other_model).items())
    name, tensor = held[0]
    for tensors, status in ((held, 200), ([(name, tensor + 1), *held[1:]], 400)):
        _post(renewed, "/begin_weight_update")
        _send(renewed, tensors, 43)
        reply = _post(renewed, "/end_weight_update", status=status)
    assert "is not version 43 of policy actor" in reply["message"]
    assert "Use another --run" in reply["message"]
    with pytest.raises(EngineError, match="the weights are mixed"):
        _generate(renewed)
