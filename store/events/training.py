"""Kinds of events about weights and optimizer steps; see `store.events`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollbook.store.events.about import About, Record

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PolicyPublished(Record, kind="policy.published", about=About(of="policy")):
    """Weights of a policy version were written where engines can load them."""

    policy: str
    policy_version: int
    parent_version: int | None
    path: str
    weights_digest: str


@dataclass(frozen=True, slots=True)
class PolicyActivated(Record, kind="policy.activated"):
    """An engine serves this version; its own tensors were digested and equal what was published.

    `weight_name` is what the engine is to call them from here on, a name that is used once: tokens that
    name it are of this version. `checksums` is `ranks_digest` of what it holds
    (`engines.weights.rank_checksums`). Both are empty for an engine in the process that wrote this,
    which knows by itself.
    `held` says how it holds them, from which and the version's weights alone `checksums` follow
    (`engines.weights.compare`): the kind of `checksum` of a tensor (`sha256` or `tiled`), the `dtype`
    and the model's `head_dim`; whether vocabularies are `padded`; `tp_size` and the `tp_ranks` that
    answered; and what several tensors of the model are `merged` into (such as `qkv_proj`). It is null where
    that is not known.
    """

    policy: str
    policy_version: int
    engine: str
    weights_digest: str
    path: str
    weight_name: str = ""
    checksums: str = ""
    held: Json | None = None


@dataclass(frozen=True, slots=True)
class EngineControlled(Record, kind="engine.controlled"):
    """An operator changed what an engine does, by one of the proxy's `/engine` routes.

    `action` is the route's name, `asked` the mode, version or path that was sent with it, `error` why the
    engine refused (null: it is done), `by` the name of the key (null: keys are not checked). It holds no text
    of a trajectory and nothing is folded from it: erasure passes over it, retention lets it go with its unit.
    """

    engine: str
    action: str
    asked: Json
    error: str | None = None
    by: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Record, kind="checkpoint.written", about=About(of="policy")):
    """Weights, and optimizer state unless `optimizer_digest` is null, are at `path` in the store."""

    policy: str
    policy_version: int
    path: str
    weights_digest: str
    optimizer_digest: str | None
    phase: str | None
    bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointRemoved(Record, kind="checkpoint.removed", about=About(of="policy")):
    """The checkpoint at `path` counts no more: its folder was removed after this was written, or is at the
    next start.

    Its version and digests stay: the weights are a fold of an earlier checkpoint and the steps since, and may
    be written again, at the same path even, by a later `checkpoint.written`.
    """

    policy: str
    policy_version: int
    path: str
    weights_digest: str
    optimizer_digest: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class SampleDropped(Record, kind="sample.dropped", about=About(of="run")):
    """A recipe's rule kept a sample (named by its leaf turn) out of an attempt at a step.

    It was decided at `cut`, for the trainer at `policy_version`; both are null where these are those of the
    step's plan.
    """

    trajectory_id: str
    turn_id: str
    rule: str
    recipe: str
    step: int
    detail: Json
    attempt: int = 1
    policy_version: int | None = None
    cut: str | None = None


@dataclass(frozen=True, slots=True)
class StepPlanned(Record, kind="step.planned", about=About(of="policy")):
    """The manifest of an optimizer step: everything that decides its bits, written before it runs.

    `samples` are named by `trajectory_id` and `turn_id`, their leaf; the chosen one of a pair has its
    `margin` too, where the loss asks for it, and one that was cut the `tokens` that are left of it.
    `rollout_batch` is null where the step's samples are a rollout batch of their own. Of one on which several
    steps are taken it says: `first_step`, `number` (of this one, from 0) and `steps` (how many there are);
    until one of them is committed also `samples` and `partition`, of all of it. `critic` is null where the
    algorithm has none; otherwise it says its `optimizer`, its `learning_rate`, and whether it learns `alone`.
    `packed` says that the model was given the samples of a micro-batch one after the other, without padding.
    `others` are trajectories of the samples' groups that the recipe dropped, and whose rewards the samples
    were compared with: each with its `trajectory_id`, `run`, `group`, `reward`, its `tokens` that could have
    been trained, and whether it was `truncated`. It is null where there is none, and after the first
    committed step on a rollout batch.
    `lora` is null where the policy's weights are trained; otherwise low-rank factors beside those of version
    `base_version` are: their `rank`, `alpha`, `targets` (null: all that there are), and the `seed` that they
    began by.
    `routing_replay` says that tokens went to the experts that their turns record, where these do.
    `schedule` says what the learning rate, the seed, the micro-batches and the order of samples follow from:
    the `number` of the step in its training (from 0), the `steps` that the schedule of the learning rate
    spans, the training's own `seed`, its `micro_batch_size` and `tokens_per_micro_batch`, and the `slice` of
    its epochs that the rollout batch is (null where samples are used once). It is null where it was not
    recorded.
    `operations` are those of a client whose model a service trains, the step's own last: their
    `request_id`, `number`, `operation` and `body_digest`. Then the data are what these sent, those of
    `samples` that were not sampled here have no `trajectory_id`, and an empty `environment` is that of the
    run's last opening. It is null where the samples are the log's.
    """

    step: int
    attempt: int
    policy: str
    policy_version: int
    phase: str
    cut: str
    recipe: Json
    recipe_digest: str
    samples: list[Json]
    partition: list[list[list[int]]]
    algorithm: Json
    optimizer: Json
    learning_rate: float
    seed: int
    input_digests: Json
    environment: Json
    rollout_batch: Json | None = None
    critic: Json | None = None
    packed: bool = False
    others: list[Json] | None = None
    lora: Json | None = None
    routing_replay: bool = False
    schedule: Json | None = None
    operations: list[Json] | None = None


@dataclass(frozen=True, slots=True)
class StepCommitted(Record, kind="step.committed", about=About(of="policy")):
    """A step's results: one digest per stage, the metrics, and the version it made.

    `hashes` are of parts of stages: `samples` is base64 of bytes, 3 for each of `stages` and of each of these
    for each sample of the manifest; `tensors` has of stages base64 of 6 bytes for each tensor, by name. They
    are the first bytes of xxh3-128 hashes. It is null where it was not recorded.
    """

    step: int
    attempt: int
    policy: str
    policy_version: int
    digests: Json
    metrics: Json
    hashes: Json | None = None


@dataclass(frozen=True, slots=True)
class StepVectors(Record, kind="step.vectors", about=About(of="policy")):
    """What a committed step computed of each trained token in a stage, sample by sample, in the order of the
    manifest. `values` is base64 of float32, little-endian. It is appended together with `step.committed`."""

    step: int
    attempt: int
    policy: str
    stage: str
    values: str


@dataclass(frozen=True, slots=True)
class StepFailed(Record, kind="step.failed", about=About(of="policy")):
    """A planned step did not commit; a later attempt plans anew."""

    step: int
    attempt: int
    policy: str
    error: str


@dataclass(frozen=True, slots=True)
class StepAbandoned(Record, kind="step.abandoned", about=About(of="policy")):
    """A committed step counts no more: training went back to an earlier version, and on under a new number.

    What the step consumed and dropped may be used again. The version that it made keeps its number for ever,
    for engines may have been given it: `goes_on_as` is the number, above all of them, under which the weights
    and the optimizer state of version `back_to` are the policy's from then on.
    """

    step: int
    attempt: int
    policy: str
    policy_version: int
    back_to: int
    goes_on_as: int


@dataclass(frozen=True, slots=True)
class StepRetired(Record, kind="step.retired", about=About(lasting=True)):
    """A step is given up for replay, so that retention may drop what only it needed."""

    step: int
    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class EvalFinished(Record, kind="eval.finished", about=About(of="policy")):
    """A version was evaluated on what is held out of training: samples and rewards of split `eval`.

    `samples` are those held out at `cut`, of which `tokens` count. `trajectories` are those that finished
    with a reward since the evaluation before this one, seen up to `counted_to`; the versions that sampled
    them are `oldest_version` to `newest_version`, null where there are none. `metrics` has
    `loss` and what the algorithm measures of the samples, and the mean `reward` and `success` of the
    trajectories, as far as there are any. Where agents were awaited, `expected` is how many trajectories
    there were to be, null if nobody said; `whole` is false if some of them were not awaited to their end, or
    came to none because their infrastructure failed: then `reward` and `success` are of those that did.
    """

    policy: str
    policy_version: int
    phase: str
    cut: str
    counted_to: str
    samples: int
    tokens: int
    trajectories: int
    oldest_version: int | None
    newest_version: int | None
    metrics: Json
    expected: int | None = None
    whole: bool | None = None

    @property
    def partial(self) -> str | None:
        """A note on an evaluation that is not whole; None for one that is, or that does not say."""
        if self.whole is not False:
            return None
        expected = "" if self.expected is None else f" of {self.expected}"
        return f"NOT WHOLE: {self.trajectories}{expected} trajectories"


@dataclass(frozen=True, slots=True)
class EvalStarted(Record, kind="eval.started", about=About(of="policy")):
    """A training waits for agents to be evaluated at this version, on tasks that are held out."""

    policy: str
    policy_version: int
    phase: str


@dataclass(frozen=True, slots=True)
class EvalSampled(Record, kind="eval.sampled", about=About(of="policy")):
    """The agents that were to be evaluated at this version have been: a training that waits may go on.

    `rollout` is the name that their launches have, `trajectories` how many there were to be.
    """

    policy: str
    policy_version: int
    rollout: str
    trajectories: int
    by: str | None = None


@dataclass(frozen=True, slots=True)
class StopFired(Record, kind="stop.fired", about=About(of="policy")):
    """A rule of early stopping ended a training after the step that made this version.

    `values` are those that the rule judged by, each as `{"policy_version": ..., "value": ...}`.
    """

    policy: str
    policy_version: int
    phase: str
    rule: Json
    values: list[Json]


@dataclass(frozen=True, slots=True)
class SyncStarted(Record, kind="sync.started"):
    """A transfer of weights to an engine began. `sync_id` ties its events together."""

    policy: str
    policy_version: int
    sync_id: str
    engine: str
    transport: str


@dataclass(frozen=True, slots=True)
class SyncFinished(Record, kind="sync.finished"):
    """The engine holds the weights, verified. `seconds` is wall time from start to verification."""

    policy: str
    policy_version: int
    sync_id: str
    engine: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SyncFailed(Record, kind="sync.failed"):
    """The transfer did not end well; the engine is unusable until a whole one does."""

    policy: str
    policy_version: int
    sync_id: str
    engine: str
    error: str
