"""Writes tests/data/trained-1: a training that was interrupted, as a release before evidence took it.

    PYTHONPATH=<checkout of 53f837f>/src python tests/data/make_trained.py <that checkout>

It is never written again. Run `demo` took two supervised steps of a tiny model; then it took one of GRPO of
the three that it was to take, and its process ended in the next one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "trained-1"
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def main() -> None:
    """Write the store."""
    fabric = _fabric(Path(sys.argv[1]).resolve() / "tests/train/fabric.py")
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        _write_model(fabric, Path("tiny"))
        log = fabric.record_store(Path("trained"), teachers=8, groups=6, size=4)
        fabric.train(log, fabric.config(fabric.SFT, model="tiny", steps=2))
        with fabric.killed_at(3):
            fabric.train(log, fabric.config(fabric.GRPO, model="tiny"))
        for part in ("STORE.json", "lanes", "checkpoints"):
            source = log.path / part
            if source.is_dir():
                shutil.copytree(source, FOLDER / part, ignore=shutil.ignore_patterns("LOCK"))
            else:
                shutil.copy(source, FOLDER / part)


def _fabric(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("fabric", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["fabric"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["fabric"])
    return sys.modules["fabric"]


def _write_model(fabric: Any, folder: Path) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(fabric.tiny_config(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
