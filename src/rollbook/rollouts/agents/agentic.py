"""Agents as Python classes: what they derive from, and the model that they are given.

Tokens, masks and logprobs are the proxy's: a class sends messages and gets messages, as a program does.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import orjson

from rollbook.rollouts.outcome import Outcome
from rollbook.rollouts.proxy import FAILURES, Http, failure
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import ConfigError, RequestError, RolloutError
from rollbook.store.events import Json
from rollbook.store.load_object import call_maybe_async, load_object

Rollout = TypeVar("Rollout", bound=type["AgenticRollout"])
REGISTERED: dict[str, type[AgenticRollout]] = {}
"""Name -> class."""
_PLAYED = "rollbook.rollouts.agents.environments"
OURS = {"gym": f"{_PLAYED}:Gym", "openenv": f"{_PLAYED}:OpenEnv"}
"""Name -> where a class is that comes with Rollbook."""


class LLM:
    """The policy, for one trajectory: the only thing that an agent needs.

    Attributes:
        base_url: for a client of the agent's own, which speaks OpenAI's API.
        api_key: the trajectory's own; it opens no other.
        trajectory: its name.
        agent: which of a trajectory's agents it is for, in its requests' `metadata`; empty: the first.
        replies: what the policy answered it, in order.
    """

    def __init__(self, http: Http, base_url: str, api_key: str, trajectory: str, agent: str = "") -> None:
        self.base_url, self.api_key, self.trajectory, self.agent = base_url, api_key, trajectory, agent
        self.replies: list[Json] = []
        self._http = http

    def sub(self, name: str) -> LLM:
        """The policy for an agent that this one starts.

        Its conversations are paths of the same trajectory: they have its reward, and count with it as one
        member of the group. Rewards of its turns alone go by their ids, `llm.replies[i]["id"]`.
        """
        agent = f"{self.agent}/{name}" if self.agent else name
        return LLM(self._http, self.base_url, self.api_key, self.trajectory, agent)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Json:
        """The policy's message after these.

        Args:
            fields: others of a chat completion, such as `tools`, `temperature` or `max_tokens`.

        Raises:
            RolloutError: the proxy or its engine does not answer.
            RequestError: the proxy refused the request.
        """
        body = {"model": "policy", "messages": list(messages)} | fields
        if self.agent:
            body["metadata"] = fields.get("metadata", {}) | {"agent": self.agent}
        headers = {"authorization": f"Bearer {self.api_key}"}
        try:
            answer = await self._http.send("POST", f"{self.base_url}/chat/completions", body, headers)
        except FAILURES as error:
            raise RolloutError(f"the proxy at {self.base_url} does not answer: {failure(error)}") from error
        if answer.status in (408, 429) or answer.status >= 500:
            raise RolloutError(f"the proxy answered {answer.status}: {answer.text[:500]}")
        if answer.status != 200:
            raise RequestError(answer.status, "refused", answer.text[:500])
        reply: Json = answer.json()
        self.replies.append(reply)
        message: Json = reply["choices"][0]["message"]
        return message


class AgenticRollout(ABC):
    """An agent. One is made for each trajectory; `options` of the CONFIG are what it is made with."""

    @abstractmethod
    async def run(self, task: Task, llm: LLM) -> Outcome | float | None:
        """Work on a task. A number is its reward, None leaves that to scorers; an exception is its error."""

    async def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Let go of what it holds; called however it ended."""


class EnvRollout(AgenticRollout):
    """An agent whose other side is an environment of `reset` and `step`, as OpenEnv's and gym's: what it
    observes is the user, what the policy says is its action."""

    most_turns: int = 16
    whole: bool = True
    """Whether the trajectory's reward is the sum of the turns', or 0: an algorithm with `turn_rewards` counts
    the trajectory's beside them."""

    @abstractmethod
    def make_env(self, task: Task) -> Any:
        """An environment: `reset()` gives an observation (or a pair of it and a dictionary); `step(action)`
        an observation, a reward, and whether it is over (gym's five values too)."""

    def shown(self, observation: Any) -> str:
        """An observation as the policy reads it."""
        return (
            observation if isinstance(observation, str) else orjson.dumps(observation, default=str).decode()
        )

    async def run(self, task: Task, llm: LLM) -> Outcome:
        """Step until the environment is over, or `most_turns` are; its rewards are the turns'."""
        env = self.make_env(task)
        try:
            began = await call_maybe_async(env.reset)
            first = began[0] if isinstance(began, tuple) else began
            messages: list[Json] = [{"role": "user", "content": self.shown(first)}]
            rewards: list[float] = []
            over = False
            for _ in range(self.most_turns):
                reply = await llm.chat(messages)
                observation, reward, over = _stepped(
                    await call_maybe_async(env.step, reply.get("content") or "")
                )
                rewards.append(reward)
                if over:
                    break
                messages += [reply, {"role": "user", "content": self.shown(observation)}]
            return Outcome(sum(rewards) if self.whole else 0.0, truncated=not over, turn_rewards=rewards)
        finally:
            if hasattr(env, "close"):
                await call_maybe_async(env.close)


class ToolRollout(AgenticRollout):
    """An agent with tools: methods or functions, by name, which are called side by side."""

    most_turns: ClassVar[int] = 16
    tool_timeout_s: ClassVar[float] = 60.0

    @abstractmethod
    def tools(self, task: Task) -> Mapping[str, Callable[..., Any]]:
        """The tools of a task; what they return, or raise, is told to the policy."""

    @abstractmethod
    def schemas(self, task: Task) -> list[Json]:
        """The tools as OpenAI's API describes them."""

    def messages(self, task: Task) -> list[Json]:
        """The conversation's beginning."""
        return [{"role": "user", "content": str(task.values.get("prompt", task.values))}]

    def score(self, task: Task, answer: str) -> float | None:
        """The reward of the last answer, empty where the turns ran out; None leaves it to scorers."""

    async def run(self, task: Task, llm: LLM) -> Outcome:
        """Answer calls until the policy makes none."""
        tools, schemas, messages = self.tools(task), self.schemas(task), self.messages(task)
        for _ in range(self.most_turns):
            reply = await llm.chat(messages, tools=schemas)
            calls = reply.get("tool_calls") or []
            if not calls:
                return Outcome(self.score(task, reply.get("content") or ""))
            results = await asyncio.gather(*(self._answered(tools, call) for call in calls))
            messages += [reply, *results]
        return Outcome(self.score(task, ""), truncated=True)

    async def _answered(self, tools: Mapping[str, Callable[..., Any]], call: Json) -> Json:
        name = call["function"]["name"]
        try:
            arguments = orjson.loads(call["function"]["arguments"] or "{}")
            async with asyncio.timeout(self.tool_timeout_s):
                result = str(await call_maybe_async(tools[name], **arguments))
        except TimeoutError:
            result = f"error: {name} took longer than {self.tool_timeout_s:g} s"
        except KeyError:
            result = f"error: there is no tool {name!r}; there are {', '.join(tools)}"
        except Exception as error:  # whatever a tool raises is an answer to who called it
            result = f"error: {error!r}"
        return {"role": "tool", "tool_call_id": call["id"], "content": result}


def register(name: str) -> Callable[[Rollout], Rollout]:
    """Name a class, for `agent.rollout` of a CONFIG.

    Raises:
        ConfigError: another class has the name.
    """

    def named(cls: Rollout) -> Rollout:
        if REGISTERED.get(name, cls) is not cls:
            raise ConfigError(f"two rollouts are registered as {name!r}: {REGISTERED[name]!r} and {cls!r}")
        REGISTERED[name] = cls
        return cls

    return named


def rollout_class(name: str) -> type[AgenticRollout]:
    """The class that a CONFIG names.

    Raises:
        ConfigError: there is none, or it is no AgenticRollout.
    """
    cls = REGISTERED.get(name) or load_object(OURS.get(name, name), "agent.rollout")
    if not (inspect.isclass(cls) and issubclass(cls, AgenticRollout)):
        raise ConfigError(f"agent.rollout: {name!r} is {cls!r}, no class derived from AgenticRollout")
    return cls


def _stepped(result: Any) -> tuple[Any, float, bool]:
    """(observation, reward, over) of what `step` gave: gym's tuples, or an object with these attributes."""
    if isinstance(result, tuple):
        observation, reward, *ends = result
        flags = ends[:2] if len(ends) >= 3 else ends[:1]
        return observation, float(reward or 0.0), any(flags)
    return result.observation, float(result.reward or 0.0), bool(result.done)
