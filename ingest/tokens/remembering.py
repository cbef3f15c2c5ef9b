"""A chat template that remembers what it rendered, for a trial that asks for the same many times. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jinja2

from rollbook.ingest.tokens.chat_template import ChatTokenizer


def remembering(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """The same tokenizer, whose template renders a conversation once; to be dropped after the trial."""
    return replace(tokenizer, template=cast(jinja2.Template, _Remembering(tokenizer.template)))


class _Remembering:
    """What `ChatTokenizer` asks of a template. A conversation that is refused is asked for again."""

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template
        self._rendered: dict[str, str] = {}

    def render(self, **given: Any) -> str:
        """The template's text of what is given, which is texts, numbers, lists and dicts."""
        key = repr(given)
        if key not in self._rendered:
            self._rendered[key] = self._template.render(**given)
        return self._rendered[key]
