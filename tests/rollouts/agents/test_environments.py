"""Environments of gymnasium, the real package, played by a policy whose replies are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import pytest

from rollbook.rollouts.agents.agentic import LLM, rollout_class
from rollbook.rollouts.agents.environments import Gym, OpenEnv
from rollbook.rollouts.outcome import Outcome
from rollbook.rollouts.tasks import Task


class _Told(LLM):
    """Says what it is told to, and keeps what it was shown."""

    def __init__(self, replies: Sequence[str]) -> None:
        self._replies, self.shown = iter(replies), list[str]()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        self.shown.append(messages[-1]["content"])
        return {"role": "assistant", "content": next(self._replies)}


def _played(rollout: Gym, replies: Sequence[str], **values: Any) -> tuple[Outcome, list[str]]:
    model = _Told(replies)
    return asyncio.run(rollout.run(Task("t", values), model)), model.shown


class Echo(gymnasium.Env[str, str]):
    """Wants the word that it gave said again, twice."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.word, self.left = f"word{seed}", 2
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self.word, float(action == self.word), self.left == 0, False, {}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
    yield
    del gymnasium.registry["Echo-v0"]


def test_a_text_environment_is_played_to_its_end() -> None:
    """The seed is the task's, its rewards are the turns', and the sum is the trajectory's."""
    outcome, shown = _played(Gym("Echo-v0", instructions="Say it again."), ["word7", "no"], seed=7)
    assert shown == ["Say it again.\n\nword7", "word7"]
    assert outcome == Outcome(1.0, turn_rewards=[1.0, 0.0])


def test_frozen_lake_by_words_and_drawn() -> None:
    """Down, down, right, right, down, right is the way to the goal."""
    ways = {"make": {"is_slippery": False}, "actions": ["left", "down", "right", "up"], "drawn": True}
    way = ["down", "I go Down.", "right", "not left but right", "what?", "down", "right"]
    outcome, shown = _played(Gym("FrozenLake-v1", **ways), way)
    assert shown[0].endswith("FFFH\nHFFG\n")
    assert shown[5] == "Say one of: left, down, right, up."
    assert outcome == Outcome(1.0, turn_rewards=[0.0] * 6 + [1.0])


def test_blackjack_by_numbers_and_as_json() -> None:
    """An observation is three numbers; what is no action costs a turn."""
    outcome, shown = _played(Gym("Blackjack-v1"), ["-1, 2, 17", "0"], idx=3)
    assert len(shown) == 2
    assert shown[0].count(",") == 2
    assert shown[1] == "Say a number from 0 to 1."
    assert isinstance(outcome.turn_rewards, list)
    assert outcome.turn_rewards[0] == 0.0
    again, _ = _played(Gym("Blackjack-v1"), ["0"], idx=3)
    assert again.reward == outcome.reward


def test_too_many_turns_are_cut_short() -> None:
    """What it has by then is its reward."""
    outcome, _ = _played(Gym("Echo-v0", most_turns=1), ["word1"], seed=1)
    assert outcome == Outcome(1.0, truncated=True, turn_rewards=[1.0])


def test_they_are_found_by_a_short_name() -> None:
    """As a CONFIG names them."""
    assert (rollout_class("gym"), rollout_class("openenv")) == (Gym, OpenEnv)
