"""What the service's benchmark runs: the service, programs of the real client, the trainer's own loop, and
the model that all of them train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollbook.bench.processes import Process, module
from rollbook.edge.keys import add_key
from rollbook.store.errors import ConfigError

VARIABLE = "ROLLBOOK_TINKER_PYTHON"
ROOT = Path(__file__).resolve().parents[1]
CLIENT = Path(__file__).with_name("service_client.py")
QUIET = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""What is imported is compiled once, as where it is installed."""
BASE = "base"
"""What clients call the model."""
LEARNING_RATE = 1e-4
MOST_TOKENS = 8192
"""Tokens of a forward pass, as the service has it."""
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
TARGETS: tuple[Target, ...] = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
)
"""The matrices that a client trains factors of, if it leaves none out."""
Rows = Sequence[Sequence[int]]


def client_python() -> Path:
    """The interpreter of the environment that the client is in.

    Raises:
        ConfigError: there is none.
    """
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else ROOT / ".venv-service" / "bin" / "python"
    if not python.exists():
        remedy = "run `make .venv-service/.installed`, or name another environment's python in"
        raise ConfigError(f"no client: {python} is not there; {remedy} {VARIABLE}")
    return python


@dataclass(frozen=True, slots=True)
class Size:
    """Dimensions of the base model, a Qwen3; by default it has 15 million parameters.

    Attributes:
        threads: that each side computes with.
    """

    vocab: int = 4096
    width: int = 384
    layers: int = 6
    heads: int = 6
    context: int = 1024
    threads: int = 1


def write_model(folder: Path, size: Size) -> Path:
    """A folder of random weights, float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        intermediate_size=4 * size.width,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.width // size.heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def rows(size: Size, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random tokens, of so many each that are learnt."""
    rng = np.random.default_rng(seed)
    drawn: list[list[int]] = [rng.integers(0, size.vocab, length + 1).tolist() for length in lengths]
    return drawn


@dataclass(slots=True, eq=False)
class Stage:
    """A service of a store in a folder, and its clients; all of them log there.

    Attributes:
        tenants: who may have a client, each with a key of its own.
    """

    folder: Path
    model: Path
    size: Size
    tenants: tuple[str, ...]
    process: Process | None = None
    beside: list[Process] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    url: str = ""
    lives: int = 0

    @property
    def store(self) -> Path:
        """The store's folder."""
        return self.folder / "store"

    def start(self) -> None:
        """Start the service, again at the same address, and wait until it listens."""
        config, keys = self.folder / "service.toml", self.folder / "keys.toml"
        config.write_text(f'base = "{self.model}"\nname = "{BASE}"\nthreads = {self.size.threads}\n')
        for tenant in self.tenants:
            if tenant not in self.keys:
                self.keys[tenant] = add_key(keys, tenant, "writer", None, "tml-")
        port = self.url.rpartition(":")[2] or "0"
        words = ["service", config, "--store", self.store, "--port", port, "--keys", keys]
        self.lives += 1
        name = f"service-{self.lives}"
        self.process = Process(name, module("rollbook", *words), self.folder, "all", COMPILED)
        self.url = self.process.line().decode().rpartition("=")[2]

    def kill(self) -> None:
        """End the service at once."""
        assert self.process is not None
        self.process.child.kill()
        self.process.child.wait()

    def client(self, tenant: str) -> Process:
        """A program of the client's."""
        words = [str(client_python()), str(CLIENT), self.url, self.keys[tenant], str(LEARNING_RATE)]
        self.beside.append(Process(f"client-{tenant}", words, self.folder, "all", QUIET))
        return self.beside[-1]

    def loop(self, rank: int) -> Process:
        """The trainer's own loop, a process."""
        words = module("rollbook.bench.service_loop", self.model, rank, self.size.threads)
        self.beside.append(Process("loop", words, self.folder, "all", COMPILED))
        return self.beside[-1]

    def close(self) -> None:
        """End everything."""
        for program in [*self.beside, *([self.process] if self.process else [])]:
            program.stop()


def ask(program: Process, do: str, **asked: Any) -> Any:
    """Have a program do something; what came of it.

    Raises:
        BenchError: it failed.
    """
    return program.ask(do=do, **asked)["came"]
