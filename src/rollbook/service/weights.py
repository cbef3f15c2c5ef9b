"""What becomes of weights that clients saved: whose they are, how long they are there, and when their files
go. Each change is durable before it is answered."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from rollbook.service.journal import Journal
from rollbook.service.order import RUN
from rollbook.service.requests import CopyWeights
from rollbook.store import Event
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, SessionOpened, WeightsChanged, WeightsCopied, WeightsFreed
from rollbook.store.ids import new_id
from rollbook.store.safe_paths import place_inside
from rollbook.train.tenants.held import held_checkpoints
from rollbook.train.tenants.operations import (
    CREATE,
    DELETED,
    EXPIRED,
    KEPT,
    PUBLISHED,
    UNPUBLISHED,
    kind_of,
    model_id_of,
    model_in,
    path_of,
    request_id_of,
    run_of,
)

SWEEP_S = 60.0
"""Between two looks at what has expired, and at whose files may go."""
SWEEP = "sweep"
"""What one of several processes does."""
_log = logging.getLogger(__name__)


class Weights:
    """Changes what was saved, and removes what nothing refers to any more."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._operations = journal, journal.operations
        self._wake, self._stopped = asyncio.Event(), False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End behind the removal that is under way."""
        self._stopped = True
        self._wake.set()
        if self._task is not None:
            await self._task

    # What clients ask -------------------------------------------------------------------------------

    async def delete(self, path: str, caller: str | None) -> None:
        """Weights of a caller's own are not there any more; samplers that have them go on.

        Raises:
            RequestError: 404, they were not.
        """
        await self._change(path, DELETED, caller)
        self._wake.set()

    async def keep(self, path: str, seconds: int | None, caller: str | None) -> None:
        """Weights of a caller's own are there for so long from now on; None: without end.

        Raises:
            RequestError: 404, they are not.
        """
        await self._change(path, KEPT, caller, self._until(seconds))

    async def publish(self, path: str, public: bool, caller: str | None) -> None:
        """Weights of a caller's own are for all tenants, or its own alone again.

        Raises:
            RequestError: 404, they are not there.
        """
        if self._journal.saved(path, caller, owned=True).public != public:
            await self._change(path, PUBLISHED if public else UNPUBLISHED, caller)

    async def copy(self, sent: CopyWeights, once: str | None, caller: str | None) -> str:
        """The path of a copy: a new one, or that which the same request made before.

        Raises:
            RequestError: 404, the weights or the session are not there; 422, something else is where the copy
                was to be.
        """
        if once is not None and (known := self._operations.copies.get((caller, once))) is not None:
            return known
        saved, before = self._journal.saved(sent.source_path, caller), list[Event]()
        if sent.session_id is None:
            session_id, number = new_id(), 0
            opened = SessionOpened(session_id, None, {"project_id": sent.destination_project_id}, caller)
            before = [Event(opened, run=RUN)]
        else:
            self._operations.session(sent.session_id, caller)
            session_id, number = sent.session_id, sent.model_seq_id or 0
        model_id = model_id_of(session_id, number)
        path = path_of(model_id, kind_of(sent.source_path), sent.source_path.rpartition("/")[2])
        of_what = saved.model_id, saved.number, saved.version, saved.checkpoint, saved.digests
        rest = self._until(sent.ttl_seconds), saved.metadata, once, caller
        copied = WeightsCopied(model_id, path, sent.source_path, *of_what, *rest)
        made = (caller, once)

        def is_made() -> bool:
            if once is not None and made in self._operations.copies:
                return True
            if model_id in self._operations.models:
                text = f"model {model_id} is there: give another model_seq_id"
                raise RequestError(422, "other_body", text)
            return not self._journal.check_kept(saved.checkpoint)

        # In a session the model is named: nothing else is to be made of it at once.
        key = request_id_of(model_id, CREATE) if sent.session_id is not None else f"copy {made}"
        events = [*before, Event(copied, run=run_of(model_id))]
        if not await self._journal.write(events, key=key, unless=is_made):
            assert once is not None
            return self._operations.copies[caller, once]
        return path

    def described(self, path: str, caller: str | None) -> Json:
        """What one has to know of weights to load them.

        Raises:
            RequestError: 404, they are not there.
        """
        saved = self._journal.saved(path, caller)
        made = self._operations.models[saved.model_id].operations[CREATE].accepted.resolved
        base_model, lora = made["base_model"], made["lora"]
        if lora is None:
            return {"base_model": base_model, "is_lora": False}
        named = {"train_attn": "q_proj", "train_mlp": "gate_proj", "train_unembed": "lm_head"}
        trained = {part: target in lora["targets"] for part, target in named.items()}
        return {"base_model": base_model, "is_lora": True, "lora_rank": lora["rank"]} | trained

    async def _change(
        self, path: str, change: str, caller: str | None, expires_us: int | None = None
    ) -> None:
        saved = self._journal.saved(path, caller, owned=True)
        model = self._operations.models[model_in(path)]
        changed = WeightsChanged(model.model_id, path, saved.checkpoint, change, expires_us, caller)
        await self._journal.write([Event(changed, run=model.run)])

    def _until(self, seconds: int | None) -> int | None:
        return None if seconds is None else self._journal.now_us() + seconds * 1_000_000

    # What goes --------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Note what has expired, and remove files that nothing refers to."""
        if not await self._journal.take([SWEEP]):
            return
        now_us, lapsed = self._journal.now_us(), list[Event]()
        for model in list(self._operations.models.values()):
            for path, saved in list(model.saved.items()):
                if not saved.there(now_us):
                    gone = WeightsChanged(model.model_id, path, saved.checkpoint, EXPIRED)
                    lapsed.append(Event(gone, run=model.run))
        if lapsed:
            await self._journal.write(lapsed)
        if not self._operations.gone:
            return
        loose = await self._journal.ask(self._loose)
        if loose:
            sizes = await asyncio.to_thread(lambda: [bytes_of(self._folder(name)) for name in loose])
            sized = zip(loose.items(), sizes, strict=True)
            freed = [WeightsFreed(*by, name, size) for (name, by), size in sized]
            if await self._journal.free(freed, lambda: self._are_held({*loose})):
                await asyncio.to_thread(self._remove, [*loose])

    def _loose(self) -> dict[str, tuple[str, int]]:
        """The checkpoints that are not there any more, and that nothing refers to."""
        held = held_checkpoints(self._operations)
        return {name: by for name, by in self._operations.gone.items() if name not in held}

    def _are_held(self, checkpoints: set[str]) -> bool:
        """Whether something refers to one of these by now, or another process removes them."""
        operations = self._operations
        return bool(checkpoints & (held_checkpoints(operations) | operations.freed))

    async def _run(self) -> None:
        left = [*self._operations.freed]
        while not self._stopped:
            self._wake.clear()
            try:
                await asyncio.to_thread(self._remove, left)
                left = []
                await self.sweep()
            except Exception:  # whatever it is: the next look is a minute away
                _log.exception("what has expired is removed later")
            try:
                await asyncio.wait_for(self._wake.wait(), SWEEP_S)
            except TimeoutError:
                continue

    def _folder(self, checkpoint: str) -> Path:
        return place_inside(self._journal.log.path, checkpoint)

    def _remove(self, checkpoints: Sequence[str]) -> None:
        """Also what an end in the middle left."""
        for checkpoint in checkpoints:
            if (folder := self._folder(checkpoint)).exists():
                shutil.rmtree(folder)


def bytes_of(folder: Path) -> int:
    """Bytes of the files in a folder; 0 where there is none."""
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0
