"""A real SGLang for the sync's benchmark, on this machine's CPU, and a model for it to serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from rollbook.bench.processes import Process
from rollbook.store.errors import ConfigError
from rollbook.testing.asgi import free_port
from rollbook.train.sync.control import EngineControl

VARIABLE = "ROLLBOOK_SGLANG_PYTHON"
ROOT = Path(__file__).resolve().parents[1]
SHIM = ROOT / "tests" / "sglang" / "cpu_shim"
"""Lets SGLang's wheel, which is made for CUDA, start on a CPU."""
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--max-total-tokens", "2048", "--log-level", "warning"),
    *("--sleep-on-idle", "--skip-server-warmup"),
)


def sglang_python() -> Path:
    """The interpreter of the environment that SGLang is in.

    Raises:
        ConfigError: there is none.
    """
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else ROOT / ".venv-sglang" / "bin" / "python"
    if not python.exists():
        remedy = "run `make .venv-sglang/.installed`, or name another environment's python in"
        raise ConfigError(f"no SGLang: {python} is not there; {remedy} {VARIABLE}")
    return python


@dataclass(frozen=True, slots=True)
class Size:
    """A Qwen3's dimensions; by default 101 million parameters."""

    vocab: int = 24_000
    hidden: int = 768
    intermediate: int = 2304
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4


def write_model(folder: Path, size: Size, seed: int, like: Path | None = None) -> Path:
    """A model directory of random float32 weights, with the demo's tokenizer.

    Args:
        like: a directory to take all but the weights from.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollbook.demo.model import make_model

    folder.mkdir()
    if like is None:
        make_model(folder, 0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_theta=1e4,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(slots=True, eq=False)
class TimedControl(EngineControl):
    """Notes when each route was asked and answered: (route, begun, ended), by `time.perf_counter`."""

    laps: list[tuple[str, float, float]] = field(default_factory=list)

    def _ask(self, method: str, route: str, body: Any = None) -> Any:
        import time

        begun = time.perf_counter()
        try:
            # A dataclass with slots is another class than the one whose body this is: no bare `super`.
            return EngineControl._ask(self, method, route, body)
        finally:
            self.laps.append((route, begun, time.perf_counter()))


class Server:
    """SGLang serving a model directory."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [str(sglang_python()), "-m", "sglang.launch_server", *OPTIONS]
        command += ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
        environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIM)}
        self.process = Process("sglang", command, folder, "all", environment, talks=False)

    def ready(self) -> None:
        """Wait until it serves."""
        self.process.await_http(f"{self.url}/health")

    def sample(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float], list[Any]]:
        """(ids, logprobs, version spans) of a completion."""
        params = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": params, "return_logprob": True}
        answer = orjson.loads(
            httpx.post(f"{self.url}/generate", json=body, timeout=120).raise_for_status().content
        )
        meta = answer["meta_info"]
        logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
        return answer["output_ids"], logprobs, meta["weight_versions"]
