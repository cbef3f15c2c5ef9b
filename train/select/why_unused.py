"""Explains why trajectories of a log are not trained on, for a training that ends early or cannot start."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import get_args

import numpy as np
import pyarrow as pa

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.fold.history import History
from rollbook.store.sql.query import connect_at
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.recipe import Split
from rollbook.train.select.recipe import ModelLimits, mixture_in
from rollbook.train.select.references import References, references_over
from rollbook.train.select.sample_ref import SampleRef
from rollbook.train.select.sorting import select

_APART = """
    SELECT run, split, finished IS NOT NULL AS ended, count(*) FROM internal.trajectory_scalars
    GROUP BY ALL"""


def explain(
    log: Store,
    cut: Cut,
    config: TrainConfig,
    history: History,
    *,
    once: bool,
    limits: ModelLimits | None = None,
) -> str:
    """Lines that count all trajectories of a cut by the reason why no further step uses them.

    Args:
        once: a sample is used once, not in every epoch.
        limits: of the model.

    Raises:
        CorruptionError: a file is damaged.
    """
    with connect_at(log, format_cut(cut)) as connection:
        counted = connection.read(_APART).fetchall()
        mixture = mixture_in(limits)
        which = (config.run, config.recipe)
        references = references_over(connection, log, cut, *which, mixture=mixture, policy=config.policy)
    total, reasons = sum(count for *_, count in counted), Counter[str]()
    for run, split, ended, count in counted:
        if (reason := _outside_reason(run, split, config, ended=ended)) is not None:
            reasons[reason] += count
    recipe, left = config.recipe, list[list[SampleRef]]()
    used, dropped = (history.consumed(), history.dropped) if once else (set[str](), set[str]())
    gone = used | dropped
    if once and recipe.paths != "all":
        references = references.without_paths_of(history.trained_trajectories())
    for numbers, leaves in _each(references):
        reason = _spent(leaves, used, dropped)
        if reason is None:
            fresh = [references.ref(i) for i, leaf in zip(numbers, leaves, strict=True) if leaf not in gone]
            reason = _dropped(fresh, config, history.version, limits)
        if reason is None:
            left.append([references.ref(i) for i in numbers])
        else:
            reasons[reason] += 1
    reasons += _left(left, config)
    lines = [f"  {count} {reason}" for reason, count in sorted(reasons.items(), key=lambda r: (-r[1], r[0]))]
    return "\n".join([f"of {total} trajectories", *lines]) if total else "there is no trajectory"


def _outside_reason(run: str, split: str, config: TrainConfig, *, ended: bool) -> str | None:
    """Why a trajectory is outside the configuration, or not finished yet; None if it is neither."""
    if run not in config.recipe.runs(config.run):
        return f"are of run {run!r}"
    if split not in config.recipe.splits:
        wanted = ", ".join(config.recipe.splits)
        return f"are of split {split!r} (recipe.splits: {wanted}{remedy_for(split)})"
    return None if ended else "are not finished"


def remedy_for(split: str) -> str:
    """How to train on the trajectories of a split; imports, for example, are of split `teacher`."""
    trained = get_args(Split)
    return f'; to train on them: recipe.splits = ["{split}"]' if split in trained else ""


def _each(references: References) -> Iterator[tuple[list[int], list[str]]]:
    """For each trajectory, the numbers of its samples that hold something to train on, and their
    leaves."""
    leaves = references.turns["turn_id"].take(pa.array(references.leaf)).to_pylist()
    candidate = (references.trained_tokens > 0) | references.erased
    starts = np.searchsorted(references.trajectory, np.arange(references.trajectories.num_rows + 1))
    for first, end in itertools.pairwise(starts):
        numbers = [i for i in range(first, end) if candidate[i]]
        yield numbers, [leaves[i] for i in numbers]


def _spent(leaves: Sequence[str], used: Set[str], dropped: Set[str]) -> str | None:
    """Why a trajectory has no sample at all, or none left, or None."""
    if not leaves:
        return "hold no token that can be trained: text only, not delivered, or failed"
    if any(leaf not in used and leaf not in dropped for leaf in leaves):
        return None
    was_used = any(leaf in used for leaf in leaves)
    return "were used already, by committed steps of this run" if was_used else "were dropped already"


def _dropped(
    fresh: Sequence[SampleRef], config: TrainConfig, version: int, limits: ModelLimits | None
) -> str | None:
    """The rule by which the recipe drops everything left of a trajectory, or None."""
    # What compares the members of groups is counted by groups below.
    kept, drops = select(fresh, config.recipe, config.algorithm, version, limits, whole_groups=False)
    return None if kept else f"are dropped by the rule {drops[0].rule}"


def _left(left: list[list[SampleRef]], config: TrainConfig) -> Counter[str]:
    """Why the usable samples do not fill a step."""
    algorithm, reasons = config.algorithm, Counter[str]()
    if "groups" not in algorithm.needs:
        if left and "pairs" in algorithm.needs:
            reasons["are in no recorded preference of which both sides can be trained on"] = len(left)
        elif left:
            reasons[f"are left: a step takes {algorithm.demand.groups} samples"] = len(left)
        return reasons
    groups: dict[str, list[list[SampleRef]]] = defaultdict(list)
    for samples in left:
        groups[samples[0].group or samples[0].trajectory_id].append(samples)
    for members in groups.values():
        rewards = {sample.reward for samples in members for sample in samples}
        if len(members) < (config.recipe.min_group or 0):
            text = f"are in groups of which fewer than {config.recipe.min_group} are kept (recipe.min_group)"
        elif len(members) < algorithm.demand.group_size:
            text = f"are in groups of fewer than {algorithm.demand.group_size} (algorithm.group_size)"
        elif len(rewards) == 1 and (config.recipe.drop_zero_variance or "pairs" in algorithm.needs):
            text = "are in groups whose rewards are all equal (recipe.drop_zero_variance)"
        else:
            text = f"are left: a step takes {algorithm.demand.groups} groups (algorithm.groups)"
        reasons[text] += len(members)
    return reasons
