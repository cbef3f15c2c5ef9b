"""The service behind its routes: what is accepted is durable before it is answered, and done once."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from starlette.concurrency import run_in_threadpool

from rollbook.service.downloads import Downloads
from rollbook.service.journal import Journal
from rollbook.service.lists import Lists
from rollbook.service.metrics import ServiceMetrics
from rollbook.service.order import RUN
from rollbook.service.requests import (
    CreateModel,
    CreateSession,
    LoadState,
    LoadWeights,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Unusable,
    digest_of,
)
from rollbook.service.sampling import Samplers
from rollbook.service.weights import Weights
from rollbook.service.worker import Worker
from rollbook.store import Event
from rollbook.store.errors import RequestError
from rollbook.store.events import (
    Json,
    OperationAccepted,
    OperationEnded,
    SessionEnded,
    SessionOpened,
)
from rollbook.store.ids import new_id
from rollbook.train.model.shape import ModelShape
from rollbook.train.tenants.bodies import stored_body
from rollbook.train.tenants.effects import PASS_LIMITS
from rollbook.train.tenants.losses import resolved_keys
from rollbook.train.tenants.model import check_pass
from rollbook.train.tenants.operations import (
    CREATE,
    EXTERNAL_WEIGHTS,
    FORWARD,
    LOAD,
    PASS,
    SAMPLE,
    SAMPLER_WEIGHTS,
    SAVE,
    SAVE_EXTERNAL,
    SAVE_FOR_SAMPLER,
    STEP,
    WEIGHTS,
    Saved,
    base_model_of,
    model_id_of,
    request_id_of,
    run_of,
    sampler_id_of,
)
from rollbook.train.tenants.origins import settings_of_data
from rollbook.train.tenants.wire import parsed, pass_of

Ordered = LoadState | OptimStep | SaveExternal | SaveForSampler | SaveWeights
"""What has a number among the operations of a model."""


class TrainingService:
    """Sessions, models and operations of all clients.

    Args:
        shapes: of each base model, by what clients call it.
        samplers: of some of these.
        worker: does the operations of models; None: other processes do.
        most_rank: of adapters; trains_whole: whether whole models are made.
    """

    def __init__(
        self,
        journal: Journal,
        shapes: Mapping[str, ModelShape],
        samplers: Samplers,
        worker: Worker | None,
        most_rank: int,
        trains_whole: bool = False,
    ) -> None:
        self._shapes, self.samplers = shapes, samplers
        self._journal, self._operations, self._worker = journal, journal.operations, worker
        self._most_rank, self._trains_whole = most_rank, trains_whole
        self.weights, self.downloads, self.lists = Weights(journal), Downloads(journal), Lists(journal)

    async def start(self) -> None:
        """Begin, on the running event loop, with what waited."""
        self._journal.start()
        await self.samplers.start()
        if self._worker is not None:
            self._worker.start()
        self.weights.start()

    async def stop(self) -> None:
        """End behind the operation that is under way."""
        self._journal.stop()
        await self.weights.stop()
        await self.samplers.stop()
        if self._worker is not None:
            await run_in_threadpool(self._worker.stop)
        await run_in_threadpool(self._journal.close)

    async def current(self) -> None:
        """Know what clients asked of other processes until now."""
        await self._journal.current()

    @property
    def metrics(self) -> ServiceMetrics:
        """What is counted of operations, and of requests."""
        return self._journal.metrics

    def _shape(self, base_model: str) -> ModelShape:
        """The shape of a base model.

        Raises:
            RequestError: 400, there is none.
        """
        if (shape := self._shapes.get(base_model)) is None:
            served = ", ".join(map(repr, self._shapes))
            text = f"base_model {base_model[:80]!r} is not served: use {served}"
            raise RequestError(400, "unknown_base_model", text)
        return shape

    # Sessions ---------------------------------------------------------------------------------------

    async def open_session(self, sent: CreateSession, once: str | None, caller: str | None) -> str:
        """A new session, or the one that the same request opened before."""
        session_id, known = new_id(), self._operations.by_key
        session = Event(SessionOpened(session_id, once, sent.model_dump(exclude={"type"}), caller), run=RUN)
        if once is None:
            await self._journal.write([session])
        else:
            named = caller, once
            await self._journal.write([session], key=f"session {named}", unless=lambda: named in known)
            session_id = known[named]
        self.lists.alive(session_id)
        return session_id

    def alive(self, session_id: str, caller: str | None) -> None:
        """A session's sign of life.

        Raises:
            RequestError: 404, there is none; 410, it is over.
        """
        self._operations.session(session_id, caller)
        if session_id in self._operations.over:
            raise RequestError(410, "session_over", f"session {session_id} is over: begin another")
        self.lists.alive(session_id)

    async def end_session(self, session_id: str, reason: Json, caller: str | None) -> None:
        """Note that a session is over; its first reason counts."""
        self._operations.session(session_id, caller)
        ended, over = Event(SessionEnded(session_id, reason), run=RUN), self._operations.over
        await self._journal.write([ended], key=f"end {session_id}", unless=lambda: session_id in over)

    # Operations -------------------------------------------------------------------------------------

    async def create(self, sent: CreateModel, caller: str | None) -> Json:
        """Accept that a model is made."""
        self._operations.session(sent.session_id, caller)
        self._shape(sent.base_model)
        asked, model_id = sent.lora_config, model_id_of(sent.session_id, sent.model_seq_id)
        if request_id_of(model_id, CREATE) not in self._operations.by_request:
            self._check_trained(None if asked is None else asked.rank)
        lora = None if asked is None else asked.config().model_dump(mode="json")
        seed = 0 if asked is None else asked.seed
        body = sent.model_dump(mode="json")
        drawn = secrets.randbelow(1 << 31) if seed is None else seed
        settings = {"base_model": sent.base_model, "lora": lora, "seed": drawn}
        settings |= {} if sent.user_metadata is None else {"user_metadata": sent.user_metadata}
        return await self._accept(model_id, CREATE, "create_model", body, digest_of(body), settings)

    async def load(self, sent: LoadWeights, caller: str | None) -> Json:
        """Accept that a model is made from weights that were saved."""
        self._operations.session(sent.session_id, caller)
        model_id, body = model_id_of(sent.session_id, sent.model_seq_id), sent.model_dump(mode="json")
        asked = model_id, CREATE, "load_weights", body, digest_of(body)
        if request_id_of(model_id, CREATE) in self._operations.by_request:
            return await self._accept(*asked, {})  # what the path named then may be gone by now
        saved = self._with_optimizer(sent.path, caller)
        made = self._operations.models[saved.model_id].operations[CREATE].accepted.resolved
        if sent.base_model not in (None, made["base_model"]):
            text = f"base_model {sent.base_model!r}: {sent.path} is of {made['base_model']!r}"
            raise RequestError(400, "other_base_model", text)
        if made["lora"] is None:
            self._check_trained(None)
        # What the path names now: it may be written over before the model is made again.
        settings = made | {"path": sent.path, "optimizer": sent.optimizer}
        settings |= {"checkpoint": saved.checkpoint, "digests": saved.digests}
        settings["user_metadata"] = sent.user_metadata
        return await self._accept(*asked, settings, saved.checkpoint)

    def _check_trained(self, rank: int | None) -> None:
        """Refuse to make what is not trained here: an adapter of a rank, or (None) a whole model.

        Raises:
            RequestError: 400.
        """
        if rank is None and not self._trains_whole:
            text = "lora_config: whole models are not trained here: send it, or have the service's CONFIG say"
            raise RequestError(400, "not_supported", f"{text} full = 1")
        if rank is not None and rank > self._most_rank:
            text = f"lora_config.rank {rank}: here it is {self._most_rank} at most (limits.rank)"
            raise RequestError(400, "bad_rank", text)

    async def load_into(self, sent: LoadState, caller: str | None) -> Json:
        """Accept that weights that were saved take the place of a model's own."""
        self._operations.model(sent.model_id, caller)
        try:
            saved = self._with_optimizer(sent.path, caller)
        except RequestError as error:  # it has a number, for which those behind it wait
            return await self._ordered(sent, LOAD, {"refused": error.message})
        settings = {"path": sent.path, "optimizer": sent.optimizer}
        settings |= {"checkpoint": saved.checkpoint, "digests": saved.digests}
        return await self._ordered(sent, LOAD, settings, needs=saved.checkpoint)

    def _with_optimizer(self, path: str, caller: str | None) -> Saved:
        """Weights that training goes on from.

        Raises:
            RequestError: 404, none were saved there; 400, they are to sample from.
        """
        saved = self._journal.saved(path, caller)
        if saved.kind != WEIGHTS:
            text = f"{path} has no optimizer: load what save_weights saved"
            raise RequestError(400, "sampler_weights", text)
        return saved

    async def accept_pass(self, body: bytes, caller: str | None) -> Json:
        """Accept a forward pass, or one forward and backward."""
        message = await run_in_threadpool(parsed, body, PASS_LIMITS)
        model = self._operations.model(message.model_id, caller)
        shape = self._shape(base_model_of(model))
        settings = await run_in_threadpool(self._settings_of_pass, message, shape, caller)
        name = FORWARD if message.forward_only else PASS
        stored = await run_in_threadpool(stored_body, "protobuf", body)
        named = message.model_id, message.seq_id, name
        return await self._accept(*named, stored, sha256(body).hexdigest(), settings)

    def _settings_of_pass(self, message: Any, shape: ModelShape, caller: str | None) -> Json:
        """What decides the bits of a pass; of one that cannot be done, why: it has a number, for which those
        behind it wait, so it is accepted and fails."""
        try:
            sent = pass_of(message, PASS_LIMITS)
            keys = resolved_keys(sent.loss, sent.config)
            check_pass(sent, shape)
        except RequestError as error:
            return {"refused": error.message}
        tokens = sum(len(datum.tokens) for datum in sent.data)
        data = settings_of_data(sent, self._operations.origins, caller)
        tokens *= 1 if sent.forward_only else 3
        return {"loss": sent.loss, "keys": keys, "tokens": tokens} | data

    async def refuse(self, sent: Unusable, operation: str, caller: str | None) -> Json:
        """Accept an operation that cannot be done, and fails when its number comes."""
        self._operations.model(sent.model_id, caller)
        named = sent.model_id, sent.seq_id, operation
        return await self._accept(*named, {}, digest_of({"sent": sent.sent}), {"refused": sent.why})

    async def step(self, sent: OptimStep, caller: str | None) -> Json:
        """Accept an optimizer step."""
        self._operations.model(sent.model_id, caller)
        return await self._ordered(sent, STEP, sent.adam_params.resolved())

    async def save(self, sent: SaveWeights, caller: str | None) -> Json:
        """Accept that weights are saved."""
        self._operations.model(sent.model_id, caller)
        settings = {"kind": WEIGHTS, "name": sent.path, "overwrite": sent.overwrite} | _said(sent)
        return await self._ordered(sent, SAVE, settings)

    async def save_for_sampler(self, sent: SaveForSampler, caller: str | None) -> Json:
        """Accept that weights are saved to be sampled from: by a name, or for a sampler of their own."""
        model = self._operations.model(sent.model_id, caller)
        sampler = self.samplers.of_base(base_model_of(model))  # refused where nothing samples
        try:
            if model.whole:
                sampler.check_whole()
        except RequestError as error:  # it has a number, for which those behind it wait
            return await self._ordered(sent, SAVE_FOR_SAMPLER, {"refused": error.message}, sent.digest())
        settings: Json = {"kind": SAMPLER_WEIGHTS, "name": sent.path, "overwrite": False} | _said(sent)
        if sent.path is None:
            number = sent.sampling_session_seq_id
            if number is None:
                raise RequestError(400, "no_name", "give path, or sampling_session_seq_id")
            settings |= {"sampler_id": sampler_id_of(model.session_id, number)}
        return await self._ordered(sent, SAVE_FOR_SAMPLER, settings, sent.digest())

    async def save_external(self, sent: SaveExternal, caller: str | None) -> Json:
        """Accept that weights are saved for other programs."""
        self._operations.model(sent.model_id, caller)
        settings = {"kind": EXTERNAL_WEIGHTS, "name": sent.path, "overwrite": False} | _said(sent)
        return await self._ordered(sent, SAVE_EXTERNAL, settings)

    def described(self, model_id: str, caller: str | None) -> Json:
        """A model's own description."""
        model = self._operations.model(model_id, caller)
        settings, name = model.operations[CREATE].accepted.resolved, base_model_of(model)
        data = {"arch": self._shape(name).family, "model_name": name, "tokenizer_id": name}
        own = {"is_lora": not model.whole, "lora_rank": (settings["lora"] or {}).get("rank")}
        own |= {"model_name": name}
        return {"type": "get_info", "model_id": model_id, "model_data": data} | own

    def capabilities(self) -> Json:
        """The base models that are served."""
        models = [
            {"model_name": name, "max_context_length": shape.context, "trainable": True}
            | {"sampleable": self.samplers.samples(name)}
            for name, shape in self._shapes.items()
        ]
        return {"supported_models": models}

    async def result(self, request_id: str, caller: str | None) -> OperationEnded | None:
        """How an operation ended; None where it did not in time."""
        return await self._journal.result(request_id, caller)

    async def answered(self, request_id: str) -> None:
        """Note that a client was sent a result."""
        operation = self._operations.by_request.get(request_id)
        if operation is not None and operation.accepted.operation == SAMPLE:
            await self.samplers.of(operation.accepted.model_id).delivered(operation)

    async def _ordered(
        self,
        sent: Ordered,
        operation: str,
        settings: Json,
        digest: str | None = None,
        needs: str | None = None,
    ) -> Json:
        """Accept an operation of a model that is there.

        Args:
            digest: of what its repetitions have in common; None: of all of it.
            needs: the checkpoint that it refers to.
        """
        body = sent.model_dump(mode="json")
        named = sent.model_id, sent.seq_id, operation
        return await self._accept(*named, body, digest or digest_of(body), settings, needs)

    async def _accept(
        self,
        model_id: str,
        number: int,
        operation: str,
        body: Json,
        digest: str,
        settings: Json,
        needs: str | None = None,
    ) -> Json:
        """Write that an operation came, unless it did before.

        Raises:
            RequestError: as `Journal.accept`.
        """
        request_id, run = request_id_of(model_id, number), run_of(model_id)
        wanted = OperationAccepted(request_id, model_id, number, operation, body, digest, settings)
        await self._journal.accept(wanted, run=run, needs=needs)
        return {"request_id": request_id, "model_id": model_id}


def _said(sent: SaveWeights | SaveForSampler | SaveExternal) -> Json:
    """What a client said of weights, as far as it did: how long they are there, and its own words."""
    said = {"ttl_seconds": sent.ttl_seconds, "user_metadata": getattr(sent, "user_metadata", None)}
    return {name: value for name, value in said.items() if value is not None}
