"""The wheel, the sdist and the checkout agree on what is in the package `rollbook`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollbook.bench import SHIPPED


@pytest.fixture(scope="module")
def build(root: Path) -> dict[str, Any]:
    """The table `tool.hatch.build` of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]


def _mapped(build: dict[str, Any]) -> dict[str, str]:
    """Folder -> its name within rollbook, without the line for src/rollbook itself."""
    sources = dict(build["targets"]["wheel"]["sources"])
    assert sources.pop("src/rollbook") == "rollbook"
    return {folder: target.removeprefix("rollbook/") for folder, target in sources.items()}


def test_each_source_has_its_link(root: Path, build: dict[str, Any]) -> None:
    """Every folder that ships under a name has a relative link of that name in src/rollbook, and no other."""
    links = {p.name: p for p in (root / "src" / "rollbook").iterdir() if p.is_symlink()}
    mapped = _mapped(build)
    assert {name: str(link.readlink()) for name, link in links.items()} == {
        name: f"../../{folder}" for folder, name in mapped.items()
    }
    assert all((root / folder).is_dir() for folder in mapped)


def test_only_include_names_the_same(root: Path, build: dict[str, Any]) -> None:
    """`only-include` has each mapped folder and what stands in src/rollbook itself, nothing else."""
    package = root / "src" / "rollbook"
    own = [p for p in package.iterdir() if not p.is_symlink() and p.name != "__pycache__"]
    files = {f"src/rollbook/{p.name}" for p in own}
    assert set(build["only-include"]) == set(_mapped(build)) | files
    assert len(build["only-include"]) == len(set(build["only-include"]))
    assert build["dev-mode-dirs"] == ["src"]


def test_migrations_do_not_shadow_alembic(root: Path) -> None:
    """`alembic/` has no `__init__.py`: from the root it would hide the library of that name."""
    assert not (root / "alembic" / "__init__.py").exists()
    assert (root / "src" / "rollbook" / "migrations" / "env.py").exists()


def test_versions_agree(root: Path) -> None:
    """pyproject and `rollbook.__version__` name one version."""
    import rollbook

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["version"] == rollbook.__version__
    assert project["scripts"] == {"rollbook": "rollbook.__main__:main"}


def test_the_wheel_has_what_shipped_benchmarks_import(root: Path, build: dict[str, Any]) -> None:
    """Of `bench/` the commands' own modules and those that they import or start, and no other."""
    excluded = build["targets"]["wheel"]["exclude"]
    assert excluded[0] == "bench/*"
    needed, new = {"__init__"}, {"__init__", *SHIPPED}
    while new:
        needed |= new
        texts = [(root / "bench" / f"{name}.py").read_text() for name in new]
        named = {name for text in texts for name in re.findall(r"rollbook\.bench(?:\.| import )(\w+)", text)}
        new = {name for name in named if (root / "bench" / f"{name}.py").exists()} - needed
    assert set(excluded[1:]) == {f"!bench/{name}.py" for name in needed}
