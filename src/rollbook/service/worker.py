"""Does the operations of all models, one at a time: each model's in order, the models in turn by tokens."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rollbook.service.idle import IdleStates
from rollbook.service.journal import Journal, failure_of
from rollbook.service.order import PATIENCE_S
from rollbook.store import Event
from rollbook.store.errors import ModelError, RequestError, StoreError, UnstorableError
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
from rollbook.train.tenants.effects import Effect, effect_of, made, model_before, start_before
from rollbook.train.tenants.model import ClientModel
from rollbook.train.tenants.operations import (
    CREATE,
    OPTIMIZER,
    PASS,
    POLICY,
    SAVE_FOR_SAMPLER,
    SAVES,
    SAVES_WITHOUT_OPTIMIZER,
    STEP,
    ModelOperations,
    Operation,
    base_model_of,
    run_of,
    saved_path,
    session_of,
    trained_digest,
)
from rollbook.train.tenants.states import remove_attempts, write_state, write_trained
from rollbook.train.tenants.steps import committed_step, planned_step

LEAST_COST = 256
"""Tokens that an operation counts for at least: a step has none, and takes time as well."""
STEPS_BETWEEN = 50
"""Optimizer steps after which a model's state is written: so many run again after a crash, at most."""
LOOK_S = 0.5
"""Between two looks at models that another process trains."""
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
        bases: the weights that models share, by what clients call them.
        most_models: in the device's memory at once; as many more in this host's.
        most_whole: whole models in the device's memory at once; the others are on the disk.
    """

    def __init__(
        self, journal: Journal, bases: Mapping[str, Base], most_models: int, most_whole: int = 0
    ) -> None:
        self._journal, self._operations, self._store = journal, journal.operations, journal.log.path
        self._bases, self._most_models, self._most_whole = bases, most_models, max(most_whole, 1)
        self._models = OrderedDict[str, ClientModel]()
        self._idle = IdleStates(self._store / "idle" / journal.order.lane, most_models)
        self._opened = set[str]()
        self._turns = Turns()
        self._behind: dict[str, int] = {}
        self._own = set[str]()
        self._seen: dict[str, tuple[float, float]] = {}
        self._news, self._stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="operations", daemon=True)

    def start(self) -> None:
        """Begin, with what waited when the log was opened."""
        self._journal.watch(self._news.set)
        self._thread.start()

    def stop(self) -> None:
        """End behind the operation that is under way."""
        self._stopped = True
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._news.clear()
            if self._stopped:  # whoever says so behind this wakes it
                return
            try:
                worked = self._work()
            except Exception:  # the next operation is tried again, or another one comes
                _log.exception("no operation could be begun")
                worked = False
            if not worked:
                self._news.wait(LOOK_S if self._journal.order.shared else None)

    def _work(self) -> bool:
        """Do the next operation, if there is one."""
        if not (ready := self._ready()):
            return False
        model = self._operations.models[self._turns.next(ready)]
        if (operation := model.next) is not None:  # which another process may have done by now
            self._do(model, operation)
        return True

    def _ready(self) -> dict[str, int]:
        """The models with a next operation that is to be done here, and what it costs."""
        ready = list(self._operations.ready.values())
        if self._journal.order.shared:
            self._take({model.model_id for model in ready})
            ready = [model for model in ready if model.model_id in self._own]
        following = ((model.model_id, model.next) for model in ready)
        return {model_id: _cost(o.accepted) for model_id, o in following if o is not None}

    def _take(self, ready: set[str]) -> None:
        """Have models that no other process trains, and leave those that are trained no more."""
        now = time.monotonic()
        self._seen = {model_id: self._seen.get(model_id, (now, now)) for model_id in ready - self._own}
        try:
            due = {model_id: since for model_id, (since, again) in self._seen.items() if now >= again}
            self._seen |= {model_id: (since, now + LOOK_S) for model_id, since in due.items()}
            for waits in (True, False):
                names = [name for name, since in due.items() if (now - since >= PATIENCE_S) is waits]
                if names and (taken := self._journal.order.take(names, PATIENCE_S if waits else 0.0)):
                    self._own |= taken
                    self._journal.look()  # whoever had them may have done more of them
            models = self._operations.models
            if over := [
                m for m in self._own if session_of(m) in self._operations.over and not models[m].pending
            ]:
                self._own.difference_update(over)
                self._journal.order.leave(over)
        except (StoreError, OSError) as error:
            _log.warning("models that wait are not looked at: %s", error)

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
        counts, checkpoint = self._ended(model, records)
        if counts:
            self._behind[model.model_id] = accepted.number
        else:  # another process has the model
            self._own.discard(model.model_id)
            self._opened.discard(model.model_id)
        if checkpoint is not None:
            remove_attempts(self._store, checkpoint, counts)

    def _ended(self, model: ModelOperations, records: list[Record]) -> tuple[bool, str | None]:
        """Write the records of an operation: whether they count, and the checkpoint that they name."""
        ended = records[-1]
        assert isinstance(ended, OperationEnded)
        try:
            counts = self._journal.end([Event(record, run=model.run) for record in records])
        except UnstorableError as error:
            self._models.pop(model.model_id, None)
            failed = replace(ended, result=None, error=failure_of(error), digests={}, checkpoint=None)
            counts = self._journal.end([Event(failed, run=model.run)])
        return counts, ended.checkpoint

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
            records += published(model, accepted, ended)
        return [*records, ended]

    def _opening(self, model: ModelOperations) -> list[Record]:
        """What is written of a run before the first operation that is done here."""
        if model.model_id in self._opened:
            return []
        self._opened.add(model.model_id)
        base = self._base(model)
        how = base.how
        config = model.operations[CREATE].accepted.resolved | {
            "base": str(base.folder),
            "weights_digest": base.digest,
            "device": how.device.type,
            "dtype": how.dtype,
            "threads": how.threads,
            "recompute": how.recompute,
        }
        return [RunOpened("service", config, base.name, environment=base.environment())]

    def _base(self, model: ModelOperations) -> Base:
        """The base model of a model.

        Raises:
            ModelError: it is not served any more.
        """
        if (base := self._bases.get(name := base_model_of(model))) is None:
            served = ", ".join(map(repr, self._bases))
            raise ModelError(
                f"base model {name!r} is not served any more, but {served}: have the CONFIG name it"
            )
        return base

    def _written(self, model: ModelOperations, here: ClientModel, accepted: OperationAccepted) -> str | None:
        """Where the state behind an operation was written, if it is to be."""
        what = self._store, model.run, accepted.number, here, self._base(model)
        if accepted.operation in SAVES_WITHOUT_OPTIMIZER:
            return write_trained(*what)
        if accepted.operation in SAVES:
            return write_state(*what)
        if self._is_due(model, accepted):
            return write_state(*what, sampled=False)
        return None

    def _is_due(self, model: ModelOperations, accepted: OperationAccepted) -> bool:
        if accepted.operation != STEP:
            return False
        _, since = start_before(model, accepted.number)
        return 1 + sum(operation.accepted.operation == STEP for operation in since) >= STEPS_BETWEEN

    def _model(self, model: ModelOperations, accepted: OperationAccepted) -> ClientModel:
        """The model that an operation is done to, in the state behind the operation before it."""
        if self._behind.get(model.model_id) != accepted.number - 1:  # another process went on with it
            self._models.pop(model.model_id, None)
            self._idle.take(model.run)
        if (held := self._models.get(model.model_id)) is None:
            most = self._most_whole if model.whole else self._most_models
            alike = [name for name in self._models if self._operations.models[name].whole == model.whole]
            for model_id in alike[: max(len(alike) + 1 - most, 0)]:
                self._idle.put(run_of(model_id), self._models.pop(model_id).state())
            if model.whole:
                gc.collect()  # what left is only freed so: its parts refer to each other
            held = self._models[model.model_id] = self._made(model, accepted)
        self._models.move_to_end(model.model_id)
        return held

    def _made(self, model: ModelOperations, accepted: OperationAccepted) -> ClientModel:
        if accepted.number == CREATE:
            return made(self._base(model), self._store, accepted)
        if (state := self._idle.take(model.run)) is None:
            return model_before(self._base(model), self._journal.log, model, accepted.number)
        here = made(self._base(model), self._store, model.operations[CREATE].accepted)
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
    inputs = {"input_weights": trained_digest(model.digests), "input_optimizer": model.digests[OPTIMIZER]}
    plan = planned_step(model, operation, inputs, {})
    return [plan, committed_step(plan, model, effect.digests, effect.metrics)]


def published(model: ModelOperations, accepted: OperationAccepted, ended: OperationEnded) -> list[Record]:
    """The records of weights that may be sampled from: their version of the policy, and the sampler that
    they were saved for."""
    checkpoint, digest = ended.checkpoint, trained_digest(ended.digests)
    assert checkpoint is not None
    parent = model.steps - 1 if model.steps else None
    records: list[Record] = [PolicyPublished(POLICY, model.steps, parent, checkpoint, digest)]
    if (sampler_id := accepted.resolved.get("sampler_id")) is not None:
        session_id = session_of(sampler_id)
        rest = base_model_of(model), model.model_id, None, model.steps, digest, checkpoint
        records.append(SamplerOpened(sampler_id, session_id, *rest))
    return records


def _cost(accepted: OperationAccepted) -> int:
    return max(int(accepted.resolved.get("tokens", 0)), LEAST_COST)
