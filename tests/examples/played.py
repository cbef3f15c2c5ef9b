"""An example played to its end, as its page says: served, rolled out, trained on for a step, replayed."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from tests.fakes.models.habits import make_habits
from tests.fakes.processes.warm import EMBEDDED, TORCH, WarmProcess, run_warm

from rollbook import store as rb
from rollbook.bench.rollouts import lines_of_ours as lines_that_name_rollbook
from rollbook.store import Store
from rollbook.store.events import StepPlanned
from rollbook.testing.asgi import free_port

HERE = Path(__file__).parents[2]
EXAMPLES = HERE / "examples"
CLIENTS = HERE / ".venv-clients"
_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Played:
    """What there is then: the log, what each `rollbook rollout` said, and what `rollbook replay` printed."""

    log: Store
    said: dict[str, Any]
    replayed: str

    def asked(self, query: str) -> list[tuple[Any, ...]]:
        """An answer of SQL."""
        with rb.connect(self.log.path) as connection:
            return connection.execute(query).fetchall()

    def taken(self) -> set[str]:
        """The trajectories that the steps trained on."""
        planned = [e.record for e in self.log.events() if isinstance(e.record, StepPlanned)]
        return {ref["trajectory_id"] for step in planned for ref in step.samples}

    def tool_results(self) -> set[str]:
        """What tools told the policy."""
        rows = self.asked("""
            SELECT DISTINCT m ->> 'content' FROM (SELECT unnest(new_messages::JSON[]) AS m FROM turns)
            WHERE m ->> 'role' = 'tool'""")
        return {text for (text,) in rows}


def play(folder: Path, name: str, ways: Sequence[str], sayings: Sequence[str], *settings: str) -> Played:
    """Play `examples/NAME` by the commands of its page, with a model that says one of a few things.

    Args:
        ways: those of its files of rollouts that are run, without `.toml`; a step is trained on each.
        settings: `--set` of each of them.
    """
    (folder / "examples").symlink_to(EXAMPLES)
    make_habits(folder / "my-model", sayings, HERE / "docs")
    serve, *commands = _commands(name)
    outputs: dict[str, Any] = {}
    replayed = ""
    with served(folder, *serve[1:], "--threads", "1", "--no-admission", "--no-seal") as url:
        for words in commands:
            if words[0] == "rollout" and (way := Path(words[1]).stem) in ways:
                overrides = [f'proxy="{url}"', *settings]
                words += ["--json", *(word for setting in overrides for word in ("--set", setting))]
                outputs[way] = orjson.loads(rollbook(folder, *words))
                assert outputs[way]["by_status"].keys() <= {"done", "truncated"}, _printed(
                    folder, outputs[way]
                )
            elif words[0] == "train":
                rollbook(folder, *words, "--set", f"steps={len(ways)}")
            elif words[0] == "replay":
                replayed = rollbook(folder, *words)
    return Played(rb.open(folder / "runs"), outputs, replayed)


def _commands(name: str) -> list[list[str]]:
    """The commands of ours that an example's page shows, the server's first."""
    lines = (EXAMPLES / name / "README.md").read_text().splitlines()
    commands = [shlex.split(line.removesuffix("&"))[1:] for line in lines if line.startswith("rollbook ")]
    assert commands[0][0] == "serve"
    return commands


@contextmanager
def served(folder: Path, *options: object) -> Iterator[str]:
    """The address of a `rollbook serve`."""
    port, log = free_port(), folder / "serve.log"
    with log.open("wb") as file:
        words = _command("serve", "--port", port, *options)
        process = WarmProcess(words, modules=EMBEDDED, cwd=folder, env=_ENVIRONMENT, stdout=file, stderr=file)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while not _answers(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def rollbook(folder: Path, *words: object) -> str:
    """What a command prints, run from a folder in which `examples` is."""
    ran = run_warm(_command(*words), modules=TORCH, cwd=folder, env=_ENVIRONMENT, timeout=200)
    assert ran.returncode == 0, ran.stderr.decode()[-3000:] + ran.stdout.decode()[-1000:]
    printed: str = ran.stdout.decode()
    return printed


def _printed(folder: Path, progress: dict[str, Any]) -> str:
    logs = sorted(folder.glob("rollouts/*/std*.log"))
    return "\n".join([str(progress), *(log.read_text(errors="replace")[-1500:] for log in logs)])


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "rollbook.cli.app", *map(str, words)]


def lines_of_ours(agent: str) -> list[str]:
    """Lines of an agent that are there for Rollbook, as many as its page says."""
    lines = lines_that_name_rollbook((EXAMPLES / agent).read_text())
    assert f"lines changed: {len(lines)}" in (EXAMPLES / agent).with_name("README.md").read_text()
    return lines
