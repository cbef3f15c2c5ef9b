"""Fixtures of the token tests: desks that remember what the engine saw, and real tokenizers and templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollbook.ingest.replies.detect import FAMILIES, detect_family
from rollbook.ingest.tokens.bridge import TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer

from .corpus import chat_templates, qwen_tokenizer, real_chat_tokenizer
from .desks import TokenDesk


@pytest.fixture
def desk(tmp_path: Path, chat: Callable[[str], ChatTokenizer]) -> Iterator[Callable[..., TokenDesk]]:
    """Makes desks; closes them. A template is named, or a tokenizer with one given."""
    made: list[TokenDesk] = []

    def make(
        answers: Callable[[Any, Any], Any],
        template: str | ChatTokenizer = "chatml",
        policy: TreePolicy | None = None,
    ) -> TokenDesk:
        real = isinstance(template, ChatTokenizer)
        tokenizer = template if isinstance(template, ChatTokenizer) else chat(template)
        family = FAMILIES[detect_family(tokenizer.template_source)] if real else None
        made.append(TokenDesk(tmp_path / f"desk-{len(made)}", tokenizer, answers, policy, family))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Qwen3's tokenizer; it takes seconds to make, so pytest's cache keeps it."""
    cache = getattr(request.config, "cache", None)
    return qwen_tokenizer(tmp_path_factory.mktemp("qwen") if cache is None else cache.mkdir("qwen-tokenizer"))


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Sources of the real chat templates, by name."""
    return chat_templates()


@pytest.fixture(scope="session")
def real_chat(qwen: Tokenizer, templates: dict[str, str]) -> Callable[[str], ChatTokenizer]:
    """Real chat templates over Qwen's tokenizer, by name."""
    made: dict[str, ChatTokenizer] = {}

    def get(name: str) -> ChatTokenizer:
        if name not in made:
            made[name] = real_chat_tokenizer(qwen, name, templates[name])
        return made[name]

    return get
