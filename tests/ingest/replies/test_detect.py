"""Families by template and by name, and prompts that open the reasoning."""

from __future__ import annotations

import pickle

import pytest

from rollbook.ingest.replies.choose import FAMILIES, detect_family, family_named, opens_reasoning
from rollbook.ingest.tokens.chat_template import compile_template
from rollbook.store.errors import ConfigError

# What is in no list is plain: its template knows no calls, or a form that no family reads.
EXPECTED = {
    "hermes": ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"],
    "qwen_coder": [
        "qwen3_5_nothink",
        "qwen3_5_think",
        "qwen3_6",
        "qwen3_8",
        "nemotron_3_5_lightning",
        "nemotron_3_nano",
        "nemotron_3_super",
        "nemotron_3_ultra",
    ],
    "deepseek": ["deepseek_r1_distill", "deepseekv3"],
    "glm": ["glm4moe"],
    "gpt_oss": ["gptoss"],
    "lfm2": ["lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"],
    "llama_json": ["llama3_1", "llama3_2"],
}


def test_every_template_of_the_corpus_has_its_family(corpus: dict[str, str]) -> None:
    """All 72: those of a form we read by their family, all others plain."""
    assert len(corpus) == 72
    families = {name: family for family, names in EXPECTED.items() for name in names}
    expected = {name: families.get(name.removesuffix("_training"), "plain") for name in corpus}
    assert {name: detect_family(source) for name, source in corpus.items()} == expected
    assert set(families) <= set(corpus)


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("{{ '[TOOL_CALLS]' + tool.name + '[ARGS]' + arguments }}", "mistral"),
        ("{{ '[THINK]' + message.reasoning + '[/THINK]' }}", "mistral"),
        ("{{ '<｜DSML｜function_calls>' }}", "deepseek"),
        ("<|start_header_id|> ... <|python_tag|>", "llama_json"),
        # Look-alikes that are read otherwise: Functionary, Gemma 4, Hunyuan.
        ("<function=example>{json}</function>", "plain"),
        ("<|tool_call>call:f{arguments}<tool_call|>", "plain"),
        ("<|tool_call_start|>[f(arguments)]<|tool_call_end|>", "lfm2"),
        ("{{ messages[0].content }}", "plain"),
        ("", "plain"),
    ],
)
def test_templates_that_the_corpus_lacks(source: str, family: str) -> None:
    """Told by what such templates hold, and not by what looks like it."""
    assert detect_family(source) == family


def test_a_family_is_chosen_by_its_name() -> None:
    """Every family answers to the name it has in the registry."""
    assert {name: family_named(name).name for name in FAMILIES} == {name: name for name in FAMILIES}
    assert len(FAMILIES) == 9


def test_an_unknown_name_is_told_the_choices() -> None:
    """The error names the value and every choice, and survives pickling."""
    with pytest.raises(ConfigError) as caught:
        family_named("qwen")
    assert "'qwen'" in str(caught.value)
    assert all(name in str(caught.value) for name in FAMILIES)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),
        ("[/INST][THINK]", True),
        ("<|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nWhat is <think><|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_prompts_that_open_the_reasoning(prompt: str, opens: bool) -> None:
    """Only an opening at the very end counts; a message may speak of it."""
    assert opens_reasoning(prompt) is opens


@pytest.mark.parametrize(
    ("name", "options", "opens"),
    [
        ("qwen3", {}, False),
        ("qwen3_5_think", {}, True),
        ("qwen3_5_think", {"enable_thinking": False}, False),
        ("qwen3_5_nothink", {}, False),
        ("nemotron_3_nano", {}, True),
        ("deepseekv3", {}, True),
        ("deepseek_r1_distill", {}, True),
        ("glm4moe", {}, False),
        ("gptoss", {}, False),
        ("llama3_1", {}, False),
    ],
)
def test_generation_prompts_of_the_corpus(
    corpus: dict[str, str], name: str, options: dict[str, bool], opens: bool
) -> None:
    """Real templates, rendered up to where the model is to answer."""
    messages = [{"role": "user", "content": "Say <think>"}]
    prompt = compile_template(corpus[name]).render(
        messages=messages, tools=None, add_generation_prompt=True, bos_token="", **options
    )
    assert opens_reasoning(prompt) is opens
