"""Trainings that begin with what others exported: of the same run, of another, and of another store.

Each link records with the model that it begins with, and trains on that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoModelForCausalLM

from rollbook import store as rb
from rollbook.demo.model import make_model
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.serve.options import ServeOptions
from rollbook.ingest.serve.prepared import prepared
from rollbook.replay.stretch import history_of, prove_stretch
from rollbook.store import Store
from rollbook.store.events import CheckpointWritten, StepCommitted, StepPlanned, TurnCompleted
from rollbook.train.checkpoints.export import export_model

pytestmark = pytest.mark.torch
GROUPS, SIZE = 2, 4


@dataclass(frozen=True)
class Link:
    """A training of the chain: its algorithm, run and store, and the version that its model is there."""

    algorithm: dict[str, Any]
    run: str
    store: str
    begins: int
    critic: dict[str, Any] | None = None


CHAIN = (
    Link({"name": "sft", "batch_size": 8}, "sums", "here", 0),
    Link({"name": "grpo", "groups": 2, "group_size": 4}, "sums", "here", 1),
    Link({"name": "ppo", "groups": 8}, "other", "here", 0, {"lr": 1e-3}),
    Link({"name": "dpo", "pairs": "rewards", "group_size": 4, "batch_size": 2}, "sums", "elsewhere", 0),
)


def _record(path: Path, run: str, model: Path, first: int) -> None:
    """Groups of trajectories whose rewards differ, through a proxy of this process."""
    options = ServeOptions(path, model, run=run, threads=1, seal=False)
    proxy, recorder = prepared(options), Recorder(rb.open(path, create=True), options.lane, run)
    proxy.looked_at(recorder)
    app = proxy.app(recorder)

    async def agent(client: httpx.AsyncClient, group: int, sample: int) -> None:
        name = f"{group}.{sample}"
        asked = {"messages": [{"role": "user", "content": f"What is {group} plus 58?"}]}
        wanted = {"max_tokens": 6, "temperature": 1.0, "seed": sample}
        headers = {"x-rollbook-group": f"{group}"}
        reply = await client.post(f"/t/{name}/v1/chat/completions", json=asked | wanted, headers=headers)
        assert reply.status_code == 200, reply.text
        done = await client.post(f"/v1/trajectories/{name}/finish", json={"reward": float(sample)})
        assert done.status_code == 200, done.text

    async def agents() -> None:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60
            ) as client,
        ):
            every = [agent(client, first + g, i) for g in range(GROUPS) for i in range(SIZE)]
            await asyncio.gather(*every)

    asyncio.run(agents())


def _train(path: Path, link: Link, model: Path) -> None:
    """`rollbook train` in this process, on samples of the version that it begins with."""
    from rollbook.cli.training import run_train
    from rollbook.train.config.config import parse_config

    values = {
        "run": link.run,
        "model": str(model),
        "steps": 1,
        "threads": 1,
        "algorithm": link.algorithm,
        "recipe": {"max_staleness": 0},
        "optimizer": {"lr": 1e-3},
    }
    values |= {} if link.critic is None else {"critic": link.critic}
    run_train(parse_config(values, "test"), path, "cut", "head", "train", None, 1)


def _of(log: Store, run: str, kind: type) -> list[Any]:
    return [event.record for event in log.events_of({kind.KIND}) if event.run == run]  # type: ignore[attr-defined]


def check_versions(log: Store, run: str, wanted: list[int]) -> None:
    """Every turn of a run is of the version that it names: of those wanted, by that version's own weights."""
    turns: dict[int, list[TurnCompleted]] = {}
    for turn in _of(log, run, TurnCompleted):
        [span] = turn.version_spans
        assert (span.policy, span.start, span.end) == ("actor", 0, len(turn.completion_ids))
        turns.setdefault(span.version, []).append(turn)
    assert sorted(turns) == wanted
    folders = {c.policy_version: log.path / c.path for c in _of(log, run, CheckpointWritten)}
    for version, made in turns.items():
        model = AutoModelForCausalLM.from_pretrained(folders[version], dtype=torch.float32).eval()
        for turn in made:
            ids = torch.tensor([[*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1]
            own = torch.log_softmax(logits, -1).gather(-1, ids[0, len(turn.prompt_ids) :, None])[:, 0]
            np.testing.assert_allclose(turn.logprobs, own.numpy(), atol=2e-4)


def check_steps(log: Store, run: str, wanted: list[int]) -> None:
    """A run's steps began with these versions, were trained on fresh samples, and replay bit for bit."""
    assert [plan.policy_version for plan in _of(log, run, StepPlanned)] == wanted
    staleness = [step.metrics.get("staleness_mean") for step in _of(log, run, StepCommitted)]
    assert set(staleness) <= {0.0, None}
    history = history_of(log, run, "actor")
    found = prove_stretch(log, history, min(history.steps), max(history.steps))
    assert [one.replay is not None and one.replay.bit_for_bit for one in found.steps] == [True] * len(wanted)


def test_a_chain_of_trainings(tmp_path: Path) -> None:
    """SFT, GRPO, PPO, DPO: each begins with what the one before exported, as the version that it is there."""
    make_model(model := tmp_path / "model", 0, width=24, layers=1)
    for number, link in enumerate(CHAIN):
        path, begun = tmp_path / link.store, model
        _record(path, link.run, begun, first=10 * number)
        _train(path, link, begun)
        exported = export_model(rb.open(path), model := tmp_path / f"{number}", None, link.run, "actor")
        assert exported.policy_version == link.begins + 1
    # Started again with what it began with, and with what it made.
    _record(path, link.run, begun, first=50)
    _record(path, link.run, model, first=60)
    for store, run, recorded, trained in (
        ("here", "sums", [0, 1], [0, 1]),
        ("here", "other", [0], [0]),
        ("elsewhere", "sums", [0, 1], [0]),
    ):
        check_versions(rb.open(tmp_path / store), run, recorded)
        check_steps(rb.open(tmp_path / store), run, trained)
