"""Plays rollouts of a verifiers environment: `python -P verifiers_worker.py PORT WORDS...`, with the words of
vf-eval.

It runs with verifiers and without Rollbook. Each line that it is sent is a rollout to play, or to cancel;
each that it sends says how one ended. What a rollout is, and what it is worth, is the environment's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from pydantic_config import cli
from verifiers.v1.cli.resolve import narrow_config, plugin_errors, with_positional_taskset
from verifiers.v1.clients import ModelContext
from verifiers.v1.clients import eval as relaying
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.env import RunSlot
from verifiers.v1.utils.loaders import load_environment
from verifiers.v1.utils.logging import setup_logging

LONGEST = 1 << 20
TOKEN = "ROLLBOOK_WORKER_TOKEN"


class Worker:
    """The environment, and the rollouts that are being played in it."""

    def __init__(self, config: Any, writer: asyncio.StreamWriter) -> None:
        self._config, self._writer = config, writer
        self._env = load_environment(config.env)
        self._taskset = iter(self._env.taskset.select(config.select))
        self._tasks: list[Any] = []
        self._playing: dict[str, asyncio.Task[None]] = {}

    async def work(self, reader: asyncio.StreamReader) -> None:
        """Play what is asked for until nobody asks any more."""
        async with self._env.serving():
            self._say({"ready": True})
            while line := await reader.readline():
                request = json.loads(line)
                if (cancelled := request.get("cancel")) is None:
                    self._playing[request["id"]] = asyncio.create_task(self._play(request))
                elif cancelled in self._playing:
                    self._playing[cancelled].cancel()
            for playing in self._playing.values():
                playing.cancel()
            await asyncio.gather(*self._playing.values(), return_exceptions=True)

    async def _play(self, request: dict[str, Any]) -> None:
        result: dict[str, Any] = {}
        variable = f"ROLLBOOK_KEY_{request['id']}"
        os.environ[variable] = request["key"]
        try:
            address = {"base_url": request["base_url"], "api_key_var": variable}
            client = self._config.client.model_copy(update=address)
            ctx = ModelContext(client=client, model=self._config.model, sampling=self._config.sampling)
            result = _report(await self._env.run_slot(RunSlot(self._task(request["idx"])), ctx))
        except asyncio.CancelledError:
            result = {"cancelled": True}
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"}
        finally:
            del os.environ[variable], self._playing[request["id"]]
            self._say({"id": request["id"]} | result)

    def _task(self, at: int) -> Any:
        self._tasks += itertools.islice(self._taskset, max(0, at + 1 - len(self._tasks)))
        if at >= len(self._tasks):
            raise IndexError(f"the environment has {len(self._tasks)} tasks, and none at position {at}")
        return self._tasks[at]

    def _say(self, message: dict[str, Any]) -> None:
        try:
            line = json.dumps(message, allow_nan=False)
        except ValueError as error:  # a reward that is no number: the environment's, and no agent's doing
            line = json.dumps({"id": message["id"], "failed": f"what it says is no JSON: {error}"})
        self._writer.write(line.encode() + b"\n")


def _report(episode: Any) -> dict[str, Any]:
    """How an episode ended, and its traces as verifiers writes them."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    playing = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    timeouts = [trace.stop_condition for trace in episode.traces if trace.is_timeout]
    rewards = {}
    for trace in playing:
        before = "" if len(playing) == 1 else f"{trace.agent.name}."
        for name, reward in trace.rewards.items():
            if reward is not None:
                rewards[before + name] = {"score": reward.score, "weight": reward.weight}
    return {
        "ok": episode.ok,
        "errors": [error.model_dump(include={"type", "message", "status_code"}) for error in errors],
        "timeout": "episode" if episode.is_timeout else next(iter(timeouts), None),
        "truncated": any(trace.is_truncated for trace in playing),
        "rewards": rewards,
        "traces": [trace.to_record() for trace in episode.traces],
    }


def _configured(words: list[str]) -> Any:
    """What vf-eval makes of its command line."""
    words = with_positional_taskset(words)
    with plugin_errors():
        kind = narrow_config(EvalConfig, words)
        sys.argv = ["vf-eval", *words]
        config = cli(kind)
        if not isinstance(config.client, vf.EvalClientConfig):
            raise SystemExit("--client.type: the proxy speaks chat completions, which is `eval`")
    return config


async def main(port: int, words: list[str]) -> None:
    """Connect to who asks, and play."""
    config = _configured(words)
    setup_logging("INFO")
    # Each rollout has an address of its own, and so a client, which would have its own connections.
    shared = relaying.build_async_httpx(config.client)
    relaying.build_async_httpx = lambda _: shared
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LONGEST)
    writer.write(os.environ.pop(TOKEN).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await Worker(config, writer).work(reader)
        await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
