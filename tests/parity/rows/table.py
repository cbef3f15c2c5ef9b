"""All rows and fixtures: those of the modules beside this one, and of folders that are named."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.row import Fixture, Row


def rows_in(folders: Iterable[str]) -> tuple[Row, ...]:
    """The rows of this folder and of others, module by module: what each has as `ROWS`."""
    return tuple(row for module in _modules(folders) for row in getattr(module, "ROWS", ()))


def fixtures_in(folders: Iterable[str]) -> tuple[Fixture, ...]:
    """Cases worked out by hand, that a module of rows may have as `FIXTURES`."""
    return tuple(fixture for module in _modules(folders) for fixture in getattr(module, "FIXTURES", ()))


def _modules(folders: Iterable[str]) -> list[ModuleType]:
    here: Any = sys.modules[__package__ or ""]
    beside = [m.name for m in pkgutil.iter_modules(here.__path__) if m.name != "table"]
    names = [f"{__package__}.{name}" for name in sorted(beside)]
    for folder in map(Path, folders):
        if str(folder.resolve()) not in sys.path:  # parts of one's own are imported from there, by their name
            sys.path.insert(0, str(folder.resolve()))
        names += sorted(path.stem for path in folder.glob("*.py"))
    return [importlib.import_module(name) for name in names]
