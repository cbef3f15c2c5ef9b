"""`docs/run-configuration.md`, rendered from the typed settings by `docs/render/page_run.py`."""

from __future__ import annotations

from collections.abc import Mapping

from key_tables import page
from pydantic import BaseModel

from rollbook.online.config import EnginesConfig, EvaluatedConfig, PlacedConfig, SharedConfig

INTRODUCTION = """# Configuration of a run

<!-- Generated: python docs/render/page_run.py > docs/run-configuration.md -->

`rollbook run CONFIG` reads a TOML file with the keys below. Its tables `[serve]`, `[train]` and `[rollout]`
have the keys of those commands: [serving](serving.md), [configuration](configuration.md),
[rollout-configuration](rollout-configuration.md). What follows from the rest need not be said there: the run,
the store, the model, the proxy's address, the engines, and `samples` of `[rollout]`, which is the algorithm's
`group_size`. `--set table.key=value` overrules a key. What it is for is in [online](online.md).
"""
TABLES: Mapping[str, type[BaseModel]] = {
    "Top of the file": SharedConfig,
    "`[engines]`": EnginesConfig,
    "`[engines.placed]`": PlacedConfig,
    "`[evaluation]`": EvaluatedConfig,
}


APART = frozenset({"placed"})
"""Keys that are tables of their own."""


def render() -> str:
    """The whole page as Markdown."""
    return page(INTRODUCTION, TABLES, APART)


if __name__ == "__main__":
    print(render(), end="")
