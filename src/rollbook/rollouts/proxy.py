"""The client by which rollouts talk to a proxy, over HTTP alone.

Connections are kept: hundreds of agents ask through one client at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import orjson
from yarl import URL

from rollbook.edge.server_sent_events import MessageReader
from rollbook.rollouts.launchers.agent_environment import NO_KEY
from rollbook.store.errors import ConfigError, ProxyLostError, RequestError, RolloutError
from rollbook.store.events import JUDGE, VOID, Event, Json
from rollbook.store.events.event_json import from_json
from rollbook.store.patience import Waiting, waits
from rollbook.store.whose import ProxyIdentity

ANY = ProxyIdentity()
AWAY_S = 180.0
"""How long a proxy may be away: it is started again, or weights change behind it."""
FIRST_S = 5.0
"""How long the first answer is waited for."""
PAUSE_S = 0.5
TOO_OLD = "an online training would find them too old by the time that it trains on them"
SILENCE_S = 45.0
"""A stream that says nothing for so long is dead: a proxy gives a sign of life every 15 s."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A trajectory that was opened: its name, its id in the log, and its own key."""

    name: str
    trajectory_id: str
    key: str


class Proxy(contextlib.AbstractAsyncContextManager["Proxy"]):
    """A proxy of `rollbook serve`.

    Args:
        url: without a path.
        key: of an operator or writer, where it asks for keys.
        wanted: whose it is to be.
    """

    def __init__(self, url: str, key: str | None = None, wanted: ProxyIdentity = ANY) -> None:
        self.url, self._wanted = url.rstrip("/"), wanted
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = Http(headers)
        self.say: Callable[[str], None] = lambda text: None
        """Told what requests wait for, where they wait long."""
        self._away, self._held = Waiting(), Waiting()
        self._why_away, self._away_until, self._why_held = "", 0.0, TOO_OLD

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()

    async def run_name(self) -> str:
        """The run that it records into.

        Raises:
            RolloutError: it does not answer, or is another's.
        """
        by = time.monotonic() + FIRST_S
        while True:
            try:
                answer = await self.http.send("GET", f"{self.url}/healthz")
                health = answer.json()  # of one that waits for its engine too
            except (*FAILURES, ValueError) as error:
                if time.monotonic() > by:
                    why = f"does not answer ({failure(error)}); is `rollbook serve` up?"
                    raise ProxyLostError(f"the proxy at {self.url} {why}") from error
                await asyncio.sleep(PAUSE_S)
                continue
            if "run" not in health:
                text = f"the proxy at {self.url} asks for a key: give an operator's as ROLLBOOK_KEY"
                raise RolloutError(text)
            if (refusal := self._wanted.refuses(ProxyIdentity.of_health(health))) is not None:
                text = f"the proxy at {self.url} {refusal}: give `proxy` the address of that one's"
                raise RolloutError(text)
            return str(health["run"])

    async def open(self, name: str, group: str, task: str, split: str, labels: Json) -> Opened:
        """Open a trajectory; waits as long as an online training admits none.

        Raises:
            RequestError: 409, the run has one of that name.
            RolloutError: the proxy does not answer, or refuses.
        """
        body = {"id": name, "group": group, "task": task, "split": split, "labels": labels}
        opened = await self._sent("POST", "/v1/trajectories", body, held=True)
        return Opened(opened["id"], opened["trajectory_id"], opened.get("api_key") or NO_KEY)

    async def open_unless(
        self, stop: asyncio.Event, name: str, group: str, task: str, split: str, labels: Json
    ) -> Opened | None:
        """As `open`, until this event is set; None: it was set, and nothing is open of the trajectory.

        Raises:
            RequestError, RolloutError: as `open`.
        """
        opening = asyncio.ensure_future(self.open(name, group, task, split, labels))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            both: set[asyncio.Future[Any]] = {opening, stopped}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                return opening.result()
        finally:
            opening.cancel()
            stopped.cancel()
        with contextlib.suppress(RolloutError, RequestError):  # it was held, or the answer was on its way
            await self.finish(name, {"status": VOID})
        return None

    async def open_judge(self, name: str, judged: str, labels: Json) -> Opened:
        """Open a trajectory of a model that judges another, whose id is given.

        Raises:
            RequestError: 409, the run has one of that name.
            RolloutError: the proxy does not answer, or refuses.
        """
        body = {"id": name, "split": JUDGE, "judges": judged, "labels": labels}
        opened = await self._sent("POST", "/v1/trajectories", body)
        return Opened(opened["id"], opened["trajectory_id"], opened.get("api_key") or NO_KEY)

    async def trajectory(self, name: str) -> Json:
        """What the log has of a trajectory: its conversations, and its rewards.

        Raises:
            RolloutError: the proxy does not answer, or refuses.
        """
        return await self._sent("GET", _path_of(name))

    async def launch(self, name: str, fields: Json) -> str:
        """Record that an agent is started for a trajectory; the launch's id."""
        return str((await self._sent("POST", f"{_path_of(name)}/launches", fields))["launch_id"])

    async def end_launch(self, name: str, launch_id: str, fields: Json) -> None:
        """Record how it ended."""
        await self._sent("POST", f"{_path_of(name)}/launches/{quote(launch_id)}/end", fields)

    async def leaked(self, name: str, launch_id: str, fields: Json) -> None:
        """Record processes that it left behind."""
        await self._sent("POST", f"{_path_of(name)}/launches/{quote(launch_id)}/leaks", fields)

    async def finish(self, name: str, fields: Json) -> bool:
        """Finish a trajectory; False: it was finished already.

        Raises:
            RolloutError: the proxy does not answer, or refuses.
        """
        try:
            await self._sent("POST", f"{_path_of(name)}/finish", fields)
        except RequestError as error:
            if error.code != FINISHED:
                raise
            return False
        return True

    async def evaluated(self, policy: str, version: int, rollout: str, trajectories: int) -> None:
        """Record that agents were evaluated at a version."""
        body = {"policy": policy, "policy_version": version, "rollout": rollout, "trajectories": trajectories}
        await self._sent("POST", "/v1/evaluations", body)

    async def reward(self, name: str, value: float, source: str, supersedes: str | None = None) -> None:
        """Record a reward; sent again it is still one.

        Args:
            supersedes: the event of an earlier one of the source, in whose place it is.
        """
        body = {"reward": value, "source": source, "supersedes": supersedes}
        await self._sent("POST", f"{_path_of(name)}/rewards", body)

    async def _sent(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        held: bool = False,
        away_s: float = AWAY_S,
    ) -> Json:
        """The reply to a request, sent again while the proxy is away.

        Args:
            held: whether it may be kept waiting for as long as it takes.
            away_s: for how long it is sent again.

        Raises:
            RequestError: 409, it contradicts what the log has.
            RolloutError: the proxy does not answer, or refuses.
        """
        ticket = object()
        if held:
            self._held.begin(ticket, time.monotonic())
        try:
            return await self._answered(method, path, body, ticket, held=held, away_s=away_s)
        finally:
            self._held.end(ticket)
            self._away.end(ticket)

    async def _answered(
        self, method: str, path: str, body: Json | None, ticket: object, *, held: bool, away_s: float
    ) -> Json:
        """As `_sent`, whose place among those that wait is noted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + away_s
        while True:
            try:
                answer = await self.http.send(method, self.url + path, body)
            except FAILURES as error:
                why = f"does not answer ({failure(error)}); is `rollbook serve` up?"
                self._is_away(ticket, why, deadline - loop.time())
            else:
                self._answers(ticket, answer.status)
                if answer.status < 300:
                    reply: Json = answer.json()
                    return reply
                code, text = _refusal(answer)
                if answer.status == 409 and code not in _PASSING:
                    raise RequestError(409, code, text)
                if answer.status not in (409, 429, 503):
                    raise RolloutError(f"the proxy at {self.url} refused {method} {path}: {text}")
                why = f"answered {answer.status}: {text}"
                if held and answer.status in (429, 503):
                    self._why_held = text
                    deadline = loop.time() + away_s
                elif answer.status != 409:  # a turn of it is under way, which has its own time
                    self._is_away(ticket, why, deadline - loop.time())
            if loop.time() > deadline:
                raise ProxyLostError(f"the proxy at {self.url} {why}")
            await asyncio.sleep(PAUSE_S)

    # What is waited for -----------------------------------------------------------------------

    def look(self) -> None:
        """Report what requests wait for that have waited long."""
        now = time.monotonic()
        if count := self._away.due(now):
            what = f"the proxy at {self.url} ({count} requests): it {self._why_away}"
            self.say(waits(what, now - self._away.oldest, self._away_until - now, time.time()))
        if count := self._held.due(now):
            what = f"room for {count} new trajectories, which the proxy holds: {self._why_held}"
            self.say(waits(what, now - self._held.oldest, None, time.time()))

    def _is_away(self, ticket: object, why: str, left_s: float) -> None:
        """Note that a request is not answered, and for how long it is sent again."""
        now = time.monotonic()
        self._away.begin(ticket, now)
        self._why_away, self._away_until = why, now + left_s
        self.look()

    def _answers(self, ticket: object, status: int) -> None:
        """Note that a request is answered; if the wait was said, and no other waits, that is said too."""
        if status not in (429, 503) and self._away.end(ticket):
            self.say(f"the proxy at {self.url} answers again")

    # The log ----------------------------------------------------------------------------------

    async def course(self, rollout: str) -> Json:
        """What the log has of the rollouts of a name: see `ingest.trajectories.launches`."""
        return await self._sent("GET", f"/v1/rollouts/{quote(rollout, safe='')}")

    async def recorded(self, run: str, kinds: tuple[str, ...], since: str = "") -> tuple[list[Event], str]:
        """The events of some kinds that the run has, and the cut at which they were read.

        Args:
            since: a cut, or `head`; those that it holds are left out.

        Raises:
            RolloutError: the proxy does not answer, or refuses.
        """
        events: list[Event] = []
        query = {"kinds": ",".join(kinds), "run": run, "follow": "false", "format": "sse", "from": since}
        async with self.http.stream(f"{self.url}/v1/events?{urlencode(query)}") as answer:
            await _check(answer, self.url)
            cut = ""
            async for message in _messages(answer):
                cut = message.id or cut
                if message.type == "message":
                    events += [from_json(values) for values in orjson.loads(message.data)]
        return events, cut

    async def batches(
        self,
        run: str,
        kinds: tuple[str, ...],
        cut: str,
        connected: Callable[[bool], None] = lambda there: None,
    ) -> AsyncIterator[tuple[list[Event], str]]:
        """The events of some kinds after a cut, for ever; the connection is made again where it breaks.

        They come in batches, each with the cut up to which all has come; an empty one at the head.

        Args:
            connected: told that it broke, and that it is there again.
        """
        broken = False
        while True:
            query = {"kinds": ",".join(kinds), "run": run, "follow": "true", "from": cut}
            with contextlib.suppress(*FAILURES):
                url = f"{self.url}/v1/events?{urlencode(query)}"
                async with self.http.stream(url, SILENCE_S) as answer:
                    await _check(answer, self.url)
                    if broken:
                        connected(True)
                    async for message in _messages(answer):
                        cut = message.id or cut
                        if message.type == "message":
                            yield [from_json(values) for values in orjson.loads(message.data)], cut
                        elif message.type == "head":
                            yield [], cut
            broken = True
            connected(False)
            await asyncio.sleep(PAUSE_S)


FINISHED = "trajectory_finished"
_PASSING = ("trajectory_busy",)
"""Conflicts that pass by themselves: the reply to an agent that was ended is awaited."""


def _path_of(name: str) -> str:
    return f"/v1/trajectories/{quote(name, safe='')}"


async def _messages(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    reader = MessageReader()
    async for data in answer.content.iter_any():
        for message in reader.feed(data):
            yield message
    for message in reader.end():
        yield message


async def _check(answer: aiohttp.ClientResponse, url: str) -> None:
    if answer.status != 200:
        reply = Answer(answer.status, await answer.read())
        raise RolloutError(f"the proxy at {url} refused its log: {_refusal(reply)[1]}")


def _refusal(answer: Answer) -> tuple[str, str]:
    """(code, message) of an error."""
    try:
        error: Mapping[str, Any] = answer.json()["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", f"HTTP {answer.status}: {answer.text[:200]}"


FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
"""What a request raises that is not answered."""
CONNECT_S = 30.0


def failure(error: BaseException) -> str:
    """What kept a request from being answered, in a line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body, whatever it is."""
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """What it says.

        Raises:
            ValueError: it is no JSON.
        """
        return orjson.loads(self.body)


class Http:
    """A client.

    Args:
        headers: of every request.
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})
        self._made: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """The answer to a request, whose body is sent as JSON; it is waited for as long as it takes.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: nothing answers.
        """
        data, more = None, dict(headers or {})
        if body is not None:
            data, more["content-type"] = orjson.dumps(body, default=str), "application/json"
        async with self._session.request(
            method, URL(url, encoded=True), data=data, headers=more, allow_redirects=False
        ) as reply:
            return Answer(reply.status, await reply.read())

    @contextlib.asynccontextmanager
    async def stream(self, url: str, silence_s: float | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a GET, to be read as it comes.

        Args:
            silence_s: how long it may say nothing.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: nothing answers, or no more.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        async with self._session.get(URL(url, encoded=True), timeout=timeout) as reply:
            yield reply

    async def close(self) -> None:
        """End its connections."""
        if self._made is not None:
            await self._made.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._made is None:  # which a running loop is needed for
            self._made = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._made


def bearer(variable: str | None, key: str) -> dict[str, str]:
    """The headers of requests to somebody's service.

    Args:
        variable: of this process, which holds a token; None: no token is sent.
        key: of the CONFIG, which names the variable.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return {}
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"{key}: the variable {variable!r} is not set: give it the service's token")
    return {"authorization": f"Bearer {token}"}
