"""A server of OpenEnv: an environment that wants a number guessed. Word: the port."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess."""

    number: str


class Hint(Observation):
    """What is told of it."""

    text: str


class Numbers(Environment[Guess, Hint, State]):
    """The number is the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        """Begin."""
        self.number, self.left = seed or 0, 4
        return Hint(text="Guess a number from 0 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        """Answer a guess."""
        self.left -= 1
        right = action.number == str(self.number)
        return Hint(text="right" if right else "wrong", reward=float(right), done=right or self.left == 0)

    @property
    def state(self) -> State:
        """Nothing more."""
        return State()


app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
