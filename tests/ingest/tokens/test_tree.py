"""The tree of turns, over a real log: what extends, what becomes a root and why, and which ids result."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rollbook.ingest.tokens.bridge import SENTINEL
from rollbook.store.fold.trajectory import fold
from rollbook.train.select.samples import samples_of

from .invariants import check_invariants

USER = {"role": "user", "content": "What is the weather in Paris?"}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"city":"Paris",  "days": 2}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>{"name": "look", "arguments": {"at": [1.5, 2]}}</tool_call>'


def _user(text: str = "And tomorrow?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _tool(answered: Any, text: str, index: int = 0) -> dict[str, Any]:
    call = answered.reply["tool_calls"][index]
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def _script(*answers: Any) -> Callable[[Any, Any], Any]:
    waiting = deque(answers)
    return lambda messages, tools: waiting.popleft()


# What extends --------------------------------------------------------------------------------------


def test_a_verbatim_echo_extends(desk: Any) -> None:
    """01: the client sends back exactly what it got: one sample, whose mask is the two completions."""
    d = desk(_script("Sunny.", "Rain."))
    first = d.take([USER])
    second = d.take([USER, first.reply, _user()])
    assert d.link(first) == "root:first_turn"
    assert d.link(second) == first.turn_id
    (sample,) = check_invariants(d)
    assert sample.turn_ids == (first.turn_id, second.turn_id)
    assert d.tokenizer.decode(sample.tokens, special=True) == (
        "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\nSunny.<|im_end|>\n"
        "<|im_start|>user\nAnd tomorrow?<|im_end|>\n<|im_start|>assistant\nRain.<|im_end|>"
    )
    assert (
        d.tokenizer.decode(sample.tokens[sample.loss_mask], special=True) == "Sunny.<|im_end|>Rain.<|im_end|>"
    )


def _respaced(message: dict[str, Any]) -> dict[str, Any]:
    calls = json.loads(json.dumps(message["tool_calls"]))
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        mirrored = {k: float(v) if v == 2 else v for k, v in reversed(arguments.items())}
        call["function"]["arguments"] = json.dumps(mirrored, indent=1)
    return message | {"tool_calls": calls}


ECHOES = {
    "verbatim": lambda m: m,
    "arguments": _respaced,
    "empty text": lambda m: m | {"content": ""},
    "no content": lambda m: {k: v for k, v in m.items() if k != "content"},
    "no parts": lambda m: m | {"content": []},
    "extra keys": lambda m: m | {"refusal": None, "audio": None, "function_call": None, "annotations": []},
    "no call ids": lambda m: m | {"tool_calls": [{"function": c["function"]} for c in m["tool_calls"]]},
    "objects": lambda m: (
        m
        | {
            "tool_calls": [
                c | {"function": c["function"] | {"arguments": json.loads(c["function"]["arguments"])}}
                for c in m["tool_calls"]
            ]
        }
    ),
}


@pytest.mark.parametrize("echo", ECHOES)
def test_a_reserialised_echo_extends(desk: Any, tools: list[dict[str, Any]], echo: str) -> None:
    """03, 04, 06, 07, 07b: key order, white space, 2.0 for 2, null for "", extra keys: still the turn."""
    d = desk(_script(TWO_CALLS, "Rain."))
    first = d.take([USER], tools=tools)
    echoed = ECHOES[echo](first.reply)
    second = d.take([USER, echoed, _tool(first, "3"), _tool(first, "4", 1)], tools=tools)
    assert d.link(second) == first.turn_id
    assert len(check_invariants(d)) == 1


def test_text_as_parts_extends(desk: Any) -> None:
    """05: a client that sends text as a list of parts still goes on from its turn."""
    d = desk(_script("Sunny.", "Rain."))
    first = d.take([USER])
    parts = {
        "role": "assistant",
        "content": [{"type": "text", "text": "Sun"}, {"type": "text", "text": "ny."}],
    }
    second = d.take(
        [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}, parts, _user()]
    )
    assert d.link(second) == first.turn_id


def test_sampled_ids_are_kept_though_no_tokenizer_gives_them(desk: Any) -> None:
    """11: the ids sampled stay in the next prompt, where encoding their text gives others."""
    d = desk(_script("calling the tool now, calling the tool now", "Rain."))
    first = d.take([USER])
    second = d.take([USER, first.reply, _user()])
    sampled = d.engine.made[0].completion_ids
    text = d.tokenizer.decode(sampled, special=True)
    assert sampled.tolist() != d.tokenizer.encode(text).tolist()
    prompt = d.trajectory().prompt_ids(d.turn(second))
    start = first.completed.prompt_length
    assert np.array_equal(prompt[start : start + len(sampled)], sampled)
    assert np.array_equal(d.engine.sent[1], prompt)
    assert not np.array_equal(prompt, d.tokenizer.encode(d.tokenizer.decode(prompt, special=True)))


def test_a_canonical_completion_equals_rendering_the_whole(desk: Any) -> None:
    """29: if the engine samples what the tokenizer would give, extending is rendering the history."""
    d = desk(_script("Sunny.", "Rain."))
    d.engine.ids_of = lambda text: d.tokenizer.encode(text).tolist()
    first = d.take([USER])
    messages = [USER, first.reply, _user()]
    d.take(messages)
    whole = d.tokenizer.encode(d.tokenizer.render(messages, None, generate=True))
    assert np.array_equal(d.engine.sent[1], whole)


def test_tool_results_in_another_order_are_new_content(desk: Any, tools: list[dict[str, Any]]) -> None:
    """24: which result comes first is the client's to say."""
    d = desk(_script(TWO_CALLS, "Rain."))
    first = d.take([USER], tools=tools)
    second = d.take([USER, first.reply, _tool(first, "4", 1), _tool(first, "3")], tools=tools)
    assert d.link(second) == first.turn_id


def test_control_tokens_in_tool_output_are_exact_context(desk: Any, tools: list[dict[str, Any]]) -> None:
    """27: a file that holds <|im_end|> makes context without loss, and the turn after it extends too."""
    d = desk(_script(CALL, "Rain.", "Bye."))
    first = d.take([USER], tools=tools)
    messages = [USER, first.reply, _tool(first, "log:<|im_end|>\n<|im_start|>assistant\nhi")]
    second = d.take(messages, tools=tools)
    third = d.take([*messages, second.reply, _user()], tools=tools)
    assert [d.link(second), d.link(third)] == [first.turn_id, second.turn_id]
    (sample,) = check_invariants(d)
    stop = d.tokenizer.stop_ids[0]
    assert int((sample.tokens[sample.loss_mask] == stop).sum()) == 3


def test_a_template_that_wants_string_arguments_extends(desk: Any, tools: list[dict[str, Any]]) -> None:
    """The bridge is derived in the form of arguments the template takes."""
    d = desk(_script(CALL, "Rain."), "string_arguments")
    first = d.take([USER], tools=tools)
    second = d.take([USER, first.reply, _tool(first, "3")], tools=tools)
    assert d.link(second) == first.turn_id


# What becomes a root -------------------------------------------------------------------------------


def _edited_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = json.loads(json.dumps(message["tool_calls"]).replace("Paris", "London"))
    return message | {"tool_calls": calls}


EDITS = {
    "arguments": _edited_arguments,
    "content": lambda m: m | {"content": "I changed this."},
    "order of calls": lambda m: m | {"tool_calls": m["tool_calls"][::-1]},
    "dropped call": lambda m: m | {"tool_calls": m["tool_calls"][:1]},
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_turn_makes_a_root(desk: Any, tools: list[dict[str, Any]], edit: str) -> None:
    """08, 09, 25: what the client changed was not sampled: two samples, each exact."""
    d = desk(_script(TWO_CALLS, "Rain."))
    first = d.take([USER], tools=tools)
    second = d.take([USER, EDITS[edit](first.reply), _tool(first, "3")], tools=tools)
    assert d.link(second) == "root:no_matching_turn"
    assert len(check_invariants(d)) == 2


def test_white_space_a_client_strips_makes_a_root(desk: Any) -> None:
    """White space of content counts: a stripped echo is another text."""
    d = desk(_script("Sunny.\n", "Rain."))
    first = d.take([USER])
    assert first.reply["content"] == "Sunny.\n"
    assert (
        d.link(d.take([USER, {"role": "assistant", "content": "Sunny."}, _user()])) == "root:no_matching_turn"
    )


def test_a_parent_cut_off_by_length_makes_a_root(desk: Any) -> None:
    """12: a turn that ran out of tokens is gone on from in a root of its own."""
    d = desk(_script(("Sunny with", "length", None), "Rain."))
    first = d.take([USER])
    assert first.completed.finish_reason == "length"
    assert d.link(d.take([USER, first.reply, _user()])) == "root:parent_without_end_of_turn"
    assert len(check_invariants(d)) == 2


def test_a_parent_ended_by_another_stop_token_makes_a_root(desk: Any, chat: Any) -> None:
    """14: <|endoftext|> ends a completion, but the template does not write it."""
    d = desk(_script(("Sunny.", "stop", chat().stop_ids[1]), "Rain."))
    first = d.take([USER])
    assert first.reply["content"] == "Sunny."
    assert d.link(d.take([USER, first.reply, _user()])) == "root:no_end_of_turn_in_template"


def test_a_template_that_drops_thinking_makes_a_root(desk: Any) -> None:
    """16: after a new user message this template would render earlier thinking away."""
    d = desk(_script("<think>hm</think>Looking.", "Rain.", "Bye."), "rewriting")
    first = d.take([USER])
    messages = [USER, first.reply, {"role": "tool", "content": "rain"}]
    second = d.take(messages)
    third = d.take([*messages, second.reply, _user()])
    assert [d.link(second), d.link(third)] == [first.turn_id, "root:template_rewrites_history"]
    assert len(check_invariants(d)) == 2


@pytest.mark.parametrize("change", ["reordered", "dropped", "edited"])
def test_other_tools_make_a_root(desk: Any, tools: list[dict[str, Any]], change: str) -> None:
    """17: tools are part of the prompt, in their order."""
    other = {"reordered": tools[::-1], "dropped": None, "edited": [tools[0], tools[1] | {"strict": True}]}
    d = desk(_script("Sunny.", "Rain."))
    first = d.take([USER], tools=tools)
    second = d.take([USER, first.reply, _user()], tools=other[change])
    assert d.link(second) == "root:no_matching_turn"


def test_another_system_message_makes_a_root(desk: Any) -> None:
    """18: a date in the system message is another conversation."""
    d = desk(_script("Sunny.", "Rain."))
    first = d.take([{"role": "system", "content": "Today is Monday."}, USER])
    second = d.take([{"role": "system", "content": "Today is Tuesday."}, USER, first.reply, _user()])
    assert d.link(second) == "root:no_matching_turn"


def test_an_injected_assistant_message_makes_a_root(desk: Any) -> None:
    """26: a turn the engine never took is in the prompt, so nothing of it may be trained."""
    d = desk(_script("Sunny.", "Rain."))
    earlier = d.take([USER])
    injected = {"role": "assistant", "content": "Injected."}
    later = d.take([USER, earlier.reply, _user(), injected, _user("Go on")])
    assert d.link(later) == "root:foreign_assistant_message"
    first, second = check_invariants(d)
    assert "Injected." in d.tokenizer.decode(second.tokens)
    assert "Injected." not in d.tokenizer.decode(second.tokens[second.loss_mask])
    assert first.turn_ids == (earlier.turn_id,)


def test_the_sentinel_in_user_text_makes_a_root(desk: Any) -> None:
    """42: text that holds this process's sentinel costs a sample and nothing else."""
    d = desk(_script("Sunny.", "Rain."))
    first = d.take([USER])
    second = d.take([USER, first.reply, _user(SENTINEL)])
    assert d.link(second) == "root:sentinel_not_rendered_once"
    assert len(check_invariants(d)) == 2


def test_a_tokenizer_that_merges_the_end_never_extends(desk: Any) -> None:
    """F2: where the self-test fails, every turn is a root that says so."""
    d = desk(_script("Sunny.", "Rain."), "not_atomic")
    assert d.turn_runner.bridges.refused == "end_of_turn_not_atomic"
    first = d.take([USER])
    second = d.take([USER, first.reply, _user()])
    assert [d.link(first), d.link(second)] == ["root:extension_refused", "root:extension_refused"]
    check_invariants(d)


def test_a_system_message_the_template_refuses_is_a_400(desk: Any) -> None:
    """A template without system messages refuses the request, and nothing is recorded of it."""
    from rollbook.store.errors import RequestError

    d = desk(_script("Sunny."), "no_system")
    with pytest.raises(RequestError, match="System role not supported"):
        d.take([{"role": "system", "content": "s"}, USER])
    assert list(d.store.events()) == []


# Forests -------------------------------------------------------------------------------------------


def test_compaction_makes_a_root_that_itself_extends(desk: Any) -> None:
    """19: after a summary the conversation is another one, and goes on as such: two samples."""
    d = desk(_script("Sunny.", "Rain.", "Snow.", "Bye."))
    first = d.take([USER])
    second = d.take([USER, first.reply, _user()])
    summary = [_user("Summary: sun, then rain. Next?")]
    third = d.take(summary)
    fourth = d.take([*summary, third.reply, _user()])
    assert [d.link(t) for t in (second, third, fourth)] == [
        first.turn_id,
        "root:no_matching_turn",
        third.turn_id,
    ]
    samples = check_invariants(d)
    assert [s.turn_ids for s in samples] == [(first.turn_id, second.turn_id), (third.turn_id, fourth.turn_id)]


def test_an_interleaved_sub_agent_leaves_the_main_line_alone(desk: Any, tools: list[dict[str, Any]]) -> None:
    """20: a sub-agent with its own system message has its own root; the main line still extends."""
    d = desk(_script(CALL, "sub 1", "Rain.", "sub 2"))
    main = d.take([USER], tools=tools)
    sub_messages = [{"role": "system", "content": "Summarise."}, _user("text")]
    sub = d.take(sub_messages)
    main_two = d.take([USER, main.reply, _tool(main, "3")], tools=tools)
    sub_two = d.take([*sub_messages, sub.reply, _user()])
    assert [d.link(t) for t in (main, sub)] == ["root:first_turn", "root:no_matching_turn"]
    assert [d.link(t) for t in (main_two, sub_two)] == [main.turn_id, sub.turn_id]
    assert len(check_invariants(d)) == 2


def test_a_fork_trains_the_shared_turn_once(desk: Any) -> None:
    """21: two continuations of a turn are two samples; the first leaf owns the shared turn."""
    d = desk(_script("Sunny.", "Rain.", "Snow."))
    first = d.take([USER])
    second = d.take([USER, first.reply, _user()])
    third = d.take([USER, first.reply, _user("And in winter?")])
    assert [d.link(second), d.link(third)] == [first.turn_id, first.turn_id]
    left, right = check_invariants(d)
    assert d.tokenizer.decode(left.tokens[left.loss_mask]) == "Sunny.Rain."
    assert d.tokenizer.decode(right.tokens[right.loss_mask]) == "Snow."
    assert "Sunny." in d.tokenizer.decode(right.tokens)


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_twins_are_told_apart_by_the_call_ids_echoed(
    desk: Any, tools: list[dict[str, Any]], chosen: int
) -> None:
    """22: equal replies of other tokens: the call id the client echoes names the one it went on from."""
    d = desk(_script(CALL, CALL, CALL, "Rain."))
    twins = [d.take([USER], tools=tools) for _ in range(3)]
    assert len({g.completion_ids.tobytes() for g in d.engine.made}) == 3
    picked = twins[chosen]
    last = d.take([USER, picked.reply, _tool(picked, "3")], tools=tools)
    assert d.link(last) == picked.turn_id
    check_invariants(d)


def test_twins_of_text_go_on_from_the_latest(desk: Any) -> None:
    """23: equal texts cannot be told apart; the latest is taken, and its own tokens are kept."""
    d = desk(_script("Sunny and warm.", "Sunny and warm.", "Rain."))
    d.take([USER])
    two = d.take([USER])
    three = d.take([USER, two.reply, _user()])
    assert d.link(three) == two.turn_id
    assert len(check_invariants(d)) == 2


def test_a_twin_without_an_end_leaves_the_other_flagged(desk: Any, chat: Any) -> None:
    """23: where the latest twin cannot be extended the other one is, and it is said that there were two."""
    d = desk(_script("Sunny.", ("Sunny.", "stop", chat().stop_ids[1]), "Rain."))
    first = d.take([USER])
    second = d.take([USER])
    third = d.take([USER, second.reply, _user()])
    assert d.link(third) == first.turn_id
    assert third.completed.flags == ["ambiguous_parent"]
    check_invariants(d)


def test_a_twin_that_is_named_is_the_only_one(desk: Any, tools: list[dict[str, Any]], chat: Any) -> None:
    """22: where the turn that the call ids name cannot be extended, no other is taken for it."""
    d = desk(_script(CALL, (CALL, "stop", chat().stop_ids[1]), "Rain."))
    d.take([USER], tools=tools)
    two = d.take([USER], tools=tools)
    three = d.take([USER, two.reply, _tool(two, "3")], tools=tools)
    assert d.link(three) == "root:no_end_of_turn_in_template"
    check_invariants(d)


def test_the_deepest_match_wins_and_gives_the_reason(desk: Any) -> None:
    """The deepest turn is tried first; where no bridge is found, the root names that turn's reason."""
    d = desk(_script("Sunny.", "Rain.", ("cut", "length", None), "Bye."))
    first = d.take([USER])
    messages = [USER, first.reply, _user()]
    second = d.take(messages)
    messages += [second.reply, _user("More")]
    third = d.take(messages)
    assert d.link(third) == second.turn_id
    fourth = d.take([*messages, third.reply, _user("Again")])
    # The earlier turns would need the cut-off turn's text as an assistant message; its own reason counts.
    assert d.link(fourth) == "root:parent_without_end_of_turn"


def test_the_same_request_again_is_a_sibling(desk: Any, tools: list[dict[str, Any]]) -> None:
    """A repeated request samples anew under the same parent."""
    d = desk(_script(CALL, "Rain.", "Snow."))
    first = d.take([USER], tools=tools)
    messages = [USER, first.reply, _tool(first, "3")]
    second, third = d.take(messages, tools=tools), d.take(messages, tools=tools)
    assert [d.link(second), d.link(third)] == [first.turn_id, first.turn_id]
    assert len(check_invariants(d)) == 2


def test_an_echo_proves_delivery(desk: Any) -> None:
    """A turn whose delivery was uncertain is delivered once a later request shows its reply."""
    d = desk(_script("Sunny.", "Rain."))
    d.recorder.mark_delivered = lambda live, turn_id, how: (
        type(d.recorder).mark_delivered(d.recorder, live, turn_id, how) if how == "echoed" else None
    )
    first = d.take([USER])
    assert d.turn(first).delivered is None
    (sample,) = samples_of(d.trajectory())
    assert not sample.loss_mask.any()
    d.take([USER, first.reply, _user()])
    assert d.turn(first).delivered == "echoed"


# Storage -------------------------------------------------------------------------------------------


def test_requests_come_back_as_sent_and_cost_their_new_part(desk: Any) -> None:
    """Messages are stored against the parent's request, and rebuilt exactly, parts and odd keys too."""
    d = desk(lambda m, t: f"answer {len(m)}")
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "ann"}]
    for turn in range(6):
        answered = d.take(messages)
        folded = d.turn(answered)
        assert d.trajectory().messages(folded) == messages
        assert len(folded.requested.messages) == (1 if turn == 0 else 2)
        messages = [*messages, answered.reply, _user(str(turn))]
    changed = [messages[0] | {"name": "bob"}, *messages[1:]]
    assert d.trajectory().messages(d.turn(d.take(changed))) == changed


def _mutated(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The message as some client would echo it."""
    message = json.loads(json.dumps(message))
    if message.get("tool_calls"):
        message = rng.choice([lambda m: m, _reordered, ECHOES["no call ids"], ECHOES["objects"]])(message)
        if message.get("content") is None:
            message["content"] = rng.choice([None, "", []])
    elif rng.random() < 0.5:
        text = message["content"]
        cut = rng.randint(0, len(text))
        message["content"] = [{"type": "text", "text": text[:cut]}, {"type": "text", "text": text[cut:]}]
    if rng.random() < 0.5:
        message |= {"refusal": None, "annotations": []}
    return dict(reversed(message.items())) if rng.random() < 0.5 else message


def _reordered(message: dict[str, Any]) -> dict[str, Any]:
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
    return message


@pytest.mark.parametrize("seed", range(4))
def test_forty_turns_of_a_mutating_client_are_one_sample(
    desk: Any, tools: list[dict[str, Any]], seed: int
) -> None:
    """28, 43: forty random turns, echoed in ever other forms, are one path, and fold the same twice."""
    rng = random.Random(seed)
    alphabet = "abc XYZ.,\n\t{}[]\"'\\<>|_éü天気🌦12"

    def text() -> str:
        return "".join(rng.choices(alphabet, k=rng.randint(1, 15)))

    def answer(messages: Any, offered: Any) -> str:
        if rng.random() < 0.5:
            return text()
        arguments = {text(): rng.choice([1, 2.0, text(), None, [True, {"k": text()}]]) for _ in range(3)}
        calls = [{"name": rng.choice("fg"), "arguments": arguments} for _ in range(rng.randint(1, 2))]
        spoken = rng.choice(["", "Calling.\n"])
        return spoken + "".join(f"<tool_call>{json.dumps(c, ensure_ascii=False)}</tool_call>" for c in calls)

    d = desk(answer)
    history: list[Any] = [{"role": "system", "content": "s"}, _user(text())]
    turn_ids = []
    for _ in range(40):
        echoed = [_mutated(m, rng) if m["role"] == "assistant" else m for m in history]
        answered = d.take(echoed, tools=tools)
        turn_ids.append(answered.turn_id)
        message = answered.reply
        calls = message.get("tool_calls") or ()
        new = [{"role": "tool", "tool_call_id": c["id"], "content": text()} for c in calls]
        history += [message, *(new or [_user(text())])]
    trajectory = d.trajectory()
    (sample,) = check_invariants(d)
    assert list(sample.turn_ids) == turn_ids
    parents = [trajectory.turns[t].requested.parent_turn_id for t in turn_ids]
    assert parents == [None, *turn_ids[:-1]]
    canonical = [
        d.tokenizer.encode(d.tokenizer.decode(g.completion_ids, special=True)) for g in d.engine.made
    ]
    odd = sum(len(c) != len(g.completion_ids) for c, g in zip(canonical, d.engine.made, strict=True))
    assert odd > 10  # the point of it: most of these ids are no tokenizer's
    (again,) = samples_of(next(iter(fold(d.store.events()).values())))
    assert again.digest() == sample.digest()
    lengths = [len(ids) for ids in d.engine.sent]
    assert all(a < b for a, b in pairwise(lengths))


def test_an_echo_proves_delivery_even_of_a_turn_that_cannot_be_extended(desk: Any) -> None:
    """A truncated turn whose text comes back was delivered, although the new turn is a root."""
    d = desk(_script(("Sunny with", "length", None), "Rain."))
    first = d.take_undelivered([USER])
    assert d.turn(first).delivered is None
    second = d.take([USER, first.reply, USER])
    assert d.link(second) == "root:parent_without_end_of_turn"
    assert d.turn(first).delivered == "echoed"
