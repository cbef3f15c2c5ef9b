"""Agents of somebody's service, over HTTP: started, asked after, and cancelled by the launch's id.

The protocol is a table of docs/rollouts.md. Nothing of it depends on one connection: whatever is not answered
is sent again, and who is silent for as long as the lease is taken for dead, by either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from rollbook.edge.bounds import Finite
from rollbook.rollouts.config import AgentConfig, ClocksConfig, ServiceConfig
from rollbook.rollouts.jobs import Agents, Job, Started, until
from rollbook.rollouts.launchers.launching import Exit, Leak
from rollbook.rollouts.outcome import Ended, Outcome
from rollbook.rollouts.proxy import bearer
from rollbook.store.config import first_invalid_value
from rollbook.store.events import Json
from rollbook.store.redaction import shown

CANCEL_S = 10.0
"""So long is waited for the answer to a cancellation; the lease ends what did not get it."""
SHOWN = 500
"""Characters of an answer that are shown."""
_PASSING = frozenset({408, 409, 425, 429})
"""Answers that pass by themselves, beside those of 500 and more."""


class Answer(BaseModel):
    """What a service says of an agent."""

    model_config = ConfigDict(extra="ignore")
    status: Literal["running", "done", "truncated", "failed", "infra_failed"]
    reward: Finite | dict[str, Finite] | None = None
    success: bool | None = None
    turn_rewards: list[Finite] | dict[str, Finite] | None = None
    error: str | None = None


class ServiceAgents(Agents):
    """Agents of a service.

    Args:
        proxy: its URL, as the service reaches it.

    Raises:
        ConfigError: the variable that holds the service's token is not set.
    """

    def __init__(self, agent: AgentConfig, service: ServiceConfig, clocks: ClocksConfig, proxy: str) -> None:
        self._agent, self._service, self._clocks, self._proxy = agent, service, clocks, proxy
        self._headers = bearer(service.token_variable, "agent.service.token_variable")
        self._ssl = httpx.create_ssl_context()

    async def start(self, job: Job) -> Started:
        """As `Agents`; what keeps it from starting its end says."""
        return _ServiceAgent(self._client(), self._service, self._body(job), job, self._clocks)

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """Cancel what is dead. Other launches of the service are not known here."""
        async with self._client() as client:
            await asyncio.gather(*(_cancel(client, self._service, launch_id) for launch_id in sorted(dead)))
        return []

    async def close(self) -> None:
        """Nothing is held."""

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self._headers, verify=self._ssl, timeout=min(self._service.lease_s, 30.0)
        )

    def _body(self, job: Job) -> Json:
        address, clocks = job.address.at(self._proxy), self._clocks
        return {
            "launch_id": job.launch_id,
            "task": job.task.values,
            "names": {"task": job.task.name, "group": job.group, "trajectory": address.trajectory},
            "base_url": address.openai,
            "anthropic_base_url": address.root,
            "api_key": address.key,
            "finish_url": address.finish,
            "clocks": {"start_s": clocks.start_s, "idle_s": clocks.idle_s, "total_s": clocks.total_s},
            "lease_s": self._service.lease_s,
            "options": self._agent.options,
        }


class _ServiceAgent(Started):
    """An agent that a service is asked to run."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        service: ServiceConfig,
        body: Json,
        job: Job,
        clocks: ClocksConfig,
    ) -> None:
        self.isolation: Json = {"level": "service", "url": shown(service.url)}
        self._client, self._service, self._body = client, service, body
        self._job, self._clocks = job, clocks

    async def end(self) -> tuple[Ended, Exit | None]:
        """As `Started`."""
        over = False
        async with self._client:
            running = asyncio.ensure_future(self._run())
            try:
                stopped = await until(running, self._job, self._clocks)
                if stopped is not None:
                    return Ended(stopped=stopped), None
                over, ended = running.result()
                return ended, None
            finally:
                running.cancel()
                await asyncio.wait([running])
                if not over:
                    await _cancel(self._client, self._service, self._job.launch_id)

    async def _run(self) -> tuple[bool, Ended]:
        """See it started and over: whether the service says that it is, and how it ended."""
        key = {"idempotency-key": self._job.launch_id}
        url = _url_of(self._service, self._job.launch_id)
        heard, started = time.monotonic(), False
        while True:
            try:
                if started:
                    answer = await self._client.get(url)
                else:
                    answer = await self._client.post(
                        self._service.url, json=self._body, headers=key, timeout=self._service.lease_s
                    )
                why = f"{answer.status_code}: {answer.text[:SHOWN]}"
            except httpx.HTTPError as error:
                answer, why = None, repr(error)
            if answer is not None and answer.status_code not in _PASSING and answer.status_code < 500:
                if (ended := _ended(answer, asked=started)) is not None:
                    return ended
                heard, started = time.monotonic(), True
            elif time.monotonic() - heard > self._service.lease_s:
                text = f"its service gave no good answer for {self._service.lease_s:g} s: {why}"
                return False, Ended(infrastructure=text)
            await asyncio.sleep(self._service.poll_s)


def _ended(answer: httpx.Response, *, asked: bool) -> tuple[bool, Ended] | None:
    """Whether a service says that an agent is over, and how it ended; None: it runs."""
    if answer.status_code == 202 and not asked:
        return None
    if answer.status_code in (404, 410) and asked:
        return True, Ended(infrastructure="its service does not know it any more: was it started again?")
    if answer.status_code >= 300:
        text = f"its service answered {answer.status_code}: {answer.text[:SHOWN]}"
        return False, Ended(infrastructure=text)
    try:
        state = Answer.model_validate_json(answer.content)
    except ValidationError as error:
        text = "its service answered what docs/rollouts.md does not have: "
        text += first_invalid_value(error, _values(answer))
        return False, Ended(infrastructure=text)
    if state.status == "running":
        return None
    if state.status == "infra_failed":
        return True, Ended(infrastructure=state.error or "its service says that its infrastructure failed")
    if state.status == "failed":
        return True, Ended(code=1, error=state.error or "its service says that it failed")
    return True, Ended(
        outcome=Outcome(state.reward, state.status == "truncated", state.success, state.turn_rewards)
    )


def _values(answer: httpx.Response) -> Any:
    """What an answer says, where it is JSON."""
    with contextlib.suppress(ValueError):
        return answer.json()
    return None


async def _cancel(client: httpx.AsyncClient, service: ServiceConfig, launch_id: str) -> None:
    """Ask once for a cancellation; a service that does not hear it ends what nobody asks for."""
    try:
        await client.delete(_url_of(service, launch_id), timeout=CANCEL_S)
    except httpx.HTTPError:
        return


def _url_of(service: ServiceConfig, launch_id: str) -> str:
    return f"{service.url.rstrip('/')}/{launch_id}"
