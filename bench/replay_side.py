"""A warm process that replays parts of steps: it has imported what it needs, and done each once.

    python -m rollbook.bench.replay_side

Answers each line of standard input with a line of JSON. Seconds are of its CPU, all threads,
which the machine's other work does not change.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from rollbook import store
from rollbook.bench.processes import BenchError
from rollbook.replay.attempts import drops_of
from rollbook.replay.claims.activations import activations
from rollbook.replay.claims.selection import Selections, openings
from rollbook.replay.step import run_log
from rollbook.replay.step import step as steps
from rollbook.replay.step.partial import Part
from rollbook.replay.step.run_log import RunLog, recorded_vectors
from rollbook.replay.step.starts import find_start
from rollbook.replay.step.step import history_with, late_rewards, replay_step
from rollbook.replay.stretch import first_bad
from rollbook.replay.stretch.stretch import history_of
from rollbook.store.events import Json

Seconds = defaultdict[str, float]
"""By part."""
OF_STEPS = ("history_with", "recorded_vectors", "recorded_batch", "part_stages", "late_rewards")
PARTS: Mapping[str, Any] = MappingProxyType({**dict.fromkeys(OF_STEPS, steps), "openings": run_log})
"""What `replay_step` calls for a part without a model, beside the selection -> the module that calls it."""


@contextlib.contextmanager
def _counted(seconds: Seconds, part: str) -> Iterator[None]:
    begun = time.process_time()
    yield
    seconds[part] += time.process_time() - begun


def _counting(seconds: Seconds, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        with _counted(seconds, part):
            return call(*given, **named)

    return counted


@contextlib.contextmanager
def _parts(seconds: Seconds) -> Iterator[None]:
    """Context: counts the seconds of the parts of `replay_step`."""
    held = {name: getattr(module, name) for name, module in PARTS.items()}
    claim = Selections.claim
    for name, call in held.items():
        setattr(PARTS[name], name, _counting(seconds, name, call))
    Selections.claim = _counting(seconds, "selection", claim)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, call in held.items():
            setattr(PARTS[name], name, call)
        Selections.claim = claim  # type: ignore[method-assign]


def stages(log: str, run: str, step: int) -> Json:
    """Seconds of `rollbook replay step STEP --no-model --to losses`, by part.

    Raises:
        BenchError: a stage differs.
    """
    seconds = Seconds(float)
    with _counted(seconds, "whole"), _parts(seconds):
        part = Part(last="losses", model=False)
        result = replay_step(store.open(Path(log)), step, run, part=part)
    if not result.bit_for_bit or "losses" not in result.stages:
        raise BenchError(f"step {step} of run {run} does not replay: {result.first_difference}")
    return dict(seconds)


def find(log: str, step: int) -> Json:
    """Seconds, by part, to find a step: everything that a replay reads of the log except its samples."""
    seconds, opened = Seconds(float), store.open(Path(log))
    with _counted(seconds, "history"):
        history = history_with(opened, step, None, "actor")
    target, run = history.steps[step], history.run
    reads: dict[str, Callable[[], object]] = {
        "start": lambda: find_start(RunLog(opened, history), target),
        "drops": lambda: drops_of(opened, run, "actor", range(step, step + 1)),
        "openings": lambda: openings(opened, run, "actor"),
        "activations": lambda: activations(opened, run, "actor"),
        "vectors": lambda: recorded_vectors(opened, history, target.planned),
        "late_rewards": lambda: late_rewards(opened, history, target),
    }
    for part, read in reads.items():
        with _counted(seconds, part):
            read()
    return dict(seconds)


def bisect(log: str, last: int) -> Json:
    """The steps run by a search for the first bad one up to `last`, that step, and the CPU and wall
    seconds."""
    opened = store.open(Path(log))
    begun, cpu = time.perf_counter(), time.process_time()
    history = history_of(opened, None, "actor")
    search = first_bad.find_first_bad(opened, history, min(history.steps), last)
    return {
        "ran": len(search.ran),
        "first": None if search.first is None else search.first.step,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - begun,
    }


ASKED: dict[str, Callable[..., Json]] = {"stages": stages, "find": find, "bisect": bisect}


def main() -> None:
    """Answer until standard input ends."""
    for line in sys.stdin:
        command = orjson.loads(line)
        answer = ASKED[command.pop("what")](**command)
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
