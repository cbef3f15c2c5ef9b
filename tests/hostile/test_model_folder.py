"""A model directory from anywhere: it opens, or one clear error says why; nothing hangs or runs."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.engines.model_files import read_json, weight_files
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store.errors import ModelError

PROGRAM = Path(__file__).with_name("programs") / "open_folders.py"
SOURCE = Path(__file__).resolve().parents[2] / "src"


def _open_spoiled(model: Path, scratch: Path, first: int, count: int, *weights: str) -> int:
    """Open so many spoiled copies; how many of them were refused."""
    words = [sys.executable, PROGRAM, model, scratch, str(first), str(count), *weights]
    env = os.environ | {"PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "RUST_BACKTRACE": "0"}
    done = subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    output = f"{done.returncode}: {done.stdout[-300:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, output
    match = re.search(r"(\d+) of (\d+) were refused", done.stdout)
    assert match is not None, output
    assert int(match[2]) == count
    return int(match[1])


@pytest.mark.parametrize("first", [0, 200, 400])
def test_a_spoiled_tokenizer_or_template(text_folder: Path, tmp_path: Path, first: int) -> None:
    """Bytes, structures, kinds of files: only errors of our own, in bounded memory and time."""
    assert 60 < _open_spoiled(text_folder, tmp_path, first, 200) < 200


@pytest.mark.torch
def test_spoiled_weights_load_or_raise_model_errors(whole_folder: Path, tmp_path: Path) -> None:
    """Spoiled headers, offsets, types, indexes and configurations raise only Rollbook's errors."""
    assert 20 < _open_spoiled(whole_folder, tmp_path, 0, 60, "weights") < 60


class _Runs:
    """A pickle that runs what it was made for."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


@pytest.mark.torch
def test_no_code_of_a_model_runs(whole_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a pickle in the place of weights nor a module that the configuration names."""
    from rollbook.engines.embedded.engine import _loaded

    folder, trace = tmp_path / "model", tmp_path / "it-ran"
    folder.mkdir()
    for file in whole_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = orjson.loads((folder / "config.json").read_bytes())
    config |= {
        "auto_map": {"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.Config"},
        "model_type": "own",
    }
    (folder / "config.json").write_bytes(orjson.dumps(config))
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelError):
        _loaded(folder, "cpu")
    (folder / "config.json").write_bytes((whole_folder / "config.json").read_bytes())
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Runs(trace)))
    with pytest.raises(ModelError, match="no safetensors"):
        _loaded(folder, "cpu")
    assert not trace.exists()
    pickle.loads(pickle.dumps(_Runs(trace)))
    assert trace.exists()  # it would have


def _copied(text_folder: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in text_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"]
)
def test_no_link_leads_out(text_folder: Path, tmp_path: Path, name: str) -> None:
    """Of a directory; within it, and within Hugging Face's cache, links are what they are."""
    folder = _copied(text_folder, tmp_path / "model")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ModelError, match=r"out of the model's directory"):
        load_chat_tokenizer(folder)
    (folder / name).unlink()
    (folder / "own").mkdir()
    (tmp_path / name).rename(folder / "own" / name)
    (folder / name).symlink_to(Path("own") / name)
    assert load_chat_tokenizer(folder).stop_ids


def test_hugging_faces_cache_is_read(text_folder: Path, tmp_path: Path) -> None:
    """Its snapshots are links to blobs beside them."""
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    _copied(text_folder, cache / "blobs")
    snapshot.mkdir(parents=True)
    for file in (cache / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert load_chat_tokenizer(snapshot).stop_ids


def test_weights_are_named_beside_their_index(tmp_path: Path) -> None:
    """An index that names a file elsewhere, or one that is missing, is refused."""
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    (tmp_path / "x.safetensors").touch()
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors")):
        index.write_bytes(orjson.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelError, match="no file beside it"):
            weight_files(tmp_path / "model")
    index.write_bytes(orjson.dumps({"weight_map": {"a": "y.safetensors"}}))
    with pytest.raises(ModelError, match="is missing"):
        weight_files(tmp_path / "model")


def test_special_and_oversized_model_files_are_refused(tmp_path: Path) -> None:
    """A pipe, a device, a folder or an oversized file in a file's place is an error at once."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match="no plain file"):
        read_json(tmp_path, "config.json")
    with (tmp_path / "tokenizer_config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelError, match="more than any such file"):
        read_json(tmp_path, "tokenizer_config.json")
