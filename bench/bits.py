"""`bits.*`: how far a step's stages lie apart where bits are not promised, and how much of that is tolerated.

The same step is taken by processes that differ in one thing each: instructions, threads, micro-batches.
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
    """How far a stage of a side lies from the same stage as it is without.

    Attributes:
        most: the greatest distance: of the largest number of its kind, or for weights of the learning rate.
    """

    dtype: str
    side: str
    stage: str
    most: float
    found: Comparison

    @property
    def share(self) -> float:
        """How much of its tolerance that is; 0 of equal bits."""
        return 0.0 if self.found.worst is None else self.found.worst.share


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> list[Apart]:
    """Take the step on every side.

    Raises:
        BenchError: a process failed, or the same settings gave other bits.
    """
    make_model(folder / "model", SIZE)
    found: list[Apart] = []
    recorded: dict[str, Arrays] = {}

    def take(process: Process, side: str, dtype: str, **way: int) -> None:
        process.ask(dtype=dtype, **way)
        with np.load(folder / FILE) as held:
            now = dict(held)
        was = recorded.setdefault(dtype, now)
        found.extend(_apart(dtype, side, stage, was, now) for stage in STAGES if was is not now)
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
    changed = [one.stage for one in found if one.side == SAME and one.found.verdict != "equal"]
    if changed:
        raise BenchError(f"the same step came out in two ways: {', '.join(changed)}")
    return found


def _process(folder: Path, variables: Mapping[str, str]) -> Process:
    words = module("rollbook.bench.bits_side", folder / "model", folder / FILE)
    return Process("bits", words, folder, some_cores(2), variables)


def _apart(dtype: str, side: str, stage: str, recorded: Arrays, now: Arrays) -> Apart:
    one, other = (_stage(stage, of) for of in (recorded, now))
    found = compare_stage(stage, one, other, dtype=dtype, rate=LR)
    return Apart(dtype, side, stage, max(_most(stage, one, other), default=0.0), found)


def _stage(stage: str, of: Arrays) -> Arrays:
    return {n.partition("/")[2]: array for n, array in of.items() if n.startswith(f"{stage}/")}


def _most(stage: str, one: Arrays, other: Arrays) -> list[float]:
    """The greatest distance, of each kind of numbers."""
    kinds: dict[str, tuple[float, float]] = {}
    for name, array in one.items():
        kind = name.rpartition(".")[2] if stage in ("optimizer", "metrics") else ""
        apart, largest = kinds.get(kind, (0.0, 0.0))
        apart = max(apart, float(np.abs(array - other[name]).max(initial=0.0)))
        kinds[kind] = apart, max(largest, float(np.abs(array).max(initial=0.0)))
    kinds.pop(MAIN, None)  # the weights are a stage of their own
    return [apart / (LR if stage == "weights" else largest or 1.0) for apart, largest in kinds.values()]


def outcome(measured: list[Apart]) -> Outcome:
    """A figure per type and stage: the farthest side; its ratio is to the tolerance, and is to be below 1."""
    figures, spreads = [], []
    for dtype in dict.fromkeys(one.dtype for one in measured):
        for stage in STAGES:
            of = [one for one in measured if (one.dtype, one.stage) == (dtype, stage) and one.side != SAME]
            figures.append(_figure(of))
            spreads.append(_spread(of))
    return Outcome(tuple(figures), tuple(spreads))


def _figure(of: list[Apart]) -> Figure:
    far = max(of, key=lambda one: (one.share, one.most))
    unit = "of the rate" if far.stage == "weights" else "of the largest"
    name = f"bits.{far.dtype}.{far.stage}"
    return Figure(
        name, max(one.most for one in of), unit, f"its tolerance; farthest: {far.side}", far.share, len(of)
    )


def _spread(of: list[Apart]) -> Spread:
    return spread(f"{of[0].dtype} {of[0].stage}", "of its tolerance", [one.share for one in of])
