"""Why trajectories of a log are not trained on: said where a training ends early, or never begins. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Set

from rollbook.store.fold.trajectory import Trajectory
from rollbook.train.config.config import TrainConfig
from rollbook.train.data.recipe import ModelLimits, is_candidate, select
from rollbook.train.data.samples import Sample, samples_of
from rollbook.train.history import History


def explain(
    trajectories: Iterable[Trajectory],
    config: TrainConfig,
    history: History,
    *,
    once: bool,
    limits: ModelLimits | None = None,
) -> str:
    """Lines that count all trajectories by the one reason for which each is not part of a further step.

    Args:
        once: a sample is used once, not in every epoch.
        limits: of the model.
    """
    reasons, left = Counter[str](), list[list[Sample]]()
    total, used, dropped = 0, history.consumed() if once else set(), history.dropped if once else set()
    for trajectory in trajectories:
        total += 1
        candidates = [
            sample
            for sample in samples_of(trajectory, config.recipe.reward_source)
            if is_candidate(sample, config.recipe)
        ]
        reason = _apart(trajectory, config) or _spent(candidates, used, dropped)
        reason = reason or _dropped(candidates, config, used | dropped, history.version, limits)
        if reason is None:
            left.append(candidates)
        else:
            reasons[reason] += 1
    reasons += _left(left, config)
    lines = [f"  {count} {reason}" for reason, count in sorted(reasons.items(), key=lambda r: (-r[1], r[0]))]
    return "\n".join([f"of {total} trajectories", *lines]) if total else "there is no trajectory"


def _apart(trajectory: Trajectory, config: TrainConfig) -> str | None:
    """Why a configuration does not speak of a trajectory, or not yet."""
    if trajectory.run != config.run:
        return f"are of run {trajectory.run!r}"
    if trajectory.opened.split not in config.recipe.splits:
        wanted = ", ".join(config.recipe.splits)
        return f"are of split {trajectory.opened.split!r} (recipe.splits: {wanted})"
    return "are not finished" if trajectory.finished is None else None


def _spent(candidates: list[Sample], used: Set[str], dropped: Set[str]) -> str | None:
    """Why a trajectory holds no sample, or none that is left, or None."""
    if not candidates:
        return "hold no token that can be trained: text only, not delivered, or failed"
    if any(s.leaf_turn_id not in used and s.leaf_turn_id not in dropped for s in candidates):
        return None
    was_used = any(sample.leaf_turn_id in used for sample in candidates)
    return "were used already, by committed steps of this run" if was_used else "were dropped already"


def _dropped(
    candidates: list[Sample], config: TrainConfig, gone: Set[str], version: int, limits: ModelLimits | None
) -> str | None:
    """The rule by which the recipe drops all that is left of a trajectory, or None."""
    fresh = [s for s in candidates if s.leaf_turn_id not in gone]
    recipe = config.recipe.model_copy(update={"drop_zero_variance": False})  # that is a matter of groups
    kept, drops = select(fresh, recipe, config.algorithm, version, limits)
    return None if kept else f"are dropped by the rule {drops[0].rule}"


def _left(left: list[list[Sample]], config: TrainConfig) -> Counter[str]:
    """Why what could be used does not fill a step."""
    algorithm, reasons = config.algorithm, Counter[str]()
    if "groups" not in algorithm.needs:
        if left:
            reasons[f"are left: a step takes {algorithm.demand.groups} samples"] = len(left)
        return reasons
    groups: dict[str, list[list[Sample]]] = defaultdict(list)
    for samples in left:
        groups[samples[0].group or samples[0].trajectory_id].append(samples)
    for members in groups.values():
        rewards = {sample.reward for samples in members for sample in samples}
        if len(members) < algorithm.demand.group_size:
            text = f"are in groups of fewer than {algorithm.demand.group_size} (algorithm.group_size)"
        elif len(rewards) == 1 and config.recipe.drop_zero_variance:
            text = "are in groups whose rewards are all equal (recipe.drop_zero_variance)"
        else:
            text = f"are left: a step takes {algorithm.demand.groups} groups (algorithm.groups)"
        reasons[text] += len(members)
    return reasons
