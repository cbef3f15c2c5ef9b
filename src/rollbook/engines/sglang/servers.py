"""The SGLang server at an address, or those behind a router: what they are, which weights they hold."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollbook.engines.sglang.http import SglangServer
from rollbook.engines.sglang.protocol import Routing, check_preferred, check_version
from rollbook.engines.weights.identify import BusyError
from rollbook.engines.weights.name import read_name
from rollbook.store.errors import EngineError, EngineLostError, VersionError
from rollbook.store.events import Json

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """Maps the names of weights to versions; `identify.Identity` implements it."""

    @property
    def changes(self) -> int:
        """A counter that rises whenever there is something new to compare weights with."""

    def version_of(self, name: str) -> int | None:
        """The version that a name is bound to, or None."""

    def gave(self, name: str) -> bool:
        """Whether this process gave a server that name, bound or not."""

    async def refresh(self) -> None:
        """Read newer bindings from the log."""

    async def identify(self, server: SglangServer) -> int:
        """Find out which version a server holds, and bind a new name to it."""


@dataclass(frozen=True, slots=True)
class _Refuted:
    """Weights of no known version: the server's start, their name, and the reason."""

    name: str
    start: str
    changes: int
    why: str


@dataclass(slots=True, eq=False)
class Servers:
    """The servers behind one address.

    Attributes:
        first: the one at the address itself, which may be a router.
        routed: whether it is one.
        doubts: address -> why its weights are of no known version.
        version: the oldest version served, among servers whose version is known.
    """

    first: SglangServer
    weights: Weights
    routed: bool = False
    doubts: dict[str, str] = field(default_factory=dict)
    version: int | None = None
    _refuted: dict[str, _Refuted] = field(default_factory=dict)
    _met: set[str] = field(default_factory=set)
    _settled: bool = False

    async def check(self, routing: Routing | None) -> None:
        """Check that all can be used.

        Raises:
            EngineError: nothing answers there, or not as SGLang does; the SGLang is too old,
                samples with parameters of its own, or does not return the experts, which are to
                be recorded.
        """
        status, info = await self.first.ask("/model_info")
        if status == 404:  # a router knows the older name only
            status, info = await self.first.ask("/get_model_info")
            self.routed = True
        url = self.first.url
        if status in (401, 403):
            await self.first.model_info()  # says what is missing
        if status != 200 or not isinstance(info, dict):
            raise EngineError(f"{url}/model_info answers {status}: is it an SGLang server?")
        check_preferred(info, url)
        for server in await self.all():
            await self._check(server, routing)

    async def _check(self, server: SglangServer, routing: Routing | None) -> None:
        try:
            _, answer = await server.ask("/server_info")
            # A router's answer is that of one of its workers.
            info = (await server.ask("/model_info"))[1] if self.routed else None
        except EngineLostError:
            if not self.routed:
                raise
            answer = info = None  # a worker that only its router reaches
        check_preferred(info, server.url)
        if note := check_version(answer, server.url):
            logger.warning(note)
        elif routing is not None and answer.get("enable_return_routed_experts") is False:
            raise EngineError(
                f"{server.url} tells no routed experts: start it with --enable-return-routed-experts"
            )

    async def all(self) -> list[SglangServer]:
        """The servers themselves: those behind a router have routes that it lacks, /abort_request for one."""
        if not self.routed:
            return [self.first]
        _, answer = await self.first.ask("/workers")
        try:
            urls = [worker["url"].rstrip("/") for worker in answer["workers"]]
        except (TypeError, KeyError, AttributeError):
            return [self.first]
        return [SglangServer(url, self.first.session, self.first.keys) for url in urls]

    async def models(self) -> list[tuple[str, Json]]:
        """(address, its model info) of each server that answers."""
        models = []
        for server in await self.all():
            try:
                models.append((server.url, await server.model_info()))
            except EngineError:
                continue
        return models

    async def verify(self) -> None:
        """Find out which version each holds, by names that the log has bound, else by checksums.

        Raises:
            EngineLostError: it cannot be reached.
            VersionError: the first time: it holds a version's files, and the log says that the version is
                other weights.
        """
        versions: list[int] = []
        doubts: dict[str, str] = {}
        for server in await self.all():
            try:
                versions.append(await self._verified(server))
            except EngineLostError:
                if not self.routed:
                    raise
                doubts[server.url] = f"{server.url} is reached by its router alone: let the trainer sync it"
            except VersionError as error:
                if not self._settled:
                    raise
                doubts[server.url] = str(error)
            except EngineError as error:
                doubts[server.url] = str(error)
        self.doubts, self.version, self._settled = doubts, min(versions, default=None), True

    async def _verified(self, server: SglangServer) -> int:
        name = str((await server.model_info()).get("weight_version"))
        await self.weights.refresh()
        first = server.url not in self._met
        self._met.add(server.url)
        if (version := self.weights.version_of(name)) is not None:
            return version
        if read_name(name) is not None and not first and not self.weights.gave(name):
            raise EngineError(
                f"{server.url} calls its weights {name}: another store's proxy or trainer has named them so "
                "since; give each its own servers, or start this proxy again"
            )
        start = start_of((await server.ask("/server_info"))[1])
        known = self._refuted.get(server.url)
        if known is not None and (known.name, known.start, known.changes) == (
            name,
            start,
            self.weights.changes,
        ):
            raise EngineError(known.why)
        try:
            return await self.weights.identify(server)
        except (BusyError, EngineLostError):
            raise
        except (EngineError, VersionError) as error:
            self._refuted[server.url] = _Refuted(name, start, self.weights.changes, str(error))
            raise

    def refutes(self, name: str) -> bool:
        """Whether a server with weights of that name was compared and holds no known version."""
        return any(known.name == name for known in self._refuted.values())


def start_of(info: Any) -> str:
    """An identifier of a server's start: the durations of its parts, and its seed."""
    known = info if isinstance(info, dict) else {}
    return f"{known.get('startup_time')} {known.get('random_seed')}"
