"""Reads TOML files that people write, and their JSON that programs write."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from rollbook.store.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file, or of a JSON file of the same form (`.json`).

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        text = path.read_text()
        if path.suffix == ".json":
            found: dict[str, Any] = json.loads(text)
            return found
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def override(values: dict[str, Any], text: str) -> None:
    """Set a value by `key=value`: a dotted key, and TOML or plain text.

    Raises:
        ConfigError: it is no such text, or leads through what is no table.
    """
    key, sep, value = text.partition("=")
    if not sep:
        raise ConfigError(f"--set {text!r}: write key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *tables, last = key.strip().split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {text!r}: {table} is not a table")
    values[last] = parsed
