"""Trainings that begin with what others exported: of the same run, of another, and of another store.

Each link records with the model that it begins with, and trains on that: in this process, and once by the
commands that people type.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.fakes.proxies.settings import proxy_parts

pytest.importorskip("torch")

import torch
from tests.fakes.processes.online_run import Run
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.demo.model import make_model
from rollbook.demo.processes import rollbook_command
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.serve.serve import prepared
from rollbook.replay.stretch.stretch import history_of, prove_stretch
from rollbook.store import Store
from rollbook.store.events import CheckpointWritten, StepCommitted, StepPlanned, TurnCompleted
from rollbook.train.checkpoints.export import export_model

pytestmark = pytest.mark.torch
GROUPS, SIZE = 2, 4
STEPS = 3
"""Of each training that is typed."""
TYPED = """
run = "{run}"
model = "{model}"
steps = {steps}
threads = 1
[algorithm]
name = "{name}"
batch_size = 2
"""


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
    parts = proxy_parts(store=path, model=model, run=run, threads=1, seal=False)
    proxy, recorder = prepared(*parts), Recorder(rb.open(path, create=True), "serve", run)
    proxy.looked_at(recorder)
    app = proxy.app(recorder)

    async def agent(client: httpx.AsyncClient, group: int, sample: int) -> None:
        name = f"{group}.{sample}"
        request = {"messages": [{"role": "user", "content": f"What is {group} plus 58?"}]}
        wanted = {"max_tokens": 6, "temperature": 1.0, "seed": sample}
        headers = {"x-rollbook-group": f"{group}"}
        reply = await client.post(f"/t/{name}/v1/chat/completions", json=request | wanted, headers=headers)
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
    from rollbook.cli.train.training import run_train
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


def _run_records(log: Store, run: str, kind: type) -> list[Any]:
    return [event.record for event in log.events_of({kind.KIND}) if event.run == run]  # type: ignore[attr-defined]


def versions_of_turns(log: Store, run: str) -> list[int]:
    """The versions that sampled a run's turns, the first one first; each turn is of the version that it
    names, by that version's own weights."""
    turns: dict[int, list[TurnCompleted]] = {}
    for turn in _run_records(log, run, TurnCompleted):
        [span] = turn.version_spans
        assert (span.policy, span.start, span.end) == ("actor", 0, len(turn.completion_ids))
        turns.setdefault(span.version, []).append(turn)
    folders = {c.policy_version: log.path / c.path for c in _run_records(log, run, CheckpointWritten)}
    for version, sampled in turns.items():
        model = AutoModelForCausalLM.from_pretrained(folders[version], dtype=torch.float32).eval()
        for turn in sampled:
            ids = torch.tensor([[*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1]
            own = torch.log_softmax(logits, -1).gather(-1, ids[0, len(turn.prompt_ids) :, None])[:, 0]
            np.testing.assert_allclose(turn.logprobs, own.numpy(), atol=2e-4)
    return list(turns)


def check_steps(log: Store, run: str, wanted: list[int]) -> None:
    """A run's steps began with these versions, were trained on fresh samples, and replay bit for bit."""
    assert [plan.policy_version for plan in _run_records(log, run, StepPlanned)] == wanted
    staleness = [step.metrics.get("staleness_mean") for step in _run_records(log, run, StepCommitted)]
    assert set(staleness) <= {0.0, None}
    history = history_of(log, run, "actor")
    proof = prove_stretch(log, history, min(history.steps), max(history.steps))
    assert [proven.replay is not None and proven.replay.bit_for_bit for proven in proof.steps] == [
        True
    ] * len(wanted)


@pytest.mark.more
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
        assert versions_of_turns(rb.open(tmp_path / store), run) == recorded
        check_steps(rb.open(tmp_path / store), run, trained)


def _start(folder: Path, *words: str) -> None:
    """`rollbook WORDS...`, typed in a folder, to its end."""
    with (path := folder / "said.log").open("wb") as log:
        done = subprocess.run(rollbook_command(*words), cwd=folder, stdout=log, stderr=log, timeout=300)
    assert done.returncode == 0, path.read_text()[-3000:]


def _call(*words: object) -> str:
    """What `rollbook WORDS...` says, in this process."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def _weights(log: Store, run: str, version: int) -> str:
    """The digest of a version's weights."""
    [digest] = {
        c.weights_digest for c in _run_records(log, run, CheckpointWritten) if c.policy_version == version
    }
    return digest


def _check_begun(log: Store, run: str, weights: str) -> None:
    """A run began with these weights, as its version 0."""
    assert _weights(log, run, 0) == weights
    assert [plan.policy_version for plan in _run_records(log, run, StepPlanned)] == list(range(STEPS))


def _check_rollouts(log: Store, run: str) -> None:
    """Rollouts are of the run's own versions, the first ones of version 0, and trained while fresh enough."""
    versions = versions_of_turns(log, run)
    assert (versions[0], set(versions) <= set(range(STEPS + 1))) == (0, True)
    sampled = {turn.turn_id: turn.version_spans[0].version for turn in _run_records(log, run, TurnCompleted)}
    for plan in _run_records(log, run, StepPlanned):
        assert {plan.policy_version - sampled[ref["turn_id"]] for ref in plan.samples} <= {0, 1, 2}


@pytest.mark.crashes
@pytest.mark.timeout(900)
def test_a_chain_as_people_type_it(tmp_path: Path) -> None:
    """SFT on a file, GRPO online from its export into another store, DPO from that export in the same store
    under another name; and what `rollbook replay step` says of the last step of each."""
    folder = Run(tmp_path).folder
    online = (folder / "online.toml").read_text().replace("steps = 100000", f"steps = {STEPS}")
    (folder / "online.toml").write_text(online.replace("my-model", "from-taught"))
    taught = TYPED.format(run="taught", model="my-model", name="sft", steps=STEPS)
    (folder / "taught.toml").write_text(taught)
    judged = TYPED.format(run="judged", model="from-sums", name="dpo", steps=STEPS)
    pairs = 'pairs = "rewards"\ngroup_size = 4\n[recipe]\nsource_runs = ["sums"]\n'
    (folder / "judged.toml").write_text(judged + pairs)
    chat = {"messages": [{"role": "user", "content": "6 plus 3?"}, {"role": "assistant", "content": "9"}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 6)
    lessons, runs = folder / "lessons", folder / "runs"
    _start(folder, "train", "taught.toml", "--store", "lessons", "--data", "chats.jsonl")
    _call("export", "model", "--store", lessons, "-o", folder / "from-taught")
    _start(folder, "run", "online.toml")
    _call("export", "model", "--store", runs, "--run", "sums", "-o", folder / "from-sums")
    _start(folder, "train", "judged.toml", "--store", "runs")
    _check_begun(rb.open(runs), "sums", _weights(rb.open(lessons), "taught", STEPS))
    _check_rollouts(rb.open(runs), "sums")
    _check_begun(rb.open(runs), "judged", _weights(rb.open(runs), "sums", STEPS))
    for store, run in ((lessons, "taught"), (runs, "sums"), (runs, "judged")):
        output = _call("replay", "step", STEPS - 1, "--store", store, "--run", run)
        assert output.splitlines()[-1] == f"step {STEPS - 1}: bit for bit"
