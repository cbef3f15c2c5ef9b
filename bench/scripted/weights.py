"""The weight routes of a scripted SGLang (0.5.23), with the real one's quirks but without weights.

With `Options.weights` it starts from the tensors of its model directory and keeps SGLang's
checksum of every tensor: q, k and v merged in `qkv_proj`, gate and up in `gate_up_proj`, experts
in `w13_weight` and `w2_weight`, vocabularies padded to a multiple of 64 rows. Tensors without a
place are silently ignored, as in the real one. Faults may be scripted: a route hangs, fails,
takes a tensor wrong, or ends the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rollbook.bench.scripted.asgi import Message
from rollbook.bench.scripted.job import Job, Options

VOCABULARY_MULTIPLE = 64
NO_SESSION = "must run between begin_weight_update() and end_weight_update()"
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
Reply = tuple[int, Any]
Route = Callable[[Message], Awaitable[Reply]]

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MERGED = {"q_proj": ("qkv_proj", 0, 3), "k_proj": ("qkv_proj", 1, 3), "v_proj": ("qkv_proj", 2, 3)} | {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}


def place_in_sglang(name: str, experts: int) -> tuple[str, int, int]:
    """(tensor of SGLang's, which part of it, how many parts it has) of a checkpoint's tensor."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        layer, number, kind = expert[1], int(expert[2]), expert[3]
        if kind == "down":
            return f"{layer}.w2_weight", number, experts
        return f"{layer}.w13_weight", 2 * number + (kind == "up"), 2 * experts
    module, _, kind = name.rpartition(".")
    parent, _, projection = module.rpartition(".")
    if projection not in _MERGED:
        return name, 0, 1
    merged, part, parts = _MERGED[projection]
    return f"{parent}.{merged}.{kind}", part, parts


class HeldChecksums:
    """Checksums of the tensors that an engine would hold on a CPU in `dtype` (a torch type's name)."""

    def __init__(self, model: Path, dtype: str) -> None:
        self.dtype = dtype
        tensors = dict(_read(model))
        self._experts = 1 + max((int(m[2]) for m in map(_EXPERT.fullmatch, tensors) if m), default=-1)
        self._parts: dict[str, dict[int, Any]] = {}
        self.checksums: dict[str, str] = {}
        self._known = {self._place(name)[0] for name in tensors}
        self.take(tensors.items())

    def _place(self, name: str) -> tuple[str, int, int]:
        return place_in_sglang(name, self._experts)

    def take(self, tensors: Iterable[tuple[str, Any]], *, spoilt: bool = False) -> None:
        """Take tensors of a checkpoint; `spoilt`: one value of the first known one is corrupted."""
        for name, tensor in tensors:
            place, part, parts = self._place(name)
            if place not in self._known:
                continue
            data = bytearray(self._bytes(place, tensor))
            if spoilt:
                data[0] ^= 1
                spoilt = False
            come = self._parts.setdefault(place, {})
            come[part] = data
            # The old parts are not kept, so a half-changed tensor gets a checksum that nothing else has.
            whole = [f"half changed from {self.checksums.get(place)}".encode()] if len(come) < parts else []
            mixed = hashlib.sha256(b"".join([*whole, *(come[i] for i in sorted(come))]))
            self.checksums[place] = mixed.hexdigest()[:16]
            if len(come) == parts:
                del self._parts[place]

    def _bytes(self, place: str, tensor: Any) -> bytes:
        import torch

        tensor = tensor.detach().to(getattr(torch, self.dtype)).contiguous()
        rows = -tensor.shape[0] % VOCABULARY_MULTIPLE if place.split(".")[-2] in PADDED else 0
        data: bytes = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return data + bytes(rows * len(data) // max(tensor.shape[0], 1))


PADDED = ("embed_tokens", "lm_head")


def _read(model: Path) -> Iterator[tuple[str, Any]]:
    from rollbook.engines.weights.digests import read_weights

    yield from read_weights(model).items()


class Served(Protocol):
    """The part of the server that the weight routes use.

    Attributes:
        weight_version: of the tokens that come now, as in the spans.
        stale_version: what /model_info says where that is another one.
    """

    options: Options
    faults: Faults
    paused: str | None
    running: dict[str, Job]
    weight_version: str
    stale_version: str | None

    def abort_all(self) -> None: ...
    def can_flush(self) -> bool: ...


class ScriptedWeights:
    """The weight routes."""

    def __init__(self, server: Served) -> None:
        self._server, self._session = server, False
        options = server.options
        self.held = HeldChecksums(Path(options.model_path), options.weights) if options.weights else None
        self.routes: dict[str, Route] = {
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_distributed": self._from_distributed,
            "/init_weights_update_group": self._init_group,
            "/weights_checker": self._checker,
        }

    async def _begin(self, body: Message) -> Reply:
        if self._session:
            return _reply("a weight-update session is already open; call end_weight_update() first", False)
        self._session = True
        return _reply("Success")

    async def _end(self, body: Message) -> Reply:
        if not self._session:
            return _reply("no weight-update session is open; call begin_weight_update() first", False)
        self._session = False
        return _reply("Success")

    async def _from_disk(self, body: Message) -> Reply:
        await self._alone(body)
        paused: Message = {"num_paused_requests": 0}
        if self.held is not None:
            try:
                tensors = list(_read(Path(body["model_path"])))
            except Exception as error:
                return _reply(f"Failed to get weights iterator: {error}.", False, paused)
            self.held.take(tensors, spoilt=self._spoilt("/update_weights_from_disk"))
        return self._changed(body, "Succeeded to update model weights.", paused)

    async def _from_tensor(self, body: Message) -> Reply:
        await self._alone(body)
        if not self._session:
            return _reply(f"update_weights_from_tensor {NO_SESSION}", False)
        if self.held is not None:
            from rollbook.engines.embedded.sent_tensors import read_sent

            named = read_sent(body["serialized_named_tensors"])
            self.held.take(named, spoilt=self._spoilt("/update_weights_from_tensor"))
        return self._changed(body, "Success", {})

    async def _from_distributed(self, body: Message) -> Reply:
        if not self._session:
            return _reply(f"update_weights_from_distributed {NO_SESSION}", False)
        return _reply("Failed to receive weights: a scripted server joins no group", False)

    async def _init_group(self, body: Message) -> Reply:
        return _reply("Failed to initialize custom process group: a scripted server joins none.", False)

    async def _checker(self, body: Message) -> Reply:
        action = body.get("action", "checksum")
        if action != "checksum":
            return _reply(f"Unsupported {action=}", False)
        checksums = {} if self.held is None else self.held.checksums
        text = "".join(name + checksums[name] for name in sorted(checksums))
        whole = hashlib.sha256(text.encode()).hexdigest()
        place: Message = {f"{kind}_rank": 0 for kind in ("tp", "dp", "pp")}
        place |= {f"{kind}_size": 1 for kind in ("tp", "dp", "pp")}
        info = [{"role": "target", "rank": 0, "size": 1} | place]
        rank = {"checksums": checksums, "per_gpu_checksum": whole, "parallelism_info": info}
        engine = hashlib.sha256(whole.encode()).hexdigest()
        return _reply("Success.", True, {"ranks": [rank], "per_engine_checksum": engine})

    async def _alone(self, body: Message) -> None:
        """Wait until no request runs, unless generation is paused."""
        if body.get("abort_all_requests"):
            self._server.abort_all()
        while self._server.paused is None and self._server.running:
            await asyncio.sleep(0.002)

    def _changed(self, body: Message, message: str, rest: Message) -> Reply:
        """Note the new weights: later tokens are sampled with them, even if the reply is an error."""
        server, version = self._server, body.get("weight_version")
        reported = server.stale_version or server.weight_version
        if version is not None:
            server.weight_version, server.stale_version = version, reported
        if body.get("flush_cache", True) and not server.can_flush():
            return _reply(NOT_FLUSHED, False, rest)
        if version is not None:
            server.stale_version = None
            message += f" Weight version updated to {version}."
        return _reply(message, True, rest)

    def _spoilt(self, route: str) -> bool:
        return self._server.faults.spoils(route)


def _reply(message: str, success: bool = True, rest: Message | None = None) -> Reply:
    return 200 if success else 400, {"success": success, "message": message} | (rest or {})


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one route.

    `hang` waits `seconds` before it answers as ever; `error` is an HTTP 500, and nothing is done; `drop` ends
    the connection, and nothing is done; `wrong` takes one value of the first tensor wrong, and answers
    success; `die` ends the whole process, so the server must be one of its own.

    Attributes:
        after: calls of the route that go well before.
        times: calls that go wrong; -1: all that follow.
    """

    route: str
    kind: Literal["hang", "error", "drop", "wrong", "die"]
    after: int = 0
    times: int = 1
    seconds: float = 0.0


class Faults:
    """The faults of a server, and how often each route has been called."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = list(faults)
        self._calls: Counter[str] = Counter()
        self._wrong: set[str] = set()

    def add(self, fault: Fault) -> None:
        """Add a fault; calls are counted from now on."""
        self.faults.append(fault)
        self._calls[fault.route] = 0

    async def befall(self, route: str) -> str | None:
        """Count a call; returns `error` or `drop` if the call is to fail that way."""
        self._calls[route] += 1
        self._wrong.discard(route)
        for fault in self.faults:
            number = self._calls[route] - fault.after
            if fault.route != route or number < 1 or 0 <= fault.times < number:
                continue
            if fault.kind == "die":
                os._exit(9)
            if fault.kind in ("error", "drop"):
                return fault.kind
            if fault.kind == "wrong":
                self._wrong.add(route)
            await asyncio.sleep(fault.seconds)
        return None

    def spoils(self, route: str) -> bool:
        """Whether the present call corrupts a tensor."""
        return route in self._wrong
