"""Samples for clients: each request is durable before it is answered, and what it gave before it is told."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rollbook.engines.engine import (
    Generation,
    Prompt,
    Sampling,
    Scores,
    ServesAdapters,
    ServesWeights,
    TopTokens,
    ignore_tokens,
)
from rollbook.service import trajectories
from rollbook.service.journal import Journal, failure_of
from rollbook.service.requests import CreateSampler, Sample, digest_of
from rollbook.service.stop_texts import StopTexts, Texts
from rollbook.store import Event
from rollbook.store.errors import CatalogError, EngineError, EngineLostError, RequestError
from rollbook.store.events import (
    Json,
    OperationAccepted,
    OperationEnded,
    Record,
    SamplerOpened,
    TokenIds,
    token_ids,
)
from rollbook.store.ids import new_id
from rollbook.store.safe_paths import place_inside
from rollbook.train.tenants.bodies import sent_body, stored_body
from rollbook.train.tenants.operations import (
    SAMPLE,
    WHOLE,
    Operation,
    Saved,
    base_model_of,
    check_same,
    request_id_of,
    run_of,
    sampler_id_of,
    session_of,
    trained_digest,
)
from rollbook.train.tenants.origins import key_of
from rollbook.train.tenants.wire import Sampled, write_samples

AGAIN_S = 1.0
"""Between two tries to reach an engine that is lost."""
ADOPT_S = 2.0
"""Between two looks at what processes that ended were to sample."""
CANCEL = "cancel "
"""A message to all processes begins with it: a request of which nobody wants the sequences any more."""
_log = logging.getLogger(__name__)


async def _activated(*_: Any) -> None:
    """The log has which weights are sampled from with each sampler."""


@dataclass(frozen=True, slots=True)
class Held:
    """What samples for a sampler: an engine, and the name of the adapter that it holds; "": it needs none."""

    engine: ServesAdapters
    adapter: str


class HeldAdapters:
    """The adapters that an engine holds for samplers: as many as it may, those that were used last.

    Args:
        most: adapters at once.
    """

    def __init__(self, engine: ServesAdapters, journal: Journal, most: int) -> None:
        self._engine, self._journal, self._most = engine, journal, most
        self._held = OrderedDict[str, None]()
        self._users = Counter[str]()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def use(self, sampler: SamplerOpened) -> AsyncIterator[Held]:
        """Context: the engine holds a sampler's adapter, if it has one.

        Raises:
            EngineError: it cannot be loaded, or is another than was saved.
        """
        if sampler.checkpoint is None:
            yield Held(self._engine, "")
            return
        name = sampler.weights_digest
        async with self._changed:
            await self._changed.wait_for(lambda: name in self._held or self._room())
            if name not in self._held:
                await self._load(name, sampler.checkpoint)
            self._held.move_to_end(name)
            self._users[name] += 1
        try:
            yield Held(self._engine, name)
        finally:
            async with self._changed:
                self._users[name] -= 1
                self._changed.notify_all()

    def _room(self) -> bool:
        return len(self._held) < self._most or any(not self._users[name] for name in self._held)

    async def _load(self, name: str, checkpoint: str) -> None:
        if len(self._held) >= self._most:
            idle = next(held for held in self._held if not self._users[held])
            await self._engine.unload_adapter(idle)
            del self._held[idle]
        await self._engine.load_adapter(name, place_inside(self._journal.log.path, checkpoint), name)
        self._held[name] = None


class HeldWhole:
    """An engine of its own for whole models, of which it holds one at a time; it is made for the first.

    Args:
        make: the engine, with weights of the base model's architecture.
    """

    def __init__(self, make: Callable[[], ServesWeights], journal: Journal) -> None:
        self._make, self._journal = make, journal
        self._engine: ServesWeights | None = None
        self._held, self._users = "", 0
        self._turn, self._changed = asyncio.Lock(), asyncio.Condition()

    @asynccontextmanager
    async def use(self, sampler: SamplerOpened) -> AsyncIterator[Held]:
        """Context: the engine holds a sampler's weights. Where it held others, those who use them end first;
        who comes meanwhile waits behind.

        Raises:
            EngineError: they cannot be loaded, or are others than were saved.
        """
        async with self._turn:
            if self._engine is None:
                self._engine = await asyncio.to_thread(self._make)
                await self._engine.start(_activated)
            if self._held != sampler.weights_digest:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._users)
                await self._load(self._engine, sampler)
            self._users += 1
        try:
            yield Held(self._engine, "")
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()

    async def _load(self, engine: ServesWeights, sampler: SamplerOpened) -> None:
        assert sampler.checkpoint is not None
        self._held = ""
        folder = place_inside(self._journal.log.path, sampler.checkpoint)
        await engine.load_weights(folder, sampler.policy_version, sampler.weights_digest)
        self._held = sampler.weights_digest

    async def abort(self, request_id: str) -> None:
        """End a request with what it has."""
        if self._engine is not None:
            await self._engine.abort(request_id)

    async def close(self) -> None:
        """End."""
        if self._engine is not None:
            await self._engine.close()


class Sampler:
    """Opens samplers of a base model, and of what was trained from it, and samples for them.

    Args:
        engine: serves the base model, and adapters beside it.
        run: of what is sampled from the base model itself; digest: of its weights.
        texts: of its tokens; None: there is no tokenizer, and no stop may be a text.
        most_adapters: that the engine holds at once.
        whole: samples from whole models; None: nothing does.
    """

    def __init__(
        self,
        journal: Journal,
        engine: ServesAdapters,
        base_model: str,
        run: str,
        digest: str,
        texts: Texts | None,
        most_adapters: int,
        whole: HeldWhole | None = None,
    ) -> None:
        self._journal, self._engine, self._texts = journal, engine, texts
        self._base_model, self._run, self._digest = base_model, run, digest
        self._adapters, self._whole = HeldAdapters(engine, journal, most_adapters), whole
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._adopting: asyncio.Task[None] | None = None
        self._cancelled: set[str] = set()
        self._aborting: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        """Begin, with what waited when the log was opened."""
        await self._engine.start(_activated)
        loop = asyncio.get_running_loop()

        def hear(message: str) -> None:
            loop.call_soon_threadsafe(self._hear, message)

        self._journal.hear(hear)
        await self._take(self._pending())
        if self._journal.order.shared:
            self._adopting = loop.create_task(self._adopt())

    async def stop(self) -> None:
        """End; what is under way is sampled again after the next start."""
        tasks = [*self._tasks.values(), *([] if self._adopting is None else [self._adopting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.close()
        if self._whole is not None:
            await self._whole.close()

    def check_whole(self) -> None:
        """Refuse to sample from a whole model where nothing does.

        Raises:
            RequestError: 400.
        """
        if self._whole is None:
            text = (
                "nothing samples from whole models here: only [sampler] engine = embedded with full = 1 does"
            )
            raise RequestError(400, "not_supported", f"{text}; save_weights_external gives their files")

    # What clients ask -------------------------------------------------------------------------------

    async def open(self, sampler_id: str, path: str | None, saved: Saved | None) -> None:
        """Open a sampler of the base model, or of weights that were saved at a path.

        Raises:
            RequestError: 400, nothing samples from them; 404, they are gone; 422, it is another sampler's id.
        """
        operations, named = self._journal.operations, (sampler_id, session_of(sampler_id), self._base_model)
        if saved is not None and WHOLE in saved.digests:
            self.check_whole()
        if saved is None:
            opened, run = SamplerOpened(*named, None, None, 0, self._digest, None), self._run
        else:
            opened, run = sampler_of_saved(named, saved, path), run_of(saved.model_id)

        def known() -> bool:
            if (earlier := operations.samplers.get(sampler_id)) is None:
                return not self._journal.check_kept(opened.checkpoint)
            if earlier.path != path:
                text = f"sampling session {sampler_id} is another's weights"
                raise RequestError(422, "other_body", text)
            return True

        await self._journal.write([Event(opened, run=run)], key=sampler_id, unless=known)

    async def accept(self, sent: Sample, caller: str | None) -> Json:
        """Accept that sequences are sampled.

        Raises:
            RequestError: 404, there is no such sampler; 400, it cannot be done; as `Operations.repeated`.
        """
        sampler = self._journal.operations.sampler(sent.sampling_session_id, caller)
        request_id = request_id_of(sampler.sampler_id, sent.seq_id)
        ids = token_ids([i for chunk in sent.prompt.chunks for i in chunk.tokens])
        settings = self._resolved(sent, ids)
        body = stored_body("tokens", ids.astype("<i4").tobytes())
        digest = digest_of(sent.model_dump(mode="json"))
        known = request_id, sampler.sampler_id, sent.seq_id, SAMPLE, body, digest
        accepted, run = OperationAccepted(*known, settings), self._run_of(sampler)
        if (older := await self._journal.older(request_id)) is not None:
            check_same(older, accepted)
            return {"request_id": request_id, "sample_sequence_ids": older.accepted.resolved["sequence_ids"]}
        before = list[Event]()
        if not self._journal.operations.repeated(accepted):  # which refuses before there is more to do
            turns = trajectories.opened(accepted, sampler, samplings_of(settings), caller)
            before = [Event(record, run=run) for record in turns]
        if await self._journal.accept(accepted, *before, run=run, needs=sampler.checkpoint):
            await self._take([request_id])
        accepted = self._journal.operations.by_request[request_id].accepted
        return {"request_id": request_id, "sample_sequence_ids": accepted.resolved["sequence_ids"]}

    def _resolved(self, sent: Sample, ids: TokenIds) -> Json:
        """Every setting of a request."""
        room = self._engine.context_length - len(ids)
        if not len(ids) or room < 1:
            text = f"the prompt has {len(ids)} tokens: give 1 to {self._engine.context_length - 1}"
            raise RequestError(400, "bad_prompt", text)
        if int(ids.max()) >= self._engine.vocabulary:
            text = f"the prompt has token {ids.max()}: ids are 0 to {self._engine.vocabulary - 1}"
            raise RequestError(400, "bad_prompt", text)
        params = sent.sampling_params
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        is_text = stop is not None and any(isinstance(one, str) for one in stop)
        if is_text and self._texts is None:
            text = "stop: the base model has no tokenizer.json: give token ids"
            raise RequestError(400, "no_tokenizer", text)
        first = secrets.randbits(62) if params.seed is None else params.seed
        return {
            "sequence_ids": [new_id() for _ in range(sent.num_samples)],
            "max_tokens": min(params.max_tokens or room, room),
            "seed": first,
            "stop": stop if is_text else [],
            "stop_ids": None if is_text or stop is None else stop,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "prompt_logprobs": bool(sent.prompt_logprobs),
            "last": sent.prompt_logprobs_last_n,
            "prompt_top": sent.topk_prompt_logprobs,
            "top": sent.topk_sample_logprobs,
        }

    def _hear(self, message: str) -> None:
        """End what a client cancelled, by whichever process, if it is sampled here."""
        request_id = message.removeprefix(CANCEL)
        if request_id != message and request_id in self._tasks:
            self._cancelled.add(request_id)
            accepted = self._journal.operations.by_request[request_id].accepted
            for sequence_id in accepted.resolved["sequence_ids"]:
                self._aborting.add(aborting := asyncio.ensure_future(self._abort(sequence_id)))
                aborting.add_done_callback(self._aborting.discard)

    async def _abort(self, sequence_id: str) -> None:
        await self._engine.abort(sequence_id)
        if self._whole is not None:
            await self._whole.abort(sequence_id)

    async def delivered(self, operation: Operation) -> None:
        """Note that a client was sent what was sampled; once."""
        accepted = operation.accepted
        if operation.succeeded and not operation.delivered:
            operation.delivered = True
            run = self._run_of(self._journal.operations.samplers[accepted.model_id])
            await self._journal.write([Event(r, run=run) for r in trajectories.delivered(accepted)])

    # Sampling ---------------------------------------------------------------------------------------

    async def _take(self, request_ids: Sequence[str]) -> None:
        """Begin with those of these requests that no other process samples for."""
        for request_id in await self._journal.take(request_ids):
            operation = self._journal.operations.by_request[request_id]
            if operation.ended is None and request_id not in self._tasks:
                task = self._tasks[request_id] = asyncio.create_task(self._sample(operation.accepted))
                task.add_done_callback(partial(self._sampled_for, request_id))

    def _sampled_for(self, request_id: str, _: asyncio.Task[None]) -> None:
        del self._tasks[request_id]
        self._cancelled.discard(request_id)

    def _pending(self) -> list[str]:
        """What is to be sampled beside this base model."""
        operations = self._journal.operations
        sampling = [(name, o.accepted.model_id) for name, o in [*operations.sampling.items()]]
        return [name for name, of in sampling if operations.samplers[of].base_model == self._base_model]

    def _run_of(self, sampler: SamplerOpened) -> str:
        return self._run if sampler.model_id is None else run_of(sampler.model_id)

    async def _adopt(self) -> None:
        """Take what other processes were to sample, and ended before."""
        while True:
            await asyncio.sleep(ADOPT_S)
            if left := [name for name in self._pending() if name not in self._tasks]:
                await self._take(left)

    async def _sample(self, accepted: OperationAccepted) -> None:
        sampler = self._journal.operations.samplers[accepted.model_id]
        named = accepted.request_id, accepted.model_id, accepted.number
        try:
            records, answer, keys = await self._until_reached(accepted, sampler)
            result = {"protobuf": base64.b64encode(answer).decode()}
            digests = {"weights": sampler.weights_digest, "sequences": keys}
            ended = OperationEnded(*named, result, None, digests)
        except Exception as error:
            if not isinstance(error, RequestError | EngineError):
                _log.exception("request %s failed", accepted.request_id)
            told = failure_of(error)
            records = trajectories.failed(accepted, told["error"])
            ended = OperationEnded(*named, None, told, {})
        events = [Event(record, run=self._run_of(sampler)) for record in [*records, ended]]
        await asyncio.to_thread(self._end, events, accepted.request_id)

    def _end(self, events: Sequence[Event], request_id: str) -> None:
        self._journal.end(events)
        with suppress(CatalogError):
            self._journal.order.leave([request_id])

    async def _until_reached(
        self, accepted: OperationAccepted, sampler: SamplerOpened
    ) -> tuple[list[Record], bytes, list[str]]:
        """What was sampled; an engine that is lost is tried again until it is there, or nobody waits."""
        while True:
            try:
                return await self._sampled(accepted, sampler)
            except EngineLostError as error:
                _log.warning("request %s waits for its engine: %s", accepted.request_id, error)
                await asyncio.sleep(AGAIN_S)
                self._check_wanted(accepted)

    def _check_wanted(self, accepted: OperationAccepted) -> None:
        if accepted.request_id in self._cancelled:
            raise RequestError(400, "cancelled", "the client cancelled it")

    async def _sampled(
        self, accepted: OperationAccepted, sampler: SamplerOpened
    ) -> tuple[list[Record], bytes, list[str]]:
        """(records of the sequences, the answer, the keys of the sequences)"""
        settings = accepted.resolved
        ids = token_ids(np.frombuffer(sent_body("tokens", accepted.body), "<i4"))
        sequences: list[str] = settings["sequence_ids"]
        async with self._held(sampler) as held:
            self._check_wanted(accepted)
            samplings = (replace(sampling, top=settings["top"]) for sampling in samplings_of(settings))
            asked = zip(sequences, samplings, strict=True)
            made = await asyncio.gather(*(self._one(s, ids, sampling, held) for s, sampling in asked))
            self._check_wanted(accepted)
            check_finite(made)
            of_prompt = await self._of_prompt(settings, ids, held)
            samples = [await self._with_top(settings, ids, own, held) for own in made]
        answer = write_samples(samples, *of_prompt)
        records: list[Record] = []
        for sequence_id, own in zip(sequences, made, strict=True):
            text = "" if self._texts is None else self._texts.decode(own.completion_ids)
            records += trajectories.completed(sequence_id, ids, own, sampler.policy_version, text)
        return records, answer, [key_of(np.concatenate([ids, own.completion_ids])) for own in made]

    def _held(self, sampler: SamplerOpened) -> AbstractAsyncContextManager[Held]:
        """Context: what a sampler samples from is in an engine.

        Raises:
            RequestError: 400, it is a whole model, from which nothing samples here.
        """
        models = self._journal.operations.models
        if sampler.model_id is None or not models[sampler.model_id].whole:
            return self._adapters.use(sampler)
        self.check_whole()
        assert self._whole is not None
        return self._whole.use(sampler)

    async def _one(self, sequence_id: str, ids: TokenIds, sampling: Sampling, held: Held) -> Generation:
        """One sequence; where the engine does not know texts that end it, they are looked for here."""
        prompt = Prompt(ids, [], None, request_id=sequence_id, adapter=held.adapter)
        if not sampling.stop or "stop" in held.engine.honoured:
            return await held.engine.generate(prompt, sampling, ignore_tokens)
        assert self._texts is not None
        watched, loop = StopTexts(self._texts, sampling.stop), asyncio.get_running_loop()
        aborts = list[asyncio.Task[None]]()

        def watch(new: Sequence[int], _: Sequence[float] | None) -> None:
            if watched.add(new) and not aborts:
                aborts.append(loop.create_task(held.engine.abort(sequence_id)))

        made = await held.engine.generate(prompt, sampling, watch)
        return cut(made, watched.count)

    async def _of_prompt(
        self, settings: Json, ids: TokenIds, held: Held
    ) -> tuple[Any | None, TopTokens | None]:
        """Logprobs of the prompt, and the likeliest tokens, where they were asked for."""
        if not settings["prompt_logprobs"] and not settings["prompt_top"]:
            return None, None
        scores = await held.engine.score(ids, held.adapter, 1.0, settings["prompt_top"])
        scores = masked(scores, settings["last"])
        return scores.logprobs if settings["prompt_logprobs"] else None, scores.top

    async def _with_top(self, settings: Json, ids: TokenIds, own: Generation, held: Held) -> Sampled:
        top = own.top
        if settings["top"] and top is None:
            whole = np.concatenate([ids, own.completion_ids])
            scores = await held.engine.score(whole, held.adapter, settings["temperature"], settings["top"])
            assert scores.top is not None
            top = TopTokens(scores.top.ids[len(ids) :], scores.top.logprobs[len(ids) :])
        return Sampled(own.completion_ids, own.logprobs, own.finish_reason == "stop", top)


class Samplers:
    """What samples from each base model.

    Args:
        by_base: of those from which something samples, by what clients call them.
        first: the base model where a client names none.
    """

    def __init__(self, journal: Journal, by_base: Mapping[str, Sampler], first: str) -> None:
        self._operations, self._by_base, self._first = journal.operations, by_base, first
        self._journal = journal

    async def start(self) -> None:
        """As `Sampler.start`, of each."""
        for sampler in self._by_base.values():
            await sampler.start()

    async def stop(self) -> None:
        """As `Sampler.stop`, of each."""
        for sampler in self._by_base.values():
            await sampler.stop()

    def samples(self, base_model: str) -> bool:
        """Whether something samples from a base model."""
        return base_model in self._by_base

    def of_base(self, base_model: str) -> Sampler:
        """What samples from a base model.

        Raises:
            RequestError: 400, nothing does.
        """
        if (sampler := self._by_base.get(base_model)) is None:
            text = f"nothing is sampled from {base_model[:80]!r} here"
            raise RequestError(
                400, "not_supported", f"{text}: it is not served, or its sampler has engine = none"
            )
        return sampler

    def of(self, sampler_id: str) -> Sampler:
        """What samples for a sampler.

        Raises:
            RequestError: 400, nothing does any more.
        """
        return self.of_base(self._operations.samplers[sampler_id].base_model)

    async def open(self, sent: CreateSampler, caller: str | None) -> str:
        """The id of a sampler: a new one, or that which the same request opened before.

        Raises:
            RequestError: 404, there is no such session, or no such weights; 400, they are of another base
                model, or nothing is sampled from it; as `Sampler.open`.
        """
        self._operations.session(sent.session_id, caller)
        sampler_id, saved = sampler_id_of(sent.session_id, sent.sampling_session_seq_id), None
        if (known := self._operations.samplers.get(sampler_id)) is not None:
            base_model = known.base_model
        elif sent.model_path is None:
            base_model = sent.base_model or self._first
        else:
            saved = self._journal.saved(sent.model_path, caller)
            base_model = base_model_of(self._operations.models[saved.model_id])
        if sent.base_model not in (None, base_model):
            text = f"base_model {sent.base_model!r}: {sent.model_path} is of {base_model!r}"
            raise RequestError(400, "other_base_model", text)
        await self.of_base(base_model).open(sampler_id, sent.model_path, saved)
        return sampler_id

    def described(self, sampler_id: str, caller: str | None) -> Json:
        """What a sampler samples from.

        Raises:
            RequestError: 404, there is none.
        """
        sampler = self._operations.sampler(sampler_id, caller)
        return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.path}

    async def accept(self, sent: Sample, caller: str | None) -> Json:
        """As `Sampler.accept`."""
        sampler = self._operations.sampler(sent.sampling_session_id, caller)
        return await self.of_base(sampler.base_model).accept(sent, caller)

    async def cancel(self, request_id: str, caller: str | None) -> None:
        """End a request of which nobody wants the sequences any more; one that ended stays as it is."""
        operation = await self._journal.request(request_id, caller)
        if operation.ended is None and operation.accepted.operation == SAMPLE:
            await asyncio.to_thread(self._journal.order.tell, f"{CANCEL}{request_id}")


def sampler_of_saved(named: tuple[str, str, str], saved: Saved, path: str | None) -> SamplerOpened:
    """A sampler of weights that were saved.

    Args:
        named: the sampler, its session and the base model.
    """
    rest = saved.version, trained_digest(saved.digests), saved.checkpoint
    return SamplerOpened(*named, saved.model_id, path, *rest)


def samplings_of(settings: Json) -> list[Sampling]:
    """How each sequence of a request is sampled: seeds count on from the first."""
    stop_ids = settings["stop_ids"]
    common = Sampling(
        settings["max_tokens"],
        settings["temperature"],
        settings["seed"],
        top_p=settings["top_p"],
        top_k=settings["top_k"],
        stop=tuple(settings["stop"]),
        stop_ids=() if settings["stop"] else None if stop_ids is None else tuple(stop_ids),
    )
    count = len(settings["sequence_ids"])
    return [replace(common, seed=(common.seed + at) % (1 << 63)) for at in range(count)]


def cut(made: Generation, count: int | None) -> Generation:
    """A generation up to the token that completed a text that ends it; None: there was none."""
    if count is None:
        return made
    logprobs = None if made.logprobs is None else made.logprobs[:count]
    top = None if made.top is None else TopTokens(made.top.ids[:count], made.top.logprobs[:count])
    spans = tuple(
        replace(span, end=min(span.end, count)) for span in made.version_spans if span.start < count
    )
    return replace(
        made,
        completion_ids=made.completion_ids[:count],
        logprobs=logprobs,
        version_spans=spans,
        finish_reason="stop",
        top=top,
    )


def check_finite(made: Sequence[Generation]) -> None:
    """Refuse what weights give that a client trained to where they are no numbers any more.

    Raises:
        RequestError: 400.
    """
    for own in made:
        if own.logprobs is not None and not np.isfinite(own.logprobs).all():
            text = "logprobs are not finite: the weights are not, or too large; sample from earlier ones"
            raise RequestError(400, "not_finite", text)


def masked(scores: Scores, last: int | None) -> Scores:
    """Scores of the last tokens alone; None: of all."""
    if last is None:
        return scores
    logprobs, top = scores.logprobs.copy(), scores.top
    logprobs[:-last] = np.nan
    if top is not None:
        top = TopTokens(top.ids, top.logprobs.copy())
        top.logprobs[:-last] = np.nan
    return Scores(logprobs, top)
