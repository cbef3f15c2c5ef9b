"""Which parser reads a model's replies: the family detected from its chat template, or one that the
operator names.

A family of ours comes first, since it streams; where there is none for a model, and it ships a response
template of its own, transformers reads that, if it is installed.

A family is detected from the template's source. It shows how its model spells calls: in its instructions, and
where it renders earlier calls. The first rule that fits counts. A template that fits none gives `plain`:
reasoning, and all else content.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rollbook.engines.model_files import read_json
from rollbook.ingest.replies.deepseek import DEEPSEEK
from rollbook.ingest.replies.family import BRACKET_THINK, THINK, Family
from rollbook.ingest.replies.gpt_oss import GPT_OSS
from rollbook.ingest.replies.json_calls import HERMES, LLAMA_JSON, MISTRAL
from rollbook.ingest.replies.lfm2 import LFM2
from rollbook.ingest.replies.marked import MarkedFamily
from rollbook.ingest.replies.response_schema import schema_family
from rollbook.ingest.replies.tagged_calls import GLM, QWEN_CODER
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json

AUTO, OWN = "auto", "response_template"


def choose_family(wanted: str, model: Path, template_source: str) -> Family:
    """The family for a model directory.

    Args:
        wanted: a family's name, `auto`, or `response_template` for the model's own.

    Raises:
        ConfigError: there is no such family, or the model ships no template that could be used.
        ModelError: its template is none.
    """
    if wanted not in (AUTO, OWN):
        return family_named(wanted)
    detected = detect_family(template_source)
    if wanted == AUTO and detected != PLAIN.name:
        return FAMILIES[detected]
    template = _shipped(model)
    family = None if template is None else schema_family(template)
    if family is not None:
        return family
    if wanted == OWN:
        why = "ships none" if template is None else "ships one, which needs transformers"
        raise ConfigError(f"--reply-format {OWN}: {model} {why}; choose one of {', '.join(FAMILIES)}")
    return PLAIN


def _shipped(model: Path) -> Json | None:
    """The response template in a model's tokenizer_config.json, if it has one."""
    template = read_json(model, "tokenizer_config.json").get("response_template")
    return template if isinstance(template, dict) else None


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
