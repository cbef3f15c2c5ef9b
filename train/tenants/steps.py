"""A client's optimizer step as a step of its run: the manifest, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollbook.store.cut import format_cut
from rollbook.store.digest import digest_json
from rollbook.store.events import Json, OperationAccepted, StepCommitted, StepPlanned
from rollbook.train.tenants.operations import CREATE, POLICY, ModelOperations, Operation, trained_digest

PHASE = "service"
RECIPE: Json = {}
"""No recipe: what a client sends is trained."""
LOSS = "loss:sum"


@dataclass(frozen=True, slots=True)
class Passed:
    """A backward pass of a step, and what came of it."""

    accepted: OperationAccepted
    digests: Json
    metrics: Json


def passed(operation: Operation) -> Passed:
    """A backward pass as it was recorded."""
    assert operation.ended is not None
    return Passed(operation.accepted, operation.ended.digests, operation.ended.metrics)


def planned_step(
    model: ModelOperations, step: Operation, input_digests: Json, environment: Json
) -> StepPlanned:
    """The manifest of a model's next step.

    Args:
        step: the operation.
        input_digests: of the model's state before it.
        environment: as of the run's opening where it is empty.
    """
    lane, seq = step.accepted_at
    settings, made = step.accepted.resolved, model.operations[CREATE].accepted.resolved
    samples = [*references(model.passes)]
    return StepPlanned(
        step=model.steps,
        attempt=1,
        policy=POLICY,
        policy_version=model.steps,
        phase=PHASE,
        cut=format_cut({lane: seq + 1}),
        recipe=RECIPE,
        recipe_digest=digest_json(RECIPE),
        samples=samples,
        partition=[[[*range(len(samples))]]],
        algorithm={"name": "+".join(sorted({p.accepted.resolved["loss"] for p in model.passes})) or "none"},
        optimizer=settings,
        learning_rate=settings["learning_rate"],
        seed=made["seed"],
        input_digests=input_digests,
        environment=environment,
        lora=None if model.whole else made["lora"] | {"seed": made["seed"], "base_version": 0},
        operations=[*map(described, [*model.passes, step])],
    )


def references(passes: Sequence[Operation]) -> Iterator[Json]:
    """References to the data of passes, in order. A datum that was sampled here is named by its trajectory
    and turn, any other by its operation and place."""
    for operation in passes:
        accepted = operation.accepted
        for place, turns in enumerate(accepted.resolved["turns"]):
            for trajectory_id, turn_id in turns or [(None, f"{accepted.request_id}#{place}")]:
                yield {"trajectory_id": trajectory_id, "turn_id": turn_id}


def described(operation: Operation) -> Json:
    """An operation as a manifest names it."""
    accepted = operation.accepted
    return {
        "request_id": accepted.request_id,
        "number": accepted.number,
        "operation": accepted.operation,
        "body_digest": accepted.body_digest,
    }


def stages_of(passes: Sequence[Passed], state: Json) -> Json:
    """The digest of each stage of a step.

    Args:
        state: digests of the model's state behind it.
    """
    gradients = {"gradients": passes[-1].digests["gradients"]} if passes else {}
    return {
        "samples": digest_json([one.accepted.body_digest for one in passes]),
        "logprobs": digest_json([one.digests["result"] for one in passes]),
        **gradients,
        "optimizer": state["optimizer"],
        "weights": trained_digest(state),
    }


def committed_step(plan: StepPlanned, model: ModelOperations, state: Json, metrics: Json) -> StepCommitted:
    """What came of a step.

    Args:
        state: digests of the model's state behind it; metrics: of the step alone.
    """
    version = plan.policy_version + 1
    passes = [*map(passed, model.passes)]
    digests, numbers = stages_of(passes, state), metrics_of(plan, passes, metrics)
    return StepCommitted(plan.step, plan.attempt, plan.policy, version, digests, numbers)


def metrics_of(plan: StepPlanned, passes: Sequence[Passed], metrics: Json) -> Json:
    """The metrics of a step: the loss is a sum over tokens, as clients have it, for each of those."""
    tokens = sum(one.accepted.resolved["targets"] for one in passes)
    loss = sum(one.metrics[LOSS] for one in passes)
    ages = [plan.policy_version - version for p in passes for version in p.accepted.resolved["versions"]]
    known = {"staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages)} if ages else {}
    return {
        "loss": loss / max(tokens, 1),
        "gradient_norm": metrics["gradient_norm:mean"],
        "trained_tokens": tokens,
        "samples": sum(len(one.accepted.resolved["turns"]) for one in passes),
        "learning_rate": plan.learning_rate,
        **known,
    }
