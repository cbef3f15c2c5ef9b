"""An example played to its end, as its page says: served, rolled out, trained on for a step, replayed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from habits import make_habits
from warm import TORCH, WarmProcess, run_warm

from rollbook import store as rb
from rollbook.replay.stretch import history_of, prove_stretch
from rollbook.store import Store
from rollbook.testing.ports import free_port

HERE = Path(__file__).parents[2]
EXAMPLES = HERE / "examples"
CLIENTS = HERE / ".venv-clients"
_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Played:
    """What there is then: the log, and what each `rollbook rollout` said."""

    log: Store
    said: dict[str, Any]

    def asked(self, query: str) -> list[tuple[Any, ...]]:
        """An answer of SQL."""
        with rb.connect(self.log.path) as connection:
            return connection.execute(query).fetchall()

    def taken(self) -> set[str]:
        """The trajectories that the steps trained on."""
        steps = history_of(self.log, None, "actor").steps.values()
        return {ref["trajectory_id"] for step in steps for ref in step.planned.samples}

    def tool_results(self) -> set[str]:
        """What tools told the policy."""
        rows = self.asked("""
            SELECT DISTINCT m ->> 'content' FROM (SELECT unnest(new_messages::JSON[]) AS m FROM turns)
            WHERE m ->> 'role' = 'tool'""")
        return {text for (text,) in rows}

    def steps_replay(self, steps: int) -> None:
        """Each of so many steps, and no other, is the same bit for bit."""
        history = history_of(self.log, None, "actor")
        assert len(history.steps) == steps
        found = prove_stretch(self.log, history, 0, steps - 1)
        assert [one.replay is not None and one.replay.bit_for_bit for one in found.steps] == [True] * steps


def play(
    folder: Path, name: str, rollouts: Sequence[str], sayings: Sequence[str], *settings: str, steps: int = 1
) -> Played:
    """Play `examples/NAME`, with a model that is in the habit of saying one of a few things.

    Args:
        rollouts: its files of rollouts, without `.toml`, run one after the other before `grpo.toml` is.
        settings: `--set` of each of the rollouts.
        steps: of the training.
    """
    (folder / "examples").symlink_to(EXAMPLES)
    for environment in HERE.glob(".venv*"):
        (folder / environment.name).symlink_to(environment)
    make_habits(folder / "my-model", sayings, HERE / "docs")
    options = ["--store", folder / "runs", "--model", folder / "my-model", "--run", name]
    said = {}
    with served(folder, *options, "--threads", 1, "--no-admission") as url:
        for one in rollouts:
            words = ["rollout", f"examples/{name}/{one}.toml", "--json", "--set", f'proxy="{url}"']
            words += [word for setting in settings for word in ("--set", setting)]
            said[one] = orjson.loads(rollbook(folder, *words))
            assert said[one]["by_status"].keys() <= {"done", "truncated"}, _printed(folder, said[one])
    words = ["train", f"examples/{name}/grpo.toml", "--store", folder / "runs", "--source", "tail"]
    rollbook(folder, *words, "--set", f"steps={steps}")
    return Played(rb.open(folder / "runs"), said)


@contextmanager
def served(folder: Path, *options: object) -> Iterator[str]:
    """The address of a `rollbook serve`."""
    port, log = free_port(), folder / "serve.log"
    with log.open("wb") as file:
        words = _command("serve", "--port", port, *options)
        process = WarmProcess(words, modules=TORCH, cwd=folder, env=_ENVIRONMENT, stdout=file, stderr=file)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while not _answers(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def rollbook(folder: Path, *words: object) -> bytes:
    """What a command prints, run from a folder in which `examples` is."""
    ran = run_warm(_command(*words), modules=TORCH, cwd=folder, env=_ENVIRONMENT, timeout=200)
    assert ran.returncode == 0, ran.stderr.decode()[-3000:] + ran.stdout.decode()[-1000:]
    out: bytes = ran.stdout
    return out


def _printed(folder: Path, said: dict[str, Any]) -> str:
    logs = sorted(folder.glob("rollouts/*/std*.log"))
    return "\n".join([str(said), *(log.read_text(errors="replace")[-1500:] for log in logs)])


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "rollbook.cli.app", *map(str, words)]


def lines_of_ours(agent: str) -> list[str]:
    """Lines of an agent that are there for Rollbook; without them it is what its authors wrote."""
    return [line for line in (EXAMPLES / agent).read_text().splitlines() if "rollbook" in line.lower()]
