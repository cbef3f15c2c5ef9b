"""Fixtures of the token tests: desks that remember what the engine saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook.ingest.replies.choose import FAMILIES, detect_family
from rollbook.ingest.tokens.bridge import TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer

from .desks import TokenDesk


@pytest.fixture
def desk(tmp_path: Path, chat: Callable[[str], ChatTokenizer]) -> Iterator[Callable[..., TokenDesk]]:
    """Makes desks; closes them. A template is named, or a tokenizer with one given."""
    desks: list[TokenDesk] = []

    def make(
        answers: Callable[[Any, Any], Any],
        template: str | ChatTokenizer = "chatml",
        policy: TreePolicy | None = None,
    ) -> TokenDesk:
        real = isinstance(template, ChatTokenizer)
        tokenizer = template if isinstance(template, ChatTokenizer) else chat(template)
        family = FAMILIES[detect_family(tokenizer.template_source)] if real else None
        desks.append(TokenDesk(tmp_path / f"desk-{len(desks)}", tokenizer, answers, policy, family))
        return desks[-1]

    yield make
    for each in desks:
        each.close()
