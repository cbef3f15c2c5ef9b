"""The manager's process in the rollouts' benchmark: runs rollouts, or starts agents one by one.

It reads commands from stdin, a JSON object a line, and answers each with one on stdout.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from rollbook.bench.processes import obey
from rollbook.bench.tied import end_with_parent
from rollbook.rollouts.config import parse_rollouts
from rollbook.rollouts.launchers.isolation import Files
from rollbook.rollouts.launchers.launching import Launch
from rollbook.rollouts.launchers.subprocess_launcher import SubprocessLauncher
from rollbook.rollouts.manager import RolloutManager
from rollbook.rollouts.places import Progress

PLAIN = "plain"
"""An agent that nobody keeps, as `subprocess` starts it; others are levels of isolation."""


async def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Run the rollouts of a CONFIG, as `rollbook rollout` does; the clock begins with the first agent."""
    config, messages = parse_rollouts(options["config"], "bench"), list[str]()
    began: list[tuple[float, float]] = []

    def tell(progress: Progress) -> None:
        if progress.running and not began:
            began.append((time.perf_counter(), time.process_time()))

    result = await RolloutManager(config, say=messages.append, tell=tell).run()
    wall, cpu = time.perf_counter() - began[0][0], time.process_time() - began[0][1]
    return {
        **{"wall_s": wall, "cpu_s": cpu, "done": result.done, "said": messages[:5], "leaked": result.leaked},
        "by_status": {str(status): count for status, count in result.by_status.items()},
    }


async def start(options: Mapping[str, Any]) -> dict[str, Any]:
    """Start agents one by one, alternately plain and at each level: milliseconds to their first request."""
    took: dict[str, list[float]] = {way: [] for way in options["ways"]}
    launcher = SubprocessLauncher(Files((Path(options["program"]).parent,)))
    for number in range(options["count"]):
        for way in options["ways"]:
            name = f"start-{way}-{number}-{uuid.uuid4().hex[:8]}"
            folder = Path(options["folder"]) / name
            folder.mkdir(parents=True)
            (folder / "task.json").write_bytes(orjson.dumps(options["task"]))
            environment = _environment(options["url"], name, folder)
            command = [sys.executable, "-S", options["program"]]
            begun = time.monotonic()
            if way == PLAIN:
                await asyncio.to_thread(_plain, command, environment, folder)
            else:
                words = (name, tuple(command), environment, folder, folder)
                running = await launcher.start(Launch(*words, isolation=way))
                ended = await running.wait()
                if ended.code != 0:
                    raise RuntimeError(f"an agent at {way} ended with {ended}")
            if number:  # the first tries what works here
                took[way].append(1e3 * (float((folder / "asked").read_text()) - begun))
    return {"took": took}


def _plain(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    null = subprocess.DEVNULL
    subprocess.run(command, env=environment, cwd=folder, check=True, stdin=null, stdout=null, stderr=null)


def _environment(url: str, name: str, folder: Path) -> dict[str, str]:
    ours = {"OPENAI_BASE_URL": f"{url}/t/{name}/v1", "OPENAI_API_KEY": "none", "HOME": str(folder)}
    return ours | {"PATH": os.environ["PATH"], "ROLLBOOK_TASK_FILE": str(folder / "task.json")}


COMMANDS = {"run": run, "start": start}


def main() -> None:
    """Execute commands until stdin ends."""
    end_with_parent()
    with asyncio.Runner() as runner:
        obey(lambda options: runner.run(COMMANDS[options["do"]](options)))


if __name__ == "__main__":
    main()
