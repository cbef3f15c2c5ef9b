"""Parts of somebody's own, named `module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rollbook.store.errors import ConfigError


def imported(text: str, what: str) -> Any:
    """The object of that name; its module is run.

    Args:
        what: what it is for, as an error says it.

    Raises:
        ConfigError: there is no such module, file or name, or the module does not run.
    """
    place, sign, name = text.rpartition(":")
    if not sign or not place or not name:
        raise ConfigError(f"{what}: {text!r} is no module:name, and no file.py:name")
    try:
        module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ConfigError(f"{what}: {place!r} cannot be imported: {error!r}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{what}: {place!r} has no {name!r}")
    return getattr(module, name)


def _of_file(path: Path) -> ModuleType:
    """A file's module, which finds others beside it."""
    whole = path.resolve()
    held = sys.modules.get(whole.stem)
    if held is not None and getattr(held, "__file__", None) == str(whole):
        return held
    spec = importlib.util.spec_from_file_location(whole.stem, whole)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(str(path))
    module = importlib.util.module_from_spec(spec)
    if str(whole.parent) not in sys.path:
        sys.path.append(str(whole.parent))
    sys.modules[whole.stem] = module
    spec.loader.exec_module(module)
    return module
