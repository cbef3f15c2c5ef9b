"""A small model, for which files are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.bench.scripted.dialogues import write_model
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> ChatTokenizer:
    """Its tokenizer."""
    return load_chat_tokenizer(model)
