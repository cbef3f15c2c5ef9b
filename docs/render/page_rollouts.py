"""`docs/rollout-configuration.md`, rendered from the typed settings by `docs/render/page_rollouts.py`."""

from __future__ import annotations

from collections.abc import Mapping

from key_tables import page
from pydantic import BaseModel

from rollbook.rollouts.config import (
    AgentConfig,
    ClocksConfig,
    ContainerConfig,
    EvaluationConfig,
    JudgeConfig,
    Limits,
    NodesConfig,
    RetriesConfig,
    RolloutConfig,
    ScoreConfig,
    ServiceConfig,
)

INTRODUCTION = """# Configuration of rollouts

<!-- Generated: python docs/render/page_rollouts.py > docs/rollout-configuration.md -->

`rollbook rollout CONFIG` reads a TOML file with the keys below. `--set table.key=value` overrules it. An
unknown key, or a value of another type, is an error that names all such keys. What it is for is in
[rollouts](rollouts.md).
"""
TABLES: Mapping[str, type[BaseModel]] = {
    "Top of the file": RolloutConfig,
    "`[agent]`": AgentConfig,
    "`[agent.limits]`": Limits,
    "`[agent.container]`": ContainerConfig,
    "`[agent.service]`": ServiceConfig,
    "`[agent.nodes]`": NodesConfig,
    "`[clocks]`": ClocksConfig,
    "`[retries]`": RetriesConfig,
    "`[[score]]`": ScoreConfig,
    "`[score.judge]`": JudgeConfig,
    "`[evaluation]`": EvaluationConfig,
}

APART = frozenset(
    {"agent", "limits", "container", "service", "nodes", "clocks", "retries", "score", "judge", "evaluation"}
)
"""Keys that are tables of their own."""


def render() -> str:
    """The whole page as Markdown."""
    return page(INTRODUCTION, TABLES, APART)


if __name__ == "__main__":
    print(render(), end="")
