"""Completions: raw prompts, as text or as ids, which no template shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.clients.streamed import PATHS
from tests.fakes.engines.played import Play
from tests.fakes.proxies.in_process import InProcess

PATH = PATHS["completions"]
NAMES = itertools.count()


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy whose engine the tests tell what to say."""
    return played()


@pytest.fixture(autouse=True)
def _reset(proxy: InProcess) -> None:
    """Each test begins with an engine that says Hello."""
    proxy.engine.answer = lambda *_: "Hello"


def _ask(proxy: Any, prompt: Any, name: str | None = None, **fields: Any) -> tuple[Any, Any]:
    """(the reply, the last turn)."""
    name = name or f"r{next(NAMES)}"
    reply = proxy.ask(f"/t/{name}{PATH}", {"prompt": prompt} | fields)
    assert reply.status == 200, reply.data
    return reply, list(proxy.trajectories()[name].turns.values())[-1]


@pytest.mark.parametrize("form", ["text", "ids", "list of a text", "list of ids"])
def test_one_prompt_in_each_form(proxy: InProcess, form: str) -> None:
    """The engine gets exactly these ids, no template and no special token around them."""
    text = "Once upon a time <|im_start|>"
    ids = proxy.engine.tokenizer.encode(text).tolist()
    prompt = {"text": text, "ids": ids, "list of a text": [text], "list of ids": [ids]}[form]
    reply, turn = _ask(proxy, prompt)
    assert proxy.engine.prompts[-1].ids.tolist() == ids
    assert turn.completed.prompt_ids.tolist() == ids
    assert reply.json["object"] == "text_completion"
    assert reply.json["id"] == f"cmpl-{turn.turn_id}"
    assert reply.json["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    sampled = len(turn.completed.completion_ids)
    assert reply.json["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": sampled,
        "total_tokens": len(ids) + sampled,
    }


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [[]], [""], 5, {}, ["a", "b"], [[1], [2]], [1, "a"], [-1], [2**31], [1.5], [True], [None]],
)
def test_what_is_no_prompt_is_a_400(proxy: InProcess, prompt: Any) -> None:
    """Nothing, several, or ids that are none."""
    reply = proxy.ask(f"/t/none{PATH}", {"prompt": prompt})
    assert (reply.status, reply.json["error"]["code"]) == (400, "bad_prompt")
    assert "none" not in proxy.trajectories()


def test_the_text_is_what_was_sampled(proxy: InProcess) -> None:
    """No reasoning, no calls, no trimming."""
    text = '  <think>x</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    proxy.engine.answer = lambda *_: text
    reply, turn = _ask(proxy, "go", tools=[{"type": "function", "function": {"name": "f"}}])
    assert reply.json["choices"][0]["text"] == text
    assert turn.completed.reply == {"role": "assistant", "content": text}


def test_the_default_limit_is_openais(proxy: InProcess) -> None:
    """16 tokens, unless it says otherwise."""
    _ask(proxy, "go")
    assert proxy.engine.samplings[-1].max_new_tokens == 16
    _ask(proxy, "go", max_tokens=99)
    assert proxy.engine.samplings[-1].max_new_tokens == 99


def test_ids_and_logprobs_on_request(proxy: InProcess) -> None:
    """What a trainer of its own needs."""
    reply, turn = _ask(proxy, "go", logprobs=1, return_token_ids=True, n=2)
    for choice in reply.json["choices"]:
        assert choice["token_ids"] == turn.completed.completion_ids.tolist()
        assert choice["logprobs"]["token_logprobs"] == turn.completed.logprobs.tolist()
        assert "".join(choice["logprobs"]["tokens"]) == "Hello<|im_end|>"
    assert [c["index"] for c in reply.json["choices"]] == [0, 1]


def test_ids_that_go_on_extend_the_turn(proxy: InProcess) -> None:
    """A prompt that begins with all ids of an earlier turn is its child; one that differs is a root."""
    ids = list(range(70, 90))
    first, parent = _ask(proxy, ids, "chain", return_token_ids=True)
    sampled = first.json["choices"][0]["token_ids"]
    _, child = _ask(proxy, [*ids, *sampled, 5, 6], "chain")
    assert child.requested.parent_turn_id == parent.turn_id
    assert child.completed.prompt_ids.tolist() == [5, 6]
    trajectory = proxy.trajectories()["chain"]
    assert trajectory.prompt_ids(child).tolist() == [*ids, *sampled, 5, 6]
    _, three = _ask(proxy, [*ids, *sampled[:-1], 7, 5], "chain")
    assert (three.requested.parent_turn_id, three.requested.root_reason) == (None, "no_matching_turn")
    _, same = _ask(proxy, [*ids, *sampled], "chain")
    assert same.requested.parent_turn_id is None  # there must be something new to answer


def test_a_text_is_always_a_root(proxy: InProcess) -> None:
    """Its ids need not begin with what was sampled, whatever its text begins with."""
    _ask(proxy, "go", "texts")
    _, two = _ask(proxy, "goHello on", "texts")
    assert (two.requested.parent_turn_id, two.requested.root_reason) == (None, "text_prompt")


def test_stop_strings_cut_the_text_and_not_the_ids(proxy: InProcess) -> None:
    """The log keeps what was sampled; the reply ends before the stop."""
    proxy.engine.answer = lambda *_: Play("one two STOP three", "length", ends=False)
    reply, turn = _ask(proxy, "go", stop=["STOP", "never"])
    assert reply.json["choices"][0] == {
        "index": 0,
        "text": "one two ",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert turn.completed.flags == ["stop_string"]
    whole = proxy.engine.tokenizer.decode(turn.completed.completion_ids)
    assert whole == "one two STOP three"


def test_an_engine_without_stop_strings_is_stopped(proxy: InProcess) -> None:
    """The proxy aborts it once the string has come; to the client it has stopped."""
    engine = proxy.engine
    engine.answer = lambda *_: "one two STOP" + " three" * 500
    engine.aborted.clear()
    honoured, engine.honoured = engine.honoured, engine.honoured - {"stop"}
    try:
        reply, turn = _ask(proxy, "go", stop="STOP", max_tokens=9999)
    finally:
        engine.honoured = honoured
    assert engine.aborted == [turn.turn_id]
    assert reply.json["choices"][0]["text"] == "one two "
    assert reply.json["choices"][0]["finish_reason"] == turn.completed.finish_reason == "stop"
    assert len(turn.completed.completion_ids) < 200
    assert turn.delivered == "sent"


def test_unsupported_fields_are_reported(proxy: InProcess) -> None:
    """`suffix`, `echo` and `best_of` are reported as not honoured."""
    reply, turn = _ask(proxy, "go", suffix="end", echo=True, best_of=3)
    assert reply.headers["x-rollbook-not-honoured"] == "best_of,echo,suffix"
    assert turn.requested.honoured == {"best_of": False, "echo": False, "suffix": False}
    assert reply.json["choices"][0]["text"] == "Hello"
