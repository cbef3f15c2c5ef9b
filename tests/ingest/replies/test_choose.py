"""Which parser reads a model's replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.replies.response_schema import ResponseTemplate
from rollbook.store.errors import ConfigError, ModelError

from .test_response_schema import TEMPLATE

HERMES = "<tool_call>{{ call.arguments }}"
OTHER = "{{ messages }}"


def _model(folder: Path, **settings: Any) -> Path:
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    return folder


def test_the_chat_template_decides(tmp_path: Path) -> None:
    """A family of ours comes before what the model ships, for it streams; without either it is plain."""
    model = _model(tmp_path, response_template=TEMPLATE)
    assert choose_family("auto", model, HERMES).name == "hermes"
    assert choose_family("auto", _model(tmp_path), OTHER).name == "plain"
    assert choose_family("auto", tmp_path / "nowhere", OTHER).name == "plain"


def test_a_family_can_be_named(tmp_path: Path) -> None:
    """Whatever the template looks like; one that is none is refused with the choices."""
    assert choose_family("mistral", tmp_path, HERMES).name == "mistral"
    with pytest.raises(ConfigError, match="hermes"):
        choose_family("claude", tmp_path, HERMES)


def test_a_models_own_template_is_read_by_transformers(tmp_path: Path) -> None:
    """Where there is no family of ours, or where it is asked for by name."""
    pytest.importorskip("transformers")
    model = _model(tmp_path, response_template=TEMPLATE)
    for wanted, source in (("auto", OTHER), ("response_template", HERMES)):
        family = choose_family(wanted, model, source)
        assert isinstance(family, ResponseTemplate)
        assert family.template == TEMPLATE


def test_a_template_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Asked for by name, and not shipped."""
    with pytest.raises(ConfigError, match="ships none"):
        choose_family("response_template", _model(tmp_path), HERMES)


def test_settings_that_are_no_json_are_told(tmp_path: Path) -> None:
    """The file is named."""
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        choose_family("auto", tmp_path, OTHER)
