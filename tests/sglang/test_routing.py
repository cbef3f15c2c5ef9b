"""A real server's routing is replayed: of a model whose routers are decided by the order of sums."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.proxies.served import Served
from tests.sglang import model
from tests.sglang.server import SglangServer

from rollbook import store
from rollbook.cli.train.training import run_train
from rollbook.replay.step.step import replay_step
from rollbook.store.events import StepCommitted
from rollbook.train.config.config import parse_config

GROUPS, GROUP_SIZE = 2, 4


@pytest.fixture(scope="module")
def undecided(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture in each of whose routers four experts are all but equal, and the other four too: which two of
    four a token goes to is decided by rounding."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("undecided") / "moe"
    model.make(folder, "moe", 6, tied=False, like=models["dense"])
    file, rng = folder / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(file)
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert len(routers) == model.LAYERS
    for name in routers:
        alike = tensors[name][[0, 4]].repeat_interleave(4, 0)
        tensors[name] = alike * (1 + 6e-8 * torch.randn(alike.shape, generator=rng))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(undecided: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """A server of it that tells where tokens went."""
    started = SglangServer(undecided, tmp_path_factory.mktemp("servers"), "--enable-return-routed-experts")
    try:
        started.start()
        started.ready()
        yield started
    finally:
        started.stop()


def _agent(url: str, group: int, member: int) -> None:
    """Two turns and a reward."""
    name = f"{group}-{member}"
    with httpx.Client(base_url=url, timeout=200) as http:
        messages: list[Any] = [{"role": "user", "content": f"{group} plus {member}"}]
        for _ in range(2):
            request = {"model": "any", "messages": messages, "max_tokens": 32}
            reply = http.post(f"/t/{name}/group/{group}/v1/chat/completions", json=request)
            assert reply.status_code == 200, reply.text
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        done = http.post(f"/v1/trajectories/{name}/finish", json={"reward": member / 4})
        assert done.status_code == 200, done.text


def test_the_gap_is_gone_where_routing_is_replayed(
    undecided: Path, server: SglangServer, tmp_path: Path
) -> None:
    """All that logprobs depend on was recorded over two turns; without replay the very same tokens differ by
    far more than rounding, and the trainer's own routing says by how much."""
    recorded = tmp_path / "store"
    words = ["--model", str(undecided), "--engine", "sglang", "--engine-url", server.url, "--routed-experts"]
    proxy = Served(recorded, words)
    try:
        for group in range(GROUPS):
            for member in range(GROUP_SIZE):
                _agent(proxy.url, group, member)
    finally:
        proxy.stop()
    metrics = {}
    for replayed in (True, False):
        path = shutil.copytree(recorded, tmp_path / f"{replayed}")
        algorithm = {"name": "grpo", "groups": GROUPS, "group_size": GROUP_SIZE}
        values = {"model": str(undecided), "steps": 1, "algorithm": algorithm, "routing_replay": replayed}
        run_train(parse_config(values, "test"), path, "cut", "head", "train", None, 1)
        log = store.open(path)
        [done] = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
        assert replay_step(log, 0).bit_for_bit
        metrics[replayed] = done.metrics
    assert metrics[True]["routing_replayed"] == 1.0
    assert metrics[True]["engine_logprob_gap"] < 1e-4
    assert metrics[False]["engine_logprob_gap"] > 0.01
    assert metrics[True]["own_routing_logprob_gap"] == pytest.approx(metrics[False]["engine_logprob_gap"])
