"""`rollbook export model`: the directory is the version's, whole or not there, and transformers loads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbook.store import Store
from rollbook.store.errors import InterchangeError, ModelError
from rollbook.train.checkpoints import export
from rollbook.train.checkpoints.checkpoint import read_checkpoint
from rollbook.train.checkpoints.export import export_model

Stores = Callable[..., Store]


def _logits(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[1, 5, 6, 7, 2]])).logits


def _version(log: Store, version: int) -> Path:
    return log.path / f"checkpoints/demo/actor/v{version:08d}"


@pytest.mark.parametrize("version", [4, 12])
def test_transformers_loads_it(trained: Stores, tmp_path: Path, version: int) -> None:
    """The logits are those of that version; what only training needs is left out, and all else is there."""
    import torch

    log, out = trained(), tmp_path / "models" / "mine"
    (_version(log, version) / "tokenizer_config.json").write_text("{}")
    done = export_model(log, out, version, None, "actor")
    assert (done.run, done.policy_version, done.to) == ("demo", version, str(out))
    assert torch.equal(_logits(out), _logits(_version(log, version)))
    assert not torch.equal(_logits(out), _logits(_version(log, 0)))
    held = {file.name for file in _version(log, version).iterdir()}
    assert {file.name for file in out.iterdir()} == held - {"optimizer.safetensors"}
    assert done.bytes == sum(file.stat().st_size for file in out.iterdir())
    assert read_checkpoint(out).optimizer is None
    manifest = json.loads((out / "rollbook.json").read_text())
    assert (manifest["policy_version"], manifest["weights_digest"]) == (version, done.weights_digest)


def test_the_command(trained: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """It says what it wrote; without --version it is the newest; an empty folder may be there."""
    log, out = trained(), tmp_path / "out"
    out.mkdir()
    code, printed, _ = cli("export", "model", "--store", log.path, "-o", out)
    assert code == 0
    assert printed.startswith(f"wrote {out}: version 12 of policy actor, run demo (")
    code, printed, _ = cli(
        "export", "model", "--store", log.path, "--to", tmp_path / "4", "--version", 4, "--json"
    )
    assert code == 0
    assert (
        json.loads(printed).items()
        >= {"policy_version": 4, "checkpoint": "checkpoints/demo/actor/v00000004"}.items()
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            {"version": 5},
            r"--version 5: run 'demo' has no checkpoint of it; there are of: 0, 4, 8, 9, 11, 12$",
        ),
        ({"run": "other"}, r"run 'other' has no checkpoint of policy 'actor'; there are of: demo$"),
        ({"policy": "critic"}, r"the store holds no checkpoint of policy 'critic': train first"),
    ],
)
def test_what_is_not_there(trained: Stores, tmp_path: Path, asked: dict[str, Any], reason: str) -> None:
    """It is named, with what there is."""
    wanted = {"version": None, "run": None, "policy": "actor"} | asked
    with pytest.raises(InterchangeError, match=reason):
        export_model(trained(), tmp_path / "out", **wanted)
    assert not (tmp_path / "out").exists()


def test_a_version_whose_folder_is_gone(trained: Stores, tmp_path: Path) -> None:
    """It is none that has a checkpoint."""
    log = trained()
    shutil.rmtree(_version(log, 12))
    assert export_model(log, tmp_path / "newest", None, None, "actor").policy_version == 11
    with pytest.raises(InterchangeError, match=r"no checkpoint of it; there are of: 0, 4, 8, 9, 11$"):
        export_model(log, tmp_path / "out", 12, None, "actor")


def _spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def test_damage_is_found_before_and_after(
    trained: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged checkpoint, and a copy that is not the checkpoint's: nothing is left of either."""
    log = trained()
    _spoil(_version(log, 4) / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"v00000004: its weights are not those that the log names for version 4"
    ):
        export_model(log, tmp_path / "out", 4, None, "actor")
    copied = export._copy

    def spoilt(source: Path, building: Path) -> None:
        copied(source, building)
        _spoil(building / "model.safetensors")

    monkeypatch.setattr(export, "_copy", spoilt)
    with pytest.raises(ModelError, match=r"partial: its weights are not those"):
        export_model(log, tmp_path / "out", 8, None, "actor")
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]


def test_nothing_is_overwritten(trained: Stores, tmp_path: Path) -> None:
    """A folder with a file in it, and a file."""
    log = trained()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(InterchangeError, match="exists: an export never overwrites"):
            export_model(log, out, None, None, "actor")
    assert (tmp_path / "out" / "mine").read_text() == "mine"
