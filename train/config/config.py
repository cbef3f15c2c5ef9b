"""The CONFIG of `rollbook train`, with its tables `[checkpoint]` and `[record]`: a typed TOML file,
in which an unknown or ill-typed key is an error.

The tables of a CONFIG that watch a training: evaluation on held-out data, and early stopping.

`[sync]` of a CONFIG: the engines that are given weights, and how.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PlainSerializer, PlainValidator, ValidationError, model_validator

from rollbook.engines.address import EngineAddress
from rollbook.store.config import Count, Positive, Table, invalid_values
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.redaction import shown
from rollbook.store.sql.training_views import RECORDED
from rollbook.store.upkeep.checkpoints import Keep, keep_of
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import ALGORITHMS, AnyAlgorithm
from rollbook.train.config.lora import LoraConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.config.recipe import Name, RecipeConfig

HELD_OUT = "evaluation."
"""What the name of a metric of evaluations begins with, where a step has one of the same name."""
OF_AGENTS = frozenset({"reward", "success"})
"""The metrics of evaluations that are of agents: of one that is not whole they are those of a part."""


class EvaluationConfig(Table):
    """Evaluation on trajectories of split `eval`, which are never trained on.

    Each writes `eval.finished`: the loss, and what the algorithm measures, of held-out samples, where
    the algorithm learns from samples as they are (`sft`, `dpo`, `reward_model`); and of a policy the mean
    reward of the trajectories that agents finished with a reward since the evaluation before."""

    every: Positive = 50
    """Optimizer steps between evaluations. One comes before the first step, and one after the last."""
    wait_s: Annotated[float, Field(ge=0)] = 0.0
    """With --source tail: how long each waits for agents to be evaluated at its version, which `rollbook
    rollout --follow` does where its CONFIG has `[evaluation]`. Then the rewards are of this version alone."""
    source_runs: tuple[str, ...] = ()
    """Runs whose samples of split `eval` are held out; absent: the recipe's."""
    max_samples: Positive = 512
    """Most samples (or pairs) that an evaluation takes, chosen by the seed; the same each time."""


class StopRule(Table):
    """A rule of early stopping: once it holds, the training ends, with a checkpoint and `stop.fired`.

    Each `[[stop]]` is one rule, with exactly one of `above`, `below` and `better`."""

    metric: str
    """A metric of steps (a column of the view `metrics`), or of evaluations: `evaluation.loss`,
    `evaluation.reward`, `evaluation.preference_accuracy` and others."""
    above: float | None = None
    """The rule holds when the metric was above this `patience` times in a row."""
    below: float | None = None
    """The rule holds when the metric was below this `patience` times in a row."""
    better: Literal["lower", "higher"] | None = None
    """Which values are better: the rule holds when the last `patience` values were no better than the best
    before them."""
    patience: Positive = 1
    """How many values decide: steps, or evaluations."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """With `better`: by how much a value must be better than the best to count."""

    @model_validator(mode="after")
    def _one_condition(self) -> StopRule:
        given = [key for key in ("above", "below", "better") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a rule has exactly one of above, below and better (got {' and '.join(given) or 'none'})"
            )
        if self.min_delta and self.better is None:
            raise ValueError("min_delta goes with better")
        return self

    @property
    def of_evaluations(self) -> bool:
        """Whether its metric is one of evaluations."""
        return self.metric.startswith(HELD_OUT)

    def dump(self) -> Json:
        """The keys that are set, as an event has them."""
        return self.model_dump(mode="json", exclude_defaults=True)


def check_stop_metrics(rules: Collection[StopRule], known: Collection[str], *, evaluates: bool) -> None:
    """Check that rules name metrics that a training has.

    Args:
        known: metrics of steps.
        evaluates: whether there are evaluations.

    Raises:
        ValueError: a rule names another.
    """
    for rule in rules:
        if rule.of_evaluations and not evaluates:
            raise ValueError(
                f"[[stop]] metric {rule.metric!r} is one of evaluations, and there is no [evaluation]"
            )
        if rule.of_evaluations or rule.metric in known:
            continue
        near = difflib.get_close_matches(rule.metric, known, 1)
        raise ValueError(
            f"[[stop]] metric {rule.metric!r} is none of a step: "
            + (f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}")
        )


Address = Annotated[EngineAddress, PlainValidator(EngineAddress.of), PlainSerializer(str)]


class SyncConfig(Table):
    """Which engines get new weights, how often, and how running requests are treated."""

    engines: Annotated[tuple[Address, ...], Field(min_length=1)]
    """Control URLs: SGLang servers, or a proxy's own engine, such as http://127.0.0.1:8000/engine."""
    key_env: Annotated[str, Field(min_length=1)] = "ROLLBOOK_ENGINE_KEY"
    """Environment variable with the key sent to the engines: SGLang's API key, or an operator key of a
    proxy."""
    transport: Literal["auto", "disk", "tensor", "distributed"] = "auto"
    """How weights are sent: from a directory that engines see too, from this host's memory, or by
    broadcast."""
    sync_every: Positive = 1
    """Optimizer steps between syncs."""
    overlap: bool = False
    """Go on while weights travel: the next samples are gathered, scored and trained on meanwhile. It takes a
    copy of the weights in the host's memory, unless they travel by disk."""
    partial_rollout: bool = False
    """Update weights while requests run; they continue with the new version. Otherwise requests finish
    first."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """How running requests continue with partial_rollout: their KV cache is recomputed, or kept, or they are
    aborted and resumed. Keeping it needs SGLang started with --disable-overlap-schedule."""
    drain_s: Annotated[float, Field(ge=0)] = 600.0
    """Longest wait for running requests to end, without partial_rollout; after it they are retracted."""
    bucket_mb: Positive = 512
    """Size of a bucket of tensors; two buckets are in flight at a time."""
    address: str = "127.0.0.1"
    """Address of this host, as engines reach it, for broadcasts."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for a reply of an engine, or for a collective operation."""
    wait_s: Annotated[float, Field(ge=0)] = 600.0
    """Longest wait for an engine to become reachable, if none is."""

    def key(self, environment: Mapping[str, str]) -> str | None:
        """The key sent to engines. It comes from the environment because a configuration is
        recorded.

        Raises:
            ConfigError: the variable is set but empty, or is not the default one and is not set.
        """
        key = environment.get(self.key_env)
        default = SyncConfig.model_fields["key_env"].default
        if (key is None and self.key_env != default) or (key is not None and not key.strip()):
            state = "not set" if key is None else "set and empty"
            raise ConfigError(
                f"sync.key_env names {self.key_env}, which is {state}: give it the engines' key"
            )
        return key


class CheckpointConfig(Table):
    """How checkpoints are written, and which are kept. `checkpoint_every` says how often; none of these keys
    changes a bit of what is trained, or of what is read back."""

    overlap: bool = False
    """Go on while a checkpoint is written: what it holds is copied to the host's memory first, and one is
    written at a time. The last one of a training is waited for, and so is one that engines load."""
    sharded: bool = False
    """Each rank writes its own part, and nothing is gathered. All hosts need the store's folder at the same
    path. Engines that load weights from disk get a directory of whole ones beside it."""
    keep_last: Positive | None = None
    """Keep the newest so many checkpoints that training can resume from, and remove the others, but for those
    that something needs; absent: keep all, or with `keep_every` the newest 2. Steps of removed versions are
    replayed from the nearest one that is kept."""
    keep_every: Positive | None = None
    """Of so many versions in a row keep the first checkpoint, too, as a replay starts from it; absent: with
    `keep_last` no others."""

    @property
    def keep(self) -> Keep | None:
        """What is kept; None: all."""
        return keep_of(self.keep_last, self.keep_every)


Vector = Literal[
    "logprobs", "losses", "entropies", "proximal_logprobs", "reference_logprobs", "values", "value_losses"
]


class RecordConfig(Table):
    """What steps record beside the digests of their stages; no key changes a bit of what is trained."""

    vectors: tuple[Vector, ...] = ()
    """Stages whose numbers are kept, a float32 for each trained token: a replay that differs then says which
    token, by how much, and where bits cannot be promised whether it is within a tolerance. With `logprobs`,
    and what else the loss needs, losses can be computed again without a model. `entropies` (nats) come with
    the logprobs; the viewer colours tokens by them."""


Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
"""Types that weights are trained in."""


class OptimizerConfig(Table):
    """Adam, or Muon beside it, with Megatron's learning-rate schedules."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` takes the matrices of the hidden layers (arXiv:2502.16982), and leaves all else to Adam."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's momentum, Nesterov's."""
    muon_steps: Positive = 5
    """Muon: iterations of Newton and Schulz that orthogonalize an update."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate, after the warm-up."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the schedule."""
    warmup_steps: Count = 0
    """Steps in which the rate rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine", "WSD"] = "constant"
    """How the rate falls from `lr` to `min_lr`; WSD: warm up, stay, then decay."""
    decay_steps: Positive | None = None
    """Step at which the schedule ends; absent: `steps`."""
    wsd_decay_steps: Positive | None = None
    """WSD: steps of the final, linear decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Adam's decay rates of the mean gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to Adam's denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, as in AdamW."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Maximum norm of the whole gradient, which is clipped to it; 0: no clipping."""

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is more than lr {self.lr:g}")
        if self.name != "muon" and (self.muon_momentum, self.muon_steps) != (0.95, 5):
            raise ValueError('muon_momentum and muon_steps go with name = "muon"')
        if (self.decay == "WSD") != (self.wsd_decay_steps is not None):
            raise ValueError('wsd_decay_steps goes with decay = "WSD", and only with it')
        return self


class CriticConfig(OptimizerConfig):
    """The critic of an algorithm that has one: its optimizer and schedule, as `[optimizer]`, and its warm-up.

    It starts as the policy's own weights with a head that gives 0, when the training begins.
    """

    alone_steps: Count = 0
    """Optimizer steps at the beginning in which the critic learns alone: the policy's weights stay as they
    are."""


class AdmissionConfig(Table):
    """How staleness of samples is limited; see `store.fold.staleness`."""

    hold: bool = True
    """Whether proxies hold new trajectories that would exceed the recipe's `max_staleness`."""
    order: Literal["windowed", "fifo", "age"] = "windowed"
    """Which groups are used first: as they complete or before they become too old; in order of their start;
    the oldest."""
    wait_s: Annotated[float, Field(ge=0)] = 300.0
    """Longest wait for the running trajectories that `order` waits for, and for rewards of finished ones."""
    stall_s: Annotated[float, Field(gt=0)] = 60.0
    """Say what is waited for, and how much of it, after each so long without a new complete group; the first
    time after 10 s."""


class TrainConfig(Table):
    """All of a CONFIG file."""

    run: Name = "default"
    """The run whose trajectories are trained on; checkpoints and steps are recorded under it."""
    policy: Name = "actor"
    """Which line of weights of the run is trained."""
    model: Path
    """Hugging Face model directory the run starts from (version 0), or the name of a model at the hub, such
    as Qwen/Qwen3-0.6B. Read when the run is new; afterwards only compared, where it is still there."""
    steps: Positive
    """Optimizer steps this configuration takes in all, restarts included."""
    seed: Count = 0
    """Decides the order of samples and the random generators of every step."""
    micro_batch_size: Positive | None = None
    """Samples per forward pass, padded to the longest; absent: the whole batch."""
    tokens_per_micro_batch: Positive | None = None
    """Packs samples instead: a forward pass takes at most so many tokens (or one sample that is longer), no
    padding is computed, and the passes of a step are of about equal work. Gradients are equal but for the
    order of sums."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints; a replay starts at the one before its step."""
    threads: Positive = 1
    """Torch threads on the CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for training; auto: a GPU if there is one."""
    dtype: Dtype = "float32"
    """Type of weights and activations, and of what engines are sent. With bfloat16 the optimizer keeps
    float32 weights beside the model's, gradients are summed in float32, and a float32 `model` is rounded
    once."""
    recompute: bool = False
    """Keep the input of each layer alone, and compute its activations again in the backward pass: less
    memory, and about a third more time."""
    routing_replay: bool = False
    """Of a mixture of experts: send each token to the experts that its turn records (`rollbook serve
    --routed-experts`), where it does, in the training pass and for the trainer's old logprobs. The router's
    weights of these are still the trainer's own."""
    engine_gap_alarm: Annotated[float, Field(gt=0)] = 0.05
    """Warn if the engine's logprobs of tokens of the step's input version differ by more than this from the
    trainer's. Another order of summation causes about 1e-5 in float32; other weights cause 1 and more."""
    on_not_finite: Literal["stop", "skip", "retake"] = "stop"
    """What to do if a step's numbers are not finite: end with an error (stop); drop its samples by the rule
    `not_finite` and take the next batch (skip); or drop only the sample, or pair, in which they began, where
    that is known, and take the step again without it (retake). At most 8 times in a row. Weights that are not
    finite always end the training."""
    mode: Literal["async", "hybrid", "colocate"] = "async"
    """How training and engines go together, with --source tail. async: each on devices of its own; a rollout
    batch is awaited, then scored and trained on. hybrid: the same, but parts of the batch are scored as they
    come. colocate: they share the devices, and take turns: who waits gives its memory away."""
    num_iters_per_train_update: Positive = 4
    """With mode = "hybrid": parts in which a rollout batch is scored, with the weights of its first step. The
    update is one, over all of it."""
    reference_apart: bool = False
    """With mode = "async" or "hybrid": the reference is a process of its own, which computes while the policy
    does, one copy of the model on as many ranks as that takes; else other weights are put in the policy's
    place for its passes. The bits are the same."""
    idle_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """With --source tail: end the training after this long without a full batch."""
    algorithm: AnyAlgorithm
    """The algorithm: advantages and loss."""
    recipe: RecipeConfig = RecipeConfig()
    """The recipe: which samples are used."""
    admission: AdmissionConfig = AdmissionConfig()
    """Limits on staleness, with `--source tail`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its learning-rate schedule."""
    critic: CriticConfig | None = None
    """The critic of an algorithm that has one; absent: with all defaults."""
    lora: LoraConfig | None = None
    """Low-rank factors that are trained in place of the weights; absent: the weights are."""
    parallel: ParallelConfig = ParallelConfig()
    """How the training is spread over its ranks."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """How checkpoints are written."""
    record: RecordConfig = RecordConfig()
    """What steps record beside the digests of their stages."""
    sync: SyncConfig | None = None
    """Engines that get new weights; absent: none."""
    evaluation: EvaluationConfig | None = None
    """Evaluation on held-out data; absent: none."""
    stop: tuple[StopRule, ...] = ()
    """Rules of early stopping."""

    @model_validator(mode="after")
    def _recipe_fits(self) -> TrainConfig:
        check_recipe(self.recipe, self.algorithm)
        return self

    @model_validator(mode="after")
    def _fitting(self) -> TrainConfig:
        if self.critic is not None and "values" not in self.algorithm.needs:
            raise ValueError(f'[critic]: algorithm "{self.algorithm.algorithm_name}" has no critic')
        if "pairs" in self.algorithm.needs and (self.micro_batch_size or 2) % 2:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size}: the samples of a pair lie in one forward pass; "
                "choose an even number"
            )
        if self.micro_batch_size and self.tokens_per_micro_batch:
            raise ValueError(
                "micro_batch_size pads samples, tokens_per_micro_batch packs them: name one of the two"
            )
        if self.algorithm.head_width and self.sync is not None:
            raise ValueError(
                "[sync]: engines serve policies, and "
                f"{self.algorithm.algorithm_name} trains a reward model: leave the table out"
            )
        if self.algorithm.head_width and self.routing_replay:
            raise ValueError(
                f"routing_replay: {self.algorithm.algorithm_name} trains a reward model, whose experts no "
                "engine chose: leave it out"
            )
        steps = self.algorithm.demand.steps
        if self.steps % steps:
            raise ValueError(
                f"steps {self.steps} is no multiple of the {steps} steps that are taken on each rollout "
                "batch (algorithm.epochs times algorithm.mini_batches)"
            )
        if self.algorithm.algorithm_name in ALGORITHMS:  # one of the user's own may measure what it likes
            known = {column.name for column in RECORDED}
            check_stop_metrics(self.stop, known, evaluates=self.evaluation is not None)
        return self

    @model_validator(mode="after")
    def _reference_fits(self) -> TrainConfig:
        if not self.reference_apart:
            return self
        if self.algorithm.reference is None:
            name = self.algorithm.algorithm_name
            raise ValueError(f"reference_apart: algorithm {name} asks for no reference; leave it out")
        if self.mode == "colocate":
            raise ValueError(
                'reference_apart: with mode "colocate" training and engines take turns on the same devices: '
                'leave it out, or take "async" or "hybrid"'
            )
        if self.parallel.expert > 1:
            raise ValueError(
                "reference_apart: it is one copy of the model, whose experts are not spread; with "
                "parallel.expert above 1 leave it out"
            )
        return self

    @model_validator(mode="after")
    def _trained_fits(self) -> TrainConfig:
        if self.mode == "colocate" and self.sync is not None and self.sync.overlap:
            raise ValueError(
                'sync.overlap: with mode "colocate" training waits while weights travel: leave it out'
            )
        if self.mode == "colocate" and (self.sync is None or self.sync.sync_every > 1):
            raise ValueError(
                'mode "colocate": engines that gave their memory away are given weights after each rollout '
                "batch: name them in [sync], with sync_every = 1"
            )
        if self.lora is not None and self.algorithm.head_width:
            raise ValueError(
                f"[lora]: {self.algorithm.algorithm_name} trains the head of a reward model, which has no "
                "factors: leave the table out"
            )
        names = {self.optimizer.name, self.critic and self.critic.name}
        if "muon" in names and self.parallel.tensor > 1:
            raise ValueError(
                'optimizer.name "muon" takes whole matrices: leave parallel.tensor 1, or take "adamw"'
            )
        if "muon" in names and self.parallel.distributed_optimizer:
            raise ValueError(
                'optimizer.name "muon" takes whole matrices: leave parallel.distributed_optimizer out, or '
                'take "adamw"'
            )
        if self.lora is not None and self.optimizer.name == "muon":
            raise ValueError('optimizer.name "muon" takes whole matrices: with [lora] take "adamw"')
        return self

    @property
    def packed(self) -> bool:
        """Whether samples are packed, instead of padded."""
        return self.tokens_per_micro_batch is not None

    def as_json(self) -> Json:
        """Plain JSON values."""
        return self.model_dump(mode="json")


def parse_config(values: Json, name: str, written: Callable[[str], str] = str) -> TrainConfig:
    """Check a CONFIG's values.

    Args:
        name: of the CONFIG in an error; written: gives a key as the file of a whole run has it.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed; all are named.
    """
    try:
        # JSON mode: TOML's lists serve as tuples and its integers as floats, yet types stay strict.
        return TrainConfig.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ConfigError(describe_errors(name, error, values, written)) from error


def describe_errors(
    name: str, error: ValidationError, values: Json, written: Callable[[str], str] = str
) -> str:
    """All errors in a file's values, a line each."""
    lines = []
    for problem in invalid_values(error, values):
        what = shown(problem.text) or f"unknown key: {_suggestion(problem.keys, values)}"
        lines.append(f"  {written(problem.key) if problem.keys else 'file'}: {what}")
    return "\n".join([f"{name}:", *lines])


TABLES: Mapping[str, Mapping[str, type[Table]]] = {
    "": {"": TrainConfig},
    "algorithm": ALGORITHMS,
    "recipe": {"": RecipeConfig},
    "admission": {"": AdmissionConfig},
    "optimizer": {"": OptimizerConfig},
    "critic": {"": CriticConfig},
    "lora": {"": LoraConfig},
    "parallel": {"": ParallelConfig},
    "checkpoint": {"": CheckpointConfig},
    "record": {"": RecordConfig},
    "sync": {"": SyncConfig},
    "evaluation": {"": EvaluationConfig},
    "stop": {"": StopRule},
}
"""Table -> variant, if it has several -> its keys, in the order in which they are shown."""


def _suggestion(keys: Sequence[str], values: Json) -> str:
    """A hint at the key that an unknown key was probably meant for."""
    key, table = keys[-1], keys[0] if len(keys) > 1 else ""
    kind = str(values[table].get("name", "")) if table == "algorithm" else ""
    held = {
        name: {key for model in kinds.values() for key in model.model_fields}
        for name, kinds in TABLES.items()
    }
    here = set(TABLES.get(table, {}).get(kind, TrainConfig).model_fields)
    where = f"[{table}]" if table else "the top of the file"
    near = difflib.get_close_matches(key, sorted(here), 1)
    elsewhere = [name for name, keys in held.items() if key in keys and name != table]
    if near and not elsewhere:
        return f"did you mean {near[0]}?"
    others = TABLES.get(table, {}).items()
    if fitting := [other for other, model in others if key in model.model_fields]:
        return f'it goes with name = "{fitting[0]}"'
    if elsewhere:
        places = " and ".join(
            f"[{name}]" if name else "the top of the file, before all tables" for name in elsewhere
        )
        return f"it belongs to {places}"
    return f"{where} has {', '.join(sorted(here))}"


# Whether a recipe has a meaning for an algorithm.


def check_recipe(recipe: RecipeConfig, algorithm: Algorithm) -> None:
    """Check that an algorithm has everything that the keys of a recipe refer to.

    Raises:
        ValueError: it has not.
    """
    name, needs = algorithm.algorithm_name, algorithm.needs
    if recipe.age_decay < 1 and "logprobs" not in needs:
        raise ValueError(
            f"recipe.age_decay weighs the tokens of policy gradients: {name} has no versions to go by"
        )
    if algorithm.head_width and recipe.max_staleness is not None:
        raise ValueError(
            "recipe.max_staleness counts versions of the policy in training, and no token is sampled by "
            "a reward model: leave it out"
        )
    if recipe.order == "recorded" and not algorithm.cycles:
        raise ValueError(
            f'recipe.order = "recorded" is about samples that are gone over again and again, and {name} uses '
            "each once: leave it out, and see admission.order"
        )
    if recipe.min_group is not None and not algorithm.cycles:
        _check_min_group(recipe.min_group, algorithm)
    if recipe.group_statistics == "all" and ("groups" not in needs or "pairs" in needs):
        raise ValueError(
            f'recipe.group_statistics = "all" is about the baselines of groups, and {name} has none here: '
            "leave it out, or compare groups (algorithm.group_size)"
        )


def _check_min_group(least: int, algorithm: Algorithm) -> None:
    """Check that the groups of a step can have so many members.

    Raises:
        ValueError: they cannot.
    """
    size = algorithm.demand.group_size
    if "groups" not in algorithm.needs:
        raise ValueError(
            f"recipe.min_group counts the members of a group, and {algorithm.algorithm_name} takes samples "
            "one by one here: leave it out, or compare groups (algorithm.group_size)"
        )
    if least > size:
        raise ValueError(
            f"recipe.min_group {least} is more than a group has (algorithm.group_size {size}): every one "
            "would be dropped"
        )
