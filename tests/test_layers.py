"""Imports point down only: store <- ingest <- train <- replay, and torch stays where engines are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BELOW = {
    "store": set(),
    "ingest": {"store"},
    "train": {"store", "ingest"},
    "replay": {"store", "ingest", "train"},
}
TORCH = {"torch", "transformers", "megatron", "safetensors"}
# A model that ships a schema of its replies is read by transformers, which is imported only then.
TORCH_IN_INGEST = {
    "batching.py",
    "compare_weights.py",
    "embedded.py",
    "held_weights.py",
    "response_schema.py",
    "sampling.py",
    "sent_tensors.py",
    "tensor_checksums.py",
    "tensor_layout.py",
    "weights.py",
}


def _imports(source: str) -> set[str]:
    """Every module the source imports, anywhere in it, by its full dotted name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _layers(names: set[str]) -> set[str]:
    """The packages of ours among the imported names."""
    return {name.split(".")[1] for name in names if name.startswith("rollbook.")}


def _files(root: Path, layer: str) -> list[Path]:
    return sorted((root / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", BELOW)
def test_imports_point_down(root: Path, layer: str) -> None:
    """No module imports a layer above its own, or an application (bench, demo, cli) from a layer."""
    allowed = BELOW[layer] | {layer, "__version__"}
    wrong = {
        f"{path.relative_to(root)} imports {name}"
        for path in _files(root, layer)
        for name in _layers(_imports(path.read_text())) - allowed
    }
    assert wrong == set()


def test_torch_stays_in_engines_and_training(root: Path) -> None:
    """The store imports no torch, and ingest only inside its embedded engine."""
    users = {
        (layer, path.name)
        for layer in ("store", "ingest")
        for path in _files(root, layer)
        if {name.split(".")[0] for name in _imports(path.read_text())} & TORCH
    }
    assert users <= {("ingest", name) for name in TORCH_IN_INGEST}


def test_the_walk_sees_every_kind_of_import() -> None:
    """Imports inside functions and under TYPE_CHECKING count, and each form is understood."""
    source = (
        "import rollbook.train.loop\nfrom rollbook import replay\n"
        "def f():\n    from rollbook.ingest.proxy import x\n"
        "if TYPE_CHECKING:\n    import torch.nn\n"
    )
    assert _layers(_imports(source)) == {"train", "replay", "ingest"}
    assert "torch.nn" in _imports(source)
