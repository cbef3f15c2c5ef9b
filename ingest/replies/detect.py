"""Detects a model's family from its chat template's source; and the families by name.

A template shows how its model spells calls: in its instructions, and where it renders earlier calls. The
first rule that fits counts. A template that fits none gives `plain`: reasoning, and all else content.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollbook.ingest.replies.deepseek import DEEPSEEK
from rollbook.ingest.replies.family import Family
from rollbook.ingest.replies.glm import GLM
from rollbook.ingest.replies.gpt_oss import GPT_OSS
from rollbook.ingest.replies.hermes import HERMES
from rollbook.ingest.replies.lfm2 import LFM2
from rollbook.ingest.replies.llama_json import LLAMA_JSON
from rollbook.ingest.replies.marked import MarkedFamily
from rollbook.ingest.replies.mistral import MISTRAL
from rollbook.ingest.replies.qwen_coder import QWEN_CODER
from rollbook.ingest.replies.reasoning import BRACKET_THINK, THINK
from rollbook.store.errors import ConfigError

PLAIN = MarkedFamily("plain")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {f.name: f for f in (HERMES, QWEN_CODER, LLAMA_JSON, MISTRAL, DEEPSEEK, GLM, GPT_OSS, LFM2, PLAIN)}
)

# Family and what its templates hold, all of it. Hermes comes behind those that share its tag.
_RULES = (
    ("gpt_oss", ("<|start|>", "<|channel|>", "<|message|>")),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("deepseek", ("｜DSML｜",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("mistral", ("[THINK]",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("llama_json", ("<|start_header_id|>", "<|python_tag|>")),
    ("llama_json", ("<|start_header_id|>", '"parameters": ')),
)


def detect_family(template_source: str) -> str:
    """The name of the family whose form a chat template renders."""
    fitting = (name for name, marks in _RULES if all(mark in template_source for mark in marks))
    return next(fitting, PLAIN.name)


def family_named(name: str) -> Family:
    """A family by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        return FAMILIES[name]
    except KeyError:
        choices = ", ".join(FAMILIES)
        raise ConfigError(f"{name!r} is no family of replies; choose one of {choices}") from None


def opens_reasoning(prompt_text: str) -> bool:
    """The rendered prompt ends inside an open reasoning block, as those of thinking models do.

    Only what stands at the very end counts: a message may speak of `<think>`.
    """
    openings = (THINK.open, BRACKET_THINK.open, "<|channel|>analysis<|message|>")
    return prompt_text.rstrip().endswith(openings)
