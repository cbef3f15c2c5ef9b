"""Finds out which version of a policy an engine holds, by the engine's own checksums; the log gets
the result.

An engine's name for its weights is trusted only if the log has bound that name to a version. For
any other name the engine is asked for the checksums of its tensors. They either match a version
that was seen before, or are compared with the files of the likely versions, in a separate
process; then the engine gets a name that is used once, and the log binds it. Until then its
tokens have no version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import orjson

from rollbook.engines.model_files import origin_of
from rollbook.engines.weights.log import Verified, WeightLog
from rollbook.engines.weights.name import weight_name
from rollbook.engines.weights.rank_checksums import RankChecksums, ranks_digest
from rollbook.store.errors import EngineError, StoreError
from rollbook.store.events import Json, PolicyActivated

COMPARE = "rollbook.engines.weights.compare"
CLAIM_S = 60.0
"""How long to wait for another process that binds a version of the same run."""
Write = Callable[..., Awaitable[Any]]
"""Appends records, and returns once they are durable."""


class BusyError(EngineError):
    """A sync is transferring weights at this moment: try again later."""


class Server(Protocol):
    """The part of an engine's server that identification needs."""

    url: str

    async def server_info(self) -> Json: ...
    async def checksums(self) -> list[RankChecksums]: ...
    async def name_weights(self, name: str) -> None: ...


class Identity:
    """Binds the weights that engines hold to versions.

    Args:
        log: the policy's weights according to the log.
        write: appends to it.
        model: the directory that the run starts from, or a checkpoint; None: there is none to
            compare with.
    """

    def __init__(self, log: WeightLog, write: Write, model: Path | None = None) -> None:
        self.log, self._write, self._model = log, write, model
        self._gave: set[str] = set()

    @property
    def changes(self) -> int:
        """A counter that rises whenever there is something new to compare weights with."""
        return self.log.changes

    def version_of(self, name: str) -> int | None:
        """The version that a weights' name is bound to, or None."""
        return self.log.version_of(name)

    def gave(self, name: str) -> bool:
        """Whether this process gave a server that name."""
        return name in self._gave

    async def refresh(self) -> None:
        """Read the log up to now: a trainer binds names too.

        Raises:
            EngineError: the log cannot be read now.
        """
        try:
            await asyncio.to_thread(self.log.refresh)
        except (StoreError, OSError) as error:
            raise EngineError(f"the log cannot be read to see which weights are known: {error}") from error

    async def identify(self, server: Server) -> int:
        """Find out which version the server holds, bind a new name to it, and give the server that name.

        Raises:
            EngineError: it holds no version that is known here, or a mix; the reason and the
                remedy.
            VersionError: it holds a version's files, but the log binds that version to other
                weights.
        """
        await self.refresh()
        if self.log.under_way(server.url):
            raise BusyError(f"a sync of {server.url} is under way")
        begun = self.log.begun
        ranks = await server.checksums()
        checksums = ranks_digest(ranks)
        held = self.log.holder_of(checksums) or await self._compared(server, ranks)
        self.log.check(held.version, held.weights_digest, f"what {server.url} serves, {held.path},")
        name = weight_name(self.log.run, self.log.policy, held.version)
        self._gave.add(name)
        await server.name_weights(name)
        async with self._alone():
            # Weights move only behind a sync's start, which is durable before. So they are those that were
            # compared, as long as none is in the log after the name was given.
            if self.log.begun != begun:
                raise BusyError(f"a sync began while the weights of {server.url} were compared")
            where = (server.url, held.weights_digest, held.path)
            await self.bind(
                PolicyActivated(self.log.policy, held.version, *where, name, checksums, held.held)
            )
        return held.version

    async def activated(self, engine: str, version: int, digest: str, path: Path) -> None:
        """Record which version an engine in this process holds.

        Raises:
            VersionError: the log has bound the version to other weights.
        """
        async with self._alone():
            await self.bind(PolicyActivated(self.log.policy, version, engine, digest, str(path)))

    async def bind(self, record: PolicyActivated) -> None:
        """Write the record that binds a version, unless the log contradicts it.

        Raises:
            VersionError: the log has bound the version to other weights.
        """
        self.log.check(record.policy_version, record.weights_digest, f"engine {record.engine}")
        await self._write(record)
        await self.refresh()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold the claim to bind versions of the run, with all earlier bindings read."""
        claim = binding(self.log)
        await asyncio.to_thread(claim.__enter__)
        try:
            await self.refresh()
            yield
        finally:
            claim.__exit__(None, None, None)

    async def _compared(self, server: Server, ranks: Sequence[RankChecksums]) -> Verified:
        """The version whose files hold what the server holds.

        Raises:
            EngineError: none of the likely ones.
        """
        models = [*([] if self._model is None else [self._model]), *self.log.likely(server.url)]
        if not models:
            raise EngineError(f"there are no weights to compare those of {server.url} with; {REMEDY}")
        info = await server.server_info()
        request = {
            "url": server.url,
            "models": [str(model.absolute()) for model in models],
            "device": str(info.get("device", "cpu")),
            "dtype": str(info.get("dtype", "auto")),
            "trees": self.log.trees,
            "ranks": [asdict(rank) for rank in ranks],
        }
        answer = await compare_elsewhere(request)
        match = answer["found"]
        if match is None:
            reasons = "; ".join(f"{path}: {why}" for path, why in answer["reasons"].items())
            raise EngineError(f"{server.url} holds no version that is known here ({reasons}); {REMEDY}")
        # Whatever is no version of this run is what the run begins with, from wherever it comes.
        version = await asyncio.to_thread(self.log.own, origin_of(Path(match["path"])))
        return Verified(version or 0, match["digest"], match["path"], match["held"])


REMEDY = "give the proxy a --model with the weights that it serves, or let the trainer sync it"


def binding(log: WeightLog) -> contextlib.AbstractContextManager[None]:
    """The claim to be the only process that binds versions of the log's run and policy."""
    what = f"binding versions of policy {log.policy} of run {log.run}"
    return log.store.claim(what, "wait until it has", patience_s=CLAIM_S)


async def compare_elsewhere(request: Json) -> Json:
    """The result of `compare.answer` in a child process, which is killed if the wait is cancelled.

    Raises:
        EngineError: it fails.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", COMPARE)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment
    )
    try:
        output, errors = await process.communicate(orjson.dumps(request))
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it was killed"])[-1]
        lacking = "ModuleNotFoundError" in last
        remedy = "install torch and safetensors with pip install 'rollbook[engine]', or " if lacking else ""
        text = (
            f"the weights of {request['url']} could not be compared: {last}: {remedy}let the trainer sync it"
        )
        raise EngineError(text)
    answer: Json = orjson.loads(output)
    return answer
