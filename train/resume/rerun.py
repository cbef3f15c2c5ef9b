"""Reruns committed steps from the log alone, and compares every stage with what was recorded.

Both resuming a run and replaying a step use it, since the state of a policy is a fold of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from rollbook.engines.weights.digests import Look
from rollbook.store import Store
from rollbook.store.events import Json
from rollbook.store.fold.history import CommittedStep
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import Batch
from rollbook.train.batches.manifest_batch import begins, samples_at_cut
from rollbook.train.ranks.policy import Policy
from rollbook.train.resume.schedule import settings_of
from rollbook.train.step.evidence import Evidence, of_tensors
from rollbook.train.step.experiences import Experiences
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
