"""What packages export: pinned, sorted, and no more than twelve names."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import rollbook.store
from rollbook.store import errors


def test_the_store_exports_what_it_says() -> None:
    """`rollbook.store.__all__` is this list, each name is there, and star-imports give just these."""
    assert rollbook.store.__all__ == ["Event", "Store", "connect", "format_cut", "open", "parse_cut"]
    assert all(hasattr(rollbook.store, name) for name in rollbook.store.__all__)


@pytest.mark.parametrize("package", ["store", "ingest", "train", "replay"])
def test_exports_are_sorted_complete_and_few(root: Path, package: str) -> None:
    """A package's `__all__` is sorted, names all that its `__init__` imports, and has at most 12 names."""
    init = root / package / "__init__.py"
    tree = ast.parse(init.read_text() if init.exists() else "")
    imported = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    ]
    exported = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names = exported[0] if exported else []
    assert names == sorted(imported)
    assert len(names) <= 12


def test_the_page_names_what_is_public(root: Path) -> None:
    """Each module of the table has these names in its `__all__`, and no others."""
    page = (root / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `(rollbook\.[\w.]+)` \| ([^|]+) \|", page, re.MULTILINE)
    named = {module: re.findall(r"`(\w+)`", names) for module, names in rows}
    assert named == {module: importlib.import_module(module).__all__ for module in named}
    assert set(named) == {f"rollbook.{name}" for name in ("store", "agents", "client", "testing.ledger")}


def test_errors_are_one_tree_and_survive_pickling() -> None:
    """Every error is a RollbookError and comes back from pickle with its type, text and fields."""
    import pickle

    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) > 12
    for kind in kinds:
        assert issubclass(kind, errors.RollbookError)
        error = kind(409, "code", "text") if issubclass(kind, errors.RequestError) else kind("text")
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), vars(back)) == (kind, "text", vars(error))
