"""`[recipe]` of a CONFIG, or a file of its own: which samples of the log are trained on."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import orjson
from pydantic import Field

from rollbook.store.config import Count, Positive, Table
from rollbook.store.events import SPLITS, Json

Name = Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]{0,127}$")]
"""Part of a checkpoint's path, so it must not lead out of the store."""
Split = Literal["train", "teacher"]
Status = Literal["completed", "truncated", "aborted", "failed"]
Paths = Literal["all", "last", "longest"]
STATUSES: tuple[Status, ...] = get_args(Status)

assert {"train", "teacher", "eval"} == set(SPLITS)


class RecipeConfig(Table):
    """Which samples of the log are trained on."""

    splits: tuple[Split, ...] = ("train",)
    """Splits of the trajectories that are trained on; `eval` can never be named here."""
    source_runs: tuple[Name, ...] = ()
    """Runs whose trajectories are trained on, with --source cut; absent: the run itself. Versions of another
    run say nothing of this one's, so its tokens are never stale."""
    reward_source: str = "agent"
    """The reward source to train on: the `source` of `reward.assigned`."""
    max_staleness: Count | None = None
    """Drop samples whose oldest token is more than this many versions old; absent: never. Versions are those
    of the policy in training."""
    other_policies: tuple[Name, ...] | None = ()
    """Policies whose tokens are trained on as well, of any version and never stale, as of a teacher that is
    served in the same run; a sample with a token of any other policy is dropped."""
    stale_tokens: Literal["drop", "mask"] = "drop"
    """With max_staleness: drop a sample for one token that is too old, or mask such tokens, and drop a sample
    of which all are."""
    stale_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """With max_staleness: drop a sample if more than this share of its trained tokens is too old; 1: if all
    are. Absent: 0, or 1 where such tokens are masked."""
    age_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What the loss of a token is multiplied by for each version of its age; 1: old tokens count as new ones.
    Policy gradients only."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal: with a baseline of the group, their advantages are zero."""
    too_long: Literal["drop", "cut"] = "drop"
    """Samples that are longer than the model's context: dropped by the rule of that name, or cut, and trained
    on as far as the context goes."""
    paths: Paths = "all"
    """Which of a trajectory's root-to-leaf paths are trained on: each, with what several share trained in the
    first; or one alone, with all of its tokens: the last that the client had, or that with the most trained
    tokens."""
    group_statistics: Literal["kept", "all"] = "kept"
    """Whose rewards make a group's baseline and deviation, and say whether its rewards are all equal: those
    of the members that are trained on, or also those of the members that the recipe drops, as far as they
    have one."""
    order: Literal["shuffled", "recorded"] = "shuffled"
    """With --source cut, of algorithms that go over their samples again and again: each time in another
    order, decided by the seed; or always as their trajectories were recorded. Groups come as
    `admission.order` says."""
    refill: bool = False
    """Fill a step with other groups in the place of those that drop_zero_variance drops; otherwise it is
    smaller."""
    min_group: Positive | None = None
    """Drop a group whole if fewer than so many of its trajectories are kept; absent: never. A trajectory
    without a group is a group of one."""
    statuses: Annotated[tuple[Status, ...], Field(min_length=1)] | None = None
    """Only trajectories that finished with one of these statuses; absent: with any."""
    success: bool | None = None
    """Only trajectories that finished with this `success`."""
    min_reward: float | None = None
    """Only trajectories with at least this reward."""
    top_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of each group only this share of trajectories, those with the highest rewards, rounded up: 0.5 of five
    are three, and of one it is that one."""
    labels: tuple[Annotated[str, Field(pattern=r"^[^=]+=.*$")], ...] = ()
    """Only trajectories with all of these labels, each as name=value."""
    models: tuple[str, ...] = ()
    """Only trajectories whose turns all asked for one of these models."""
    where: str | None = None
    """Only trajectories for which this SQL condition on the view `trajectories` holds; with --source cut."""

    preference_sources: tuple[str, ...] = ()
    """Only preferences of these sources; empty: of all."""

    def takes_preference(self, source: str) -> bool:
        """Whether preferences of a source count."""
        return not self.preference_sources or source in self.preference_sources

    def own(self, policy: str | None) -> str | None:
        """The policy in training, if only its versions are compared; None: those of all policies
        are, as if they were one policy's."""
        return None if self.other_policies is None else policy

    @property
    def counts_ages(self) -> bool:
        """Whether the age of tokens matters."""
        return self.max_staleness is not None or self.age_decay != 1

    @property
    def deciding_share(self) -> float:
        """The share of a sample's trained tokens that may be too old: 0 to 1; at 1, the newest one
        may not be."""
        if self.stale_share is not None:
            return self.stale_share
        return 1.0 if self.stale_tokens == "mask" else 0.0

    @property
    def asks_sql(self) -> bool:
        """Whether a key is a condition in SQL."""
        return bool(self.labels or self.models or self.where)

    def runs(self, own: str) -> tuple[str, ...]:
        """The runs whose trajectories are trained on."""
        return self.source_runs or (own,)


def recorded_recipe(recorded: Json) -> RecipeConfig:
    """The recipe in a record. One without `other_policies` was applied when policies were not told
    apart.

    Raises:
        ValueError: it is not a valid recipe.
    """
    return RecipeConfig.model_validate_json(orjson.dumps({"other_policies": None} | recorded))
