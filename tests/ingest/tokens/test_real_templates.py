"""Bridges of real chat templates over a real tokenizer: which there are, and that they are the rendering."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.fakes.models.corpus import ends_of
from tests.fakes.proxies.desk import bridges_of

from rollbook.ingest.tokens.bridge import NoBridge, bridge, self_test
from rollbook.ingest.tokens.chat_template import ChatTokenizer

from .invariants import check_invariants

RealChat = Callable[[str], ChatTokenizer]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]

# What follows a turn: a tool's result, two of them, the user after an answer, the user after tools were used.
TRANSITIONS = ("tool", "parallel", "user", "steps")

BRIDGE, REFUSES = "bridge", "template_refuses"
REWRITES, CHANGES = "template_rewrites_history", "template_changes_the_turn"
HIDDEN = "sentinel_not_rendered_once"

ALL = (BRIDGE,) * 4
THOUGHTS_GO = (BRIDGE, BRIDGE, REWRITES, REWRITES)
"""Reasoning is taken away once the user speaks again."""
CHAT_ONLY = (REFUSES, REFUSES, BRIDGE, REFUSES)
"""Tools, or their messages, are refused."""

# What becomes of each transition, of a turn without reasoning and of one with it.
EXPECTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            *("qwen2_5", "qwen2_5_vl", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
            *("llama3", "lfm2", "lfm2_v2", "gemma4_v2", "deepseek_r1_distill_training"),
            *("phi3", "phi3_5", "idefics3", "smolvlm"),
            *("qwen3_training", "qwen3_5_nothink_training", "qwen3_5_think_training", "qwen3_6_training"),
        ),
        (ALL, ALL),
    ),
    **dict.fromkeys(("cohere", "gemma", "gemma3", "llava_next"), (CHAT_ONLY, CHAT_ONLY)),
    "cohere2": ((BRIDGE, BRIDGE, BRIDGE, REFUSES),) * 2,
    **dict.fromkeys(
        (
            *("glm4moe", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
            *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        ),
        (ALL, THOUGHTS_GO),
    ),
    # An empty block is written, and taken away, where there was no reasoning.
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), (THOUGHTS_GO, THOUGHTS_GO)),
    # The empty block is in the last turn only, so what was sent stands as it is.
    "qwen3": (ALL, THOUGHTS_GO),
    # What stands in front of </think> goes from every answer, but not from one behind a tool's result.
    "deepseek_r1_distill": (ALL, (REWRITES, REWRITES, REWRITES, BRIDGE)),
    "deepseekv3": (ALL, (BRIDGE, BRIDGE, REWRITES, BRIDGE)),
    # A final turn ends with <|return|>, which becomes <|end|> once something follows; and reasoning is shown
    # only where there are calls, and no content.
    "gptoss": ((BRIDGE, BRIDGE, CHANGES, CHANGES), (REWRITES,) * 4),
    # A call and its result are one turn.
    **dict.fromkeys(
        ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"),
        ((REWRITES, REWRITES, BRIDGE, BRIDGE), (CHANGES, CHANGES, REWRITES, REWRITES)),
    ),
    # Content is left out where there are calls; more than one call is refused.
    **dict.fromkeys(("llama3_1", "llama3_2"), ((HIDDEN, REFUSES, BRIDGE, BRIDGE),) * 2),
    "muse_glimmer": ((HIDDEN, HIDDEN, BRIDGE, BRIDGE),) * 2,
}


def _expected(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return EXPECTED.get(name) or EXPECTED[name.removesuffix("_training")]


# Those of the corpus that it has no prefix-preserving variant of.
ALONE = (
    *("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
    *("llama3_1", "llama3_2"),
)
STOCK = [name for name in EXPECTED if not name.endswith("_training")]
NAMES = sorted([*STOCK, *(f"{name}_training" for name in STOCK if name not in ALONE)])
ONE_OF_EACH = (
    *("deepseek_r1_distill", "deepseekv3_training", "gemma3", "glm4moe", "gptoss", "llama3_1", "llava_next"),
    *("phi3_5", "qwen2_5_training", "qwen3", "qwen3_8"),
)
"""One template of each family: these stay in `make test`."""


def _call(number: int) -> dict[str, Any]:
    function = {"name": "look", "arguments": f'{{"what": "thing {number}"}}'}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": f"found {number}"}


def transition(kind: str, *, thinks: bool) -> tuple[list[Any], Any, list[Any], Any]:
    """(request, reply, new messages, tools)."""
    thought = {"reasoning_content": "I wonder."} if thinks else {}
    user, more = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    called = {"role": "assistant", "content": "Looking.", "tool_calls": [_call(1)]} | thought
    answer = {"role": "assistant", "content": "Done."} | thought
    match kind:
        case "tool":
            return [user], called, [_result(1)], TOOLS
        case "parallel":
            return [user], called | {"tool_calls": [_call(1), _call(2)]}, [_result(1), _result(2)], TOOLS
        case "user":
            return [user], answer, [more], None
    return [user, called, _result(1)], answer, [more], TOOLS


def best_bridge(tokenizer: ChatTokenizer, messages: Any, reply: Any, new: Any, tools: Any) -> tuple[Any, int]:
    """The bridge behind the first end-of-turn token that has one, or why there is none; and that token."""
    refused: list[tuple[NoBridge, int]] = []
    for last in tokenizer.stop_ids:
        result = bridge(tokenizer, messages, reply, new, tools, last)
        if not isinstance(result, NoBridge):
            return result, last
        refused.append((result, last))
    return refused[0]


def test_the_table_is_of_all_templates(templates: dict[str, str]) -> None:
    """Every template of the corpus has its line, so that a new one is looked at."""
    assert len(templates) == 72
    assert sorted(templates) == NAMES


@pytest.mark.more_but(*ONE_OF_EACH)
@pytest.mark.parametrize("name", NAMES)
def test_which_transitions_have_a_bridge(real_chat: RealChat, name: str) -> None:
    """As the table says; and where there is a bridge, rendering the whole gives the very same ids."""
    tokenizer = real_chat(name)
    # Of the stock ones the desks below ask it too.
    refused = bridges_of(tokenizer).refused if name in STOCK else self_test(tokenizer)
    assert refused is None
    rows = []
    for thinks in (False, True):
        row = []
        for kind in TRANSITIONS:
            messages, reply, new, tools = transition(kind, thinks=thinks)
            result, last = best_bridge(tokenizer, messages, reply, new, tools)
            row.append(result.reason if isinstance(result, NoBridge) else BRIDGE)
            if not isinstance(result, NoBridge):
                whole = tokenizer.encode(tokenizer.render([*messages, reply, *new], tools, generate=True))
                assert whole[-len(result) - 1 :].tolist() == [last, *result], (kind, thinks)
        rows.append(tuple(row))
    assert tuple(rows) == _expected(name)


TEXTS = (
    "",
    " ",
    "\n",
    "a\n",
    " b",
    "{'k': 1}",
    "é天🌦",
    "<|im_end|>",
    "</think>",
    "12\t3",
    "</tool_call>",
    "line\n\n",
)


def _spoken(rng: random.Random) -> str:
    return "x" + "".join(rng.choices(TEXTS, k=rng.randint(0, 4)))


def _conversations(rng: random.Random) -> Iterator[tuple[list[Any], Any, list[Any], Any]]:
    """Transitions with texts that tokenizers and templates stumble over."""
    for kind in TRANSITIONS:
        for thinks in (False, True):
            messages, reply, new, tools = transition(kind, thinks=thinks)
            messages = [m | {"content": _spoken(rng)} for m in messages]
            yield (
                messages,
                reply | {"content": _spoken(rng)},
                [m | {"content": _spoken(rng)} for m in new],
                tools,
            )


@pytest.mark.more_but(*ONE_OF_EACH)
@pytest.mark.parametrize("name", NAMES)
def test_a_bridge_is_what_rendering_the_whole_appends(real_chat: RealChat, name: str) -> None:
    """Over odd texts: whatever the template does to the reply, the ids behind it are the bridge's."""
    tokenizer, rng = real_chat(name), random.Random(name)
    compared = 0
    for _ in range(6):
        for messages, reply, new, tools in _conversations(rng):
            result, last = best_bridge(tokenizer, messages, reply, new, tools)
            if not isinstance(result, NoBridge):
                whole = tokenizer.encode(tokenizer.render([*messages, reply, *new], tools, generate=True))
                assert np.array_equal(whole[-len(result) - 1 :], [last, *result])
                compared += 1
    assert compared or BRIDGE not in {*_expected(name)[0], *_expected(name)[1]}


# Recording over each of them -------------------------------------------------------------------------


@pytest.mark.more_but(*ONE_OF_EACH)
@pytest.mark.parametrize("name", STOCK)
def test_every_template_records_exactly(desk: Any, real_chat: RealChat, name: str) -> None:
    """With a bridge or without: a family that has none costs roots, and never a token."""
    tokenizer = real_chat(name)
    d = desk(lambda messages, tools: ("Sun is shining.", "stop", tokenizer.stop_ids[0]), tokenizer)
    messages: list[Any] = [{"role": "user", "content": "one"}]
    links = []
    for turn in range(3):
        answered = d.take(messages)
        links.append(d.link(answered))
        shown = {"role": "assistant", "content": answered.reply["content"]}
        messages += [shown, {"role": "user", "content": f"more {turn}"}]
    samples = check_invariants(d)
    assert len(samples) == sum(link.startswith("root:") for link in links)
    extended = not links[1].startswith("root:")
    first = bridge(tokenizer, messages[:1], answered.reply, messages[2:3], None, tokenizer.stop_ids[0])
    assert extended == (not isinstance(first, NoBridge))
    assert ends_of(name)[0] in tokenizer.decode(samples[0].tokens, special=True)


# The tokenizer -------------------------------------------------------------------------------------


def test_the_tokenizer_is_qwens(real_chat: RealChat) -> None:
    """Known ids: words, and the control tokens that Qwen3 added."""
    tokenizer = real_chat("qwen3").tokenizer
    assert tokenizer.encode("Hello world").ids == [9707, 1879]
    names = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
    )
    ids = (151643, 151644, 151645, 151657, 151658, 151667, 151668)
    assert tuple(map(tokenizer.token_to_id, names)) == ids
    text = "<|im_start|>user\nHello world<|im_end|>\n"
    assert tokenizer.encode(text).ids == [151644, 872, 198, 9707, 1879, 151645, 198]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_boundaries_in_text_are_not_boundaries_in_ids(real_chat: RealChat) -> None:
    """Why bridges begin at an end-of-turn token: elsewhere ids of two texts are not those of their sum."""
    tokenizer, rng = real_chat("qwen3"), random.Random(5)
    end = "<|im_end|>"
    letters = "abc XYZ.,\n\t{}[]\"'é天1"
    merged = split = 0
    for _ in range(600):
        left, right = ("".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(2))
        apart = [*tokenizer.encode(left), *tokenizer.encode(right)]
        merged += tokenizer.encode(left + right).tolist() != apart
        stop = tokenizer.stop_ids[0]
        around = [*tokenizer.encode(left), stop, *tokenizer.encode(right)]
        split += tokenizer.encode(left + end + right).tolist() != around
    assert merged > 50
    assert split == 0
