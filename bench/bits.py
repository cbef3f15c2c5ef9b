"""`bits.*`: how far a step's stages differ where equal bits are not promised, relative to their
tolerance.

The same step is taken by processes that differ in one thing each: instructions, threads,
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollbook.bench.bits_side import LR
from rollbook.bench.figure import Figure, Outcome, Spread, spread
from rollbook.bench.processes import BenchError, Process, module, some_cores
from rollbook.bench.train_sides import Size, make_model
from rollbook.replay.step.tolerances import Comparison, compare_stage
from rollbook.train.ranks.backend import MAIN

DTYPES = ("float32", "bfloat16")
SIZE = Size(128, 4, 4)
"""2 million parameters."""
SAME = "the same again"
FILE = "step.npz"
STAGES = ("advantages", "logprobs", "losses", "gradients", "optimizer", "weights", "metrics")

Arrays = dict[str, npt.NDArray[np.floating]]


PLAIN: dict[str, dict[str, int]] = {
    SAME: {},
    "two threads": {"threads": 2},
    "a sample at a time": {"rows": 1},
}
"""What is done otherwise by the process that took the step first."""
OTHERS = {
    "ATen without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "MKL's compatible code": {"MKL_CBWR": "COMPATIBLE"},
    "oneDNN with SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Processes that have these variables."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The types of weights."""

    dtypes: tuple[str, ...] = DTYPES

    @property
    def steps(self) -> int:
        """How often the step is taken."""
        return len(self.dtypes) * (1 + len(PLAIN) + len(OTHERS))


@dataclass(frozen=True, slots=True)
class Apart:
    """How far a stage of a side differs from the same stage of the reference run.

    Attributes:
        most: the greatest distance: of the largest number of its kind, or for weights of the
            learning rate.
    """

    dtype: str
    side: str
    stage: str
    most: float
    found: Comparison

    @property
    def share(self) -> float:
        """The share of its tolerance that this is; 0 for equal bits."""
        return 0.0 if self.found.worst is None else self.found.worst.share


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> list[Apart]:
    """Take the step on every side.

    Raises:
        BenchError: a process failed, or the same settings gave other bits.
    """
    make_model(folder / "model", SIZE)
    differences: list[Apart] = []
    recorded: dict[str, Arrays] = {}

    def take(process: Process, side: str, dtype: str, **way: int) -> None:
        process.ask(dtype=dtype, **way)
        with np.load(folder / FILE) as held:
            now = dict(held)
        was = recorded.setdefault(dtype, now)
        differences.extend(_apart(dtype, side, stage, was, now) for stage in STAGES if was is not now)
        on_round()

    with _process(folder, {}) as process:
        for dtype in plan.dtypes:
            take(process, "", dtype)
            for side, way in PLAIN.items():
                take(process, side, dtype, **way)
    for side, variables in OTHERS.items():
        with _process(folder, variables) as process:
            for dtype in plan.dtypes:
                take(process, side, dtype)
    changed = [
        difference.stage
        for difference in differences
        if difference.side == SAME and difference.found.verdict != "equal"
    ]
    if changed:
        raise BenchError(f"the same step came out in two ways: {', '.join(changed)}")
    return differences


def _process(folder: Path, variables: Mapping[str, str]) -> Process:
    words = module("rollbook.bench.bits_side", folder / "model", folder / FILE)
    return Process("bits", words, folder, some_cores(2), variables)


def _apart(dtype: str, side: str, stage: str, recorded: Arrays, now: Arrays) -> Apart:
    before, after = (_stage(stage, arrays) for arrays in (recorded, now))
    comparison = compare_stage(stage, before, after, dtype=dtype, rate=LR)
    return Apart(dtype, side, stage, max(_most(stage, before, after), default=0.0), comparison)


def _stage(stage: str, arrays: Arrays) -> Arrays:
    return {n.partition("/")[2]: array for n, array in arrays.items() if n.startswith(f"{stage}/")}


def _most(stage: str, before: Arrays, after: Arrays) -> list[float]:
    """The greatest distance, for each kind of number."""
    kinds: dict[str, tuple[float, float]] = {}
    for name, array in before.items():
        kind = name.rpartition(".")[2] if stage in ("optimizer", "metrics") else ""
        apart, largest = kinds.get(kind, (0.0, 0.0))
        apart = max(apart, float(np.abs(array - after[name]).max(initial=0.0)))
        kinds[kind] = apart, max(largest, float(np.abs(array).max(initial=0.0)))
    kinds.pop(MAIN, None)  # the weights are a stage of their own
    return [apart / (LR if stage == "weights" else largest or 1.0) for apart, largest in kinds.values()]


def outcome(measured: list[Apart]) -> Outcome:
    """A figure per type and stage, for the side that differs most; its ratio is to the tolerance,
    and should be below 1."""
    figures, spreads = [], []
    for dtype in dict.fromkeys(difference.dtype for difference in measured):
        for stage in STAGES:
            differences = [
                difference
                for difference in measured
                if (difference.dtype, difference.stage) == (dtype, stage) and difference.side != SAME
            ]
            figures.append(_figure(differences))
            spreads.append(_spread(differences))
    return Outcome(tuple(figures), tuple(spreads))


def _figure(differences: list[Apart]) -> Figure:
    far = max(differences, key=lambda difference: (difference.share, difference.most))
    unit = "of the rate" if far.stage == "weights" else "of the largest"
    name = f"bits.{far.dtype}.{far.stage}"
    return Figure(
        name,
        max(difference.most for difference in differences),
        unit,
        f"its tolerance; farthest: {far.side}",
        far.share,
        len(differences),
    )


def _spread(differences: list[Apart]) -> Spread:
    return spread(
        f"{differences[0].dtype} {differences[0].stage}",
        "of its tolerance",
        [difference.share for difference in differences],
    )
