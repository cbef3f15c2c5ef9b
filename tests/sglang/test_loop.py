"""The whole loop on real parts: agents, the proxy, two SGLang servers, the log, Megatron, the sync."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tests.fakes.proxies.served import Served
from tests.sglang.conftest import TOLERANCE, Reference, Weights
from tests.sglang.server import SglangServer

from rollbook import store
from rollbook.demo.processes import rollbook_command
from rollbook.store import Store
from rollbook.store.events import PolicyActivated, StepCommitted, SyncFinished
from rollbook.testing.ledger import fold_ledger

VERSIONS, GROUPS, GROUP_SIZE = 5, 2, 4
CONFIG = """
run = "loop"
model = "{model}"
steps = {steps}
checkpoint_every = 1
idle_timeout_s = 120
mode = "{mode}"

[algorithm]
name = "grpo"
groups = {groups}
group_size = {group_size}

[recipe]
max_staleness = {max_staleness}
drop_zero_variance = false

[optimizer]
lr = 3e-3

[sync]
engines = {engines}
transport = "{transport}"
partial_rollout = {partial}
pause = "{pause}"
bucket_mb = 1
"""


def _agent(url: str, group: int, member: int) -> None:
    """Two turns and a reward; whoever is held asks again."""
    name = f"{group}-{member}"
    with httpx.Client(base_url=url, timeout=200) as http:
        messages: list[Any] = [{"role": "user", "content": f"{group} plus {member}"}]
        for _ in range(2):
            body = {"model": "any", "messages": messages, "max_tokens": 24}
            while (
                reply := http.post(f"/t/{name}/group/{group}/v1/chat/completions", json=body)
            ).status_code == 503:
                assert "retry-after" in reply.headers
            assert reply.status_code == 200, reply.text
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        reward = (len(orjson.dumps(messages)) % 11) / 11
        done = http.post(f"/v1/trajectories/{name}/finish", json={"reward": reward})
        assert done.status_code == 200, done.text


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts `rollbook serve` in front of SGLang servers."""
    proxies: list[Served] = []

    def start(model: Path, *servers: SglangServer) -> Served:
        urls = [word for server in servers for word in ("--engine-url", server.url)]
        options = ["--model", str(model), "--engine", "sglang", "--run", "loop", *urls]
        proxies.append(Served(tmp_path / "store", options))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.stop()


@pytest.mark.parametrize(
    ("mode", "transport", "pause", "max_staleness"),
    [
        ("async", "tensor", "retract", 2),
        ("hybrid", "distributed", "abort", 1),
        ("colocate", "tensor", "retract", 2),
    ],
)
def test_five_versions_are_served_and_balance(
    mode: str,
    transport: str,
    pause: str,
    max_staleness: int,
    models: dict[str, Path],
    servers: dict[str, SglangServer],
    weights: Callable[[SglangServer], Weights],
    serve: Callable[..., Served],
    reference: Reference,
    tmp_path: Path,
) -> None:
    """Every token is of a version that was verified first, with its logprobs, and the books balance."""
    engines = [servers["dense"], servers["second"]]
    for engine in engines:
        weights(engine)  # gives it its own back at the end
    config = tmp_path / "loop.toml"
    config.write_text(
        CONFIG.format(
            model=models["dense"],
            steps=VERSIONS,
            mode=mode,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            max_staleness=max_staleness,
            engines=orjson.dumps([engine.url for engine in engines]).decode(),
            transport=transport,
            partial="true",
            pause=pause,
        )
    )
    proxy = serve(models["dense"], *engines)
    command = rollbook_command("train", config, "--store", tmp_path / "store", "--source", "tail")
    trainer = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    _await_sync(tmp_path / "store", trainer, len(engines))
    jobs = [(g, m) for g in range(VERSIONS * GROUPS) for m in range(GROUP_SIZE)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda job: _agent(proxy.url, *job), jobs))
    _, errors = trainer.communicate(timeout=180)
    assert trainer.returncode == 0, errors.decode()
    proxy.stop()
    log = store.open(tmp_path / "store")
    _check_versions(log, [engine.url for engine in engines])
    _check_logprobs(log, reference)
    ledger = fold_ledger(log.events())
    assert not ledger.unaccounted()


def _await_sync(log: Path, trainer: subprocess.Popen[bytes], engines: int) -> None:
    """Until the engines have what training starts from: before, they serve what nobody verified."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if trainer.poll() is not None and trainer.stderr is not None:
            raise AssertionError(trainer.stderr.read().decode())
        if sum(isinstance(event.record, SyncFinished) for event in store.open(log).events()) == engines:
            return
        time.sleep(0.2)
    raise AssertionError("no sync within two minutes")


def _check_versions(log: Store, urls: list[str]) -> None:
    """Both engines were given every version, verified, in order; a token's version was active before it."""
    activated: dict[str, list[tuple[int, str]]] = {url: [] for url in urls}
    digests: dict[int, str] = {}
    finished = 0
    for event in log.events():
        record = event.record
        if isinstance(record, PolicyActivated):
            activated[record.engine].append((record.policy_version, record.weights_digest))
        elif isinstance(record, StepCommitted):
            digests[record.policy_version] = record.digests["weights"]
        finished += isinstance(record, SyncFinished)
    for history in activated.values():
        # The proxy has found out at its start that it is version 0, and then the trainer has given it that.
        assert [version for version, _ in history] == [0, *range(VERSIONS + 1)]
        assert all(digest == digests[version] for version, digest in history if version)
    assert finished == len(urls) * (VERSIONS + 1)


def _check_logprobs(log: Store, reference: Reference) -> None:
    """The recorded logprobs are those of transformers with the checkpoint of each span's version."""
    worst, spans = 0.0, 0
    for trajectory in log.trajectories().values():
        for turn in trajectory.turns.values():
            done = turn.completed
            assert done is not None
            assert done.logprobs is not None
            ends = [0, *(span.end for span in done.version_spans)]
            assert [span.start for span in done.version_spans] == ends[:-1]
            assert ends[-1] == len(done.completion_ids)
            prompt = trajectory.prompt_ids(turn)
            for span in done.version_spans:
                path = log.path / "checkpoints" / "loop" / "actor" / f"v{span.version:08d}"
                wanted = reference.logprobs(path, prompt, done.completion_ids.tolist(), 1.0)
                gap = np.abs(done.logprobs - wanted)[span.start : span.end]
                worst, spans = max(worst, float(gap.max())), spans + 1
    assert spans >= 2 * VERSIONS * GROUPS * GROUP_SIZE
    assert worst <= TOLERANCE
