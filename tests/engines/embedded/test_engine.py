"""The embedded engine: exact logprobs, seeded draws, and weights that change between requests."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.proxies.in_process import InProcess

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollbook.engines.embedded.batching import GREEDY, sample, uniform_draw
from rollbook.engines.embedded.engine import EmbeddedEngine
from rollbook.engines.engine import Generation, Prompt, Sampling
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.engines.weights.log import WeightLog
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store import Event, Store
from rollbook.store.errors import ModelError
from rollbook.store.events import CheckpointWritten, PolicyActivated
from rollbook.store.fold.trajectory import fold

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

USER = {"role": "user", "content": "What is 37 plus 58?"}


def _forward(model: Path, prompt: Any, completion: Any, temperature: float) -> np.ndarray:
    """Logprobs of the completion by a plain forward pass in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([[*map(int, prompt), *map(int, completion)]])
    with torch.no_grad():
        logits = loaded(ids).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :].unsqueeze(-1))
    return chosen.squeeze(-1).numpy()


@pytest.fixture(scope="module")
def steady(tiny_model: Path, in_process: Callable[..., InProcess]) -> InProcess:
    """An in-process proxy over the embedded engine, for tests that leave its weights alone."""
    return in_process(EmbeddedEngine(tiny_model), load_chat_tokenizer(tiny_model))


def _prompt(served: Any, text: str = "What is 37 plus 58?") -> Prompt:
    tokenizer = served.turn_runner.bridges.tokenizer
    messages = [{"role": "user", "content": text}]
    return Prompt(tokenizer.encode(tokenizer.render(messages, None, generate=True)), messages, None)


def _generate(served: Any, *samplings: Sampling, prompt: Prompt | None = None) -> list[Generation]:
    sent = prompt or _prompt(served)

    async def all_at_once() -> list[Generation]:
        return list(await asyncio.gather(*(served.engine.generate(sent, s) for s in samplings)))

    return served.run(all_at_once())


def _update(served: Any, model: Path, version: int | str | None = None) -> Any:
    body = {"model_path": str(model)} | ({} if version is None else {"weight_version": str(version)})
    return served.post("/engine/update_weights_from_disk", json=body)


def _all(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k and top-p of rows that keep every token."""
    return torch.zeros(rows), torch.ones(rows)


# Sampling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5, 0.0])
def test_recorded_logprobs_are_those_of_a_plain_forward_pass(
    steady: InProcess, tiny_model: Path, temperature: float
) -> None:
    """Over several turns the log's logprobs equal a forward pass over the log's own ids."""
    messages: list[Any] = [USER]
    for _ in range(3):
        answer = steady.chat(f"t{temperature}", *messages, temperature=temperature, max_tokens=24, seed=4)
        assert answer.status_code == 200
        assert answer.headers["x-rollbook-policy-version"] == "0"
        messages = [*messages, answer.json()["choices"][0]["message"], USER]
    steady.settled()
    trajectories = fold(steady.store.events()).values()
    (trajectory,) = (t for t in trajectories if t.opened.name == f"t{temperature}")
    assert len(trajectory.turns) == 3
    for turn in trajectory.turns.values():
        done = turn.completed
        prompt = trajectory.prompt_ids(turn)
        expected = _forward(tiny_model, prompt, done.completion_ids, temperature)
        assert len(done.logprobs) == len(done.completion_ids) > 0
        assert np.abs(done.logprobs - expected).max() < 1e-5
        assert done.logprob_semantics["temperature"] == temperature
        (span,) = done.version_spans
        assert (span.policy, span.version, span.start, span.end) == ("actor", 0, 0, len(done.completion_ids))


def test_greedy_takes_the_most_probable_token(steady: InProcess, tiny_model: Path) -> None:
    """Temperature 0 is arg max at every place, whatever the seed."""
    first, second = _generate(steady, Sampling(16, 0.0, 1), Sampling(16, 0.0, 2))
    assert first.completion_ids.tolist() == second.completion_ids.tolist()
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    prompt = _prompt(steady).ids
    ids = torch.tensor([[*prompt.tolist(), *first.completion_ids.tolist()]])
    with torch.no_grad():
        best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert first.completion_ids.tolist() == best.tolist()


def test_a_seed_decides_the_tokens_alone_and_in_a_batch(steady: InProcess) -> None:
    """A request's tokens depend on its seed and not on what else is in the batch; seeds differ."""
    (alone,) = _generate(steady, Sampling(20, 1.0, 11))
    batch = _generate(steady, *(Sampling(20, 1.0, seed) for seed in range(32)))
    assert batch[11].completion_ids.tolist() == alone.completion_ids.tolist()
    assert np.abs(batch[11].logprobs - alone.logprobs).max() < 1e-5
    assert len({g.completion_ids.tobytes() for g in batch}) == 32
    again = _generate(steady, *(Sampling(20, 1.0, seed) for seed in reversed(range(32))))
    assert [g.completion_ids.tolist() for g in again[::-1]] == [g.completion_ids.tolist() for g in batch]


def test_the_end_of_turn_token_finishes_with_stop(steady: InProcess) -> None:
    """A completion that ends in the end-of-turn token stopped; any other ran out of tokens."""
    stop = steady.turn_runner.bridges.tokenizer.stop_ids
    generations = _generate(steady, *(Sampling(60, 3.0, seed) for seed in range(48)))
    reasons = {g.finish_reason for g in generations}
    assert reasons == {"stop", "length"}
    for g in generations:
        ended = int(g.completion_ids[-1]) in stop
        assert g.finish_reason == ("stop" if ended else "length")
        assert ended or len(g.completion_ids) == 60
        assert not set(g.completion_ids[:-1].tolist()) & set(stop)


def test_a_request_over_the_context_is_a_400(steady: InProcess) -> None:
    """The prompt and what was asked for must fit the model's 512 positions; nothing is sampled."""
    answer = steady.chat("t", {"role": "user", "content": "天" * 300})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = steady.chat("t", USER, max_tokens=512)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_draws_are_pinned_and_uniform() -> None:
    """The draw of (seed, position) is part of the recorded format: it may never change."""
    assert [uniform_draw(s, p) for s, p in PINNED] == list(PINNED.values())
    draws = np.array([uniform_draw(seed, position) for seed in range(100) for position in range(200)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert (draws == draws.astype(np.float32)).all()
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert uniform_draw(-1, 0) == uniform_draw(2**64 - 1, 0)


PINNED = {
    (0, 0): 0.8150392770767212,
    (0, 1): 0.05071532726287842,
    (1, 0): 0.15213972330093384,
    (2**63 - 1, 511): 0.483456015586853,
    (-1, 7): 0.9908527731895447,
}


def test_sampled_frequencies_follow_the_distribution() -> None:
    """Tokens drawn by inversion have the distribution's frequencies; impossible ones never come."""
    logits = torch.tensor([2.0, -1.0, 0.5, float("-inf"), 0.0, -3.0, float("-inf")])
    draws = torch.tensor([uniform_draw(9, i) for i in range(20000)], dtype=torch.float32)
    tokens, logprobs = sample(logits.expand(len(draws), -1), draws, *_all(len(draws)))
    probabilities = torch.softmax(logits.double(), -1).numpy()
    counts = np.bincount(tokens.numpy(), minlength=7)
    assert counts[3] == counts[6] == 0
    possible = probabilities > 0
    expected = probabilities[possible] * len(draws)
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 18.5  # 4 degrees, p = 0.001
    assert torch.equal(logprobs, torch.log_softmax(logits, -1)[tokens])


def test_the_sampler_at_its_edges() -> None:
    """The smallest and the largest draw, and a greedy row among others."""
    scores = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]]).expand(3, -1)
    tokens, logprobs = sample(scores, torch.tensor([0.0, 1 - 2**-24, GREEDY]), *_all(3))
    assert tokens.tolist() == [1, 2, 2]
    assert logprobs.isfinite().all()


# Weights -------------------------------------------------------------------------------------------


def test_new_weights_answer_also_where_the_prefix_was_cached(
    served: InProcess, tiny_model: Path, other_model: Path
) -> None:
    """After an update every logprob is the new weights', the version is stamped and the log says so."""
    long = {"role": "user", "content": "What is 37 plus 58? " * 50}
    options = {"max_tokens": 16, "seed": 3}
    for _ in range(2):
        before = served.chat("old", long, **options)
    assert before.headers["x-rollbook-policy-version"] == "0"
    cache = served.engine._manager.batch_processor.cache
    prefix = _prompt(served, long["content"])
    assert cache.search_prefix_match("probe", prefix.ids.tolist()) == 256  # so there is one to forget
    cache.free_blocks("probe")
    answer = _update(served, other_model, 7)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True
    after = served.chat("new", long, **options)
    assert after.headers["x-rollbook-policy-version"] == "7"
    served.settled()
    old, new = fold(served.store.events()).values()
    for trajectory, model, version in ((old, tiny_model, 0), (new, other_model, 7)):
        for turn in trajectory.turns.values():
            prompt, done = trajectory.prompt_ids(turn), turn.completed
            assert np.abs(done.logprobs - _forward(model, prompt, done.completion_ids, 1.0)).max() < 1e-5
            assert done.policy_version == version
            assert {s.version for s in done.version_spans} == {version}
    done = next(iter(new.turns.values())).completed
    stale = _forward(tiny_model, done.prompt_ids, done.completion_ids, 1.0)
    assert np.abs(done.logprobs - stale).max() > 1e-2  # the two models are apart, so the check can fail
    activated = [e.record for e in served.store.events() if isinstance(e.record, PolicyActivated)]
    assert [(a.policy_version, a.path) for a in activated] == [(0, str(tiny_model)), (7, str(other_model))]
    assert activated[1].weights_digest == answer.json()["digest"] != activated[0].weights_digest
    info = served.run(served.client.get("/engine/model_info")).json()
    assert (info["model_path"], info["weight_version"]) == (str(other_model), "7")
    assert (info["weights"], info["failure"]) == ("whole", None)
    assert served.run(served.client.get("/healthz")).json()["policy_version"] == 7


def _another_shape(folder: Path, model: Path) -> None:
    config = Qwen3Config.from_pretrained(model)
    config.hidden_size = 48
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _another_depth(folder: Path, model: Path) -> None:
    config = Qwen3Config.from_pretrained(model)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _no_weights(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)


def _damaged(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _other_than_its_manifest(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "rollbook.json").write_text('{"policy_version": 3, "weights_digest": "' + "0" * 64 + '"}')


BAD: list[Callable[[Path, Path], None]] = [
    _another_shape,
    _another_depth,
    _no_weights,
    _damaged,
    _other_than_its_manifest,
    lambda folder, model: folder.rmdir(),
]


def test_a_checkpoint_that_does_not_fit_changes_nothing(
    served: InProcess, other_model: Path, tmp_path: Path
) -> None:
    """Each is a 400, and the old weights go on answering under the old version."""
    (before,) = _generate(served, Sampling(12, 1.0, 5))
    for number, make in enumerate(BAD):
        folder = tmp_path / f"bad-{number}"
        folder.mkdir()
        make(folder, other_model)
        answer = _update(served, folder, 9)
        assert (make.__name__, answer.status_code) == (make.__name__, 400), answer.text
        assert answer.json()["error"]["code"] == "update_failed"
        assert str(folder) in answer.json()["error"]["message"]
        (after,) = _generate(served, Sampling(12, 1.0, 5))
        assert after.completion_ids.tolist() == before.completion_ids.tolist()
        assert np.array_equal(after.logprobs, before.logprobs)
        assert after.version_spans == before.version_spans
    activated = [e for e in served.store.events() if isinstance(e.record, PolicyActivated)]
    assert len(activated) == 1


def test_a_bfloat16_checkpoint_is_widened(served: InProcess, other_model: Path, tmp_path: Path) -> None:
    """The engine computes in float32: a bf16 checkpoint's numbers are served exactly, as float32."""
    folder = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.bfloat16).save_pretrained(folder)
    answer = _update(served, folder, 9)
    assert answer.status_code == 200, answer.text
    expected = digest_tensors({n: t.float() for n, t in read_weights(folder).items()}, tree=True)
    assert answer.json()["digest"] == expected == served.engine.weights.digest
    assert served.engine.policy_version() == 9


@pytest.mark.parametrize("version", ["abc", "-1", "1.5", "²", ""])
def test_a_version_that_is_no_number_is_refused(steady: InProcess, other_model: Path, version: str) -> None:
    """Versions count steps: anything else is a 400 before weights are touched."""
    answer = _update(steady, other_model, version)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_version")
    assert steady.engine.policy_version() == 0


def test_requests_in_flight_end_with_the_weights_they_began_with(
    served: InProcess, tiny_model: Path, other_model: Path
) -> None:
    """An update waits for running requests; those that arrive meanwhile get the new weights."""
    prompt = _prompt(served)

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        running = [
            asyncio.create_task(served.engine.generate(prompt, Sampling(60, 0.5, s))) for s in range(6)
        ]
        await asyncio.sleep(0.05)
        assert not any(r.done() for r in running)
        update = asyncio.create_task(
            served.client.post(
                "/engine/update_weights_from_disk",
                json={"model_path": str(other_model), "weight_version": "1"},
            )
        )
        while served.engine.gate.open.is_set():
            await asyncio.sleep(0)
        late = [asyncio.create_task(served.engine.generate(prompt, Sampling(20, 1.0, s))) for s in range(6)]
        assert (await update).status_code == 200
        return list(await asyncio.gather(*running)), list(await asyncio.gather(*late))

    early, late = served.run(scenario())
    for generations, model, version, temperature in (
        (early, tiny_model, 0, 0.5),
        (late, other_model, 1, 1.0),
    ):
        for g in generations:
            assert [s.version for s in g.version_spans] == [version]
            expected = _forward(model, prompt.ids, g.completion_ids, temperature)
            assert np.abs(g.logprobs - expected).max() < 1e-5


def test_pausing_holds_requests_until_it_continues(steady: InProcess) -> None:
    """While paused no request is answered and none is lost."""
    prompt = _prompt(steady)

    async def scenario() -> Generation:
        assert (await steady.client.post("/engine/pause_generation")).status_code == 200
        waiting = asyncio.create_task(steady.engine.generate(prompt, Sampling(4, 1.0, 1)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert (await steady.client.post("/engine/continue_generation")).status_code == 200
        return await asyncio.wait_for(waiting, 20)

    generation = steady.run(scenario())
    assert generation.timings["held_us"] > 250_000
    assert 0 < generation.timings["first_token_us"] <= generation.timings["engine_us"] < 250_000
    assert len(generation.completion_ids) <= 4


def test_an_update_while_paused_stays_paused(served: InProcess, other_model: Path) -> None:
    """Who paused the engine continues it: an update in between does not let requests in."""
    prompt = _prompt(served)

    async def scenario() -> Generation:
        await served.client.post("/engine/pause_generation")
        body = {"model_path": str(other_model), "weight_version": "2"}
        assert (await served.client.post("/engine/update_weights_from_disk", json=body)).status_code == 200
        assert (await served.client.post("/engine/flush_cache")).status_code == 200
        waiting = asyncio.create_task(served.engine.generate(prompt, Sampling(4, 1.0, 1)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await served.client.post("/engine/continue_generation")
        return await asyncio.wait_for(waiting, 20)

    assert [s.version for s in served.run(scenario()).version_spans] == [2]


def test_sglangs_generate_speaks_sglangs_form(steady: InProcess) -> None:
    """/engine/generate takes ids and gives ids, logprobs and versions as SGLang does."""
    prompt = _prompt(steady)
    (direct,) = _generate(steady, Sampling(6, 1.0, 21), prompt=prompt)
    params = {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 21}
    body = {"input_ids": prompt.ids.tolist(), "sampling_params": params, "return_logprob": True}
    answer = steady.post("/engine/generate", json=body).json()
    assert answer["output_ids"] == direct.completion_ids.tolist()
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] == len(prompt.ids)
    assert [t for _, t, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert np.allclose([p for p, _, _ in meta["output_token_logprobs"]], direct.logprobs, atol=1e-5)
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": len(answer["output_ids"])}]


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": []},
        {"input_ids": [1, 10**6]},
        {"input_ids": [2**40]},
        {"input_ids": [-1]},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}},
        {"input_ids": [1] * 500, "sampling_params": {"max_new_tokens": 100}},
    ],
)
def test_ids_the_model_cannot_read_are_refused(steady: InProcess, body: Any) -> None:
    """A prompt that would end the generation loop is refused, and the engine goes on."""
    answer = steady.post("/engine/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
    assert _generate(steady, Sampling(1, 1.0, 1))[0].logprobs is not None


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 5e-324])
def test_a_temperature_next_to_zero_is_greedy(steady: InProcess, temperature: float) -> None:
    """Dividing by it would overflow to logprobs that are no numbers; it is recorded as the 0 it means."""
    name = f"tiny{temperature}"
    tiny = steady.chat(name, USER, temperature=temperature, max_tokens=8)
    greedy = steady.chat(name + "-greedy", USER, temperature=0, max_tokens=8)
    assert tiny.json()["choices"] == greedy.json()["choices"]
    steady.settled()
    (trajectory,) = (t for t in fold(steady.store.events()).values() if t.opened.name == name)
    (turn,) = trajectory.turns.values()
    assert turn.requested.sampling["temperature"] == 0
    assert turn.completed.logprob_semantics["temperature"] == 0
    assert np.isfinite(turn.completed.logprobs).all()


def test_control_is_for_this_host_only(steady: InProcess) -> None:
    """Another host that reaches the port may record, but not change weights."""
    import httpx

    async def scenario() -> httpx.Response:
        far = httpx.ASGITransport(steady.app, client=("192.0.2.1", 1))
        async with httpx.AsyncClient(transport=far, base_url="http://127.0.0.1") as client:
            return await client.post("/engine/pause_generation")

    answer = steady.run(scenario())
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "loopback_only")
    assert steady.engine.gate.open.is_set()


def test_a_model_that_cannot_be_served_is_named(tmp_path: Path, tiny_model: Path) -> None:
    """Missing or foreign directories are ModelErrors that name the path."""
    with pytest.raises(ModelError, match="nowhere"):
        EmbeddedEngine(tmp_path / "nowhere")
    lying = Path(shutil.copytree(tiny_model, tmp_path / "lying"))
    (lying / "rollbook.json").write_text('{"policy_version": 3, "weights_digest": "' + "0" * 64 + '"}')
    with pytest.raises(ModelError, match=r"lying.*weights digest"):
        EmbeddedEngine(lying)
    with pytest.raises(ModelError, match="no safetensors"):
        read_weights(tmp_path)


def _with_origin(folder: Path, run: str, digest: str) -> Path:
    """The folder, which says that it is version 12 of a run."""
    origin = {"run": run, "policy": "actor", "policy_version": 12, "weights_digest": digest}
    (folder / "rollbook.json").write_text(json.dumps(origin))
    return folder


@pytest.mark.parametrize("trees", [True, False])
def test_only_a_version_of_the_run_gives_its_own_version(
    served: InProcess, other_model: Path, tmp_path: Path, trees: bool
) -> None:
    """Without a version in the request the log names it: by run, policy, version and digest."""
    digest = digest_tensors(read_weights(other_model), tree=trees)
    folder = _with_origin(Path(shutil.copytree(other_model, tmp_path / "published")), "default", digest)
    served.engine.weights.begin_with(WeightLog(served.store, "default", "actor").own, trees=trees)
    refused = _update(served, folder)
    assert refused.status_code == 400
    assert "is no version of this run by itself" in refused.text
    written = CheckpointWritten("actor", 12, "checkpoints/v12", digest, None, None, 1)
    served.run(served.recorder.write(written))
    refused = _update(served, folder, 3)
    assert "is version 12 of its policy, not 3" in refused.text
    assert _update(served, folder).json()["digest"] == digest
    assert served.engine.policy_version() == 12
    assert served.run(served.client.get("/engine/weights_checker")).json()["digest"] == digest


def test_an_engine_begins_with_version_0(tiny_model: Path, tmp_path: Path, store: Store) -> None:
    """Whatever another run called the model; what the run itself has as a version is that one."""
    digest = digest_tensors(read_weights(tiny_model), tree=True)
    engine = EmbeddedEngine(
        _with_origin(Path(shutil.copytree(tiny_model, tmp_path / "exported")), "run", digest)
    )
    assert engine.held() == (0, digest)
    for run, wanted in (("run", 0), ("other", 0), ("run", 12), ("other", 0)):
        if wanted:
            with store.writer("train") as writer:
                written = CheckpointWritten("actor", 12, "checkpoints/v12", digest, None, None, 1)
                writer.append([Event(written, "run")]).result()
        engine.weights.begin_with(WeightLog(store, run, "actor").own, trees=True)
        assert engine.held() == (wanted, digest)
