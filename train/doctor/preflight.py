"""Preflight: what is worth checking before a training is started, each with a verdict. Pure but for the
log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Literal

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.errors import ModelError
from rollbook.store.sql.query import connect_at
from rollbook.train.config.config import TrainConfig
from rollbook.train.data.applied import Applied, apply_recipe
from rollbook.train.data.held_out import learns_from_samples
from rollbook.train.data.recipe import ModelLimits
from rollbook.train.megatron.shape import ModelShape, shape_to_train
from rollbook.train.megatron.weight_names import weight_shapes

Verdict = Literal["green", "yellow", "red"]
STATE_BYTES = 16
"""Of a parameter in training: weight, gradient and Adam's two moments, each float32."""
LOGIT_BYTES = 16
"""Of a logit while a micro-batch runs: itself, its logprob, their gradients."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `red` will fail or teach nothing, `yellow` is worth a look; `lever` acts on it."""

    name: str
    verdict: Verdict
    said: str
    lever: str = ""


def preflight(config: TrainConfig, log: Store | None, cut: Cut, source: str, memory: int) -> list[Check]:
    """Every check of a configuration.

    Args:
        log: that it is to train on; None: only what needs none is checked.
        cut: of the log.
        source: `cut` or `tail`.
        memory: bytes of this machine.

    Raises:
        ConfigError: a condition of the recipe is not SQL.
        CorruptionError: a file of the log is damaged.
    """
    checks = [*_algorithm(config), _staleness(config, source)]
    try:
        shape = shape_to_train(config.model, config.algorithm.head_width)
        limits, unreadable = ModelLimits(shape.vocab, shape.context), None
    except ModelError as error:
        shape, limits, unreadable = None, None, error
    applied = None
    if log is not None:
        which = (config.run, config.policy, config.recipe, config.algorithm)
        applied = apply_recipe(log, cut, *which, limits=limits)
        checks += [
            *_data(config, applied, source),
            *_rewards(config, log, cut),
            _evaluation(config, log, cut, source),
        ]
    if shape is None:
        return [Check("model", "red", str(unreadable), "model"), *checks]
    longest = max((ref.length for ref in applied.kept), default=0) if applied else 0
    return [
        Check("model", "green", f"{shape.family}, {parameters(shape):,} parameters"),
        *_memory(config, shape, longest, memory),
        *checks,
    ]


def parameters(shape: ModelShape) -> int:
    """How many numbers the model's weights are."""
    return sum(prod(dims) for dims in weight_shapes(shape).values())


def _memory(config: TrainConfig, shape: ModelShape, longest: int, memory: int) -> list[Check]:
    needs = config.algorithm.needs
    models = 1 + ("values" in needs)
    state = parameters(shape) * (STATE_BYTES * models + 8 * ("reference" in needs))
    most, key = config.tokens_per_micro_batch, "tokens_per_micro_batch"
    if most is None:
        demand = config.algorithm.demand
        samples, key = config.micro_batch_size or demand.groups * demand.group_size, "micro_batch_size"
        tokens, pass_of = samples * longest, f"{samples} samples of {longest} tokens"
    else:
        tokens = max(most, longest)
        pass_of = f"at most {tokens} tokens, all trained,"
    logits = tokens * shape.outputs * LOGIT_BYTES
    share = (state + logits) / memory
    said = (
        f"{state / 2**30:.2f} GiB of state and {logits / 2**30:.2f} GiB of logits ({pass_of} in a forward "
        f"pass), of {memory / 2**30:.1f} GiB"
    )
    verdict: Verdict = "red" if share > 1 else "yellow" if share > 0.7 else "green"
    return [Check("memory", verdict, said, key)]


def _algorithm(config: TrainConfig) -> list[Check]:
    demand, algorithm = config.algorithm.demand, config.algorithm
    size = demand.groups * demand.group_size
    said = f"{size} trajectories a rollout batch, in {demand.groups} groups; {demand.steps} steps on each"
    found = [Check("batch", "green", said)]
    if "pairs" in algorithm.needs:
        found = [Check("batch", "green", f"{demand.groups} pairs a step")]
    elif "groups" in algorithm.needs and demand.group_size < 4:
        said = f"groups of {demand.group_size}: a baseline of so few says little"
        found = [Check("batch", "yellow", said, "algorithm.group_size")]
    elif "values" not in algorithm.needs and not algorithm.cycles and size < 8:
        found = [Check("batch", "yellow", f"{said}: gradients of so few are noise", "algorithm.groups")]
    if "rewards" in algorithm.needs and "reference" not in algorithm.needs:
        said = "no KL term holds the policy to where it began; most do without, and watch old_kl and entropy"
        found.append(Check("kl", "green", said, "algorithm.kl"))
    return found


def _staleness(config: TrainConfig, source: str) -> Check:
    limit = config.recipe.max_staleness
    if source == "tail" and limit is None:
        said = "nothing limits how old samples are, and nothing holds back trajectories that will be too old"
        return Check("staleness", "yellow", said, "recipe.max_staleness")
    if limit is not None and limit < config.algorithm.demand.steps - 1:
        said = (
            f"max_staleness {limit} is less than the {config.algorithm.demand.steps} versions that one "
            "rollout batch makes: what is sampled meanwhile is too old"
        )
        return Check("staleness", "red" if source == "tail" else "yellow", said, "recipe.max_staleness")
    return Check("staleness", "green", f"max_staleness {'is not set' if limit is None else limit}")


def _data(config: TrainConfig, applied: Applied, source: str) -> list[Check]:
    demand = config.algorithm.demand
    grouped = "groups" in config.algorithm.needs
    members: dict[str, set[str]] = {}
    for ref in applied.kept:
        key = (ref.group or ref.trajectory_id) if grouped else ref.leaf_turn_id
        members.setdefault(key, set()).add(ref.trajectory_id)
    whole = sum(len(of) >= demand.group_size for of in members.values()) if grouped else len(members)
    unit = "whole groups" if applied.pairs is None else "pairs"
    whole = whole if applied.pairs is None else len(applied.pairs)
    dropped = ", ".join(f"{rule} {count}" for rule, count in applied.rules.most_common()) or "none"
    said = (
        f"{len(applied.kept)} samples, {whole} {unit} where a rollout batch takes {demand.groups}; "
        f"dropped: {dropped}"
    )
    empty: Verdict = "red" if source == "cut" else "yellow"
    found = [Check("data", empty if whole < demand.groups else "green", said, "[recipe]")]
    flat = applied.rules["zero_variance"]
    if flat > len(applied.kept):
        text = f"{flat} samples are in groups whose rewards are all equal, {len(applied.kept)} are not"
        found.append(Check("difficulty", "yellow", text, "tasks of another difficulty; algorithm.group_size"))
    return found


def _rewards(config: TrainConfig, log: Store, cut: Cut) -> list[Check]:
    if "rewards" not in config.algorithm.needs:
        return []
    with connect_at(log, format_cut(cut)) as connection:
        runs = {"runs": list(config.recipe.runs(config.run))}
        sources: Counter[str] = Counter(dict(connection.execute(_SOURCES, runs).fetchall()))
    wanted = config.recipe.reward_source
    there = ", ".join(f"{source} {count}" for source, count in sources.most_common()) or "none"
    verdict: Verdict = "green" if sources[wanted] else "red"
    return [
        Check(
            "rewards",
            verdict,
            f"from source {wanted!r}: {sources[wanted]} (there are: {there})",
            "recipe.reward_source",
        )
    ]


_SOURCES = """
    SELECT source, count(*) FROM rewards
    WHERE list_contains($runs, run) AND turn_id IS NULL AND NOT superseded GROUP BY ALL"""


def _evaluation(config: TrainConfig, log: Store, cut: Cut, source: str) -> Check:
    asked = config.evaluation
    runs = (asked.source_runs if asked is not None else ()) or config.recipe.runs(config.run)
    with connect_at(log, format_cut(cut)) as connection:
        query = "SELECT count(*) FROM trajectories WHERE list_contains($runs, run) AND split = 'eval'"
        row = connection.execute(query, {"runs": list(runs)}).fetchone()
    held = row[0] if row else 0
    if held:
        every = "" if asked is None else f", every {asked.every} steps"
        return Check("evaluation", "green", f"{held} trajectories of split eval{every}")
    if asked is not None and source == "cut" and learns_from_samples(config.algorithm):
        said = f"no trajectory of split eval in run {', '.join(runs)} to evaluate on"
        return Check("evaluation", "red", said, "evaluation.source_runs")
    said = "no trajectory of split eval: a reward that is gamed looks like one that is earned"
    return Check("evaluation", "yellow", said, "agents that open trajectories with split eval")
