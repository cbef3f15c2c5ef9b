"""The online training that a run's log says is under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.ingest.staleness.policy import StalenessPolicy
from rollbook.store.events import RunOpened


@dataclass(frozen=True, slots=True)
class OnlineTraining:
    """An online training that the log says is under way.

    Attributes:
        policy: what it may use, and when.
        name: the line of weights that it trains.
        group_size: trajectories in a group, 1 where there are none.
        splits: it uses trajectories of these.
        steps_left: optimizer steps until it ends.
    """

    policy: StalenessPolicy
    name: str
    group_size: int
    splits: frozenset[str]
    steps_left: int

    def uses(self, split: str, group: str | None) -> bool:
        """Whether it may use such a trajectory: where groups are compared, one in none is of no use."""
        return split in self.splits and (self.group_size == 1 or group is not None)


def training_of(opened: RunOpened) -> OnlineTraining | None:
    """The training that a `run.opened` says begins: on the log's tail, staleness bounded, steps left."""
    config = opened.config
    if opened.command != "train" or config.get("source") != "tail":
        return None
    try:
        algorithm, recipe = config["algorithm"], config["recipe"]
        grouped = algorithm["name"] == "grpo"
        order = config["admission"]["order"]
        policy = StalenessPolicy(
            algorithm["groups"] if grouped else algorithm["batch_size"], recipe["max_staleness"], order
        )
        size = algorithm["group_size"] if grouped else 1
        left = config["steps"] - config["steps_done"]
        admitted = config["admission"]["hold"] and recipe["max_staleness"] is not None
        splits = frozenset(recipe["splits"])
        return OnlineTraining(policy, config["policy"], size, splits, left) if admitted and left > 0 else None
    except (KeyError, TypeError):
        return None  # a release before this one's, which held nothing back
