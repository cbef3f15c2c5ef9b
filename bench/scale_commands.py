"""Commands as users start them, each in a separate process, and the CPU time that they took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

import rollbook
from rollbook import store
from rollbook.bench import tied
from rollbook.bench.processes import KEY_VARIABLES, BenchError, Process, module
from rollbook.bench.scale_steps import GRPO, config_text
from rollbook.bench.scale_turns import LANE, RUN
from rollbook.store.events import StepPlanned
from rollbook.store.log.tail import Filter
from rollbook.testing.asgi import free_port

READY_S = 1800.0
POLL_S = 0.02
OFFLINE = {"HF_HUBOFFLINE": "1", "TRANSFORMERSOFFLINE": "1", "COLUMNS": "100"}


@dataclass(frozen=True, slots=True)
class Use:
    """The cost of a command: CPU seconds of it and its children, and wall seconds."""

    cpu_s: float
    wall_s: float


def command(*words: object) -> list[str]:
    """`python -m rollbook WORDS...`, with this interpreter."""
    return module("rollbook", *words)


def run(words: Sequence[object], scratch: Path, code: int = 0) -> tuple[Use, bytes]:
    """Run `rollbook WORDS...` to its end; its cost, and its output.

    Raises:
        BenchError: its exit code is not `code`; with its last lines.
    """
    error_log, out = scratch / "command.err", scratch / "command.out"
    begun = time.perf_counter()
    with error_log.open("wb") as errors, out.open("wb") as file:
        tie = [sys.executable, str(Path(tied.__file__)), "all"]
        child = subprocess.Popen(
            [*tie, *command(*words)],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=errors,
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != code:
        lines = [*out.read_text().splitlines()[-10:], *error_log.read_text().splitlines()[-15:]]
        text = "\n".join([f"rollbook {' '.join(map(str, words))} ended with {child.returncode}", *lines])
        raise BenchError(text)
    return Use(used.ru_utime + used.ru_stime, time.perf_counter() - begun), out.read_bytes()


def _environment() -> Mapping[str, str]:
    path = {"PYTHONPATH": str(Path(rollbook.__file__).parents[1])}
    return {k: v for k, v in os.environ.items() if k not in KEY_VARIABLES} | path | OFFLINE


def serve_ready(log: Path, model: Path, scratch: Path) -> Use:
    """Start `rollbook serve` on a store, which it writes to; the cost until it answered.

    The sealer is left out: it starts working only then, in a process of its own.

    Raises:
        BenchError: it did not answer.
    """
    port = free_port()
    words: list[object] = ["serve", "--store", log, "--model", model, "--run", RUN, "--port", port]
    words += ["--engine", "scripted", "--script", "rollbook.demo.task:teacher", "--no-seal"]
    begun = time.perf_counter()
    with Process("serve", command(*words), scratch, "all", OFFLINE, talks=False) as server:
        server.await_http(f"http://127.0.0.1:{port}/healthz", READY_S)
        used = Use(server.cpu_s(), time.perf_counter() - begun)
        server.child.kill()  # nothing of it is kept
    return used


def train_ready(log: Path, model: Path, scratch: Path) -> Use:
    """Resume the training of a store's run, by GRPO from its tail, until the next step is planned.

    By then it has loaded the weights, knows what was used, has read the rest of the log and
    selected from it: the manifest is written before the step runs.

    Raises:
        BenchError: it planned none.
    """
    config = scratch / "train.toml"
    config.write_text(config_text(model, 1, GRPO))
    wanted = Filter(frozenset([StepPlanned.KIND]), skip_lanes=frozenset([LANE]))
    words = command("train", config, "--store", log, "--source", "tail")
    opened = store.open(log)
    begun = time.perf_counter()
    with (
        opened.tail(opened.head(), wanted) as tail,
        Process("train", words, scratch, "all", OFFLINE, talks=False) as trainer,
    ):
        while not tail.poll():
            if trainer.child.poll() is not None or time.perf_counter() - begun > READY_S:
                raise trainer.failed("planned no step")
            time.sleep(POLL_S)
        used = Use(trainer.cpu_s(), time.perf_counter() - begun)
        trainer.child.kill()
    return used


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over all samples of a store, in a process of its own: its tokens, and its most memory."""

    tokens: int
    peak_bytes: int
    cpu_s: float


def feed_pass(log: Path, scratch: Path) -> Pass:
    """Make every batch of a supervised pass over a store, without a model.

    Raises:
        BenchError: it failed, for instance for lack of memory.
    """
    words = module("rollbook.bench.scale_feed", log)
    with Process("feed", words, scratch, "all") as feed:
        report = orjson.loads(feed.line())
        return Pass(report["tokens"], feed.peak_rss(), feed.cpu_s())
