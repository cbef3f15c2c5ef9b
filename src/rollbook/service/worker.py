"""Does the operations of all models, one at a time: each model's in order, the models in turn by tokens."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollbook.service.idle import IdleStates
from rollbook.service.journal import Journal, failure_of
from rollbook.store import Event
from rollbook.store.errors import RequestError
from rollbook.store.events import (
    OperationAccepted,
    OperationEnded,
    PolicyPublished,
    Record,
    RewardAssigned,
    RunOpened,
    SamplerOpened,
)
from rollbook.train.tenants.base import Base
from rollbook.train.tenants.effects import Effect, effect_of, lora_of, made, model_before, start_before
from rollbook.train.tenants.model import ClientModel
from rollbook.train.tenants.operations import (
    CREATE,
    FACTORS,
    OPTIMIZER,
    PASS,
    POLICY,
    SAVE_FOR_SAMPLER,
    SAVES,
    SAVES_OF_FACTORS,
    STEP,
    ModelOperations,
    Operation,
    run_of,
    saved_path,
    session_of,
)
from rollbook.train.tenants.states import write_factors, write_state
from rollbook.train.tenants.steps import committed_step, planned_step

LEAST_COST = 256
"""Tokens that an operation counts for at least: a step has none, and takes time as well."""
STEPS_BETWEEN = 50
"""Optimizer steps after which a model's state is written: so many run again after a crash, at most."""
SOURCE = "advantage"
"""What the number is called that a client's operation carries for a sequence."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Turns:
    """Whose operation is next: start-time fair queueing over models (Goyal, Vin and Cheng 1996), in tokens.

    An operation begins where that before it of its model ends, or where the one under way begins, if that is
    later; the first to begin is next. So models that have operations have equally many tokens, and one that
    had none waits for no more than the operation under way and one of each other model.
    """

    ends: dict[str, int] = field(default_factory=dict)
    """Where the last operation of each model ends that has had more than others."""
    under_way: int = 0
    """Where the operation under way begins."""

    def next(self, costs: Mapping[str, int]) -> str:
        """The model to be served.

        Args:
            costs: of the next operation of each model that has one; not empty.
        """
        self.ends = {model_id: end for model_id, end in self.ends.items() if end > self.under_way}
        begins = {model_id: self.ends.get(model_id, self.under_way) for model_id in costs}
        first = min(begins, key=begins.__getitem__)
        self.under_way = begins[first]
        self.ends[first] = begins[first] + costs[first]
        return first


class Worker:
    """A thread that does what came, and writes how it ended before anybody is told.

    Args:
        base: the weights that all models share.
        most_models: in the device's memory at once; as many more in this host's.
    """

    def __init__(self, journal: Journal, base: Base, most_models: int) -> None:
        self._journal, self._operations, self._store = journal, journal.operations, journal.log.path
        self._base, self._most_models = base, most_models
        self._models = OrderedDict[str, ClientModel]()
        self._idle = IdleStates(self._store / "idle", most_models)
        self._opened = set[str]()
        self._turns = Turns()
        self._came = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="operations", daemon=True)

    def start(self) -> None:
        """Begin, with what waited when the log was opened."""
        self._thread.start()

    def wake(self) -> None:
        """Look again: an operation came."""
        with self._came:
            self._came.notify()

    def stop(self) -> None:
        """End behind the operation that is under way."""
        with self._came:
            self._stopped = True
            self._came.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._came:
                while not self._stopped and not (ready := self._ready()):
                    self._came.wait()
                if self._stopped:
                    return
            model = self._operations.models[self._turns.next(ready)]
            assert model.next is not None
            self._do(model, model.next)

    def _ready(self) -> dict[str, int]:
        """The models with a next operation, and what it costs."""
        models = list(self._operations.ready.values())
        return {m.model_id: _cost(m.next.accepted) for m in models if m.next is not None}

    def _do(self, model: ModelOperations, operation: Operation) -> None:
        accepted = operation.accepted
        named = accepted.request_id, accepted.model_id, accepted.number
        try:
            records = self._done(model, operation)
        except Exception as error:
            if not isinstance(error, RequestError):
                _log.exception("operation %s failed", accepted.request_id)
                self._models.pop(model.model_id, None)  # it is made again from the log
            records = [OperationEnded(*named, None, failure_of(error), {})]
        self._journal.end([Event(record, run=model.run) for record in records])

    def _done(self, model: ModelOperations, operation: Operation) -> list[Record]:
        """Do an operation; the records of it, its end last."""
        accepted = operation.accepted
        here = self._model(model, accepted)
        if accepted.operation in SAVES:
            _check_name(model, accepted, self._journal.now_us())
        effect = effect_of(here, accepted, self._store)
        checkpoint = self._written(model, here, accepted)
        named = accepted.request_id, accepted.model_id, accepted.number
        ended = OperationEnded(*named, effect.result, None, effect.digests, checkpoint, effect.metrics)
        records = self._opening(model)
        if accepted.operation == PASS:
            records += [RewardAssigned(s, None, r, SOURCE) for s, r in accepted.resolved["rewards"].items()]
        elif accepted.operation == STEP:
            records += _step(model, operation, effect)
        elif accepted.operation == SAVE_FOR_SAMPLER:
            records += published(model, accepted, ended, self._base.name)
        return [*records, ended]

    def _opening(self, model: ModelOperations) -> list[Record]:
        """What is written of a run before the first operation that is done here."""
        if model.model_id in self._opened:
            return []
        self._opened.add(model.model_id)
        base, how = self._base, self._base.how
        config = model.operations[CREATE].accepted.resolved | {
            "base": str(base.folder),
            "weights_digest": base.digest,
            "device": how.device.type,
            "dtype": how.dtype,
            "threads": how.threads,
            "recompute": how.recompute,
        }
        return [RunOpened("service", config, base.name, environment=base.environment())]

    def _written(self, model: ModelOperations, here: ClientModel, accepted: OperationAccepted) -> str | None:
        """Where the state behind an operation was written, if it is to be."""
        where, what = (self._store, model.run, accepted.number), (here.lora, self._base.name)
        if accepted.operation in SAVES_OF_FACTORS:
            return write_factors(*where, here.held().adapter, here.probe, *what)
        if accepted.operation in SAVES:
            return write_state(*where, here.held(), here.probe, *what)
        if self._is_due(model, accepted):
            return write_state(*where, here.held(), None, *what)
        return None

    def _is_due(self, model: ModelOperations, accepted: OperationAccepted) -> bool:
        if accepted.operation != STEP:
            return False
        _, since = start_before(model, accepted.number)
        return 1 + sum(operation.accepted.operation == STEP for operation in since) >= STEPS_BETWEEN

    def _model(self, model: ModelOperations, accepted: OperationAccepted) -> ClientModel:
        """The model that an operation is done to."""
        if (held := self._models.get(model.model_id)) is None:
            idle = None
            while len(self._models) >= self._most_models:
                model_id, idle = self._models.popitem(last=False)
                self._idle.put(run_of(model_id), idle.state())
            held = self._models[model.model_id] = self._made(model, accepted, idle)
        self._models.move_to_end(model.model_id)
        return held

    def _made(
        self, model: ModelOperations, accepted: OperationAccepted, idle: ClientModel | None
    ) -> ClientModel:
        """A model in the state before an operation; one that is held no more may take that state, since to
        build another takes long."""
        if accepted.number == CREATE:
            return made(self._base, self._store, accepted)
        if (state := self._idle.take(model.run)) is None:
            return model_before(self._base, self._journal.log, model, accepted.number)
        created = model.operations[CREATE].accepted
        here = idle if idle and idle.lora == lora_of(created) else made(self._base, self._store, created)
        here.load(state)
        return here


def _check_name(model: ModelOperations, accepted: OperationAccepted, now_us: int) -> None:
    """Refuse to save under a name that is taken now, unless it may be written over.

    Raises:
        RequestError: 400, it is.
    """
    path = saved_path(accepted)
    taken = None if path is None else model.saved.get(path)
    if taken is not None and taken.there(now_us) and not accepted.resolved["overwrite"]:
        raise RequestError(400, "name_taken", f"{path} is there: give another name, or overwrite = true")


def _step(model: ModelOperations, operation: Operation, effect: Effect) -> list[Record]:
    """The records of an optimizer step. Its inputs are what the operation before it left: passes change
    neither."""
    inputs = {"input_weights": model.digests[FACTORS], "input_optimizer": model.digests[OPTIMIZER]}
    plan = planned_step(model, operation, inputs, {})
    return [plan, committed_step(plan, model, effect.digests, effect.metrics)]


def published(
    model: ModelOperations, accepted: OperationAccepted, ended: OperationEnded, base_model: str
) -> list[Record]:
    """The records of weights that may be sampled from: their version of the policy, and the sampler that
    they were saved for."""
    checkpoint, digest = ended.checkpoint, ended.digests["adapter"]
    assert checkpoint is not None
    parent = model.steps - 1 if model.steps else None
    records: list[Record] = [PolicyPublished(POLICY, model.steps, parent, checkpoint, digest)]
    if (sampler_id := accepted.resolved.get("sampler_id")) is not None:
        session_id = session_of(sampler_id)
        rest = base_model, model.model_id, None, model.steps, digest, checkpoint
        records.append(SamplerOpened(sampler_id, session_id, *rest))
    return records


def _cost(accepted: OperationAccepted) -> int:
    return max(int(accepted.resolved.get("tokens", 0)), LEAST_COST)
