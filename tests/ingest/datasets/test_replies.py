"""Replies of data sets as tokens: what a template has no form for is refused by row, or left out, counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.bench.scripted.dialogues import write_model
from rollbook.cli.app import app
from rollbook.ingest.datasets.importing import Reading, import_dataset
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.errors import InterchangeError
from rollbook.store.events import TurnCompleted

# Text alone, twice ended, as Phi-3 does.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
USER = {"role": "user", "content": "Is it warm?"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [CALL], "reasoning_content": "Hm."}
FOUND = {"role": "tool", "content": "20", "tool_call_id": "call00001"}
WARM = {"role": "assistant", "content": "It is."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template shows text alone."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _file(tmp_path: Path, *chats: list[Any]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return path


def _turns(store: Path) -> list[TurnCompleted]:
    return [e.record for e in rb.open(store).events() if isinstance(e.record, TurnCompleted)]


def test_nothing_behind_the_first_end_is_trained(
    tmp_path: Path, model: Path, tokenizer: ChatTokenizer
) -> None:
    """Where an engine stops, a reply ends, whatever the template goes on with."""
    import_dataset(_file(tmp_path, [USER, WARM, USER, WARM]), tmp_path / "store", "r", model)
    turns = _turns(tmp_path / "store")
    texts = [tokenizer.decode(turn.completion_ids, special=True) for turn in turns]
    assert texts == ["It is.<|im_end|>"] * 2


def test_a_call_that_the_template_leaves_out_is_refused(tmp_path: Path, model: Path) -> None:
    """Row, parts, template and remedy are named, and nothing is written."""
    file = _file(tmp_path, [USER, WARM], [USER, CALLED, FOUND, WARM])
    message = r"row 2: the reply's reasoning and calls cannot be said with the chat template of .*model"
    with pytest.raises(InterchangeError, match=message) as refused:
        import_dataset(file, tmp_path / "store", "r", model)
    assert "--leave-out reasoning,calls" in str(refused.value)
    assert not (tmp_path / "store").exists()


def test_what_is_left_out_is_counted(tmp_path: Path, model: Path, tokenizer: ChatTokenizer) -> None:
    """The message in the log is what its tokens say; a flag tells what it lacks."""
    file = _file(tmp_path, [USER, CALLED, FOUND, WARM])
    words = ["import", str(file), "--store", str(tmp_path / "store"), "--run", "r", "--model", str(model)]
    result = CliRunner().invoke(app, [*words, "--leave-out", "reasoning,calls"])
    assert result.exit_code == 0, result.output
    assert "left out the reasoning of 1 reply" in result.output
    assert "left out the calls of 1 reply" in result.output
    first, second = _turns(tmp_path / "store")
    assert tokenizer.decode(first.completion_ids, special=True) == "I look.<|im_end|>"
    assert first.reply == {"role": "assistant", "content": "I look."}
    assert first.flags == ["tokens_from_text", "reasoning_left_out", "calls_left_out"]
    assert second.flags == ["tokens_from_text"]


@pytest.mark.parametrize(
    ("reply", "leave_out", "reason"),
    [
        (WARM | {"content": ""}, (), "the reply says nothing"),
        (WARM | {"content": " \n"}, (), "the reply says nothing"),
        (
            WARM | {"content": None, "tool_calls": [CALL]},
            ("calls",),
            "without its calls the reply says nothing",
        ),
        (CALLED, ("calls",), "reasoning and calls cannot be said"),
        (WARM | {"content": "It <|im_end|> is."}, ("calls",), "text cannot be said"),
    ],
)
def test_an_empty_reply_is_never_trained(
    tmp_path: Path, model: Path, reply: Any, leave_out: tuple[str, ...], reason: str
) -> None:
    """Nor one that ends in its middle."""
    reading = Reading(leave_out=leave_out)
    with pytest.raises(InterchangeError, match=reason):
        import_dataset(_file(tmp_path, [USER, reply]), tmp_path / "store", "r", model, reading=reading)
    assert not (tmp_path / "store").exists()


def test_the_option_names_parts(tmp_path: Path, model: Path) -> None:
    """Others are refused with the choice; it is of no use without a model."""
    words = ["import", str(_file(tmp_path, [USER, WARM])), "--store", str(tmp_path / "store"), "--run", "r"]
    for more, reason in (
        (["--model", str(model), "--leave-out", "text"], "choose from reasoning, calls"),
        (["--leave-out", "calls"], "--leave-out needs --model"),
    ):
        refused = CliRunner().invoke(app, [*words, *more])
        assert refused.exit_code != 0
        assert reason in str(refused.exception)
