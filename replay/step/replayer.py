"""Runs committed steps again, one after another, and checks that each of their stages came out as
recorded.

A policy in place for replays: built as a step's manifest says, in the state before the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import orjson
import torch

from rollbook.engines.weights.digests import Look, Tensors
from rollbook.replay.claim import judge_claim
from rollbook.replay.claims.schedule import schedule
from rollbook.replay.claims.selection import Selections
from rollbook.replay.claims.sent import sent, sent_differences
from rollbook.replay.claims.training import STAGE as TRAINING
from rollbook.replay.claims.training import training
from rollbook.replay.claims.written import STAGES_OF, written
from rollbook.replay.step.compare import (
    ORDER,
    DiffContext,
    Lenient,
    TensorsOf,
    compare_digests,
    due_of,
    evidence,
    hashes_of,
    metrics,
    with_missing,
)
from rollbook.replay.step.compare import STAGE as EVIDENCE
from rollbook.replay.step.partial import Part, part_stages
from rollbook.replay.step.passes import ModelNumbers
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import Start
from rollbook.replay.verdict import StageReplay, StepReplay, Verdict
from rollbook.store import Store
from rollbook.store.events import Json, StepPlanned
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.algorithms.parts import load_part, named_parts
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import Batch
from rollbook.train.batches.manifest_batch import begins, samples_at_cut
from rollbook.train.checkpoints.checkpoint import Adapter, Checkpoint
from rollbook.train.config.config import Dtype, OptimizerConfig
from rollbook.train.config.lora import recorded_lora
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.environment import fingerprint, took_flash, with_files
from rollbook.train.model.model import Build, choose_device, set_deterministic
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.varlen import serves
from rollbook.train.ranks.kept_digests import trees_of
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.resume.promise import Promise, promise
from rollbook.train.resume.restore import RerunStep, input_evidence, put_in_place, rerun_steps
from rollbook.train.select.recipe import ModelLimits
from rollbook.train.step.critic import recorded_critic, restored_critic
from rollbook.train.step.experiences import Experiences, References
from rollbook.train.step.stages import STAGES

UPDATE = ("optimizer", "weights", "critic_optimizer", "critic_weights")
"""Stages that need the optimizer's state."""
NO_UPDATE = "the checkpoint has no optimizer state"


@dataclass(slots=True, eq=False)
class Replayer(AbstractContextManager["Replayer"]):
    """Runs steps again from a start, in order.

    Attributes:
        run_log: the run.
        trust_parts: import and run the user's parts that manifests name (`module:name`).
        one_rank: one rank in the place of all those of a layout.
        look: is given each gradient of the policy, in the steps that are run from now on.
        last: the step that was run last.
    """

    run_log: RunLog
    start: Start
    trust_parts: bool = False
    one_rank: bool = False
    look: Look | None = None
    last: RerunStep | None = None
    _placed: ReplayPolicy | None = None
    _before: CommittedStep | None = None
    _chosen: tuple[int, StageReplay] | None = None
    """The stage `selection` of the last rollout batch, under the step that begins it."""
    _references: References = field(init=False)

    log: Store = field(init=False)
    history: History = field(init=False)

    def __post_init__(self) -> None:
        self.log, self.history = self.run_log.log, self.run_log.history
        self._references = References(self.log, self.history)

    def __exit__(self, *_: object) -> None:
        if self._placed is not None:
            self._placed.ranks.close()
            self._placed = None

    def run(self, step: CommittedStep, *, claims: bool = True) -> StepReplay:
        """Run the next step, and compare all of its stages.

        Args:
            claims: also check whether its manifest follows from the log and from the training's settings,
                and its checkpoint from the step.

        Raises:
            TrainError: it names user's parts that are not trusted, or cannot be loaded.
            RankError: the step was taken by several ranks, and one of those that are started here ended.
            ReplayError, CorruptionError, ModelError: the log does not hold a sample of it, or is damaged.
        """
        plan = step.planned
        placed = self._place(plan)
        policy, experiences = placed.policy, placed.experiences
        (rerun,) = rerun_steps(self.log, policy, experiences, [step], self.history.run, self.look)
        self.last = rerun
        stages = self._stages(step, rerun, placed, claims=claims)
        self._before = step
        return self._replay(step, placed, stages, rerun.metrics, ORDER)

    def _replay(
        self,
        step: CommittedStep,
        placed: ReplayPolicy,
        stages: Mapping[str, StageReplay],
        step_metrics: Json,
        wanted: Sequence[str],
    ) -> StepReplay:
        """The replay of a step as a value.

        Args:
            step_metrics: its metrics.
            wanted: the stages that are asked for.
        """
        plan = step.planned
        promise = placed.promise(plan)
        return StepReplay(
            run=self.history.run,
            step=plan.step,
            attempt=plan.attempt,
            policy=plan.policy,
            policy_version=plan.policy_version,
            from_version=self.start.record.policy_version,
            weights_only=self.start.weights_only,
            reran=[plan.step],
            stages={stage: stages[stage] for stage in wanted if stage in stages},
            metrics=step_metrics,
            environment=promise.told,
            promised=promise.bits,
        )

    def before(self, step: CommittedStep) -> tuple[Policy, Batch]:
        """The policy in the state before the next step, and the step's batch, for callers that run the rest
        themselves.

        Raises:
            TrainError, RankError, ReplayError, CorruptionError, ModelError: as `run`.
        """
        placed, _, batch = self._begun(step.planned)
        return placed.policy, batch

    def _begun(self, plan: StepPlanned) -> tuple[ReplayPolicy, Json, Batch]:
        """The policy in place for a step, the digests of what it starts from, and its batch."""
        placed = self._place(plan)
        torch.set_num_threads(int(plan.environment["threads"]))
        algorithm, trees = recorded_algorithm(plan.algorithm), trees_of(plan.input_digests)
        digests = placed.experiences.input_digests(algorithm, plan.seed, trees)
        samples = samples_at_cut(self.log, plan, self.history.run) if begins(plan) else {}
        return placed, digests, placed.experiences.batch(plan, samples)

    def run_part(self, step: CommittedStep, part: Part) -> StepReplay:
        """Run a part of the next step; no later step can follow.

        Raises:
            TrainError, RankError, ReplayError, CorruptionError, ModelError: as `run`.
        """
        plan = step.planned
        placed, digests, batch = self._begun(plan)
        inputs = input_evidence(placed.policy, placed.critic, trees_of(plan.input_digests))
        before = self._before or self._earlier(step)
        sides = DiffContext(batch, hashes_of(step, before), inputs)
        recorded = plan.input_digests
        lenient = self._lenient(step, recorded | step.committed.digests, placed)
        stages = {
            s: compare_digests(s, recorded.get(s), digest, sides, lenient) for s, digest in digests.items()
        }
        due = due_of(self.history, step, self.run_log.trainings)
        stages = with_missing(stages, due)
        if self.start.weights_only:
            stages |= self._without_update(stages)
        stages |= self._claims(step, batch, placed) | {TRAINING: self._training(step)}
        source = ModelNumbers(plan, batch, self._values(step), placed.policy)
        stages |= part_stages(step, part, source, due, lenient)
        return self._replay(step, placed, stages, {}, part.shown)

    def state(self) -> Checkpoint:
        """What a checkpoint of the version that the last step made would hold."""
        assert self._placed is not None
        assert self._before is not None
        return self._placed.state(self._before.planned)

    @property
    def policy(self) -> Policy:
        """The policy in place, once a step was run."""
        assert self._placed is not None
        return self._placed.policy

    def beside(self, step: CommittedStep, other: StepPlanned) -> tuple[Policy, Experiences]:
        """A second policy in the state before a step, beside the first, built for a manifest that differs
        from the step's.

        Raises:
            TrainError, RankError, ModelError: as `run`.
        """
        placed = self._place(step.planned)
        names = ("other", "other_critic")
        held, shape = placed.state(other), self.start.shape
        how = placed.made_for["dtype"]
        return policies(placed.ranks, other, how, shape, held, self._references, names, goes_on=True)

    # Putting in place -------------------------------------------------------------------------

    def _place(self, plan: StepPlanned) -> ReplayPolicy:
        """The policy in the state before a step, built as the step was."""
        wanted = made_for(plan, one_rank=self.one_rank)
        held = self._placed
        if held is not None and (held.made_for == wanted or not begins(plan)):
            return held
        if self.trust_parts:
            for name in named_parts(plan.algorithm):
                load_part(name)
        goes_on, state = self.start.goes_on, self.start.held
        if held is not None:
            goes_on = held.made_for["phase"] == plan.phase
            state = held.state(plan)
            held.ranks.close()
            self._placed = None
        self._placed = put(plan, wanted, self.start.shape, state, self._references, goes_on=goes_on)
        return self._placed

    # Comparing --------------------------------------------------------------------------------

    def _stages(
        self, step: CommittedStep, rerun: RerunStep, placed: ReplayPolicy, *, claims: bool
    ) -> dict[str, StageReplay]:
        checkpoints = [
            c for c in self.history.checkpoints if c.policy_version == step.committed.policy_version
        ]
        checkpoint, held = None, None
        if claims:
            checkpoint, held = written(self.log, checkpoints, step.committed.digests)
        before = self._before or self._earlier(step)
        sides = DiffContext(
            rerun.batch,
            hashes_of(step, before),
            rerun.evidence,
            self._values(step),
            _tensors_in(held),
            placed.tensor,
        )
        lenient = self._lenient(step, rerun.recorded, placed)
        stages = {
            stage: compare_digests(stage, rerun.recorded.get(stage), rerun.new.get(stage), sides, lenient)
            for stage in STAGES
            if stage in rerun.recorded or stage in rerun.new
        }
        due = due_of(self.history, step, self.run_log.trainings)
        stages = with_missing(stages, due)
        stages["metrics"] = metrics(step, rerun.metrics, lenient, due.metric)
        if self.start.weights_only:
            stages |= self._without_update(stages)
        stages[TRAINING] = self._training(step)
        stages[EVIDENCE] = evidence(step, sides, stages, due)
        if claims:
            stages |= self._claims(step, rerun.batch, placed)
        if checkpoint is not None:
            stages["checkpoint"] = checkpoint
        if claims and (sent_stage := self._sent(step, stages["weights"], placed.policy)) is not None:
            stages["sent"] = sent_stage
        return stages

    def _lenient(self, step: CommittedStep, recorded: Json, placed: ReplayPolicy) -> Lenient | None:
        """What tolerances depend on, if the machine does not promise bits; None where it does. Other code
        has to give the same bits all the same."""
        plan, promise = step.planned, placed.promise(step.planned)
        of_machine = [d for d in promise.against if d.key.partition(".")[0] not in ("sources", "parts")]
        if not of_machine and not promise.unsteady:
            return None
        rates = (plan.learning_rate, 0.0 if plan.critic is None else float(plan.critic["learning_rate"]))
        dtype = str(plan.environment["dtype"])
        elsewhere = any(d.key == "device" for d in of_machine)
        return Lenient(
            frozenset(recorded), dtype, max(rates), at_checkpoint=self._before is None, elsewhere=elsewhere
        )

    def _without_update(self, stages: Mapping[str, StageReplay]) -> dict[str, StageReplay]:
        """The stages that a start with weights alone cannot prove."""
        names = ("input_optimizer", "critic_input_optimizer", *UPDATE)
        return {
            name: replace(stages[name], verdict=Verdict.not_proven, replayed=None, why=NO_UPDATE, place=None)
            for name in names
            if name in stages
        }

    def _claims(self, step: CommittedStep, batch: Batch, placed: ReplayPolicy) -> dict[str, StageReplay]:
        shape, selections = self.start.shape, self.run_log.selections
        mixture = shape.mixture if step.planned.routing_replay else None
        selections.limits = ModelLimits(shape.vocab, shape.context, mixture)
        begun = self.history.beginning(step)
        if self._chosen is None or self._chosen[0] != begun.planned.step:
            self._chosen = begun.planned.step, judge_claim("selection", selections.claim(begun))
        return {
            "selection": self._chosen[1],
            "schedule": self._schedule(step, batch, placed, selections),
        }

    def _training(self, step: CommittedStep) -> StageReplay:
        return training(self.history, step, self.run_log.trainings, excerpt=self.run_log.selections.excerpt)

    def _schedule(
        self, step: CommittedStep, batch: Batch, placed: ReplayPolicy, selections: Selections
    ) -> StageReplay:
        if selections.excerpt and step.planned.schedule is not None:
            return judge_claim(
                "schedule", "the excerpt lacks earlier steps, after which this one is numbered"
            )
        whole, policies_of = placed.experiences.samples, (placed.policy, placed.critic)
        due = schedule(self.history, step, selections.openings, batch, whole, *policies_of)
        return StageReplay("schedule", Verdict.not_recorded) if due is None else judge_claim("schedule", due)

    def _sent(self, step: CommittedStep, weights: StageReplay, policy: Policy) -> StageReplay | None:
        """The stage `sent` of the version that a step made; None where no engine was given it."""
        activated = self.run_log.activated.get(step.committed.policy_version, ())
        if activated and weights.verdict != Verdict.equal:
            return StageReplay("sent", Verdict.not_proven, why="the step's weights are not proven")

        digest = policy.weights_digest(tree=trees_of(step.planned.input_digests).weights).digest
        return sent(sent_differences(activated, digest, policy.stream_weights))

    def _earlier(self, step: CommittedStep) -> CommittedStep | None:
        """The step that made the version that a step starts from."""
        version = step.planned.policy_version
        return next((s for s in self.history.steps.values() if s.committed.policy_version == version), None)

    def _values(self, step: CommittedStep) -> Mapping[str, Singles]:
        """What the step recorded of each trained token, by stage."""
        return self.run_log.vectors.get((step.planned.step, step.planned.attempt), {})


def _tensors_in(held: Checkpoint | None) -> TensorsOf:
    """The tensors of the checkpoint of the version that a step made, by stage and name."""

    def find(stage: str, name: str) -> torch.Tensor | None:
        what = next((what for what, stage_name in STAGES_OF.items() if stage_name == stage), None)
        tensors: Tensors | None = None if held is None or what is None else getattr(held, what)
        return None if tensors is None else tensors.get(name)

    return find


@dataclass(slots=True, eq=False)
class ReplayPolicy:
    """A policy in place, for the steps of one training in one layout.

    Attributes:
        made_for: the parts of a manifest that it is built by.
    """

    made_for: Json
    ranks: Ranks
    policy: Policy
    critic: Policy | None
    experiences: Experiences

    def state(self, plan: StepPlanned) -> Checkpoint:
        """What a checkpoint of it would hold, if trained as this manifest says."""
        policy, critic = self.policy, self.critic
        adapter = None
        if plan.lora is not None and (factors := policy.adapter()):
            adapter = Adapter(_copied(factors), recorded_lora(plan.lora))
        return Checkpoint(
            _copied(policy.weights()),
            _copied(policy.optimizer_state()),
            None if critic is None else _copied(critic.weights()),
            None if critic is None else _copied(critic.optimizer_state()),
            adapter,
        )

    def tensor(self, stage: str, name: str) -> torch.Tensor | None:
        """A tensor of a stage of weights or of an optimizer, as it is now; None where it has none."""
        policy = self.critic if stage.startswith("critic") else self.policy
        if policy is None:
            return None
        if stage.endswith("weights"):
            return policy.weights().get(name)
        return policy.optimizer_state().get(name) if stage.endswith("optimizer") else None

    def promise(self, plan: StepPlanned) -> Promise:
        """Whether a step is promised to give the recorded bits here."""
        return promise(plan.environment, _fingerprint(plan, self.ranks.described))


def promised(log: Store, run: str, plan: StepPlanned, *, one_rank: bool) -> Promise:
    """Whether a step of a run is promised to give the recorded bits in this process; asked before anything
    is built. Source files that differ are named.

    Args:
        one_rank: one rank in the place of all those of the layout.
    """
    set_deterministic(int(plan.environment["threads"]))
    parallel, ranks = recorded_parallel({} if one_rank else plan.environment.get("parallel") or {})
    here = _fingerprint(plan, parallel.described(ranks))
    return promise(*with_files(log, run, plan.environment, here))


def _fingerprint(plan: StepPlanned, layout: Json) -> Json:
    """The fingerprint that a step would get here."""
    how = _build_like(plan)
    return fingerprint(how.device, plan.algorithm, layout, dtype=how.dtype, flash=how.flash)


def made_for(plan: StepPlanned, *, one_rank: bool) -> Json:
    """The parts of a manifest that a policy is built by.

    Args:
        one_rank: one rank in the place of all those of the layout.
    """
    environment = plan.environment
    return {
        "phase": plan.phase,
        "optimizer": plan.optimizer,
        "lora": plan.lora,
        "critic": None if plan.critic is None else plan.critic["optimizer"],
        "parallel": {} if one_rank else environment.get("parallel") or {},
        "dtype": environment["dtype"],
        "device": str(environment["device"]).split(":")[0],
        "flash": took_flash(environment),
    }


def put(
    plan: StepPlanned,
    wanted: Json,
    shape: ModelShape,
    held: Checkpoint,
    references: References,
    *,
    goes_on: bool,
) -> ReplayPolicy:
    """Build a policy, and put what a checkpoint holds in place.

    Args:
        wanted: what it is built by.
        goes_on: whether the step's training goes on from the checkpoint; else it begins there.

    Raises:
        ModelError: it cannot be built, or is of another architecture.
        RankError: it needs several ranks, and one of them does not come.
        TrainError: there is no checkpoint of the base weights of its LoRA factors.
    """
    ranks = Ranks(*recorded_parallel(wanted["parallel"]))
    try:
        policy, experiences = policies(
            ranks, plan, wanted["dtype"], shape, held, references, ("actor", "critic"), goes_on=goes_on
        )
    except BaseException:
        ranks.close()
        raise
    return ReplayPolicy(wanted, ranks, policy, experiences.critic, experiences)


def policies(
    ranks: Ranks,
    plan: StepPlanned,
    dtype: Dtype,
    shape: ModelShape,
    held: Checkpoint,
    references: References,
    names: tuple[str, str],
    *,
    goes_on: bool,
) -> tuple[Policy, Experiences]:
    """The policy of a manifest, and what makes its batches, with the critic if there is one. Arguments and
    errors as of `put`.

    Args:
        names: by which the ranks know the policy and its critic.
    """
    how = replace(_build_like(plan), dtype=dtype)
    optimizer = OptimizerConfig.model_validate_json(orjson.dumps(plan.optimizer))
    lora = None if plan.lora is None else recorded_lora(plan.lora)
    own = replace(how, lora=None if lora is None else lora.config)
    policy = ranks.policy(names[0], shape, optimizer, own)
    put_in_place(policy, held, lora, references, goes_on=goes_on)
    critic = None
    if plan.critic is not None:
        settings = recorded_critic(plan)
        critic = restored_critic(ranks, shape, settings, held, how, goes_on=goes_on, name=names[1])
    return policy, Experiences(policy, references, critic)


def _build_like(plan: StepPlanned) -> Build:
    """How a step computed, as far as it can be computed so here."""
    recorded, device = plan.environment, device_like(plan)
    how = Build(1, device, plan.seed, int(recorded["threads"]), recorded["dtype"])
    return replace(how, flash=took_flash(recorded) and serves(device, how.type))


def device_like(plan: StepPlanned) -> torch.device:
    """A device of the kind that a step was taken on, if there is one here."""
    kind = str(plan.environment["device"]).split(":")[0]
    return choose_device("cpu" if kind == "cuda" and not torch.cuda.is_available() else kind)


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
