"""Reads TOML files that people write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from rollbook.store.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
