"""What clients asked of the service, as a fold of events: sessions, models and samplers, and what is to be
done with them. Pure.

Of an operation that ended neither its body nor its result is kept: the fold says where in the log they are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rollbook.store.errors import RequestError
from rollbook.store.events import (
    Json,
    OperationAccepted,
    OperationEnded,
    SamplerOpened,
    SessionEnded,
    SessionOpened,
    WeightsChanged,
    WeightsCopied,
    WeightsFreed,
)
from rollbook.train.tenants.origins import Origins

MOST_SAMPLED = 1 << 16
"""Requests to sample that ended and are known without the log; of more, the newest."""
MOST_SHOWN = 200
"""Characters of a name that nothing has, in the error that says so."""
POLICY = "actor"
"""The policy of a client's run."""
SAMPLE = "sample"
FORWARD, PASS, STEP = "forward", "forward_backward", "optim_step"
PASSES = (FORWARD, PASS)
LOAD = "load_state"
SAVE, SAVE_FOR_SAMPLER, SAVE_EXTERNAL = "save_weights", "save_weights_for_sampler", "save_weights_external"
SAVES = (SAVE, SAVE_FOR_SAMPLER, SAVE_EXTERNAL)
SAVES_WITHOUT_OPTIMIZER = (SAVE_FOR_SAMPLER, SAVE_EXTERNAL)
"""Saves from which training does not go on."""
WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS = "weights", "sampler_weights", "external_weights"
"""Kinds of weights in a path: with the optimizer, to sample from, and for other programs."""
FACTORS, WHOLE, OPTIMIZER, GRADIENTS = "adapter", "weights", "optimizer", "gradients"
"""Parts of a model's state, by which their digests are named: factors, or all weights of a whole model."""
CREATE = 0
"""Number of the operation that makes a model."""
DELETED, EXPIRED, PUBLISHED, UNPUBLISHED, KEPT = "deleted", "expired", "published", "unpublished", "kept"
"""What becomes of weights that were saved."""
Place = tuple[str, int]
"""(lane, number) of an event."""
CHANGES = (PASS, STEP, LOAD)
"""What changes a model's state."""
SCHEME = "tinker://"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be under way at once.

    Attributes:
        pending: operations of a model that wait; bytes: of what was sent with them, as events have it.
        sequences: that are sampled, or wait, for the samplers of a session.
    """

    pending: int = 256
    bytes: int = 256 << 20
    sequences: int = 4096


@dataclass(slots=True)
class Operation:
    """An operation, and how it ended, if it did: then without its body, and without the result.

    Attributes:
        delivered: whether it was noted that the client was sent what was sampled.
    """

    accepted: OperationAccepted
    accepted_at: Place
    ended: OperationEnded | None = None
    ended_at: Place = ("", -1)
    delivered: bool = field(default=False, compare=False)

    def end(self, ended: OperationEnded, place: Place) -> None:
        """Note how it ended."""
        self.accepted = replace(self.accepted, body={})
        self.ended, self.ended_at = replace(ended, result=None), place

    def forget(self, sampler_id: str) -> None:
        """Keep of a request to sample what its repetitions are answered with, and where it is."""
        assert self.ended is not None
        sequences = {"sequence_ids": self.accepted.resolved["sequence_ids"]}
        self.accepted = replace(self.accepted, model_id=sampler_id, resolved=sequences)
        self.ended = replace(self.ended, model_id=sampler_id, digests={})

    @property
    def succeeded(self) -> bool:
        """Whether it is done."""
        return self.ended is not None and self.ended.error is None


@dataclass(frozen=True, slots=True)
class Saved:
    """Weights that a model's operation saved.

    Attributes:
        number: of that operation.
        kind: `weights`, with the optimizer, or `sampler_weights` or `external_weights`, without.
        version: of the model's policy: optimizer steps behind it.
        checkpoint: their folder in the store; digests: of their parts.
        saved_us: when, and until when they are there (None: without end), in microseconds since 1970.
        metadata: what the client said of them; public: whether they are for all tenants.
    """

    model_id: str
    number: int
    kind: str
    version: int
    checkpoint: str
    digests: Json
    saved_us: int = 0
    expires_us: int | None = None
    metadata: Json | None = None
    public: bool = False

    def there(self, now_us: int) -> bool:
        """Whether they may still be had."""
        return self.expires_us is None or now_us < self.expires_us


@dataclass(slots=True)
class ModelOperations:
    """The operations of a model.

    Attributes:
        run: of its events; owner: name of the key that its session was opened with.
        done: operations that ended, all before any that did not.
        bytes: of what was sent with those that did not.
        steps: optimizer steps among them.
        passes: backward passes since the last of them, whose gradients the next takes.
        digests: of the parts of its state, as the last operation left them that changed factors or optimizer.
        saved: by path, what was saved under it last.
        used_us: when its newest operation came, in microseconds since 1970.
        copy_of: the model whose weights it holds copies of, and is never trained; None: it is trained.
    """

    model_id: str
    session_id: str
    run: str
    owner: str | None
    operations: dict[int, Operation] = field(default_factory=dict)
    done: int = 0
    bytes: int = 0
    steps: int = 0
    passes: list[Operation] = field(default_factory=list)
    digests: Json = field(default_factory=dict)
    saved: dict[str, Saved] = field(default_factory=dict)
    used_us: int = 0
    copy_of: str | None = None

    @property
    def whole(self) -> bool:
        """Whether all of its weights are trained, and not factors beside the base's."""
        return self.operations[CREATE].accepted.resolved["lora"] is None

    @property
    def next(self) -> Operation | None:
        """The operation to be done next, if it came."""
        return self.operations.get(self.done)

    @property
    def pending(self) -> int:
        """Operations that came and did not end."""
        return len(self.operations) - self.done

    def end(self, ended: OperationEnded, time_us: int) -> None:
        """Note that its next operation ended, and when."""
        operation = self.operations[ended.number]
        self.done = ended.number + 1
        if operation.succeeded:
            if operation.accepted.operation == PASS:
                self.passes.append(operation)
            elif operation.accepted.operation == LOAD:
                self.passes = []
            elif operation.accepted.operation == STEP:
                self.steps, self.passes = self.steps + 1, []
            if OPTIMIZER in ended.digests:
                self.digests = ended.digests
            if (path := saved_path(operation.accepted)) is not None:
                self.saved[path] = _saved(operation.accepted, ended, self.steps, time_us)


@dataclass(slots=True)
class Operations:
    """The fold.

    Attributes:
        sessions: by id; opened_us: when they were opened, in microseconds since 1970.
        by_key: those that name what their repetitions have in common; endings: why sessions are over.
        ready: by id, the models whose next operation came.
        sampling: by request, what is to be sampled and has not ended; sequences: of it, by session.
        origins: what was sampled.
        copies: paths of copies that name what repetitions of their requests have in common.
        gone: by checkpoint, the operation that wrote weights which are not there any more.
        sampled: requests to sample that ended, in this order.
        older: by sampler, the highest number of those that are known to the log alone.
        bounds: of what is accepted.
        freed: checkpoints whose files are removed, or about to be.
    """

    sessions: dict[str, SessionOpened] = field(default_factory=dict)
    opened_us: dict[str, int] = field(default_factory=dict)
    by_key: dict[tuple[str | None, str], str] = field(default_factory=dict)
    endings: dict[str, Json] = field(default_factory=dict)
    models: dict[str, ModelOperations] = field(default_factory=dict)
    ready: dict[str, ModelOperations] = field(default_factory=dict)
    samplers: dict[str, SamplerOpened] = field(default_factory=dict)
    by_request: dict[str, Operation] = field(default_factory=dict)
    sampling: dict[str, Operation] = field(default_factory=dict)
    sequences: Counter[str] = field(default_factory=Counter)
    origins: Origins = field(default_factory=Origins)
    copies: dict[tuple[str | None, str], str] = field(default_factory=dict)
    gone: dict[str, tuple[str, int]] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)
    sampled: deque[str] = field(default_factory=deque)
    older: dict[str, int] = field(default_factory=dict)
    bounds: Bounds = Bounds()

    @property
    def over(self) -> Set[str]:
        """The sessions that are over."""
        return self.endings.keys()

    def add(self, record: Any, place: Place = ("", -1), time_us: int = 0) -> None:
        """Fold the next record, which is at a place of the log, and of a time; those of other kinds change
        nothing."""
        match record:
            case SessionOpened():
                self.sessions[record.session_id] = record
                self.opened_us[record.session_id] = time_us
                if record.once is not None:
                    self.by_key[record.by, record.once] = record.session_id
            case SessionEnded():
                self.endings.setdefault(record.session_id, record.reason)
            case SamplerOpened():
                self.samplers[record.sampler_id] = record
            case OperationAccepted():
                self._accept(record, Operation(record, place), time_us)
            case OperationEnded():
                operation = self.by_request[record.request_id]
                size = size_of(operation.accepted)
                operation.end(record, place)
                if self.sampling.pop(record.request_id, None) is None:
                    model = self.models[record.model_id]
                    model.bytes -= size
                    model.end(record, time_us)
                    self._note_ready(model)
                else:
                    self._sampled(operation, record)
            case _:
                self._add_weights(record, time_us)

    def _add_weights(self, record: Any, time_us: int) -> None:
        match record:
            case WeightsChanged():
                self._change(record)
            case WeightsCopied():
                self._copy(record, time_us)
            case WeightsFreed():
                self._free(record)

    def _change(self, record: WeightsChanged) -> None:
        """What is under the path by now may be other weights: of those nothing was said."""
        here = self.models[record.model_id].saved
        if (saved := here.get(record.path)) is None or saved.checkpoint != record.checkpoint:
            return
        if record.change in (DELETED, EXPIRED):
            del here[record.path]
            self.gone[saved.checkpoint] = saved.model_id, saved.number
        elif record.change == KEPT:
            here[record.path] = replace(saved, expires_us=record.expires_us)
        else:
            here[record.path] = replace(saved, public=record.change == PUBLISHED)

    def _copy(self, record: WeightsCopied, time_us: int) -> None:
        model = self._model(record.model_id)
        model.copy_of, model.used_us = record.of_model, time_us
        kind, what = kind_of(record.path), (record.policy_version, record.checkpoint, record.digests)
        rest = time_us, record.expires_us, record.metadata
        model.saved[record.path] = Saved(record.of_model, record.number, kind, *what, *rest)
        if record.once is not None:
            self.copies[record.by, record.once] = record.path

    def _free(self, record: WeightsFreed) -> None:
        """Training does not start at that state any more, but at one before it."""
        self.freed.add(record.checkpoint)
        self.gone.pop(record.checkpoint, None)
        operation = self.models[record.model_id].operations[record.number]
        if operation.ended is not None:
            operation.ended = replace(operation.ended, checkpoint=None)

    def _accept(self, record: OperationAccepted, operation: Operation, time_us: int) -> None:
        self.by_request[record.request_id] = operation
        if record.operation == SAMPLE:
            self.sampling[record.request_id] = operation
            self.sequences[session_of(record.model_id)] += len(record.resolved["sequence_ids"])
        else:
            model = self._model(record.model_id)
            model.operations[record.number], model.used_us = operation, time_us
            model.bytes += size_of(record)
            self._note_ready(model)
            self.origins.reward(model.owner, record.resolved.get("rewards", ()))

    def _note_ready(self, model: ModelOperations) -> None:
        if model.next is None:
            self.ready.pop(model.model_id, None)
        else:
            self.ready[model.model_id] = model

    def _sampled(self, operation: Operation, ended: OperationEnded) -> None:
        accepted = operation.accepted
        session_id, sequences = session_of(accepted.model_id), accepted.resolved["sequence_ids"]
        self.sequences[session_id] -= len(sequences)
        sampler = self.samplers[accepted.model_id]
        if operation.succeeded:
            owner = self.sessions[session_id].by
            for sequence_id, key in zip(sequences, ended.digests["sequences"], strict=True):
                self.origins.add(owner, sequence_id, key, sampler.policy_version)
        operation.forget(sampler.sampler_id)
        self.sampled.append(accepted.request_id)
        if len(self.sampled) > MOST_SAMPLED:
            oldest = self.by_request.pop(self.sampled.popleft()).accepted
            self.older[oldest.model_id] = max(oldest.number, self.older.get(oldest.model_id, -1))

    def is_older(self, model_id: str, number: int) -> bool:
        """Whether a sampler's request of this number may have come without being known here: the log says."""
        known = request_id_of(model_id, number) in self.by_request
        return not known and number <= self.older.get(model_id, -1)

    def _model(self, model_id: str) -> ModelOperations:
        if (model := self.models.get(model_id)) is None:
            session_id = session_of(model_id)
            run, owner = run_of(model_id), self.sessions[session_id].by
            model = self.models[model_id] = ModelOperations(model_id, session_id, run, owner)
        return model

    def waiting(self) -> list[Operation]:
        """Every operation that came and did not end."""
        of_models = (o for model in self.models.values() for o in model.operations.values())
        return [*(o for o in of_models if o.ended is None), *self.sampling.values()]

    def session(self, session_id: str, caller: str | None) -> SessionOpened:
        """A session of a caller's own.

        Raises:
            RequestError: 404, there is none.
        """
        return self._own(self.sessions, session_id, caller, "session")

    def model(self, model_id: str, caller: str | None, trained: bool = True) -> ModelOperations:
        """A model of a caller's own.

        Args:
            trained: not one that holds copies of weights.

        Raises:
            RequestError: 404, there is none; 400, it holds copies.
        """
        model = self._own(self.models, model_id, caller, "model")
        if trained and model.copy_of is not None:
            text = f"model {model_id} holds copies of weights, and is not trained: make one from a copy"
            raise RequestError(400, "holds_copies", text)
        return model

    def sampler(self, sampler_id: str, caller: str | None) -> SamplerOpened:
        """A sampler of a caller's own.

        Raises:
            RequestError: 404, there is none.
        """
        return self._own(self.samplers, sampler_id, caller, "sampling session")

    def request(self, request_id: str, caller: str | None) -> Operation:
        """An operation of a caller's own.

        Raises:
            RequestError: 404, there is none.
        """
        return self._own(self.by_request, request_id, caller, "request")

    def _own(self, things: Mapping[str, T], name: str, caller: str | None, what: str) -> T:
        thing = things.get(name)
        if thing is None or self.sessions[session_of(name)].by != caller:
            raise not_there(f"{what} {name!r}")
        return thing

    def repeated(self, wanted: OperationAccepted, coming: Iterable[OperationAccepted] = ()) -> bool:
        """Whether it came before.

        Args:
            coming: others that are being written.

        Raises:
            RequestError: 422, another came with its number; 429, too many wait.
        """
        if (earlier := self.by_request.get(wanted.request_id)) is not None:
            check_same(earlier, wanted)
            return True
        if wanted.operation == SAMPLE:
            self._check_sampling(wanted, coming)
        elif wanted.number == CREATE:
            self._check_free(wanted.model_id)
        elif (model := self.models.get(wanted.model_id)) is not None and wanted.number != model.done:
            others = [other for other in coming if other.model_id == wanted.model_id]
            count = model.pending + len(others)
            size = model.bytes + sum(map(size_of, [*others, wanted]))
            if count >= self.bounds.pending or (count and size > self.bounds.bytes):
                text = f"{count} operations of {wanted.model_id} wait, with {size} bytes: try again"
                raise RequestError(429, "too_many_pending", text)
        return False

    def _check_free(self, model_id: str) -> None:
        """Refuse to make a model where copies of weights are.

        Raises:
            RequestError: 422, they are.
        """
        if model_id in self.models:
            text = f"model {model_id} holds copies of weights: give another model_seq_id"
            raise RequestError(422, "holds_copies", text)

    def _check_sampling(self, wanted: OperationAccepted, coming: Iterable[OperationAccepted]) -> None:
        session_id = session_of(wanted.model_id)
        others = (o for o in coming if o.operation == SAMPLE and session_of(o.model_id) == session_id)
        count = self.sequences[session_id] + sum(len(other.resolved["sequence_ids"]) for other in others)
        if count and count + len(wanted.resolved["sequence_ids"]) > self.bounds.sequences:
            text = f"{count} sequences of session {session_id} are sampled or wait: try again"
            raise RequestError(429, "too_many_pending", text)


def check_same(earlier: Operation, wanted: OperationAccepted) -> None:
    """Check that an operation with the number of an earlier one is its repetition.

    Raises:
        RequestError: 422, it is another.
    """
    if earlier.accepted.body_digest != wanted.body_digest:
        text = f"operation {wanted.number} of {wanted.model_id} came before, with another body"
        raise RequestError(422, "other_body", f"{text}: give it a number of its own")


def size_of(accepted: OperationAccepted) -> int:
    """Bytes of what was sent with an operation, as its event has it."""
    return sum(len(sent) for sent in accepted.body.values() if isinstance(sent, str))


def not_there(what: str) -> RequestError:
    """The error for what is not there, or is another's."""
    what = what if len(what) <= MOST_SHOWN else f"{what[:MOST_SHOWN]}…"
    return RequestError(404, "not_found", f"{what} is not there: it was never made here, or is another's")


def request_id_of(model_id: str, number: int) -> str:
    """The id of an operation: the same, however often it is sent."""
    return f"{model_id}:{number}"


def session_of(name: str) -> str:
    """The session that a session, a model or a request is of, by its id."""
    return name.partition(":")[0]


def run_of(model_id: str) -> str:
    """The run of a model's events: its id, without what no file's name may have."""
    return model_id.replace(":", ".")


def path_of(model_id: str, kind: str, name: str) -> str:
    """What clients call weights that were saved."""
    return f"{SCHEME}{model_id}/{kind}/{name}"


def saved_path(accepted: OperationAccepted) -> str | None:
    """What clients call the weights that an operation saves; None: it saves none, or they have no name."""
    if accepted.operation not in SAVES or (name := accepted.resolved.get("name")) is None:
        return None
    return path_of(accepted.model_id, accepted.resolved["kind"], name)


def kind_of(path: str) -> str:
    """The kind of weights that a path names."""
    return path.split("/")[-2]


def trained_digest(digests: Json) -> str:
    """The digest of what a model trains, among those of the parts of its state."""
    digest: str = digests[WHOLE] if WHOLE in digests else digests[FACTORS]
    return digest


def _saved(accepted: OperationAccepted, ended: OperationEnded, version: int, time_us: int) -> Saved:
    """What an operation saved: it is there for as long as was asked, from then on."""
    settings, checkpoint = accepted.resolved, ended.checkpoint
    assert checkpoint is not None
    ttl = settings.get("ttl_seconds")
    expires_us = None if ttl is None else time_us + ttl * 1_000_000
    what = settings["kind"], version, checkpoint, ended.digests
    return Saved(
        accepted.model_id, accepted.number, *what, time_us, expires_us, settings.get("user_metadata")
    )


def model_id_of(session_id: str, number: int) -> str:
    """The id of a session's model."""
    return f"{session_id}:train:{number}"


def model_in(path: str) -> str:
    """The model that a path of weights names."""
    return path.removeprefix(SCHEME).partition("/")[0]


def sampler_id_of(session_id: str, number: int) -> str:
    """The id of a session's sampler."""
    return f"{session_id}:sample:{number}"


def saved_at(
    models: Mapping[str, ModelOperations], path: str, caller: str | None, now_us: int, owned: bool = False
) -> Saved:
    """The weights that a path names: of a caller's own model, or of anybody's who published them.

    Args:
        owned: only a caller's own.

    Raises:
        RequestError: 404, none are there.
    """
    model = models.get(model_in(path))
    saved = None if model is None else model.saved.get(path)
    if model is None or saved is None or not saved.there(now_us):
        raise not_there(f"weights {path!r}")
    if model.owner != caller and (owned or not saved.public):
        raise not_there(f"weights {path!r}")
    return saved


def base_model_of(model: ModelOperations) -> str:
    """What clients call the model beside a model's own weights."""
    base_model: str = model.operations[CREATE].accepted.resolved["base_model"]
    return base_model
