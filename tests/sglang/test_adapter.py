"""A real SGLang loads an exported adapter beside the model that it was trained beside, and computes with it
what the checkpoint, which has both in one, does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sglang.conftest import PROMPT, TOLERANCE, Reference
from tests.sglang.server import SglangServer

from rollbook import store as rb
from rollbook.engines.weights.digests import read_weights
from rollbook.store import Event
from rollbook.train.checkpoints.checkpoint import Adapter, write_checkpoint
from rollbook.train.checkpoints.export import export_adapter
from rollbook.train.config.lora import TARGETS, LoraConfig, LoraTraining
from rollbook.train.model.lora import fresh_factors, merged
from rollbook.train.model.shape import read_shape

LORA = LoraConfig(rank=4, alpha=8.0)
OPTIONS = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "4")


@pytest.fixture(scope="module")
def folders(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with trained factors, and the adapter that is exported of it."""
    model, folder = models["dense"], tmp_path_factory.mktemp("adapter")
    log, own = rb.open(folder / "store", create=True), read_weights(model)
    generator = torch.Generator().manual_seed(1)
    fresh = fresh_factors(read_shape(model), LORA, 0).items()
    factors = {n: t if t.any() else torch.randn(t.shape, generator=generator) * 0.05 for n, t in fresh}
    whole, adapter = (
        dict(merged(own.items(), factors, read_shape(model), LORA)),
        Adapter(factors, LoraTraining(LORA, 0, 0)),
    )
    record = write_checkpoint(
        log.path, "run", "actor", 1, whole, None, like=model, phase="p", adapter=adapter
    )
    with log.writer("train") as writer:
        writer.append([Event(record, "run")]).result(30)
    export_adapter(log, folder / "adapter", 1, "run", "actor")
    return log.path / record.path, folder / "adapter"


@pytest.fixture
def server(models: dict[str, Path], tmp_path: Path) -> Iterator[SglangServer]:
    """A server of the model that takes adapters."""
    server = SglangServer(models["dense"], tmp_path, *OPTIONS, "--lora-target-modules", *TARGETS)
    server.start()
    try:
        server.ready()
        yield server
    finally:
        server.stop()


def _logprobs(server: SglangServer, **adapter: Any) -> tuple[list[int], torch.Tensor]:
    """Twelve tokens, and the logprob of each."""
    sampling = {"temperature": 0, "max_new_tokens": 12}
    reply = server.post(
        "/generate", {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True} | adapter
    )
    logprobs = [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]]
    return reply["output_ids"], torch.tensor(logprobs)


def test_it_serves_what_was_trained(
    server: SglangServer, models: dict[str, Path], folders: tuple[Path, Path], reference: Reference
) -> None:
    """With the adapter as the checkpoint, without it as the model that is beside it."""
    checkpoint, adapter = folders
    reply = server.post("/load_lora_adapter", {"lora_name": "mine", "lora_path": str(adapter)})
    assert reply["success"], reply
    chosen = []
    for path, named in ((models["dense"], {}), (checkpoint, {"lora_path": "mine"})):
        ids, logprobs = _logprobs(server, **named)
        expected = torch.from_numpy(reference.logprobs(path, PROMPT, ids, 1.0))
        assert float((logprobs - expected).abs().max()) < TOLERANCE
        chosen.append(ids)
    assert chosen[0] != chosen[1]
