"""A verifiers environment: it relays an agent's requests, and names the rollout by X-Session-ID alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import ENVIRONMENT, HERE, Proxy

from rollbook.store.fold.trajectory import Trajectory
from rollbook.train.select.samples import samples_of


def _trace(proxy: Proxy, folder: Path, *words: str) -> dict[str, Any]:
    """The trace of the one rollout, as vf-eval writes it."""
    command = [ENVIRONMENT / "verifiers" / "bin" / "vf-eval", "adder", "-n", "1", "-m", "a-model"]
    client = ["--client.base-url", f"{proxy.url}/v1", "--client.api-key-var", "OPENAI_API_KEY"]
    agent = ["--env.agent.harness.id", "adder", "--env.agent.runtime.type", "subprocess"]
    environment = {"HOME": str(folder), "PYTHONPATH": str(HERE / "programs"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [*command, *client, *agent, *words, "--no-push", "--no-rich", "--output-dir", folder],
        env=environment | {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = folder.glob("*/traces.jsonl")
    [episode] = map(json.loads, file.read_text().splitlines())
    [trace] = episode["traces"]
    assert trace["ok"], trace["errors"]
    return trace


@pytest.mark.parametrize("words", [(), ("--env.agent.harness.streams",)], ids=["whole", "stream"])
def test_a_rollouts_turns_are_on_one_path(words: tuple[str, ...], proxy: Proxy, tmp_path: Path) -> None:
    """Its trace and our log hold the same three turns, on one path."""
    trace = _trace(proxy, tmp_path, *words)
    assert trace["rewards"]["right"]["score"] == 1.0
    trajectory = proxy.trajectory(trace["id"])
    turns = list(trajectory.turns.values())
    assert [t.requested.parent_turn_id for t in turns] == [None, *(t.turn_id for t in turns[:2])]
    assert [t.delivered for t in turns] == ["sent"] * 3
    [sample] = samples_of(trajectory)
    sampled = [i for t in turns for i in proxy.made(trajectory, t).tolist()]
    assert sample.tokens[sample.loss_mask].tolist() == sampled
    assert _traced(trace) == _logged(trajectory)


def _traced(trace: dict[str, Any]) -> list[Any]:
    rows = []
    for call in trace["calls"]:
        message, usage = trace["nodes"][call["node"]]["message"], call["usage"]
        calls = [(c["id"], c["name"], c["arguments"]) for c in message.get("tool_calls") or ()]
        reply = (message.get("content") or "", message.get("reasoning_content"), calls)
        rows.append((*reply, call["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]))
    return rows


def _logged(trajectory: Trajectory) -> list[Any]:
    rows = []
    for turn in trajectory.turns.values():
        done = turn.completed
        assert done is not None
        calls = [
            (c["id"], c["function"]["name"], c["function"]["arguments"])
            for c in done.reply.get("tool_calls") or ()
        ]
        reply = (done.reply["content"] or "", done.reply["reasoning_content"], calls)
        rows.append((*reply, done.finish_reason, done.prompt_length, len(done.completion_ids)))
    return rows
