"""`cluster.ray_samples`: `rollbook samples --json --ray 2` over `--ray 1`, as processes, of a store that is
sealed but for its newest trajectories (`scale_store`).

- `cluster.ray_samples`: in a cluster that is there, of this host, so that neither starts Ray.
- `cluster.ray_samples_alone`: each starts and stops a cluster of its own.
- `cluster.ray_samples_vs_here`: two workers in the cluster that is there, over the command without Ray.

Before anything is timed, all five have to print the same bytes. While they are timed it goes nowhere.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.processes import BenchError
from rollbook.bench.rounds import order, times_faster
from rollbook.bench.scale_commands import command
from rollbook.bench.scale_store import make_turns
from rollbook.store.ray_connection import ADDRESS, MODE, TOKEN_PATH, connect

HERE, ONE, TWO, ONE_ALONE, TWO_ALONE = "here", "one", "two", "one, alone", "two, alone"
WORKERS = {HERE: 0, ONE: 1, TWO: 2, ONE_ALONE: 1, TWO_ALONE: 2}
ALONE = (ONE_ALONE, TWO_ALONE)
GOAL = 1.7


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        sealed, live: trajectories of the store, of 8 turns and about 4,000 tokens each.
        rounds: in which each side runs once.
    """

    sealed: int = 9_000
    live: int = 600
    rounds: int = 3

    @property
    def steps(self) -> int:
        """How often `on_round` will be called."""
        return self.rounds + 1


@dataclass(frozen=True, slots=True)
class Measured:
    """Wall seconds of each side, round by round; and how many trajectories there are."""

    walls: Mapping[str, Sequence[float]]
    trajectories: int


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Make the store in `folder`, and time the commands.

    Raises:
        BenchError: a command failed, or printed other bytes than the others.
        ConfigError: Ray is not installed.
    """
    make_turns(folder / "samples", plan.sealed, plan.live)
    walls: dict[str, list[float]] = {name: [] for name in WORKERS}
    variables = {name: value for name, value in os.environ.items() if name not in (ADDRESS, MODE, TOKEN_PATH)}
    leave = connect()
    try:
        sides = {
            name: (_words(folder / "samples", count), variables if name in ALONE else dict(os.environ))
            for name, count in WORKERS.items()
        }
        if len(printed := {_digest(*side) for side in sides.values()}) != 1:
            raise BenchError(f"samples by Ray are not those of one process: {len(printed)} outputs differ")
        on_round()
        for number in range(plan.rounds):
            for name in order(list(sides), number):
                walls[name].append(_seconds(*sides[name]))
            on_round()
    finally:
        if leave is not None:
            leave()
    return Measured(walls, plan.sealed + plan.live)


def _words(store: Path, workers: int) -> list[str]:
    return command("samples", "--store", store, "--json", "--ray", workers)


def _digest(words: Sequence[str], environment: Mapping[str, str]) -> str:
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        digest = hashlib.sha256()
        while some := child.stdout.read(1 << 20):
            digest.update(some)
    _check(words, child.returncode)
    return digest.hexdigest()


def _seconds(words: Sequence[str], environment: Mapping[str, str]) -> float:
    begun = time.perf_counter()
    done = subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=False)
    _check(words, done.returncode)
    return time.perf_counter() - begun


def _check(words: Sequence[str], code: int) -> None:
    if code:
        raise BenchError(f"{' '.join(words)} ended with {code}")


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    figures = (
        _figure("", measured, ONE, TWO, f"goal >= {GOAL} on two quiet cores"),
        _figure("_alone", measured, ONE_ALONE, TWO_ALONE, "each starts Ray"),
        _figure("_vs_here", measured, HERE, TWO, "without Ray"),
    )
    return Outcome(figures, tuple(spread(f"samples, {name}", "s", measured.walls[name]) for name in WORKERS))


def _figure(name: str, measured: Measured, against: str, ours: str, more: str) -> Figure:
    walls = measured.walls
    return Figure(
        f"cluster.ray_samples{name}",
        median(walls[ours]),
        "s",
        f"{against}: {median(walls[against]):.1f} s, {measured.trajectories} trajectories; {more}",
        times_faster(walls[ours], walls[against]),
        len(walls[ours]),
    )
