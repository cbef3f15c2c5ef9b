"""Agents that are rollouts of a verifiers environment, played by `verifiers_worker.py` in a process."""

from __future__ import annotations

import asyncio
import os
import secrets
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from rollbook.rollouts.config import AgentConfig, ClocksConfig
from rollbook.rollouts.jobs import Job, Started, until
from rollbook.rollouts.launchers.agent_environment import passed, placed
from rollbook.rollouts.launchers.launching import Exit, Launch, Launcher, Leak, Running
from rollbook.rollouts.outcome import Ended, Outcome
from rollbook.store.errors import LaunchError
from rollbook.store.events import Json

WORKER = Path(__file__).with_name("verifiers_worker.py").resolve()
TOKEN = "ROLLBOOK_WORKER_TOKEN"
READY_S = 120.0
LONGEST = 1 << 30
"""Bytes of a line: a trace, with the images in it."""
SHOWN = 2000
NOT_THE_AGENT = (
    *("ProviderError", "TunnelError", "InterceptionError", "SandboxError", "ToolsetError", "EnvError"),
    "TaskError",
)
"""Errors of verifiers, its environments and tasks, which are not the agent's doing."""


class Verifiers:
    """Starts rollouts of one environment, in one process that is started with the first of them.

    Args:
        agent: its command is that of vf-eval; the tasks' `idx` are positions in the environment's taskset.
        folder: where the process has a folder of its own.
    """

    def __init__(self, agent: AgentConfig, clocks: ClocksConfig, launcher: Launcher, folder: Path) -> None:
        self._agent, self._clocks, self._launcher = agent, clocks, launcher
        self._command, self._folder = placed(agent.command), folder
        self._worker: asyncio.Task[_Worker] | None = None

    async def start(self, job: Job) -> Started:
        """As `Agents`."""
        if self._worker is None or (self._worker.done() and not _serves(self._worker)):
            self._worker = asyncio.create_task(self._started())
        worker = await asyncio.shield(self._worker)
        return _Rollout(worker, job, self._clocks)

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """As `Agents`."""
        own = {self._worker.result().launch_id} if self._worker and _serves(self._worker) else set()
        return await self._launcher.sweep(alive | own, dead)

    async def close(self) -> None:
        """As `Agents`."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
            if not self._worker.cancelled() and self._worker.exception() is None:
                await self._worker.result().close(self._clocks.grace_s)

    async def _started(self) -> _Worker:
        """The process, once it asks for work.

        Raises:
            LaunchError: it does not.
        """
        launch_id, token = f"verifiers-{uuid.uuid4()}", secrets.token_hex(16)
        folder = (self._folder / launch_id).resolve()
        folder.mkdir(parents=True, mode=0o700)
        connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            if secrets.compare_digest(line.strip(), token.encode()):
                await connected.put((reader, writer))
            else:
                writer.close()

        async with await asyncio.start_server(met, "127.0.0.1", 0, limit=LONGEST) as server:
            port = server.sockets[0].getsockname()[1]
            running = await self._launcher.start(self._launch(launch_id, token, port, folder))
            ended = asyncio.ensure_future(running.wait())
            meeting = asyncio.ensure_future(connected.get())
            try:
                await asyncio.wait({ended, meeting}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                await running.stop(0)
                raise
            finally:
                meeting.cancel()
            if not meeting.done() or meeting.cancelled():
                why = f"it did not begin within {READY_S:g} s" if not ended.done() else "it ended at once"
                await running.stop(0)
                raise LaunchError(f"verifiers: {why}: {_printed(folder)}")
        return _Worker(launch_id, folder, running, ended, *meeting.result())

    def _launch(self, launch_id: str, token: str, port: int, folder: Path) -> Launch:
        agent, (program, *words) = self._agent, self._command
        python = Path(program).with_name("python")
        if not python.exists():
            raise LaunchError(f"agent.command: {program!r} is no vf-eval: there is no {python} beside it")
        own = {"HOME": str(folder), "TMPDIR": str(folder), TOKEN: token}
        return Launch(
            launch_id=launch_id,
            command=(str(python), "-P", str(WORKER), str(port), *words, "--no-push", "--no-rich"),
            environment=passed(agent, os.environ) | own | agent.environment,
            folder=folder,
            output=folder,
            isolation=agent.isolation,
            require=agent.require,
            limits=agent.limits,
            user=agent.user,
        )


def _serves(worker: asyncio.Task[_Worker]) -> bool:
    return worker.done() and worker.exception() is None and worker.result().serves


class _Worker:
    """The process, and the rollouts that it plays."""

    def __init__(
        self,
        launch_id: str,
        folder: Path,
        running: Running,
        ended: asyncio.Future[Exit],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.launch_id, self.isolation = launch_id, running.isolation
        self._folder, self._running, self._ended = folder, running, ended
        self._reader, self._writer = reader, writer
        self._asked: dict[str, asyncio.Future[Json]] = {}
        self._hearing = asyncio.create_task(self._hear())

    @property
    def serves(self) -> bool:
        """Whether it is still there."""
        return not self._hearing.done()

    def ask(self, request: Json) -> asyncio.Future[Json]:
        """Have a rollout played; the future has what the process reports of its end.

        It raises LaunchError if the process goes away before.
        """
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        if not self.serves:
            future.set_exception(self._gone())
            return future
        self._asked[request["id"]] = future
        self._writer.write(orjson.dumps(request) + b"\n")
        return future

    def cancel(self, launch_id: str) -> None:
        """Have a rollout end."""
        if self.serves:
            self._writer.write(orjson.dumps({"cancel": launch_id}) + b"\n")

    async def close(self, grace_s: float) -> None:
        """Let it go, and end what is left of it."""
        self._writer.close()
        await asyncio.wait({self._ended}, timeout=grace_s)
        await self._running.stop(grace_s)
        await asyncio.wait({self._hearing})

    async def _hear(self) -> None:
        try:
            while line := await self._reader.readline():
                message: Json = orjson.loads(line)
                future = self._asked.pop(message.get("id", ""), None)
                if future is not None and not future.done():
                    future.set_result(message)
        except (OSError, ValueError):
            pass  # as if it had ended
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self._gone())

    def _gone(self) -> LaunchError:
        return LaunchError(f"verifiers: its process went away: {_printed(self._folder)}")


class _Rollout:
    """A rollout that is played."""

    def __init__(self, worker: _Worker, job: Job, clocks: ClocksConfig) -> None:
        self.isolation: Json = worker.isolation
        self._worker, self._job, self._clocks = worker, job, clocks
        request = {"id": job.launch_id, "idx": job.task.values.get("idx"), "key": job.address.key}
        self._reply = worker.ask(request | {"base_url": job.address.openai})

    async def end(self) -> tuple[Ended, Exit | None]:
        """As `Started`."""
        try:
            stopped = await until(self._reply, self._job, self._clocks)
            if stopped is not None:
                self._worker.cancel(self._job.launch_id)
                await asyncio.wait({self._reply}, timeout=self._clocks.grace_s)
                return Ended(stopped=stopped), None
            result = self._reply.result()
        except LaunchError as error:
            return Ended(infrastructure=str(error)), None
        except BaseException:
            self._worker.cancel(self._job.launch_id)
            raise
        traces = b"".join(orjson.dumps(trace) + b"\n" for trace in result.get("traces", ()))
        (self._job.folder / "traces.jsonl").write_bytes(traces)
        return ended_of(result), None


def ended_of(result: Mapping[str, Any]) -> Ended:
    """How a rollout ended, by what a worker reported of it. Pure."""
    if "failed" in result:
        return Ended(infrastructure=f"verifiers: {result['failed']}"[:SHOWN])
    if result["timeout"] is not None:
        return Ended(stopped=str(result["timeout"]).removesuffix("_timeout"))
    if not result["ok"]:
        return _failed(
            result["errors"][-1] if result["errors"] else {"type": "Error", "message": "no reason given"}
        )
    rewards = {name: float(reward["score"]) for name, reward in result["rewards"].items()}
    weights = {name: float(reward["weight"]) for name, reward in result["rewards"].items()}
    return Ended(outcome=Outcome(rewards or None, truncated=result["truncated"], weights=weights))


def _failed(error: Mapping[str, Any]) -> Ended:
    why, status = f"{error['type']}: {error['message']}"[:SHOWN], error.get("status_code")
    # What the proxy refuses is what was asked: a conversation that is too long, for instance.
    refused = (
        error["type"] == "ProviderError" and status is not None and 400 <= status < 500 and status != 429
    )
    if error["type"] in NOT_THE_AGENT and not refused:
        return Ended(code=1, infrastructure=f"verifiers: {why}")
    return Ended(code=1, error=why)


def _printed(folder: Path) -> str:
    """The last of what the process said."""
    texts = [(folder / f"{stream}.log").read_text(errors="replace") for stream in ("stdout", "stderr")]
    return " ".join("\n".join(texts)[-SHOWN:].split())
