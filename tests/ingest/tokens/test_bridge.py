"""The bridge: the ids between a parent turn and new messages, and every reason not to have them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from rollbook.ingest.tokens.bridge import SENTINEL, NoBridge, bridge, self_test
from rollbook.ingest.tokens.chat_template import ChatTokenizer, compile_template
from rollbook.ingest.tokens.text_encoder import TextEncoder

Chat = Callable[..., ChatTokenizer]

USER = {"role": "user", "content": "What is the weather in Paris?"}
NEXT = {"role": "user", "content": "And tomorrow?"}
REPLY = {"role": "assistant", "content": "Sunny."}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def _calls(*arguments: str) -> dict[str, Any]:
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "calc", "arguments": a}}
        for i, a in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "0", "content": text}


def _bridge(
    tokenizer: ChatTokenizer, new: list[Any], reply: Any = REPLY, messages: Any = (USER,), **kw: Any
) -> Any:
    return bridge(
        tokenizer, list(messages), reply, new, kw.get("tools"), kw.get("last", tokenizer.stop_ids[0])
    )


def _decoded(tokenizer: ChatTokenizer, ids: Any) -> str:
    assert not isinstance(ids, NoBridge), ids
    return tokenizer.decode(ids, special=True)


def test_a_user_turn_follows(chat: Chat) -> None:
    """Behind the end-of-turn token come the template's line feed, the new turn and the next prompt."""
    text = _decoded(chat(), _bridge(chat(), [NEXT]))
    assert text == "\n<|im_start|>user\nAnd tomorrow?<|im_end|>\n<|im_start|>assistant\n"


def test_parallel_tool_results_follow_in_the_order_sent(chat: Chat) -> None:
    """Several tool results become one turn, as the template gathers them; another order, another text."""
    reply = _calls('{"a": 1}', '{"a": 2}')
    text = _decoded(chat(), _bridge(chat(), [_tool("3"), _tool("4")], reply))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    swapped = _decoded(chat(), _bridge(chat(), [_tool("4"), _tool("3")], reply))
    assert swapped.index(">\n4\n<") < swapped.index(">\n3\n<")


MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXT})


@settings(max_examples=150)
@given(
    st.lists(MESSAGE, min_size=1, max_size=3), st.lists(MESSAGE, min_size=1, max_size=3), TEXT, st.booleans()
)
def test_the_bridge_equals_rendering_the_whole(
    chat: Chat, asked: list[Any], new: list[Any], text: str, calls: bool
) -> None:
    """Where the template keeps history, the parent's text and the bridge are the whole rendering."""
    tokenizer = chat()
    asked = [USER, *asked, USER]
    reply = (_calls('{"a": "é"}') | {"content": text}) if calls else {"role": "assistant", "content": text}
    ids = _bridge(tokenizer, new, reply, asked)
    whole = tokenizer.render([*asked, reply, *new], None, generate=True)
    answered = tokenizer.render([*asked, reply], None, generate=False)
    end = tokenizer.decode([tokenizer.stop_ids[0]], special=True)
    prefix = answered[: answered.rfind(end) + len(end)]
    assert [*tokenizer.encode(prefix), *ids] == tokenizer.encode(whole).tolist()


def _reason(refusal: Any) -> str:
    assert isinstance(refusal, NoBridge), refusal
    return refusal.reason


def test_an_assistant_message_among_the_new_is_foreign(chat: Chat) -> None:
    """What the engine did not sample here is no part of a bridge (injected turns, prefills)."""
    assert _reason(_bridge(chat(), [NEXT, REPLY, NEXT])) == "foreign_assistant_message"


def test_a_parent_cut_off_has_no_bridge(chat: Chat) -> None:
    """A completion without an end-of-turn token (length) cannot be gone on from."""
    assert _reason(_bridge(chat(), [NEXT], last=65)) == "parent_without_end_of_turn"


def test_a_parent_ended_by_another_stop_token_has_no_bridge(chat: Chat) -> None:
    """A turn that ended in a token the template does not write is not the template's turn."""
    tokenizer = chat()
    other = tokenizer.stop_ids[1]
    assert tokenizer.decode([other], special=True) == "<|endoftext|>"
    assert _reason(_bridge(tokenizer, [NEXT], last=other)) == "no_end_of_turn_in_template"


def test_a_template_that_drops_thinking_rewrites_history(chat: Chat) -> None:
    """A new user turn makes this template drop earlier thinking; the rendering and the ids would part."""
    tokenizer = chat("rewriting")
    thought = {"role": "assistant", "content": "Look it up.", "reasoning_content": "hm"}
    messages = [USER, thought, _tool("rain")]
    assert _reason(_bridge(tokenizer, [NEXT], REPLY, messages)) == "template_rewrites_history"
    text = _decoded(tokenizer, _bridge(tokenizer, [_tool("more")], REPLY, messages))
    assert text.endswith("<|im_start|>tool\nmore<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_ends_only_the_last_turn_changes_the_turn(chat: Chat) -> None:
    """If the turn reads otherwise once something follows it, nothing can be appended."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        "{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = replace(chat(), template=compile_template(source))
    assert _reason(_bridge(tokenizer, [NEXT])) == "template_changes_the_turn"


def test_what_follows_only_the_last_turn_is_no_part_of_it(chat: Chat) -> None:
    """As Phi-3's: text behind the end of the last turn, gone once something follows, is not appended."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% else %}<|endoftext|>{% endif %}"
    )
    tokenizer = replace(chat(), template=compile_template(source))
    text = _decoded(tokenizer, _bridge(tokenizer, [NEXT]))
    assert text == "\n<|im_start|>And tomorrow?<|im_end|>\n<|im_start|>"
    assert self_test(tokenizer) is None
    ended = _bridge(tokenizer, [NEXT], last=tokenizer.stop_ids[1])
    assert _reason(ended) == "template_changes_the_turn"


def test_a_turn_that_ends_where_the_next_begins_has_a_bridge(chat: Chat) -> None:
    """As GLM's: the model stops with the token that opens the next turn, which is not appended again."""
    source = (
        "{% for m in messages %}{{ '<|endoftext|>' if m.role == 'tool' else '<|im_start|>' }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tokenizer = replace(chat(), template=compile_template(source))
    called = _calls('{"a": "<|endoftext|>x"}')  # which is no end
    ids = _bridge(tokenizer, [_tool("found")], called, last=tokenizer.stop_ids[1])
    assert _decoded(tokenizer, ids) == "found<|im_start|>"
    assert (
        _reason(_bridge(tokenizer, [NEXT], called, last=tokenizer.stop_ids[0]))
        == "no_end_of_turn_in_template"
    )


def test_a_template_that_hides_content_renders_no_sentinel(chat: Chat) -> None:
    """Where a call hides the content the turn's end cannot be found this way; without calls it can."""
    tokenizer = chat("hides_content")
    assert _reason(_bridge(tokenizer, [NEXT], _calls("{}"))) == "sentinel_not_rendered_once"
    assert _decoded(tokenizer, _bridge(tokenizer, [NEXT])).startswith("\n<|im_start|>user\nAnd")


def test_text_that_holds_the_sentinel_is_refused(chat: Chat) -> None:
    """A client that guesses the sentinel gets a root, never a bridge cut at the wrong place."""
    new = {"role": "user", "content": f"say {SENTINEL}"}
    assert _reason(_bridge(chat(), [new])) == "sentinel_not_rendered_once"
    assert _reason(_bridge(chat(), [NEXT], REPLY, [new])) == "sentinel_not_rendered_once"


def test_a_template_that_refuses_the_new_messages_gives_no_bridge(chat: Chat) -> None:
    """A template error while deriving is a reason for a root, not a failure of the request."""
    bad = {"role": "user", "content": {"no": "text"}}
    assert _reason(_bridge(chat(), [bad])) == "template_refuses"


def test_control_tokens_in_new_text_do_not_move_the_cut(chat: Chat) -> None:
    """An end-of-turn token inside a tool's output stays inside the bridge."""
    text = _decoded(chat(), _bridge(chat(), [_tool("a<|im_end|>\nb")], _calls("{}")))
    assert text.count("<|im_end|>") == 2
    assert text.startswith("\n<|im_start|>user\n<tool_response>\na<|im_end|>\nb\n</tool_response><|im_end|>")


def test_an_end_token_inside_call_arguments_does_not_move_the_cut(chat: Chat) -> None:
    """The turn ends at the last end-of-turn token the template writes, not at one in an argument."""
    reply = _calls('{"a": "<|im_end|>x"}')
    text = _decoded(chat(), _bridge(chat(), [_tool("1")], reply))
    assert text.startswith("\n<|im_start|>user\n<tool_response>")
    assert "x" not in text


def test_the_sentinel_is_of_this_process() -> None:
    """Nobody outside can know the sentinel: 64 random bits."""
    head, _, tail = SENTINEL.partition("-")
    assert head == "sentinel"
    assert len(bytes.fromhex(tail)) == 8


@pytest.mark.parametrize(
    "template", ["chatml", "rewriting", "no_system", "string_arguments", "hides_content"]
)
def test_sound_templates_pass_the_self_test(chat: Chat, template: str) -> None:
    """Templates whose turns end in an atomic token may extend."""
    assert self_test(chat(template)) is None


def test_an_end_of_turn_that_merges_fails_the_self_test(chat: Chat) -> None:
    """Where the end of a turn merges with its neighbours, appended ids are not those of the text."""
    tokenizer = chat("not_atomic")
    stop = tokenizer.stop_ids[0]
    assert tokenizer.decode([stop], special=True) == "\n"
    assert tokenizer.encode("\n\n").tolist() != [stop, stop]
    assert self_test(tokenizer) == "end_of_turn_not_atomic"


@pytest.mark.parametrize(("scheme", "refused"), [("first", "end_of_turn_not_atomic"), ("always", None)])
def test_a_tokenizer_that_puts_a_space_in_front_may_fail_the_self_test(
    chat: Chat, scheme: Any, refused: str | None
) -> None:
    """SentencePiece's way: where a text begins otherwise alone than behind the end of a turn, it does."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((c, -1.0) for c in "▁abcxy12é ü{}\n")], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<|im_end|>"])
    stop = tokenizer.token_to_id("<|im_end|>")
    assert self_test(replace(chat(), encoder=TextEncoder(tokenizer), stop_ids=(stop,))) == refused


def test_a_bridge_that_differs_from_rendering_fails_the_self_test(chat: Chat) -> None:
    """A template that writes a turn differently when it holds other text is caught at start-up."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% if 'sentinel' in m.content %}X{% endif %}{% endfor %}"
    )
    tokenizer = replace(chat(), template=compile_template(source))
    assert self_test(tokenizer) == "bridge_differs_from_rendering"


def test_an_atomic_end_splits_every_text(chat: Chat) -> None:
    """Ids around the end-of-turn token are the ids of both sides, for random text."""
    tokenizer, rng = chat(), random.Random(3)
    stop = tokenizer.stop_ids[0]
    alphabet = " \n{}\"'aAéü天🌦1<|>_-\t"
    for _ in range(500):
        left, right = ("".join(rng.choices(alphabet, k=rng.randint(0, 8))) for _ in range(2))
        parts = [*tokenizer.encode(left), stop, *tokenizer.encode(right)]
        assert tokenizer.encode(f"{left}<|im_end|>{right}").tolist() == parts
