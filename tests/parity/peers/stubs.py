"""Packages that stand in for what cannot be imported without a GPU.

OpenRLHF's and AReaL's `__init__` files import their trainers, which need DeepSpeed, flash-attention and
inference engines. Their packages stand here as bare ones with the same path, so that a single module of them
can be imported. DeepSpeed and flash-attention are empty: no function that is called here uses them.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import peft  # noqa: F401  before the names below are taken: it looks for them
import transformers  # noqa: F401


def empty(name: str, *path: str) -> types.ModuleType:
    """An empty package in place of another."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    module.__path__ = list(path)
    sys.modules[name] = module
    return module


def bare(package: str, *inner: str) -> None:
    """Packages within an installed package, whose modules can be imported and whose `__init__` is not run.

    Args:
        inner: "" is the package itself.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for name in inner:
        empty(f"{package}.{name}" if name else package, str(root.joinpath(*name.split("."))))
