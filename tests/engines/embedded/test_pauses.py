"""The embedded engine paused in mid-generation: nothing changes, or spans say exactly what did."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.conftest import Pace
from tests.fakes.proxies.in_process import InProcess

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollbook.engines.embedded.engine import EmbeddedEngine
from rollbook.engines.engine import Generation, Prompt, Sampling
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store.errors import EngineError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

SEEDS = range(6)


def _prompt(served: Any, text: str = "What is 37 plus 58?", name: str = "") -> Prompt:
    tokenizer = served.turn_runner.bridges.tokenizer
    messages = [{"role": "user", "content": text}]
    return Prompt(tokenizer.encode(tokenizer.render(messages, None, generate=True)), messages, None, name)


def _start(served: Any, tokens: int = 120, seeds: Any = SEEDS) -> list[asyncio.Task[Generation]]:
    prompt = _prompt(served)
    return [
        asyncio.create_task(
            served.engine.generate(
                Prompt(prompt.ids, prompt.messages, None, f"r{seed}"), Sampling(tokens, 1.0, seed)
            )
        )
        for seed in seeds
    ]


async def _post(served: Any, route: str, *, status: int = 200, **body: Any) -> Any:
    answer = await served.client.post(f"/engine{route}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers["content-type"].startswith("application/json") else answer.text


async def _update(served: Any, model: Path, version: int, **body: Any) -> None:
    body |= {"model_path": str(model), "weight_version": str(version)}
    await _post(served, "/update_weights_from_disk", **body)


# No other weights ---------------------------------------------------------------------------------


@pytest.mark.more_but("in_place")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_nothing(renewed: InProcess, pace: Pace, mode: str) -> None:
    """Paused twice in the middle: the same ids, and logprobs within 1e-5, as undisturbed; one span."""

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        undisturbed = await asyncio.gather(*_start(renewed))
        running = _start(renewed)
        for tokens in (10, 40):
            await pace.until(renewed, tokens)
            await _post(renewed, "/pause_generation", mode=mode)
            counts = [len(request.ids) for request in renewed.engine._live.values()]
            assert max(counts) < 120
            await asyncio.sleep(0.05)
            assert [len(request.ids) for request in renewed.engine._live.values()] == counts
            await _post(renewed, "/continue_generation")
        pace.full()
        return undisturbed, list(await asyncio.gather(*running))

    for before, after in zip(*renewed.run(scenario()), strict=True):
        assert after.completion_ids.tolist() == before.completion_ids.tolist()
        assert np.abs(after.logprobs - before.logprobs).max() < 1e-5
        assert after.finish_reason == before.finish_reason
        assert after.version_spans == before.version_spans
        assert after.timings["held_us"] > 90_000 if mode == "retract" else True


def test_what_is_heard_on_the_way_is_what_comes(renewed: InProcess, pace: Pace) -> None:
    """Across a retraction a listener hears every id once, in order."""
    heard: list[int] = []

    async def scenario() -> Generation:
        ids = _prompt(renewed).ids
        generation = asyncio.create_task(
            renewed.engine.generate(
                Prompt(ids, (), None, "r"), Sampling(60, 1.0, 3), lambda new, _: heard.extend(new)
            )
        )
        await pace.until(renewed, 5)
        await _post(renewed, "/pause_generation", mode="retract")
        await _post(renewed, "/continue_generation")
        pace.full()
        return await generation

    generation = renewed.run(scenario())
    assert heard == generation.completion_ids.tolist()


def test_abort_ends_what_has_tokens_and_holds_what_has_none(renewed: InProcess, pace: Pace) -> None:
    """The default mode, as SGLang's; who comes during the pause waits too."""

    async def scenario() -> tuple[list[Generation], Generation]:
        running = _start(renewed)
        await pace.until(renewed, 5)
        # It is in the batch, but no forward pass comes before the pause.
        await renewed.engine.updates._call(renewed.engine._manager.stand_still)
        fresh = asyncio.create_task(
            renewed.engine.generate(_prompt(renewed, name="fresh"), Sampling(8, 1.0, 77))
        )
        while "fresh" not in renewed.engine._live or renewed.engine._live["fresh"].running is None:
            await asyncio.sleep(0.001)
        answer = await _post(renewed, "/pause_generation")
        await renewed.engine.updates._call(renewed.engine._manager.go_on)
        assert answer == {"message": "Generation paused successfully.", "status": "ok"}
        pace.full()
        generations = await asyncio.gather(*running)
        await asyncio.sleep(0.05)
        assert not fresh.done()
        await _post(renewed, "/continue_generation")
        return list(generations), await fresh

    generations, fresh = renewed.run(scenario())
    assert {g.finish_reason for g in generations} <= {"abort", "stop"}
    assert "abort" in {g.finish_reason for g in generations}
    assert all(0 < len(g.completion_ids) < 120 for g in generations)
    assert fresh.finish_reason in ("length", "stop")
    (span,) = fresh.version_spans
    assert span.end == len(fresh.completion_ids)


@pytest.mark.more_but("abort", "in_place")
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_who_comes_during_a_pause_waits(renewed: InProcess, pace: Pace, mode: str) -> None:
    """`ready` holds, /v1/loads tells who runs and who waits, and nobody is lost."""

    async def loads() -> tuple[int, int]:
        reported = (await renewed.client.get("/engine/v1/loads")).json()["loads"]
        return reported[0]["num_running_reqs"], reported[0]["num_waiting_reqs"]

    async def scenario() -> None:
        assert await loads() == (0, 0)
        running = _start(renewed, 200, range(2))
        await pace.until(renewed, 5)
        assert await loads() == (2, 0)
        await _post(renewed, "/pause_generation", mode=mode)
        late = _start(renewed, 8, [9])
        ready = asyncio.create_task(renewed.engine.ready())
        await asyncio.sleep(0.05)
        assert await loads() == {"in_place": (2, 1), "retract": (0, 3), "abort": (0, 1)}[mode]
        assert (ready.done(), late[0].done()) == (False, False)
        assert (await renewed.client.get("/engine/server_info")).json()["paused"] == mode
        await _post(renewed, "/continue_generation")
        pace.full()
        await asyncio.wait_for(ready, 30)
        assert len(await asyncio.gather(*running, *late)) == 3
        assert await loads() == (0, 0)

    renewed.run(scenario())


@pytest.mark.more
def test_one_pause_may_follow_another(renewed: InProcess, pace: Pace) -> None:
    """In place, then retracted, then in place again: it goes on as if nothing had been."""

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        undisturbed = await asyncio.gather(*_start(renewed))
        running = _start(renewed)
        await pace.until(renewed, 10)
        for mode in ("in_place", "in_place", "retract", "in_place"):
            await _post(renewed, "/pause_generation", mode=mode)
        for _ in range(2):
            await _post(renewed, "/continue_generation")
        pace.full()
        return list(undisturbed), list(await asyncio.gather(*running))

    before, after = renewed.run(scenario())
    assert [g.completion_ids.tolist() for g in after] == [g.completion_ids.tolist() for g in before]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_can_be_aborted(renewed: InProcess, pace: Pace, mode: str) -> None:
    """It ends at once with what it has; one without a token is an error."""

    async def scenario() -> Generation:
        (running,) = _start(renewed, 120, [1])
        await pace.until(renewed, 5)
        await _post(renewed, "/pause_generation", mode=mode)
        (fresh,) = _start(renewed, 120, [2])
        await asyncio.sleep(0)
        for seed in (1, 2):
            await renewed.engine.abort(f"r{seed}")
        generation = await asyncio.wait_for(running, 30)
        with pytest.raises(EngineError, match="aborted before a token came"):
            await asyncio.wait_for(fresh, 30)
        await _post(renewed, "/continue_generation")
        return generation

    generation = renewed.run(scenario())
    assert (generation.finish_reason, len(generation.completion_ids) >= 5) == ("abort", True)


def test_flushing_is_refused_while_requests_stand_in_the_batch(renewed: InProcess, pace: Pace) -> None:
    """Refused while requests stand still in the batch; fine where they were taken out of it."""

    async def scenario() -> None:
        running = _start(renewed)
        await pace.until(renewed, 5)
        await _post(renewed, "/pause_generation", mode="in_place")
        assert (await _post(renewed, "/flush_cache", status=400)).startswith("Flush cache failed.")
        await _post(renewed, "/pause_generation", mode="retract")
        assert (await _post(renewed, "/flush_cache")).startswith("Cache flushed.")
        await _post(renewed, "/continue_generation")
        pace.full()
        paused = await asyncio.gather(*running)
        assert (await renewed.client.get("/engine/flush_cache")).status_code == 405  # a GET changes nothing
        undisturbed = await asyncio.gather(*_start(renewed))
        for generation, other in zip(paused, undisturbed, strict=True):
            assert generation.completion_ids.tolist() == other.completion_ids.tolist()

    renewed.run(scenario())


def test_an_unknown_mode_of_pausing_is_a_400(renewed: InProcess) -> None:
    """A 400 that names the modes, and nothing is paused."""
    answer = renewed.post("/engine/pause_generation", json={"mode": "gently"})
    assert answer.status_code == 400
    assert "abort, in_place, retract" in answer.json()["error"]["message"]
    assert renewed.engine.gate.open.is_set()


def test_draws_go_on_where_the_cache_ran_out(
    tiny_model: Path, in_process: Callable[..., InProcess], renewed: InProcess
) -> None:
    """A cache too small for all makes transformers put requests back into its queue: the tokens stay."""
    small = in_process(EmbeddedEngine(tiny_model, cache_blocks=4), load_chat_tokenizer(tiny_model))
    offloads = 0

    def counted(act: Any) -> Any:
        def count() -> Any:
            nonlocal offloads
            offloads += 1
            return act()

        return count

    async def generations(served: Any) -> list[Generation]:
        return list(await asyncio.gather(*_start(served, 300)))

    async def scenario() -> list[Generation]:
        manager = (await asyncio.gather(*_start(small, 2, [0]))) and small.engine._manager.batch_processor
        manager.offloading_manager.offload_requests = counted(manager.offloading_manager.offload_requests)
        return await generations(small)

    squeezed = small.run(scenario())
    assert offloads > 0
    for generation, other in zip(squeezed, renewed.run(generations(renewed)), strict=True):
        assert generation.completion_ids.tolist() == other.completion_ids.tolist()
        assert np.abs(generation.logprobs - other.logprobs).max() < 1e-5


# Other weights ------------------------------------------------------------------------------------


def _check(
    generation: Generation, prompt: Any, models: dict[int, Path], forward: Any, *, kept: bool
) -> float:
    """Every span's logprobs are its version's; `kept`: over the keys and values that were there."""
    spans = generation.version_spans
    assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
    assert spans[-1].end == len(generation.completion_ids)
    assert all(s.end > s.start for s in spans)
    assert all(a.version != b.version for a, b in itertools.pairwise(spans))
    worst = 0.0
    for span in spans:
        before = [(models[s.version], s.end) for s in spans if s.end <= span.end]
        used = before if kept else [(models[span.version], span.end)]
        expected = forward(used, prompt, generation.completion_ids[: span.end])
        part = slice(span.start, span.end)
        worst = max(worst, float(np.abs(generation.logprobs[part] - expected[part]).max()))
    return worst


@pytest.mark.more_but("retract")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_each_span_has_its_versions_logprobs(
    renewed: InProcess,
    pace: Pace,
    mode: str,
    tiny_model: Path,
    other_model: Path,
    perturbed: Callable[[Path, int], Path],
    forward: Callable[..., np.ndarray],
) -> None:
    """Two updates in mid-generation: three spans, split where it stood, and the logprobs are the weights'."""
    models = {0: tiny_model, 1: other_model, 2: perturbed(tiny_model, 6)}
    stood: list[dict[str, int]] = []

    async def scenario() -> list[Generation]:
        running = _start(renewed, 240)
        for version, tokens in ((1, 15), (2, 60)):
            await pace.until(renewed, tokens)
            await _post(renewed, "/pause_generation", mode=mode)
            stood.append({name: len(request.ids) for name, request in renewed.engine._live.items()})
            if mode == "in_place":
                update = {"model_path": str(models[version]), "weight_version": str(version)}
                answer = await _post(renewed, "/update_weights_from_disk", status=400, **update)
                assert "flush_cache" in answer["message"]
                assert renewed.engine.policy_version() == version - 1
            await _update(renewed, models[version], version, flush_cache=mode == "retract")
            await _post(renewed, "/continue_generation")
        pace.full()
        return list(await asyncio.gather(*running))

    generations = renewed.run(scenario())
    assert any([s.version for s in g.version_spans] == [0, 1, 2] for g in generations)
    prompt = _prompt(renewed).ids
    for seed, g in zip(SEEDS, generations, strict=True):
        assert _check(g, prompt, models, forward, kept=mode == "in_place") < 1e-5
        for span, counts in zip(g.version_spans[:-1], stood, strict=False):
            assert span.end == counts[f"r{seed}"]
    # The versions are apart: labelled otherwise, the check fails.
    longest = max(generations, key=lambda g: len(g.version_spans))
    assert _check(longest, prompt, {0: models[1], 1: models[2], 2: models[0]}, forward, kept=False) > 1e-2


@pytest.mark.more_but("in_place-50", "retract-30")
@pytest.mark.parametrize("repeats", [50, 30])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_no_later_prompt_reads_what_old_weights_cached(
    renewed: InProcess,
    pace: Pace,
    mode: str,
    repeats: int,
    other_model: Path,
    forward: Callable[..., np.ndarray],
) -> None:
    """A prefix cached before an update, or by a request that lived through it, is not read after it."""
    prompt = _prompt(renewed, "What is 37 plus 58? " * repeats)
    # A block of the cache is 256 tokens: it was full before the update, or fills up after it.
    assert (len(prompt.ids) > 256) is (repeats == 50)

    async def scenario() -> tuple[Generation, Generation, Any]:
        generation = asyncio.create_task(
            renewed.engine.generate(Prompt(prompt.ids, (), None, "r"), Sampling(100, 1.0, 8))
        )
        await pace.until(renewed, 5)
        await _post(renewed, "/pause_generation", mode=mode)
        await _update(renewed, other_model, 1, flush_cache=False)
        await _post(renewed, "/continue_generation")
        pace.full()
        early = await renewed.engine.generate(Prompt(prompt.ids, (), None), Sampling(8, 1.0, 1))
        long = np.concatenate([prompt.ids, (await generation).completion_ids])
        assert len(long) > 260
        return early, await renewed.engine.generate(Prompt(long, (), None), Sampling(8, 1.0, 1)), long

    early, late, long = renewed.run(scenario())
    for generation, ids in ((early, prompt.ids), (late, long)):
        expected = forward([(other_model, len(generation.completion_ids))], ids, generation.completion_ids)
        assert np.abs(generation.logprobs - expected).max() < 1e-5


def test_an_update_while_aborted(
    renewed: InProcess, pace: Pace, other_model: Path, tiny_model: Path, forward: Callable[..., np.ndarray]
) -> None:
    """What was aborted keeps its version; what waited has the new one only."""

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        running = _start(renewed)
        await pace.until(renewed, 5)
        await _post(renewed, "/pause_generation")
        late = _start(renewed, 20, [20, 21])
        await _update(renewed, other_model, 1)
        await _post(renewed, "/continue_generation")
        pace.full()
        return list(await asyncio.gather(*running)), list(await asyncio.gather(*late))

    early, late = renewed.run(scenario())
    prompt = _prompt(renewed).ids
    for generations, version in ((early, 0), (late, 1)):
        for g in generations:
            assert [s.version for s in g.version_spans] == [version]
            assert _check(g, prompt, {0: tiny_model, 1: other_model}, forward, kept=False) < 1e-5


def test_the_log_has_the_spans(renewed: Any, pace: Any, other_model: Path) -> None:
    """A turn through the proxy is recorded with both versions, and so is the activation between them."""

    async def scenario() -> Any:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 4}
        request = asyncio.create_task(renewed.client.post("/t/long/v1/chat/completions", json=body))
        await pace.until(renewed, 10)
        await _post(renewed, "/pause_generation", mode="retract")
        await _update(renewed, other_model, 3)
        await _post(renewed, "/continue_generation")
        pace.full()
        return await request

    assert renewed.run(scenario()).status_code == 200
    (turn,) = renewed.trajectories()["long"].turns.values()
    assert [s.version for s in turn.completed.version_spans] == [0, 3]


@pytest.mark.more_but("retract")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_closing_while_paused(tiny_model: Path, pace: Pace, mode: str) -> None:
    """Nobody waits for a pause that will not end: what was taken out ends with what it has."""

    class Served:
        engine = EmbeddedEngine(tiny_model)

    async def activated(version: int, digest: str, path: Path) -> None:
        pass

    async def scenario() -> Generation:
        await Served.engine.start(activated)
        prompt = Prompt(np.arange(5, 25, dtype=np.int32), (), None)
        running = asyncio.create_task(Served.engine.generate(prompt, Sampling(100, 1.0, 3)))
        await pace.until(Served, 5)
        await Served.engine.updates.pause(mode)
        pace.step_s = 0.0
        await asyncio.wait_for(Served.engine.close(), 20)
        return await asyncio.wait_for(running, 30)

    generation = asyncio.run(scenario())
    assert len(generation.completion_ids) >= 5
    assert (generation.finish_reason == "abort") is (mode == "retract")


# Memory -------------------------------------------------------------------------------------------


def test_the_cache_is_given_away_and_taken_again(renewed: InProcess, pace: Pace) -> None:
    """In the middle of requests, which go on as if nothing had been; until then it does not continue."""

    def size() -> int:
        return int(renewed.engine._manager.batch_processor.cache.cache_tensor.untyped_storage().nbytes())

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        undisturbed = await asyncio.gather(*_start(renewed))
        running, whole = _start(renewed), size()
        await pace.until(renewed, 10)
        refusal = await _post(renewed, "/release_memory_occupation", status=400, tags=["kv_cache"])
        assert "pause with mode retract" in refusal["message"]
        await _post(renewed, "/pause_generation", mode="retract")
        for tags in (["weights"], None, ["kv_cache", "weights"]):  # weights it keeps; twice does no harm
            await _post(renewed, "/release_memory_occupation", tags=tags)
            assert size() == (whole if tags == ["weights"] else 0)
        assert (await renewed.client.get("/engine/server_info")).json()["asleep"] is True
        refusal = await _post(renewed, "/continue_generation", status=400)
        assert "resume_memory_occupation() comes before continuing" in refusal["message"]
        await _post(renewed, "/resume_memory_occupation", tags=["kv_cache"])
        assert size() == whole > 0
        await _post(renewed, "/continue_generation")
        pace.full()
        return undisturbed, list(await asyncio.gather(*running))

    for before, after in zip(*renewed.run(scenario()), strict=True):
        assert after.completion_ids.tolist() == before.completion_ids.tolist()
        assert np.abs(after.logprobs - before.logprobs).max() < 1e-5


def test_weights_change_while_the_cache_is_away(renewed: InProcess, pace: Pace, other_model: Path) -> None:
    """As a training does that shares the devices: two spans, and what follows is of the new weights."""

    async def scenario() -> Generation:
        running = _start(renewed, seeds=[1])
        await pace.until(renewed, 10)
        await _post(renewed, "/pause_generation", mode="retract")
        await _post(renewed, "/release_memory_occupation")
        await _update(renewed, other_model, 1)
        await _post(renewed, "/resume_memory_occupation")
        await _post(renewed, "/continue_generation")
        pace.full()
        return (await asyncio.gather(*running))[0]

    assert [span.version for span in renewed.run(scenario()).version_spans] == [0, 1]
