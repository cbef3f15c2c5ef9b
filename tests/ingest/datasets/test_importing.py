"""Data sets into a store: exact tokens where the loss is, nothing half-done, nothing twice, and training on
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.cli.importing import reading_of
from rollbook.ingest.datasets.importing import FROM_TEXT, FirstLook, import_dataset
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store import Store
from rollbook.store.errors import InterchangeError
from rollbook.store.events import PreferenceAdded, TurnCompleted
from rollbook.store.interchange.export import export_store
from rollbook.store.interchange.importing import import_chats
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.units import apply_recipe
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.samples import Sample, all_samples

ASKED = {"role": "user", "content": "What is two plus two?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("It is four.", "It is five."))
PAIR = {"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five.", "margin": 1.5, "score_chosen": 1}


def _file(tmp_path: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def _samples(log: Store) -> dict[str, Sample]:
    return {sample.name: sample for sample in all_samples(log.trajectories().values())}


def _trained(sample: Sample, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(sample.tokens[sample.loss_mask], special=True)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_the_loss_is_on_the_answer(tmp_path: Path, model: Path, tokenizer: ChatTokenizer, name: str) -> None:
    """Of any kind of file: the whole rendered chat as tokens, the completion and its end alone trained."""
    file = _file(tmp_path, {"prompt": [ASKED, WRONG, ASKED], "completion": [RIGHT]}, name=name)
    done = import_dataset(file, tmp_path / "store", "r", model)
    assert (done["added"], done["turns"], done["preferences"], done["left_out"]) == (1, 1, 0, 0)
    log = rb.open(tmp_path / "store")
    [sample] = _samples(log).values()
    whole = tokenizer.render([ASKED, WRONG, ASKED, RIGHT], None, generate=False)
    assert whole.startswith(tokenizer.decode(sample.tokens, special=True))
    end = tokenizer.decode([tokenizer.stop_ids[0]], special=True)
    assert _trained(sample, tokenizer) == f"It is four.{end}"
    assert np.isnan(sample.logprobs[sample.loss_mask]).all()
    assert (sample.split, sample.oldest_version) == ("teacher", None)
    [turn] = [e.record for e in log.events() if isinstance(e.record, TurnCompleted)]
    assert turn.flags == [FROM_TEXT]


def test_every_reply_of_a_chat(tmp_path: Path, model: Path, tokenizer: ChatTokenizer) -> None:
    """A turn each; the second extends the first, token for token."""
    import_dataset(
        _file(tmp_path, {"messages": [ASKED, WRONG, ASKED, RIGHT]}), tmp_path / "store", "r", model
    )
    [sample] = _samples(rb.open(tmp_path / "store")).values()
    end = tokenizer.decode([tokenizer.stop_ids[0]], special=True)
    assert len(sample.turn_ids) == 2
    assert _trained(sample, tokenizer) == f"It is five.{end}It is four.{end}"


def test_recordings_of_text_get_tokens(tmp_path: Path, model: Path, tokenizer: ChatTokenizer) -> None:
    """Export and import again: the fork's two paths share what they have in common."""
    lines = [
        {"messages": [ASKED, RIGHT], "id": "a"},
        {"messages": [ASKED, WRONG, ASKED, RIGHT], "id": "b", "reward": 0.5},
    ]
    import_chats(_file(tmp_path, *lines), tmp_path / "text", "r")
    assert all(not len(sample.tokens) for sample in _samples(rb.open(tmp_path / "text")).values())
    export_store(tmp_path / "text", tmp_path / "out.jsonl", "jsonl")
    import_dataset(tmp_path / "out.jsonl", tmp_path / "store", "r", model)
    samples = _samples(rb.open(tmp_path / "store"))
    end = tokenizer.decode([tokenizer.stop_ids[0]], special=True)
    trained = {name: _trained(sample, tokenizer) for name, sample in samples.items()}
    assert trained == {"a": f"It is four.{end}", "b": f"It is five.{end}It is four.{end}"}
    assert samples["b"].reward == 0.5


def test_pairs_are_preferences(tmp_path: Path, model: Path) -> None:
    """Two trajectories and an event each; again adds nothing; a part that is missing is added."""
    file = _file(tmp_path, PAIR, {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, PAIR)
    done = import_dataset(file, tmp_path / "store", "r", model)
    assert (done["rows"], done["added"], done["preferences"]) == (3, 6, 3)
    log = rb.open(tmp_path / "store")
    preferences = [e.record for e in log.events() if isinstance(e.record, PreferenceAdded)]
    assert [(preference.margin, preference.source) for preference in preferences] == [
        (1.5, "label"),
        (None, "label"),
        (1.5, "label"),
    ]
    again = import_dataset(file, tmp_path / "store", "r", model)
    assert (again["added"], again["already_there"], again["preferences"]) == (0, 6, 0)
    more = import_dataset(_file(tmp_path, PAIR, PAIR | {"chosen": "4"}), tmp_path / "store", "r", model)
    assert (more["added"], more["preferences"]) == (2, 1)
    rewards = rb.connect(log.path).execute("select reward from rewards").fetchall()
    assert rewards == [(1.0,)] * 3


def test_preferences_that_a_crash_left_out_are_added(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trajectories are there, their preference is not: importing again adds it alone."""
    file = _file(tmp_path, PAIR)
    where = "rollbook.ingest.datasets.importing._add_preferences"
    monkeypatch.setattr(where, lambda *arguments: 0)
    import_dataset(file, tmp_path / "store", "r", model)
    monkeypatch.undo()
    done = import_dataset(file, tmp_path / "store", "r", model)
    assert (done["added"], done["preferences"]) == (0, 1)


def test_dpo_and_sft_take_them(tmp_path: Path, model: Path) -> None:
    """And what needs logprobs drops them by its rule."""
    import_dataset(_file(tmp_path, PAIR), tmp_path / "store", "r", model)
    log, recipe = rb.open(tmp_path / "store"), RecipeConfig(splits=("teacher",))
    results = {
        name: apply_recipe(log, log.head(), "r", "actor", recipe, recorded_algorithm({"name": name}))
        for name in ("dpo", "sft", "reinforce_plus_plus")
    }
    assert results["dpo"].pairs is not None
    assert [(a.name[-6:], b.name[-8:]) for a, b in results["dpo"].pairs] == [("chosen", "rejected")]
    assert len(results["sft"].kept) == 2
    assert results["reinforce_plus_plus"].rules == {"no_version": 2}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([PAIR, {"prompt": "a"}], "row 2: it has prompt: a prompt without an answer"),
        ([{"prompt": [{"role": "robot", "content": "x"}], "completion": "y"}], "row 1: .*robot"),
        ([{"messages": [ASKED]}], "row 1: its last message"),
        ([[1]], "row 1: is no object"),
    ],
)
def test_a_bad_row_stops_all(tmp_path: Path, model: Path, rows: list[Any], reason: str) -> None:
    """Nothing is written, not even a store; or such rows are left out, and counted."""
    file = _file(tmp_path, *rows)
    with pytest.raises(InterchangeError, match=reason):
        import_dataset(file, tmp_path / "store", "r", model)
    assert not (tmp_path / "store").exists()
    if rows[0] == PAIR:
        done = import_dataset(file, tmp_path / "store", "r", model, skip_bad=True)
        assert (done["added"], done["left_out"]) == (2, 1)
        assert "row 2" in done["first_left_out"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.txt", "a,b", "ends with none of .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow"),
        ("rows.json", "{}", "holds no list of rows"),
        ("rows.json", "[", "no JSON"),
        ("rows.parquet", "PAR1", "cannot be read as Parquet"),
        ("rows.jsonl", "{", "line 1: no JSON"),
        ("rows.jsonl", "\n", "holds no row"),
        ("missing.jsonl", None, "cannot read"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, model: Path, name: str, content: str | None, reason: str
) -> None:
    """The message names the file, and what to do."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InterchangeError, match=reason):
        import_dataset(tmp_path / name, tmp_path / "store", "r", model)


def test_the_command_shows_what_it_will_train(tmp_path: Path, model: Path) -> None:
    """The shape and the first sample, before anything is written: also if what follows fails."""
    file = _file(tmp_path, {"prompt": "Two and two?", "completion": "Four."}, {"messages": [ASKED, RIGHT]})
    words = ["import", str(file), "--store", str(tmp_path / "store"), "--run", "r", "--model", str(model)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    shown = "shape of the rows: prompt-completion (1), messages (1)\n"
    shown += "sample 1; what is trained stands within {+ +}:\n"
    shown += "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n{+Four.<|im_end|>+}\n"
    assert result.stderr == shown
    assert CliRunner().invoke(app, [*words, "--show", "0"]).stderr == shown.partition("\n")[0] + "\n"
    assert "sample 2" in CliRunner().invoke(app, [*words, "--show", "2"]).stderr
    assert "{+" not in CliRunner().invoke(app, [*words, "--json"]).stderr
    refused = CliRunner().invoke(app, [*words[:-2], "--format", "alpaca"])
    assert "--format needs --model" in str(refused.exception)
    for option, why in (
        ("--key", "write NAME=KEY"),
        ("--format", "use one of auto, "),
        ("--chat-template-kwargs", "no JSON"),
    ):
        assert why in str(CliRunner().invoke(app, [*words, option, "x"]).exception)


def test_what_is_trained_has_a_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal; long context is shortened, and escapes in it have no effect."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    reading_of("auto", [], 1).look(
        FirstLook({"messages": 1}, [[("a" * 5000 + "\x1b[2J", False), ("b", True)]])
    )
    shown = capsys.readouterr().err
    assert "4,404 characters more" in shown
    assert "\\x1b[2J" in shown
    assert "\x1b[1;32mb\x1b[0m" in shown


def test_the_command(tmp_path: Path, model: Path) -> None:
    """It says what it added; Parquet without a model is refused with what to do."""
    file = _file(tmp_path, PAIR, name="rows.parquet")
    words = ["import", str(file), "--store", str(tmp_path / "store"), "--run", "r"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code != 0
    result = CliRunner().invoke(app, [*words, "--model", str(model)])
    assert result.exit_code == 0, result.output
    assert "imported 2 trajectories (2 turns), 1 preferences into run r" in result.output.replace("\n", " ")
