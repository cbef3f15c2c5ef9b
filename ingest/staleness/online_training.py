"""The online training that a run's log says is under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.ingest.staleness.policy import StalenessPolicy
from rollbook.store.events import Json, RunOpened


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
        recipe, (groups, size, steps) = config["recipe"], _demand(config)
        policy = StalenessPolicy(groups, recipe["max_staleness"], config["admission"]["order"], steps)
        left = config["steps"] - config["steps_done"]
        admitted = config["admission"]["hold"] and recipe["max_staleness"] is not None
        splits = frozenset(recipe["splits"])
        return OnlineTraining(policy, config["policy"], size, splits, left) if admitted and left > 0 else None
    except (KeyError, TypeError):
        return None  # a release before this one's, which held nothing back


def _demand(config: Json) -> tuple[int, int, int]:
    """Groups of a rollout batch, trajectories in each (1 where each stands alone), and steps taken on it."""
    if "demand" in config:
        demand = config["demand"]
        steps = demand.get("epochs", 1) * demand.get("mini_batches", 1)
        return demand["groups"], demand["group_size"], steps
    # Recorded before runs said so, when there were these two algorithms.
    algorithm = config["algorithm"]
    if "groups" in algorithm:
        return algorithm["groups"], algorithm["group_size"], 1
    return algorithm["batch_size"], 1, 1
