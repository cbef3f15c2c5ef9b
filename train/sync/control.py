"""An engine's control routes, SGLang's own, which the embedded engine serves as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from rollbook.engines.address import EngineAddress
from rollbook.engines.weights.rank_checksums import QUESTION, RankChecksums, read_ranks
from rollbook.store.errors import EngineError, EngineLostError
from rollbook.store.events import Json
from rollbook.store.whose import FOR, ProxyIdentity

SESSIONS_SINCE = "0.5.21"
"""The first SGLang version with update sessions (begin, update from tensors or broadcast, end)."""
EMBEDDED = "rollbook-embedded"
UNVERIFIED = "unverified"
"""The name of weights of unknown content; no policy version is read from it."""
ASLEEP, WAKING = "asleep", "waking"
"""Names of the weights of an engine that gave its memory to a trainer: all of it, or that of its cache. They
stay with the server, so that another trainer knows what it must give back."""
WEIGHTS, CACHE = "weights", "kv_cache"
"""Parts of an engine's memory, as SGLang calls them."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's description of itself.

    Attributes:
        version: version of its software.
        kind: `sglang`, or `EMBEDDED`.
        device: where its weights are: cpu, cuda, ...
        overlap: whether it schedules a step before it has processed the results of the previous one.
        dtype: the type of its weights, if it reports one.
        model_path: the directory that it was started with, as it knows it.
        asleep: whether it gave its memory away; None: it does not say.
    """

    version: str
    kind: str
    device: str
    overlap: bool = False
    dtype: str = ""
    model_path: str = ""
    asleep: bool | None = None


class _RefusedError(EngineError):
    """The engine answered with a refusal."""


@dataclass(slots=True, eq=False)
class EngineControl:
    """Talks to one engine. Every call has a time-out, and every failure is an `EngineError` that
    names the engine.

    Args:
        url: where its control routes are: an SGLang server, or a proxy's `/engine`.
        key: sent as a bearer token.
        login: the header `authorization`, where the address held a login.
        admin_key: sent instead to routes that control, where the server has one for them.
        whose: on whose behalf it asks: a proxy of another run refuses.
    """

    url: str
    timeout_s: float = 60.0
    key: str | None = field(default=None, repr=False)
    login: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    whose: ProxyIdentity = field(default_factory=ProxyIdentity)
    _address: EngineAddress = field(init=False, repr=False)
    _client: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        address = EngineAddress.of(self.url).plain
        self.url, self.login = address.url, self.login or address.login
        self._address = replace(address, login=self.login)
        waits = httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, 10.0))
        # A connection for each call: one that is kept may be closed by the server just when it is used, and
        # what was called then cannot be called again, such as loading tensors that are mapped once.
        self._client = httpx.Client(timeout=waits, limits=httpx.Limits(max_keepalive_connections=0))

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    # What it is -------------------------------------------------------------------------------

    def info(self) -> EngineInfo:
        """The engine's description of itself.

        Raises:
            EngineLostError: it cannot be reached.
            EngineError: it is no engine.
        """
        info = self._ask("GET", "/server_info")
        try:
            return EngineInfo(
                str(info.get("version", "")),
                str(info.get("engine", "sglang")),
                str(info.get("device", "cpu")),
                info.get("disable_overlap_schedule") is False,
                str(info.get("dtype") or ""),
                str(info.get("model_path") or ""),
                info.get("asleep"),
            )
        except AttributeError as error:
            raise EngineError(f"engine {self.url}: /server_info is not an engine's: {error!r}") from error

    def weight_version(self) -> str:
        """The name of the weights that it serves."""
        return str(self._ask("GET", "/model_info").get("weight_version"))

    def requests(self) -> int:
        """How many requests it runs or has queued."""
        loads = self._ask("GET", "/v1/loads").get("loads", [])
        return sum(
            int(load.get("num_running_reqs", 0)) + int(load.get("num_waiting_reqs", 0)) for load in loads
        )

    def checksums(self) -> list[RankChecksums]:
        """Every rank's own checksums of the tensors that it holds now."""
        return read_ranks(self._ask("POST", "/weights_checker", QUESTION), self.url)

    # The flow of requests ---------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Stop generating. `retract` puts running requests back into the queue and drops their KV
        cache, `in_place` leaves both, `abort` ends the requests with what they have."""
        self._ask("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Go on generating."""
        self._ask("POST", "/continue_generation", {})

    def release_memory(self, *parts: str) -> None:
        """Have it release parts of its memory. It must be paused and run nothing, or SGLang would
        end."""
        self._ask("POST", "/release_memory_occupation", {"tags": list(parts)})

    def resume_memory(self, *parts: str) -> None:
        """Have it allocate released parts of its memory again: for any others SGLang would end.
        Their contents are lost."""
        self._ask("POST", "/resume_memory_occupation", {"tags": list(parts)})

    # SGLang's route also collects garbage, which takes milliseconds: it freezes what its start has made.

    def flush(self) -> EngineError | None:
        """Flush its prefix cache; returns the reason if it refuses, for example because requests are
        running."""
        try:
            self._ask("POST", "/flush_cache")
        except _RefusedError as refused:
            return refused
        return None

    # Weights ----------------------------------------------------------------------------------

    # `flush` makes an update also flush the prefix cache, which was computed with the old weights.

    def begin_update(self) -> None:
        """Open a session, which updates from tensors or from a broadcast need.

        A sync that was interrupted left a session open, which is closed first, since a second one is refused.
        """
        try:
            self._ask("POST", "/begin_weight_update", {"selector": "target"})
        except _RefusedError as refused:
            try:
                self.end_update()
            except _RefusedError:
                raise refused from None  # refused for another reason
            self._ask("POST", "/begin_weight_update", {"selector": "target"})

    def end_update(self) -> None:
        """Close the session: the engine then updates everything that it derives from the weights."""
        self._ask("POST", "/end_weight_update", {})

    def update_from_disk(self, path: str, *, flush: bool) -> None:
        """Have it load a model directory."""
        body = {"model_path": path, "flush_cache": flush, "abort_all_requests": False}
        self._ask("POST", "/update_weights_from_disk", body)

    def update_from_tensors(self, payloads: Sequence[str], *, flush: bool) -> None:
        """Have it load tensors of this host: a payload for each tensor-parallel rank."""
        body = {"serialized_named_tensors": list(payloads), "flush_cache": flush}
        self._ask("POST", "/update_weights_from_tensor", body | {"abort_all_requests": False})

    def join_group(self, address: str, port: int, rank: int, size: int, group: str, backend: str) -> None:
        """Have its ranks join a group as `rank` and up."""
        body = {"master_address": address, "master_port": port, "rank_offset": rank, "world_size": size}
        self._ask("POST", "/init_weights_update_group", body | {"group_name": group, "backend": backend})

    def leave_group(self, group: str) -> None:
        """Have it leave a group."""
        self._ask("POST", "/destroy_weights_update_group", {"group_name": group})

    def update_from_broadcast(self, bucket: Json, group: str, *, flush: bool) -> None:
        """Have it receive a bucket: `names`, `dtypes` and `shapes` of the tensors in one broadcast."""
        body = bucket | {"group_name": group, "flush_cache": flush, "abort_all_requests": False}
        self._ask("POST", "/update_weights_from_distributed", body | {"load_format": "flattened_bucket"})

    def activate(self, name: str) -> None:
        """Name the weights that it holds: tokens from now on belong to this version.

        Updates do not name a version, so that unverified weights never get a version's name.
        """
        body = {"new_version": name, "abort_all_requests": False}
        self._ask("POST", "/update_weight_version", body)

    def disown(self) -> None:
        """Have no token from here on count for any version."""
        self.activate(UNVERIFIED)

    def _ask(self, method: str, route: str, body: Json | None = None) -> Any:
        try:
            headers = self._address.headers((self.admin_key or self.key) if method == "POST" else self.key)
            headers = {**headers, FOR: self.whose.header}
            reply = self._client.request(method, self.url + route, json=body, headers=headers)
        except httpx.ReadTimeout as error:
            text = f"engine {self.url}: {route} did not answer within {self.timeout_s:g} s"
            raise EngineError(text) from error
        except httpx.HTTPError as error:
            raise EngineLostError(f"engine {self.url}: {route}: {error!r}; is it running?") from error
        content: Any = {}
        if reply.headers.get("content-type", "").startswith("application/json"):
            try:
                content = reply.json()
            except ValueError as error:
                raise EngineError(f"engine {self.url}: {route} answers no JSON") from error
        refused = isinstance(content, dict) and content.get("success") is False
        if reply.status_code != 200 or refused:
            text = f"engine {self.url}: {route} answers {reply.status_code}: {reply.text[:300].strip()}"
            raise _RefusedError(text)
        return content
