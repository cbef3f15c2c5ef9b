"""The demo's results: rewards by policy version, from SQL, and their plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollbook import store
from rollbook.cli.pictures import pyplot

REWARD_BY_VERSION = """\
SELECT max_version AS version, split, count(*) AS rollouts, avg(reward) AS reward
FROM trajectories WHERE status = 'completed' AND split <> 'teacher'
GROUP BY ALL ORDER BY version, split"""


@dataclass(frozen=True, slots=True)
class VersionReward:
    """Mean reward of a policy version's rollouts in a split."""

    version: int
    split: str
    rollouts: int
    reward: float


def reward_by_version(path: Path) -> list[VersionReward]:
    """Run `REWARD_BY_VERSION` on a store."""
    return [VersionReward(*row) for row in store.connect(path).execute(REWARD_BY_VERSION).fetchall()]


def plot(rows: list[VersionReward], file: Path) -> None:
    """Draw the rewards over the policy versions as a PNG."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(7, 4), layout="constrained")
    train = [r for r in rows if r.split == "train"]
    held_out = [r for r in rows if r.split == "eval"]
    axes.plot([r.version for r in train], [r.reward for r in train], marker=".", label="training rollouts")
    axes.plot(
        [r.version for r in held_out],
        [r.reward for r in held_out],
        marker="o",
        linestyle="--",
        label="held-out problems",
    )
    axes.set(xlabel="policy version", ylabel="mean reward", ylim=(0, 1.02))
    axes.set_title("Reward by policy version, read from the log")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=130)
    plots.close(figure)
