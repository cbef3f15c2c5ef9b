"""Which files of weights something may still read. Pure."""

from __future__ import annotations

from rollbook.train.tenants.effects import start_before, state_behind
from rollbook.train.tenants.operations import CREATE, LOAD, ModelOperations, Operation, Operations, session_of


def held_checkpoints(operations: Operations) -> set[str]:
    """The checkpoints that weights of a path, a sampler or a model refer to.

    A sampler does until its session is over, and while something is to be sampled for it. A model does to
    what it was made from, to its newest state, at which it starts again, and to what it loads behind that.
    """
    models = list(operations.models.values())
    held = {saved.checkpoint for model in models for saved in list(model.saved.values())}
    sampling = {operation.accepted.model_id for operation in list(operations.sampling.values())}
    for sampler in list(operations.samplers.values()):
        is_open = session_of(sampler.sampler_id) not in operations.over or sampler.sampler_id in sampling
        if is_open and sampler.checkpoint is not None:
            held.add(sampler.checkpoint)
    for model in models:
        held |= _held_by(model)
    return held


def _held_by(model: ModelOperations) -> set[str]:
    if (first := model.operations.get(CREATE)) is None:
        return set()
    made_from = first.accepted.resolved.get("checkpoint")
    start, since = start_before(model, model.done)
    newest = None if start is None else state_behind(start)
    waiting = [operation for operation in model.operations.values() if operation.ended is None]
    loaded = (o.accepted.resolved.get("checkpoint") for o in (*since, *waiting) if _loads(o))
    return {checkpoint for checkpoint in (made_from, newest, *loaded) if checkpoint is not None}


def _loads(operation: Operation) -> bool:
    return operation.accepted.operation == LOAD
