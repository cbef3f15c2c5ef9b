"""`docs/rollout-configuration.md`, rendered from the typed settings. Pure.

`python -m rollbook.cli.rollout_page > docs/rollout-configuration.md`
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from rollbook.rollouts.config import (
    AgentConfig,
    ClocksConfig,
    ContainerConfig,
    EvaluationConfig,
    JudgeConfig,
    LimitsConfig,
    NodesConfig,
    RetriesConfig,
    RolloutConfig,
    ScoreConfig,
    ServiceConfig,
)
from rollbook.train.config.docs import page

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
