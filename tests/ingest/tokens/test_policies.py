"""What a run may decide: dropped reasoning, templates that rewrite history, turns without an end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollbook.ingest.tokens.bridge import TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer

from .invariants import check_invariants

USER = {"role": "user", "content": "What is the weather in Paris?"}
RESPECT = TreePolicy(reasoning="respect")
PRESERVE = TreePolicy(history="preserve")
CLOSE = TreePolicy(unfinished="close")


def _user(text: str = "And tomorrow?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def _script(*answers: Any) -> Callable[[Any, Any], Any]:
    waiting = deque(answers)
    return lambda messages, tools: waiting.popleft()


def _silent(answered: Any) -> dict[str, Any]:
    """The reply as a client echoes it that knows nothing of reasoning."""
    return {k: v for k, v in answered.reply.items() if k != "reasoning_content"}


# Reasoning -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["chatml", "rewriting"])
def test_dropped_reasoning_means_nothing(desk: Any, template: str) -> None:
    """02: under restore the model goes on from what it thought, though the client shows none of it."""
    d = desk(_script("<think>hm</think>Sunny.", "Rain."), template)
    first = d.take([USER])
    assert first.reply["reasoning_content"] == "hm"
    assert d.link(d.take([USER, _silent(first), _tool("ok")])) == first.turn_id
    (sample,) = check_invariants(d)
    assert "<think>hm</think>Sunny." in d.tokenizer.decode(sample.tokens)


def test_dropped_reasoning_is_a_removal(desk: Any) -> None:
    """02: under respect it is taken out of the prompt, which then is a root; shown, it extends."""
    d = desk(_script("<think>hm</think>Sunny.", "Rain.", "Snow."), policy=RESPECT)
    first = d.take([USER])
    assert d.link(d.take([USER, first.reply, _user()])) == first.turn_id
    assert d.link(d.take([USER, _silent(first), _user()])) == "root:reasoning_removed"
    _, second = check_invariants(d)
    assert "hm" not in d.tokenizer.decode(second.tokens)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_edited_reasoning_makes_a_root(desk: Any, name: str) -> None:
    """10: reasoning that the client changed was not sampled; under which name it is shown means nothing."""
    d = desk(_script("<think>hm</think>Sunny.", "Rain.", "Snow."))
    first = d.take([USER])
    assert d.link(d.take([USER, _silent(first) | {name: " hm\n"}, _user()])) == first.turn_id
    assert d.link(d.take([USER, _silent(first) | {name: "changed"}, _user()])) == "root:no_matching_turn"
    assert len(check_invariants(d)) == 2


def test_edited_reasoning_of_an_earlier_turn_makes_a_root(desk: Any) -> None:
    """10: that of any turn counts, not only that of the last."""
    d = desk(_script("<think>hm</think>Sunny.", "Rain.", "Snow.", "Bye."))
    first = d.take([USER])
    second = d.take([USER, first.reply, _user()])
    edited = first.reply | {"reasoning_content": "changed"}
    third = d.take([USER, edited, _user(), second.reply, _user("More")])
    assert d.link(third).startswith("root:")
    assert d.link(d.take([USER, _silent(first), _user(), second.reply, _user("More")])) == second.turn_id
    check_invariants(d)


def test_reasoning_put_into_what_was_not_sampled_makes_a_root(desk: Any) -> None:
    """10: thoughts added to an assistant message that the client wrote itself are an edit, too."""
    d = desk(_script("Sunny.", "Rain."))
    shot = [_user("2+2?"), {"role": "assistant", "content": "4"}, USER]
    first = d.take(shot)
    shot[1] = shot[1] | {"reasoning_content": "easy"}
    assert d.link(d.take([*shot, first.reply, _user()])) == "root:no_matching_turn"


def test_earlier_dropped_reasoning_is_a_removal(desk: Any) -> None:
    """02: under respect a client that drops it from an earlier turn, later, removes it as well."""
    d = desk(_script("<think>hm</think>Sunny.", "Rain.", "Snow."), policy=RESPECT)
    first = d.take([USER])
    second = d.take([USER, first.reply, _user()])
    third = d.take([USER, _silent(first), _user(), second.reply, _user("More")])
    assert d.link(third) == "root:reasoning_removed"
    check_invariants(d)


# A template that rewrites history ------------------------------------------------------------------


def test_reasoning_dropped_long_ago_is_not_forgotten(desk: Any) -> None:
    """16: what a template takes away is seen, though no message the client sends shows it any more."""
    d = desk(_script("<think>hm</think>Looking.", "Rain.", "Bye."), "rewriting")
    first = d.take([USER])
    messages = [USER, _silent(first), _tool("rain")]
    second = d.take(messages)
    assert d.link(second) == first.turn_id
    third = d.take([*messages, second.reply, _user()])
    assert d.link(third) == "root:template_rewrites_history"
    check_invariants(d)


def test_the_history_may_be_preserved(desk: Any) -> None:
    """15: under preserve a new user turn is appended to the thoughts that the template would take away."""
    d = desk(_script("<think>hm</think>Looking.", "Rain."), "rewriting", PRESERVE)
    first = d.take([USER])
    second = d.take([USER, first.reply, _user()])
    assert d.link(second) == first.turn_id
    (sample,) = check_invariants(d)
    assert d.tokenizer.decode(sample.tokens, special=True) == (
        "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\n"
        "<think>hm</think>Looking.<|im_end|>\n"
        "<|im_start|>user\nAnd tomorrow?<|im_end|>\n<|im_start|>assistant\nRain.<|im_end|>"
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "qwen3_6"])
def test_preserved_history_is_the_prefix_preserving_template(
    desk: Any, real_chat: Callable[..., ChatTokenizer], family: str
) -> None:
    """15: what Qwen3's own template gives under preserve is what its prefix-preserving variant renders."""
    d = desk(_script("thinking</think>\n\nSunny.", "so</think>\n\nRain.", "x"), real_chat(family), PRESERVE)
    d.engine.ids_of = lambda text: d.tokenizer.encode(text).tolist()
    messages: list[Any] = [USER]
    if family == "qwen3":  # its prompt does not open the reasoning
        d.engine.answers = _script(
            "<think>\nthinking\n</think>\n\nSunny.", "<think>\nso\n</think>\n\nRain.", "x"
        )
    else:
        d.engine.answers = _script("thinking\n</think>\n\nSunny.", "so\n</think>\n\nRain.", "x")
    turns = []
    for text in ("And tomorrow?", "And then?"):
        turns.append(d.take(messages))
        messages = [*messages, turns[-1].reply, _user(text)]
    turns.append(d.take(messages))
    assert [t.reply.get("reasoning_content") for t in turns[:2]] == ["thinking", "so"]
    assert [d.link(t) for t in turns] == ["root:first_turn", turns[0].turn_id, turns[1].turn_id]
    whole = real_chat(f"{family}_training").render(messages, None, generate=True)
    assert d.tokenizer.decode(d.engine.sent[-1], special=True) == whole
    assert np.array_equal(d.engine.sent[-1], d.tokenizer.encode(whole))
    assert whole != d.tokenizer.render(messages, None, generate=True)
    assert len(check_invariants(d)) == 1


# Turns without an end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (("Sunny with", "length", None), {}),
        (("Sunny STOP", "stop", None), {"stop": ["STOP"]}),
        (("Sunny wi", "abort", None), {}),
    ],
    ids=["length", "stop string", "abort"],
)
def test_a_turn_without_an_end_may_be_closed(desk: Any, answer: Any, body: dict[str, Any]) -> None:
    """13: under close the end-of-turn token is appended as context: it was not sampled, nor is it trained."""
    d = desk(_script(answer, "Rain."), policy=CLOSE)
    first = d.take([USER], **body)
    second = d.take([USER, first.reply, _user()])
    assert d.link(second) == first.turn_id
    (sample,) = check_invariants(d)
    start = first.completed.prompt_length + len(first.completed.completion_ids)
    assert sample.tokens[start] == d.tokenizer.stop_ids[0]
    assert not sample.loss_mask[start]
    assert sample.loss_mask[start - 1]
    text = d.tokenizer.decode(sample.tokens[start:], special=True)
    assert text.startswith("<|im_end|>\n<|im_start|>user\nAnd tomorrow?<|im_end|>\n")


def test_a_turn_that_ended_otherwise_is_not_closed(desk: Any, chat: Any) -> None:
    """14: a turn that has an end, though not the template's, is not given another one."""
    d = desk(_script(("Sunny.", "stop", chat().stop_ids[1]), "Rain."), policy=CLOSE)
    first = d.take([USER])
    assert d.link(d.take([USER, first.reply, _user()])) == "root:no_end_of_turn_in_template"


@pytest.mark.parametrize("unfinished", ["root", "close"])
def test_a_reply_that_was_cut_in_front_of_its_end_makes_a_root(desk: Any, unfinished: str) -> None:
    """13: an engine that ran past the stop string sampled what nobody was shown: nothing goes on from it."""
    d = desk(_script("Sunny.#stop# and more", "Rain."), policy=TreePolicy(unfinished=unfinished))
    first = d.take([USER], stop=["#stop#"])
    assert (first.reply["content"], first.completed.flags) == ("Sunny.", ["stop_string"])
    assert int(first.completed.completion_ids[-1]) in d.tokenizer.stop_ids
    second = d.take([USER, first.reply, USER])
    assert d.link(second) == "root:reply_was_cut"
    assert "and more" not in d.tokenizer.decode(d.engine.sent[1], special=True)
