"""Which parser reads a model's replies: the family detected from its chat template, or one that the operator
names.

A family of ours comes first, since it streams; where there is none for a model, and it ships a response
template of its own, transformers reads that, if it is installed.
"""

from __future__ import annotations

from pathlib import Path

from rollbook.ingest.engines.model_files import read_json
from rollbook.ingest.replies.detect import FAMILIES, PLAIN, detect_family, family_named
from rollbook.ingest.replies.family import Family
from rollbook.ingest.replies.response_schema import schema_family
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
