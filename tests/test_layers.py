"""Imports point down: from layer to layer, from room to room within each, and never in a circle.

`docs/architecture.md` draws what is held here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

BELOW = {
    "edge": {"store"},
    "store": set(),
    "engines": {"edge", "store"},
    "ingest": {"engines", "edge", "store"},
    "train": {"engines", "store"},
    "replay": {"train", "ingest", "engines", "edge", "store"},
    "rollouts": {"edge", "store"},
    "lineage": {"train", "store"},
    "cassettes": {"ingest", "engines", "edge", "store"},
    "transcript": {"store"},
    "service": {"train", "engines", "edge", "store"},
    "viewer": {
        *("transcript", "lineage", "rollouts", "replay", "train", "ingest", "engines", "edge", "store"),
    },
}
"""Layer -> what it may import beside itself. From `rollouts` on: applications that others stand on."""
AT_ROOT = ("store", "ingest", "train", "replay")
ROOMS = {
    "store": [
        *("events", "redaction", "fold", "wal", "sealed", "medium", "log", "catalog", "hosts", "open"),
        *("workers", "sql", "tables", "upkeep", "interchange"),
    ],
    "engines": ["weights", "fleet", "startup_check", "sglang", "embedded"],
    "ingest": [
        *("tokens", "replies", "turns", "trajectories", "admission", "recording", "endpoints"),
        *("cluster", "routes", "upstream", "serve", "datasets"),
    ],
    "train": [
        *("algorithms", "config", "select", "batches", "sources", "model", "ranks", "checkpoints", "sync"),
        *("environment", "tenants", "step", "resume", "publish", "loop", "curves", "doctor", "reward_scores"),
    ],
    "replay": ["claims", "step", "stretch", "bundles", "what_if", "rollouts"],
}
"""Each room of a layer imports those before it; modules in no room are the ground that all stand on."""
OF_STORE_IN_EDGE = {"rollbook.store.errors", "rollbook.store.redaction"}
TORCH = {"torch", "transformers", "megatron", "safetensors"}
# A model that ships a schema of its replies is read by transformers, which is imported only then.
TORCH_BELOW_TRAIN = {"engines/embedded/", "engines/weights/", "ingest/replies/response_schema.py"}


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements within, at any depth. Expressions hold none, and are most of a tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


@functools.cache
def _imports(source: str) -> frozenset[str]:
    """Every module the source imports, anywhere in it, by its full dotted name."""
    names: set[str] = set()
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def _layers(names: Set[str]) -> set[str]:
    """The packages of ours among the imported names."""
    return {name.split(".")[1] for name in names if name.startswith("rollbook.")}


def _folder(root: Path, layer: str) -> Path:
    return root / layer if layer in AT_ROOT else root / "src" / "rollbook" / layer


def _files(root: Path, layer: str) -> list[Path]:
    return sorted(_folder(root, layer).rglob("*.py"))


@pytest.fixture(scope="module")
def modules(root: Path) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, lazily or not, applications included."""
    named = {}
    for folder in (*AT_ROOT, "bench", "demo", "src/rollbook"):
        for path in sorted((root / folder).rglob("*.py")):
            inside = path.relative_to(root).with_suffix("").parts
            if "src" in inside and path != path.resolve():
                continue  # a link to a layer, whose own folder is listed
            parts = ["rollbook", *(inside[2:] if inside[0] == "src" else inside)]
            named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        module: {found for name in _imports(path.read_text()) if (found := _module(name, named))} - {module}
        for module, path in named.items()
    }


def _module(name: str, named: Mapping[str, object]) -> str | None:
    """The module of ours that an imported name is, or is in."""
    return name if name in named else parent if (parent := name.rpartition(".")[0]) in named else None


def _room(module: str) -> tuple[str, str] | None:
    """(layer, room) of a module, the room empty for the ground; None outside the layers with rooms."""
    parts = module.split(".")[1:]
    if len(parts) < 2 or parts[0] not in ROOMS:
        return None
    return parts[0], parts[1] if parts[1] in ROOMS[parts[0]] else ""


def _upward(modules: Mapping[str, set[str]]) -> set[str]:
    """The imports that lead from a room to one that stands above it."""
    wrong = set()
    for module, imported in modules.items():
        for name in imported:
            here, there = _room(module), _room(name)
            if here is None or there is None or here[0] != there[0]:
                continue
            order = ["", *ROOMS[here[0]]]
            if order.index(there[1]) > order.index(here[1]):
                wrong.add(f"{module} imports {name}")
    return wrong


def _circle(modules: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or none."""
    left = {module: set(imported) for module, imported in modules.items()}
    while free := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


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


def test_rooms_import_the_rooms_below_them(modules: dict[str, set[str]]) -> None:
    """Within a layer, no module imports a room above its own, lazily or not."""
    assert _upward(modules) == set()


def test_there_are_no_circles(modules: dict[str, set[str]]) -> None:
    """No modules import each other in a circle, lazy imports included."""
    assert _circle(modules) == []


@pytest.mark.parametrize("layer", ROOMS)
def test_every_room_is_listed(root: Path, layer: str) -> None:
    """The rooms of a layer are its folders, and single modules that stand among them."""
    folders = {p.parent.name for p in _folder(root, layer).glob("*/__init__.py")}
    modules = {room for room in ROOMS[layer] if (_folder(root, layer) / f"{room}.py").exists()}
    assert folders | modules == set(ROOMS[layer])


def test_the_edge_knows_of_the_store_its_errors_alone(modules: dict[str, set[str]]) -> None:
    """Errors, and how secrets are taken out of what they quote: any HTTP service may stand on it."""
    edge = {name: used for name, used in modules.items() if name.startswith("rollbook.edge.")}
    used = {name for names in edge.values() for name in names if name.startswith("rollbook.store")}
    assert edge
    assert used == OF_STORE_IN_EDGE


def test_torch_stays_in_engines_and_training(root: Path) -> None:
    """Neither store nor edge imports torch; ingest and engines only where weights are."""
    users = {
        f"{layer}/{path.relative_to(_folder(root, layer)).as_posix()}"
        for layer in ("store", "edge", "engines", "ingest")
        for path in _files(root, layer)
        if {name.split(".")[0] for name in _imports(path.read_text())} & TORCH
    }
    assert users
    assert {user for user in users if not user.startswith(tuple(TORCH_BELOW_TRAIN))} == set()


def test_the_walk_sees_every_kind_of_import() -> None:
    """Imports inside functions and under TYPE_CHECKING count, and each form is understood."""
    source = (
        "import rollbook.train.loop.loop\nfrom rollbook import replay\n"
        "def f():\n    from rollbook.ingest.serve.proxy import x\n"
        "if TYPE_CHECKING:\n    import torch.nn\n"
    )
    assert _layers(_imports(source)) == {"train", "replay", "ingest"}
    assert "torch.nn" in _imports(source)


def test_the_page_draws_these_rooms(root: Path) -> None:
    """The table of docs/architecture.md has the rooms of each layer in the order that is held here."""
    page = (root / "docs" / "architecture.md").read_text()
    rows = re.findall(rf"^\| ({'|'.join(ROOMS)}) \| (\w+) \| ", page, re.MULTILINE)
    assert rows == [(layer, room) for layer, rooms in ROOMS.items() for room in rooms]


def test_an_upward_import_and_a_circle_are_found() -> None:
    """A room that imports one above it is named, and so are modules that import each other."""
    wal, sealed, log = (f"rollbook.store.{name}" for name in ("wal.files", "sealed.unit", "log.store"))
    assert _upward({sealed: {wal}, wal: set()}) == set()
    assert _upward({wal: {sealed}, sealed: set()}) == {f"{wal} imports {sealed}"}
    assert _circle({log: {sealed}, sealed: {wal}, wal: set()}) == []
    assert _circle({log: {sealed}, sealed: {log}, wal: {log}}) == [log, sealed, wal]
