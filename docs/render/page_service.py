"""`docs/service-configuration.md`, rendered from the typed settings by `docs/render/page_service.py`."""

from __future__ import annotations

from collections.abc import Mapping

from key_tables import page
from pydantic import BaseModel

from rollbook.service.config import BaseConfig, LimitsConfig, SamplerConfig, ServiceConfig

INTRODUCTION = """# Configuration of a training service

<!-- Generated: python docs/render/page_service.py > docs/service-configuration.md -->

`rollbook service CONFIG` and `rollbook service worker CONFIG` read a TOML file with the keys below.
`--set table.key=value` overrules a key, and `--show-config` prints what holds, defaults included, as a file
of its own. What it is for is in [a training service](service.md).
"""
TABLES: Mapping[str, type[BaseModel]] = {
    "Top of the file": ServiceConfig,
    "`[sampler]`, and `[bases.NAME.sampler]`": SamplerConfig,
    "`[bases.NAME]`": BaseConfig,
    "`[limits]`": LimitsConfig,
}
APART = frozenset({"sampler", "bases", "limits"})
"""Keys that are tables of their own."""


def render() -> str:
    """The whole page as Markdown."""
    return page(INTRODUCTION, TABLES, APART)


if __name__ == "__main__":
    print(render(), end="")
