"""Environments of gymnasium and OpenEnv as agents' other side: `rollout = "gym"`, `rollout = "openenv"`.

Neither library is Rollbook's: it is imported where an environment of it is played.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from rollbook.rollouts.agents.agentic import EnvRollout
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import ConfigError, RolloutError
from rollbook.store.load_object import call_maybe_async

SEEDS = ("seed", "idx")
"""Values of a task that an environment begins with, the first that there is: all of a group begin alike."""


NOT_THE_AGENT = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
"""Codes of errors of OpenEnv's server that no action brought about."""


class Gym(EnvRollout):
    """Plays an environment of gymnasium.

    Args:
        id: its name there, or `module:name`, the module being imported first.
        make: what `gymnasium.make` is given besides.
        instructions: what the policy is told before the first observation.
        actions: words for the actions of a Discrete space, in order; absent: their numbers.
        drawn: whether the policy sees what `render` gives (render_mode "ansi"), and not the observation.
        most_turns: after which it is cut short.
        whole: as `EnvRollout` has it.
    """

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        instructions: str = "",
        actions: Sequence[str] = (),
        drawn: bool = False,
        most_turns: int = 16,
        whole: bool = True,
    ) -> None:
        self.most_turns, self.whole = most_turns, whole
        self._id, self._make, self._instructions = id, dict(make or {}), instructions
        self._actions, self._drawn = [word.lower() for word in actions], drawn

    def make_env(self, task: Task) -> Any:
        """One of its own for each trajectory."""
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError("agent.rollout: 'gym' needs gymnasium: pip install gymnasium") from error
        render = {"render_mode": "ansi"} if self._drawn else {}
        return _Gym(gymnasium.make(self._id, **render | self._make), self, _seed(task))

    def said(self, observation: Any, drawing: Any) -> str:
        """What the policy is shown."""
        return drawing if self._drawn else _text(observation)

    def begun(self, shown: str) -> str:
        """The conversation's first message."""
        return "\n\n".join(part for part in (self._instructions, shown) if part)

    def action(self, text: str, space: Any) -> Any:
        """The action that a reply names last; None: it names none."""
        if not hasattr(space, "n"):
            return text if space.contains(text) else None
        if self._actions:
            words = re.findall(r"\w+", text.lower())
            numbers = [self._actions.index(word) for word in words if word in self._actions]
        else:
            numbers = [int(number) for number in re.findall(r"-?\d+", text)]
        chosen = [int(space.start) + at for at in numbers] if self._actions else numbers
        return next((number for number in reversed(chosen) if space.contains(number)), None)

    def choices(self, space: Any) -> str:
        """What a reply may be, as the policy is told where it is none of them."""
        if self._actions:
            return f"Say one of: {', '.join(self._actions)}."
        if hasattr(space, "n"):
            return f"Say a number from {int(space.start)} to {int(space.start + space.n) - 1}."
        return f"Say a text of {space}."


class _Gym:
    """An environment whose actions and observations are texts."""

    def __init__(self, env: Any, ways: Gym, seed: int | None) -> None:
        self._env, self._ways, self._seed = env, ways, seed

    def reset(self) -> str:
        """The first message."""
        observation, _ = self._env.reset(seed=self._seed)
        return self._ways.begun(self._shown(observation))

    def step(self, text: str) -> tuple[Any, ...]:
        """As gymnasium's; a text that is no action changes nothing, and is said to be none."""
        action = self._ways.action(text, self._env.action_space)
        if action is None:
            return self._ways.choices(self._env.action_space), 0.0, False, False, {}
        observation, *rest = self._env.step(action)
        return self._shown(observation), *rest

    def close(self) -> None:
        """Let go of it."""
        self._env.close()

    def _shown(self, observation: Any) -> str:
        return self._ways.said(observation, self._env.render() if self._ways._drawn else None)


class OpenEnv(EnvRollout):
    """Plays an environment that a server of OpenEnv serves; a session for each trajectory.

    Args:
        url: of the server.
        action: the field of an action that a reply is put into; absent: a reply is a JSON object, the action.
        shown: the field of an observation that the policy is shown; absent: all of it, as JSON.
        instructions: what the policy is told before the first observation.
        most_turns: after which it is cut short.
        whole: as `EnvRollout` has it.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        shown: str | None = None,
        instructions: str = "",
        most_turns: int = 16,
        whole: bool = True,
    ) -> None:
        self.most_turns, self.whole = most_turns, whole
        self.url, self._action, self._shown, self._instructions = url, action, shown, instructions

    def make_env(self, task: Task) -> Any:
        """A client of the server."""
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise ConfigError("agent.rollout: 'openenv' needs it: pip install openenv-core") from error
        return _OpenEnv(GenericEnvClient(self.url), self, _seed(task))

    def action(self, text: str) -> Any:
        """The action that a reply is; None: it is none."""
        if self._action is not None:
            return {self._action: text}
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        return value if isinstance(value, dict) else None

    def seen(self, observation: Any) -> str:
        """What the policy is shown."""
        return _text(observation[self._shown] if self._shown is not None else observation)

    def begun(self, shown: str) -> str:
        """The conversation's first message."""
        return "\n\n".join(part for part in (self._instructions, shown) if part)


class _OpenEnv:
    """A session whose actions and observations are texts."""

    def __init__(self, client: Any, ways: OpenEnv, seed: int | None) -> None:
        self._client, self._ways, self._seed = client, ways, seed

    async def reset(self) -> str:
        """The first message."""
        options = {} if self._seed is None else {"seed": self._seed}
        return self._ways.begun(
            self._ways.seen((await self._asked(self._client.reset, **options)).observation)
        )

    async def step(self, text: str) -> tuple[str, float, bool]:
        """As `EnvRollout` has it; a text that is no action changes nothing, and is said to be none."""
        action = self._ways.action(text)
        if action is None:
            return "Say an action: a JSON object.", 0.0, False
        try:
            result = await self._asked(self._client.step, action)
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return str(error), 0.0, False
        return self._ways.seen(result.observation), float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        """End the session."""
        await self._asked(self._client.close)

    async def _asked(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What the server answers.

        Raises:
            RolloutError: it does not, or has no room, which is not the agent's doing.
        """
        try:
            return await call_maybe_async(call, *given, **named)
        except Exception as error:
            away = isinstance(error, OSError) or type(error).__module__.startswith("websockets")
            if not away and not any(code in str(error) for code in NOT_THE_AGENT):
                raise
            text = f"the OpenEnv server at {self._ways.url} does not serve: {error!r}"
            raise RolloutError(text) from error


def _seed(task: Task) -> int | None:
    value = next((task.values[name] for name in SEEDS if name in task.values), None)
    return None if value is None else int(value)


def _text(observation: Any) -> str:
    """An observation as text: one of several numbers as JSON has them."""
    if isinstance(observation, str):
        return observation
    plain = observation.item() if getattr(observation, "shape", None) == () else observation
    return orjson.dumps(plain, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
