"""Requests that the server ended go on where they were; experts, servers' versions, top-k 1: at the wire."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories.weights import ToldWeights

from rollbook.bench.scripted.asgi import reply
from rollbook.bench.scripted.job import Answer, Options, in_turn, logprobs_of
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.engines.engine import Generation, Prompt, Sampling, ignore_tokens
from rollbook.engines.sglang.client import (
    SglangEngine,
    can_continue,
    join_parts,
    remaining_request,
    routing_of,
)
from rollbook.engines.sglang.protocol import Part, Routing, part, request_body, sampling_params
from rollbook.engines.weights.name import version_in
from rollbook.store.errors import EngineError, ModelError
from rollbook.store.events import VersionSpan, token_ids
from rollbook.store.events.routed_experts import unpack
from rollbook.testing.asgi import serving

PROMPT = Prompt(token_ids([1, 2, 3]), (), None, "rid")
SAMPLING = Sampling(12, 1.0, 7)
LONG = list(range(10, 22))


async def _activated(*_: Any) -> None:
    return


@pytest.fixture
def run() -> Iterator[Callable[[Any], Any]]:
    """Runs a coroutine on one loop, and everything of a test on the same."""
    with asyncio.Runner() as runner:
        yield runner.run


class Pausing(ScriptedSGLang):
    """Pauses, in mode abort, when so many tokens of a request have come; goes on under the next version."""

    def __init__(self, *at: int, answers: Any = None, **options: Any) -> None:
        slow = [Answer(LONG[sum(at[:i]) :], token_s=0.01) for i in range(len(at) + 1)]
        super().__init__(in_turn(answers or slow), Options(log=99, weight_version="4", **options))
        self.at = list(at)

    async def pauses(self) -> None:
        """Until all have been made."""
        for count in self.at:
            while not any(job.made >= count for job in self.running.values()):
                await asyncio.sleep(0.001)
            before = set(self.running.values())
            self._pause({"mode": "abort"})
            while before & set(self.running.values()):
                await asyncio.sleep(0.001)
            self.weight_version = str(int(self.weight_version) + 1)
            self._continue({})


def _generate(run: Any, app: Pausing, sampling: Sampling, heard: Any, prompt: Prompt = PROMPT) -> Generation:
    async def scenario() -> Generation:
        with ExitStack() as stack:
            engine = SglangEngine(stack.enter_context(serving(app)), ToldWeights())
            await engine.start(_activated)
            pausing = asyncio.create_task(app.pauses())
            try:
                return await engine.generate(prompt, sampling, heard)
            finally:
                pausing.cancel()
                await engine.close()

    generation: Generation = run(scenario())
    return generation


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
def test_a_request_that_a_pause_ended_goes_on(
    run: Callable[[Any], Any], stream: bool, incremental: bool
) -> None:
    """Twice: prompt and partial ids are sent again, and the turn is whole, each token with its version.

    What the server does late with the id of a stream that has ended concerns none that goes on.
    """
    app = Pausing(3, 4, incremental=incremental, late_abort_s=0.01)
    heard: list[int] = []
    heard_logprobs: list[float] = []

    def hear(ids: Any, logprobs: Any) -> None:
        heard.extend(ids)
        heard_logprobs.extend(logprobs)

    generation = _generate(run, app, SAMPLING, hear if stream else ignore_tokens)
    sizes = [len(seen["output_ids"]) for seen in app.seen]
    assert len(sizes) == 3
    assert sum(sizes) == len(generation.completion_ids) >= 3 + 4
    first, second = sizes[0], sizes[0] + sizes[1]
    wanted = [i for seen in app.seen for i in seen["output_ids"]]
    assert generation.completion_ids.tolist() == wanted
    assert generation.logprobs is not None
    assert (
        generation.logprobs.tolist()
        == np.float32([p for seen in app.seen for p in seen["logprobs"]]).tolist()
    )
    assert generation.version_spans == (
        VersionSpan("actor", 4, 0, first),
        VersionSpan("actor", 5, first, second),
        VersionSpan("actor", 6, second, sum(sizes)),
    )
    assert (heard, heard_logprobs) == (
        (wanted, [p for s in app.seen for p in s["logprobs"]]) if stream else ([], [])
    )
    assert generation.timings["resumed"] == 2
    assert [seen["input_ids"] for seen in app.seen] == [
        [1, 2, 3],
        [1, 2, 3, *wanted[:first]],
        [1, 2, 3, *wanted[:second]],
    ]
    assert [seen["sampling_params"]["max_new_tokens"] for seen in app.seen] == [12, 12 - first, 12 - second]
    assert [seen["rid"] for seen in app.seen] == ["rid", "1-rid", "2-rid"]
    assert {seen["sampling_params"]["sampling_seed"] for seen in app.seen} == {7}


def test_a_constrained_request_does_not_go_on(run: Callable[[Any], Any]) -> None:
    """A grammar would begin anew in the middle of its text: what there is is the answer."""
    app = Pausing(3)
    generation = _generate(run, app, replace(SAMPLING, constraint={"regex": "a+"}), ignore_tokens)
    assert (generation.finish_reason, len(app.seen)) == ("abort", 1)
    assert len(generation.completion_ids) >= 3


def test_a_client_that_left_is_not_gone_on_with(run: Callable[[Any], Any]) -> None:
    """Who was asked to end a request does not begin it again."""
    app = ScriptedSGLang(in_turn([Answer(LONG, token_s=0.05)]), Options(log=9))

    async def scenario() -> Generation:
        with serving(app) as url:
            engine = SglangEngine(url, ToldWeights())
            await engine.start(_activated)
            task = asyncio.create_task(engine.generate(PROMPT, SAMPLING))
            while not (app.running and next(iter(app.running.values())).made >= 2):
                await asyncio.sleep(0.001)
            await engine.abort("rid")
            generation = await task
            assert (engine._asked, engine._ended) == ({}, set())
            await engine.close()
            return generation

    generation = run(scenario())
    assert (generation.finish_reason, len(app.seen)) == ("abort", 1)
    assert "resumed" not in generation.timings


def test_an_abort_of_what_has_gone_on(run: Callable[[Any], Any]) -> None:
    """It names the part that runs now."""
    app = Pausing(3)
    app.script = in_turn([Answer(LONG, token_s=0.01), Answer(LONG, token_s=0.2)])

    async def scenario() -> Generation:
        with serving(app) as url:
            engine = SglangEngine(url, ToldWeights())
            await engine.start(_activated)
            pausing = asyncio.create_task(app.pauses())
            task = asyncio.create_task(engine.generate(PROMPT, SAMPLING))
            while "1-rid" not in app.running:
                await asyncio.sleep(0.001)
            await engine.abort("rid")
            generation = await task
            await pausing
            await engine.close()
            return generation

    generation = run(scenario())
    assert (generation.finish_reason, generation.timings["resumed"], len(app.seen)) == ("abort", 1, 2)
    assert len(generation.completion_ids) < 12


# The parts, without a server -----------------------------------------------------------------------


def _part(ids: Any, finish: Any = "abort", spans: Any = (), experts: Any = None, **numbers: int) -> Part:
    finish = {"type": finish} if isinstance(finish, str) else finish
    return Part(token_ids(ids), np.float32([-i for i in ids]), spans, finish, experts, numbers)


def test_parts_without_a_token_are_given_up() -> None:
    """A server that ends the same request again and again is not asked for ever; progress counts anew."""
    assert can_continue([_part([]), _part([])], SAMPLING)
    with pytest.raises(EngineError, match="3 times without a token"):
        can_continue([_part([1]), _part([]), _part([]), _part([])], SAMPLING)
    assert can_continue([_part([]), _part([]), _part([1]), _part([]), _part([])], SAMPLING)


def test_a_request_that_ended_by_itself_does_not_go_on() -> None:
    """What has ended by itself, and what has all the tokens that were asked for."""
    assert not can_continue([_part([1], "stop")], SAMPLING)
    assert not can_continue([_part([1], "length")], SAMPLING)
    full = [_part(range(12))]
    assert not can_continue(full, SAMPLING)
    assert join_parts(PROMPT, SAMPLING, full, {}).finish_reason == "length"
    assert can_continue([_part(range(11))], SAMPLING)


def test_the_rest_that_is_asked_for() -> None:
    """Fewer tokens at most and at least; the same otherwise; nothing changes before the first token."""
    sampling = replace(SAMPLING, min_new_tokens=4, stop=("x",), temperature=0.5)
    prompt, rest = remaining_request(PROMPT, sampling, [_part([])])
    assert (prompt.ids is PROMPT.ids, prompt.request_id, rest) == (True, "1-rid", sampling)
    prompt, rest = remaining_request(PROMPT, sampling, [_part([5, 6]), _part([]), _part([7])])
    assert (prompt.ids.tolist(), prompt.known_tokens, prompt.request_id) == ([1, 2, 3, 5, 6, 7], 6, "3-rid")
    assert rest == replace(sampling, max_new_tokens=9, min_new_tokens=1)
    assert remaining_request(PROMPT, sampling, [_part([5, 6, 7, 8, 9])])[1].min_new_tokens == 0


def test_parts_are_joined_with_spans_and_counts() -> None:
    """Spans move on, and join where the version is the same; numbers are added; penalties are told."""
    spans = (VersionSpan("actor", 1, 0, 1), VersionSpan("actor", 2, 1, 2))
    parts = [
        _part([5, 6], spans=spans, cached_tokens=2, num_retractions=1),
        _part([]),
        _part([7, 8, 9], "stop", (VersionSpan("actor", 2, 0, 3),), cached_tokens=5, num_retractions=2),
    ]
    sampling = replace(SAMPLING, frequency_penalty=0.5)
    joined = join_parts(PROMPT, sampling, parts, {"engine_us": 3})
    assert joined.completion_ids.tolist() == [5, 6, 7, 8, 9]
    assert joined.version_spans == (VersionSpan("actor", 1, 0, 1), VersionSpan("actor", 2, 1, 5))
    assert joined.timings == {"engine_us": 3, "cached_tokens": 2, "num_retractions": 3, "resumed": 2}
    assert joined.logprob_semantics["altered"] == ["frequency_penalty"]
    assert (joined.finish_reason, joined.routed_experts) == ("stop", {})
    with pytest.raises(EngineError, match="without a token"):
        join_parts(PROMPT, SAMPLING, [_part([])], {})


# Routed experts -------------------------------------------------------------------------------------

ROUTING = Routing(2, 3)


def _answer(ids: list[int], experts: Any, finish: Any = None) -> Any:
    meta = {
        "output_token_logprobs": [[-1.0, i, None] for i in ids],
        "finish_reason": finish or {"type": "stop"},
        "weight_version": "1",
    }
    if experts is not None:
        meta["routed_experts"] = base64.b64encode(np.asarray(experts, np.int32).tobytes()).decode()
    return {"output_ids": ids, "meta_info": meta}


def _ids(positions: int, first: int = 0) -> Any:
    return (np.arange(positions * 6) + first).reshape(positions, 2, 3)


def test_experts_are_asked_for_where_the_parent_ends() -> None:
    """From the parent's last token on: it was sampled, and passes through the model only now."""
    body = request_body(PROMPT, SAMPLING, False, ROUTING)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)
    child = replace(PROMPT, known_tokens=2)
    assert request_body(child, SAMPLING, False, ROUTING)["routed_experts_start_len"] == 1
    assert "return_routed_experts" not in request_body(child, SAMPLING, False)
    joined = join_parts(
        child, SAMPLING, [part(_answer([7, 8], _ids(3)), child, "actor", ROUTING, version_in)], {}
    )
    assert joined.routed_experts["start"] == 1
    assert np.array_equal(unpack(joined.routed_experts), _ids(3))


def test_experts_of_parts_are_one() -> None:
    """The second part's begin at the first one's last token; where a part tells none the turn has none."""
    first = part(_answer([7, 8], _ids(4), {"type": "abort"}), PROMPT, "actor", ROUTING, version_in)
    rest, _ = remaining_request(PROMPT, SAMPLING, [first])
    assert request_body(rest, SAMPLING, False, ROUTING)["routed_experts_start_len"] == 4
    second = part(_answer([9], _ids(1, 24)), rest, "actor", ROUTING, version_in)
    joined = join_parts(PROMPT, SAMPLING, [first, second], {})
    assert (joined.routed_experts["start"], joined.routed_experts["shape"]) == (0, [5, 2, 3])
    assert np.array_equal(unpack(joined.routed_experts), _ids(5))
    silent = part(_answer([9], None), rest, "actor", ROUTING, version_in)
    assert join_parts(PROMPT, SAMPLING, [first, silent], {}).routed_experts == {}


def _told(versions: tuple[str, ...], retractions: int) -> Any:
    answer = _answer([7, 8], _ids(4))
    spans = [{"version": name, "start": i, "end": i + 1} for i, name in enumerate(versions)]
    answer["meta_info"] |= {"weight_versions": spans, "num_retractions": retractions}
    return answer


@pytest.mark.parametrize("versions", [("1", "2"), ("somebody's", "2")])
def test_experts_of_other_weights_are_not_taken(versions: tuple[str, str]) -> None:
    """What was retracted to new weights: they chose all, also those of the tokens that the old ones made."""
    retracted = part(_told(versions, 1), PROMPT, "actor", ROUTING, version_in)
    assert retracted.experts is None
    assert join_parts(PROMPT, SAMPLING, [retracted], {}).routed_experts == {}
    for kept in (_told(versions, 0), _told(("1",), 1)):
        assert np.array_equal(part(kept, PROMPT, "actor", ROUTING, version_in).experts, _ids(4))


def test_experts_that_are_none() -> None:
    """Of another number of positions, or no ids: the engine's fault. Unwanted ones are not looked at."""
    for experts in (_ids(3), _ids(5), np.full((4, 2, 3), -1)):
        with pytest.raises(EngineError, match=r"SGLang's|expert ids"):
            join_parts(
                PROMPT, SAMPLING, [part(_answer([7, 8], experts), PROMPT, "actor", ROUTING, version_in)], {}
            )
    assert part(_answer([7, 8], _ids(9)), PROMPT, "actor", None, version_in).experts is None


def test_what_a_model_is_made_of(tmp_path: Path) -> None:
    """Read off its configuration, that of its text model where it has several."""
    config = tmp_path / "config.json"
    for text, routing in (
        ({"num_hidden_layers": 48, "num_experts_per_tok": 8}, Routing(48, 8)),
        ({"text_config": {"num_hidden_layers": 4, "num_experts_per_tok": 2}}, Routing(4, 2)),
        ({"num_hidden_layers": 48}, None),
    ):
        config.write_text(json.dumps(text))
        assert routing_of(tmp_path) == routing
    config.write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json"):
        routing_of(tmp_path)


# Failures, versions, top-k 1 ------------------------------------------------------------------------


def test_an_abort_with_a_status_is_a_failure() -> None:
    """The server's own: nothing was sampled that counts, and nothing goes on."""
    finish = {"type": "abort", "message": "the queue is full", "status_code": 503, "err_type": "Busy"}
    with pytest.raises(EngineError, match="the queue is full"):
        part(_answer([5], None, finish), PROMPT, "actor", None, version_in)


def _serving(version: Any, **more: Any) -> Any:
    """A server that says it is of this version; None: it has no such route."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/model_info":
            await reply(send, 200, {"weight_version": "3"})
        elif version is None:
            await reply(send, 404, {"detail": "Not Found"})
        else:
            await reply(send, 200, {"version": version} | more)

    return serving(app)


def _started(run: Any, url: str, **options: Any) -> SglangEngine:
    async def scenario() -> SglangEngine:
        engine = SglangEngine(url, ToldWeights(), **options)
        await engine.start(_activated)
        await engine.close()
        return engine

    engine: SglangEngine = run(scenario())
    return engine


@pytest.mark.parametrize("version", ["0.5.18", "0.5.9.post1", "0.4.99", "0.5.18.dev3+g12"])
def test_a_server_that_is_too_old(run: Callable[[Any], Any], version: str) -> None:
    """It is named, and so is the oldest that will do."""
    message = rf"SGLang {re.escape(version)}.*0\.5\.19"
    with _serving(version) as url, pytest.raises(EngineError, match=message):
        _started(run, url)


@pytest.mark.parametrize("version", ["0.5.19", "0.5.23", "0.5.19.post1", "0.6.0rc1", "1.0"])
def test_a_server_that_is_new_enough(
    run: Callable[[Any], Any], version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Taken without a word."""
    with _serving(version) as url, caplog.at_level(logging.WARNING):
        assert _started(run, url).policy_version() == 3
    assert caplog.messages == []


@pytest.mark.parametrize("version", [None, "main", "", 5])
def test_a_server_of_unknown_version(
    run: Callable[[Any], Any], version: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A router, or a build of somebody's own: taken, with a note."""
    with _serving(version) as url, caplog.at_level(logging.WARNING):
        assert _started(run, url).policy_version() == 3
        assert caplog.messages == [
            f"{url} does not say which SGLang it is: nothing older than 0.5.19 is supported"
        ]


def test_a_server_that_tells_no_experts(run: Callable[[Any], Any]) -> None:
    """Known at the start, with the option that is missing."""
    with _serving("0.5.23", enable_return_routed_experts=False) as url:
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            _started(run, url, routed_experts=ROUTING)
        _started(run, url)
    with _serving("0.5.23", enable_return_routed_experts=True) as url:
        _started(run, url, routed_experts=ROUTING)


SENT = {"top_p": 0.9, "temperature": 0.5, "repetition_penalty": 1.1, "max_new_tokens": 9}


@pytest.mark.parametrize("form", [lambda fields: fields, lambda fields: json.dumps(fields)])
@pytest.mark.parametrize("key", ["stop", "logit_bias", "json_schema", "stop_token_ids", "ignore_eos", "n"])
def test_a_server_with_sampling_parameters_of_its_own(run: Callable[[Any], Any], key: str, form: Any) -> None:
    """Those that no request sets would be sampled with, and recorded by nobody."""
    app = ScriptedSGLang(options=Options(preferred=form(SENT | {key: 1})))
    with serving(app) as url, pytest.raises(EngineError, match="--preferred-sampling-params") as caught:
        _started(run, url)
    assert str(caught.value).startswith(f"{url} samples with {key} of its own")


@pytest.mark.parametrize("preferred", [None, "", "null", {}, "{}", SENT, json.dumps(SENT)])
def test_a_server_whose_sampling_parameters_are_always_set(run: Callable[[Any], Any], preferred: Any) -> None:
    """Taken: each request says its own."""
    with serving(ScriptedSGLang(options=Options(preferred=preferred))) as url:
        _started(run, url)


@pytest.mark.parametrize("preferred", ["stop", "[1]", [1], 5])
def test_sampling_parameters_that_are_none(run: Callable[[Any], Any], preferred: Any) -> None:
    """Who cannot say what it samples with is not taken."""
    app = ScriptedSGLang(options=Options(preferred=preferred))
    with serving(app) as url, pytest.raises(EngineError, match="that are no object"):
        _started(run, url)


@pytest.mark.parametrize("reached", [True, False])
def test_a_worker_with_sampling_parameters_of_its_own(run: Callable[[Any], Any], reached: bool) -> None:
    """Each worker is asked, since the router answers for one of them; that counts where none is reached."""
    preferring = {"preferred_sampling_params": {"stop": "x"}}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answers = {
            "/get_model_info": {"weight_version": "3"} | ({} if reached else preferring),
            "/workers": {"workers": [{"url": worker}]},
        }
        content = answers.get(scope["path"])
        await reply(send, 404 if content is None else 200, content or {})

    own = ScriptedSGLang(options=Options(preferred=preferring["preferred_sampling_params"]))
    with serving(app) as url, serving(own) as there:
        worker, named = (there, there) if reached else ("http://127.0.0.1:9", url)
        with pytest.raises(EngineError, match=f"^{named} samples with stop of its own"):
            _started(run, url)


def test_top_k_1_is_greedy() -> None:
    """Asked for as temperature 0, of which the server's logprobs are always those of softmax(logits)."""
    sampling = replace(SAMPLING, temperature=0.7, top_k=1)
    assert sampling_params(sampling)["temperature"] == 0
    joined = join_parts(PROMPT, sampling, [part(_answer([7], None), PROMPT, "actor", None, version_in)], {})
    assert joined.logprob_semantics["temperature"] == 0
    assert sampling_params(replace(sampling, top_k=2))["temperature"] == 0.7


def test_the_scripted_logprobs() -> None:
    """What the tests above compare with is what a server sends: JSON numbers."""
    assert orjson.loads(orjson.dumps(logprobs_of(LONG))) == pytest.approx(logprobs_of(LONG))
