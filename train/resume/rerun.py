"""Reruns committed steps from the log alone, and compares every stage with what was recorded.

Both resuming a run and replaying a step use it, since the state of a policy is a fold of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from rollbook.engines.weights.digests import Look
from rollbook.store import Store, parse_cut
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, StepPlanned, TrajectoryErased
from rollbook.store.fold.history import CommittedStep, all_samples
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import Batch
from rollbook.train.ranks.policy import Policy
from rollbook.train.resume.schedule import settings_of
from rollbook.train.select.samples import Sample, of_another_run, samples_of
from rollbook.train.step.evidence import Evidence, of_tensors
from rollbook.train.step.experiences import Experiences, begins
from rollbook.train.step.step import STAGES, run_step


@dataclass(frozen=True, slots=True, eq=False)
class RerunStep:
    """A rerun step: the recorded and the new digest of every stage, and the new metrics.

    Attributes:
        evidence: of the parts of stages, and of what the step started from.
    """

    step: int
    recorded: Json
    found: Json
    metrics: Json
    evidence: Evidence
    batch: Batch

    @property
    def first_difference(self) -> str | None:
        """The first recorded stage whose digest differs, in the order of `STAGES`; None if all are
        equal.

        A stage that was not recorded, because the release did not know it yet, is not compared.
        """
        stages = [stage for stage in STAGES if stage in self.recorded]
        return next((stage for stage in stages if self.recorded[stage] != self.found.get(stage)), None)


def samples_at_cut(log: Store, plan: StepPlanned, run: str) -> dict[str, Sample]:
    """The samples that a manifest names, by leaf turn, materialized from the log at the manifest's
    cut; if the step begins a rollout batch, all of its samples.

    Args:
        run: that the step is of.

    Raises:
        ReplayError: the log does not hold one of them, or its tokens were erased.
    """
    named = all_samples(plan) if begins(plan) else plan.samples
    wanted = {ref["trajectory_id"] for ref in named}
    source, paths = plan.recipe["reward_source"], plan.recipe.get("paths", "all")
    trajectories = log.trajectories(parse_cut(plan.cut), wanted)
    own = None if plan.recipe.get("other_policies") is None else plan.policy
    materialized = (s for t in trajectories.values() for s in samples_of(t, source, paths, policy=own))
    samples = {sample.leaf_turn_id: sample for sample in materialized}
    samples |= {leaf: of_another_run(s) for leaf, s in samples.items() if s.run != run}
    missing = [ref for ref in named if ref["turn_id"] not in samples]
    if missing:
        raise ReplayError(f"step {plan.step}: the log no longer holds its sample {missing[0]}")
    samples |= {r["turn_id"]: samples[r["turn_id"]].within(r["tokens"]) for r in named if "tokens" in r}
    for ref in named:
        if samples[ref["turn_id"]].erased:
            raise ReplayError(
                f"step {plan.step}: the tokens of trajectory {ref['trajectory_id']}, which it trained on, "
                f"were erased ({_why_erased(log, ref['trajectory_id'])}); no step that needs them can be "
                "replayed"
            )
    return samples


def _why_erased(log: Store, trajectory_id: str) -> str:
    """The recorded reason of an erasure."""
    records = [
        e.record for e in log.events_of([TrajectoryErased.KIND]) if isinstance(e.record, TrajectoryErased)
    ]
    reasons = [r.reason for r in records if r.trajectory_id == trajectory_id and not r.tokens_kept]
    return reasons[-1] if reasons else "not recorded yet: the erasure was cut short, run it again"


def rerun_steps(
    log: Store,
    policy: Policy,
    experiences: Experiences,
    steps: Iterable[CommittedStep],
    run: str,
    look: Look | None = None,
) -> Iterator[RerunStep]:
    """Rerun committed steps on a policy that is in the state before the first of them.

    Each step sets the number of threads that was recorded for it.

    Args:
        run: that the steps are of.
        experiences: of the policy; afterwards of the rollout batch of the last step.
        look: called with each gradient of the policy.

    Raises:
        ReplayError: the log does not hold a sample that a manifest names.
    """
    for step in steps:
        plan = step.planned
        torch.set_num_threads(int(plan.environment["threads"]))
        digests = experiences.input_digests(recorded_algorithm(plan.algorithm), plan.seed)
        inputs = input_evidence(policy, experiences.critic)
        samples = samples_at_cut(log, plan, run) if begins(plan) else {}
        batch = experiences.batch(plan, samples)
        result = run_step(
            policy, settings_of(plan), batch, finite=False, critic=experiences.critic, look=look
        )
        recorded = plan.input_digests | step.committed.digests
        yield RerunStep(
            plan.step, recorded, digests | result.digests, result.metrics, inputs | result.evidence, batch
        )


def input_evidence(policy: Policy, critic: Policy | None) -> Evidence:
    """The evidence of the tensors that a step starts from."""
    evidence = of_tensors(input_weights=policy.weights_digest(), input_optimizer=policy.optimizer_digest())
    if critic is None:
        return evidence
    return evidence | of_tensors(
        critic_input_weights=critic.weights_digest(), critic_input_optimizer=critic.optimizer_digest()
    )
