"""`docs/rollout-configuration.md`, rendered from the typed settings. Pure.

`python -m rollbook.cli.rollout_page > docs/rollout-configuration.md`
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from rollbook.ingest.rollouts.config import (
    AgentConfig,
    ClocksConfig,
    EvaluationConfig,
    LimitsConfig,
    RetriesConfig,
    RolloutConfig,
    ScoreConfig,
)
from rollbook.train.config.docs import HEAD, rows

INTRODUCTION = """# Configuration of rollouts

<!-- Generated: python -m rollbook.cli.rollout_page > docs/rollout-configuration.md -->

`rollbook rollout CONFIG` reads a TOML file with the keys below. `--set table.key=value` overrules it. An
unknown key, or a value of another type, is an error that names all such keys. What it is for is in
[rollouts](rollouts.md).
"""
TABLES: Mapping[str, type[BaseModel]] = {
    "Top of the file": RolloutConfig,
    "`[agent]`": AgentConfig,
    "`[agent.limits]`": LimitsConfig,
    "`[clocks]`": ClocksConfig,
    "`[retries]`": RetriesConfig,
    "`[[score]]`": ScoreConfig,
    "`[evaluation]`": EvaluationConfig,
}

APART = frozenset({"agent", "limits", "clocks", "retries", "score", "evaluation"})
"""Keys that are tables of their own."""


def render() -> str:
    """The whole page as Markdown."""
    sections = [
        "\n".join([f"## {title}\n\n{HEAD}", *rows(model, APART), ""]) for title, model in TABLES.items()
    ]
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    print(render(), end="")
