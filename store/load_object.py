"""Loads objects of users' own code, named `module:name` or `file.py:name`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from rollbook.store.errors import ConfigError


def load_object(text: str, what: str) -> Any:
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
        raise ConfigError(f"{what}: {place!r} has no attribute {name!r}")
    return getattr(module, name)


async def call_maybe_async(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A function's result; a function that is no coroutine runs in a thread, since it may block."""
    if inspect.iscoroutinefunction(call):
        return await call(*args, **named)
    result = await asyncio.to_thread(call, *args, **named)
    return await result if inspect.isawaitable(result) else result


def _of_file(path: Path) -> ModuleType:
    """A file's module, which finds others beside it."""
    whole = path.resolve()
    # In no other module's place, whatever the file is called.
    name = f"rollbook_own_{xxhash.xxh3_64_hexdigest(os.fsencode(whole))}_{whole.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, whole)
    if spec is None or spec.loader is None or not whole.exists():
        raise FileNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    if str(whole.parent) not in sys.path:
        sys.path.append(str(whole.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
