"""A small model, for which files are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.bench.scripted.dialogues import write_model
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a tokenizer, whose training takes a second, and a chat template. Never write to it."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(scripted_model: Path) -> Path:
    """The model that a module's files are imported for."""
    return scripted_model


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    """Its tokenizer."""
    return load_chat_tokenizer(model)
