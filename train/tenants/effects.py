"""What operations do to a client's model, and the model that operations made: the same code for serving and
for replay."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import orjson

from rollbook.store import Store
from rollbook.store.errors import ModelError, ReplayError, RequestError
from rollbook.store.events import Json, OperationAccepted
from rollbook.train.config.lora import LoraConfig
from rollbook.train.ranks.backend import AdamSettings
from rollbook.train.tenants.base import Base
from rollbook.train.tenants.bodies import sent_body
from rollbook.train.tenants.history import wholes
from rollbook.train.tenants.model import ClientModel
from rollbook.train.tenants.operations import (
    CHANGES,
    CREATE,
    LOAD,
    PASSES,
    SAVE_FOR_SAMPLER,
    SAVES,
    SAVES_OF_FACTORS,
    STEP,
    ModelOperations,
    Operation,
    saved_path,
)
from rollbook.train.tenants.states import read_state
from rollbook.train.tenants.wire import Limits, read_pass, write_outputs

PASS_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Effect:
    """What an operation did.

    Attributes:
        result: as the client gets it.
        digests: of the result, and of the parts of the model's state that it changed.
        metrics: its numbers.
    """

    result: Json
    digests: Json
    metrics: Json = field(default_factory=dict)


def effect_of(here: ClientModel, accepted: OperationAccepted, store: Path) -> Effect:
    """Do an operation of a model that was made.

    Raises:
        RequestError: it cannot be done; nothing changed.
        ReplayError: it loads weights that are not whole any more.
    """
    if (why := accepted.resolved.get("refused")) is not None:
        raise RequestError(400, "refused", why)
    if accepted.operation in PASSES:
        sent = read_pass(sent_body("protobuf", accepted.body), PASS_LIMITS)
        settings = accepted.resolved  # passes of before there were packed ones are padded, as they ran
        outputs, metrics = here.run_pass(sent, settings["keys"], packed=settings.get("packed", False))
        answer = write_outputs(outputs, metrics)
        changed = {} if sent.forward_only else here.digests("gradients")
        result = {"protobuf": base64.b64encode(answer).decode()}
        return Effect(result, {"result": sha256(answer).hexdigest(), **changed}, metrics)
    if accepted.operation == STEP:
        settings = dict(accepted.resolved)
        betas = settings.pop("beta1"), settings.pop("beta2")
        metrics = here.step(AdamSettings(betas=betas, **settings))
        return Effect({"metrics": metrics}, here.digests(), metrics)
    if accepted.operation == LOAD:
        return _loaded(here, accepted, store)
    if accepted.operation == SAVE_FOR_SAMPLER:
        named = {"path": saved_path(accepted), "sampling_session_id": accepted.resolved.get("sampler_id")}
        return Effect({"type": accepted.operation} | named, here.digests("adapter"))
    if accepted.operation in SAVES:
        parts = ("adapter",) if accepted.operation in SAVES_OF_FACTORS else ()
        return Effect({"type": accepted.operation, "path": saved_path(accepted)}, here.digests(*parts))
    result = {"type": accepted.operation, "model_id": accepted.model_id}
    return Effect(
        result | ({"path": path} if (path := accepted.resolved.get("path")) else {}), here.digests()
    )


def _loaded(here: ClientModel, accepted: OperationAccepted, store: Path) -> Effect:
    settings = accepted.resolved
    state = read_state(store, settings["checkpoint"], settings["digests"])
    try:
        here.load(state if settings["optimizer"] else state.weights_alone())
    except ModelError as error:
        raise RequestError(400, "another_shape", f"{settings['path']}: {error}") from None
    named = {"type": "load_weights", "path": settings["path"], "model_id": accepted.model_id}
    return Effect(named, here.digests())


def made(base: Base, store: Path, accepted: OperationAccepted) -> ClientModel:
    """A new model, or one from weights that were saved.

    Raises:
        ReplayError: those weights are not whole any more.
    """
    settings = accepted.resolved
    here = ClientModel(base.policy, base.how, lora_of(accepted), settings["seed"])
    if "checkpoint" in settings:
        state = read_state(store, settings["checkpoint"], settings["digests"])
        here.load(state if settings["optimizer"] else state.weights_alone())
    return here


def lora_of(accepted: OperationAccepted) -> LoraConfig:
    """The factors of a model, by the operation that makes it."""
    return LoraConfig.model_validate_json(orjson.dumps(accepted.resolved["lora"]))


def state_behind(operation: Operation) -> str | None:
    """Where the whole state behind an operation was written, if it was, and its files are there."""
    ended = operation.ended
    return None if ended is None or operation.accepted.operation in SAVES_OF_FACTORS else ended.checkpoint


def start_before(model: ModelOperations, number: int) -> tuple[Operation | None, Sequence[Operation]]:
    """(the last operation before a number whose state was written, None: that which makes the model; the
    operations since, up to that number)"""
    since: list[Operation] = []
    for before in reversed(range(CREATE + 1, number)):
        operation = model.operations[before]
        if state_behind(operation) is not None:
            return operation, since[::-1]
        since.append(operation)
    return None, since[::-1]


def started(base: Base, store: Path, model: ModelOperations, start: Operation | None) -> ClientModel:
    """A model in the state behind an operation that has it written; None: as it was made.

    Raises:
        ReplayError: that state is not whole any more.
    """
    here = made(base, store, model.operations[CREATE].accepted)
    if start is not None and start.ended is not None and (checkpoint := state_behind(start)) is not None:
        here.load(read_state(store, checkpoint, start.ended.digests))
    return here


def model_before(base: Base, log: Store, model: ModelOperations, number: int) -> ClientModel:
    """A model as its operations before a number made it; those that run again are compared.

    Raises:
        RequestError: 400, it could not be made.
        ReplayError: what runs again differs from what ran then, or a state is not whole any more.
    """
    first = model.operations[CREATE]
    if not first.succeeded:
        raise RequestError(400, "no_model", f"model {model.model_id} could not be made: make another")
    start, since = start_before(model, number)
    here = started(base, log.path, model, start)
    again = [o for o in since if o.succeeded and o.accepted.operation in CHANGES]
    for operation, accepted in zip(again, wholes(log, again), strict=True):
        check_again(operation, effect_of(here, accepted, log.path))
    return here


def check_again(operation: Operation, effect: Effect) -> None:
    """Compare what an operation did again with what it did.

    Raises:
        ReplayError: it differs.
    """
    assert operation.ended is not None
    recorded = operation.ended.digests
    if odd := [name for name, digest in effect.digests.items() if recorded[name] != digest]:
        accepted = operation.accepted
        raise ReplayError(
            f"operation {accepted.number} of {accepted.model_id} differs in {odd[0]} when it runs again: "
            "serve it where it ran"
        )
