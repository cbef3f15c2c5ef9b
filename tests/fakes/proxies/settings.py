"""Settings and secrets of a proxy, in short."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from rollbook.ingest.secrets import ProxySecrets
from rollbook.ingest.settings import ServeSettings

MIB = 2**20
_SECRETS = frozenset(field.name for field in fields(ProxySecrets))


def settings_of(**settings: Any) -> ServeSettings:
    """Settings, the rest as by default."""
    return ServeSettings(**({"store": Path("store")} | settings))


def proxy_parts(**given: Any) -> tuple[ServeSettings, ProxySecrets]:
    """Settings and secrets, each by its name."""
    secrets = {name: given.pop(name) for name in _SECRETS & given.keys()}
    return settings_of(**given), ProxySecrets(**secrets)
