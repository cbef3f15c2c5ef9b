"""`bits.*`: how far a step's stages lie apart where bits are not promised, and how much of that is tolerated.

The same step is taken by processes that differ in one thing each: instructions, threads, micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollbook.bench.bits_side import LR, Way
from rollbook.bench.figure import Figure, Outcome, Spread, spread
from rollbook.bench.processes import BenchError, Process, module, some_cores
from rollbook.bench.train_sides import make_model
from rollbook.replay.tolerances import Comparison, compare_stage

DTYPES = ("float32", "bfloat16")
SAME = "the same again"
STAGES = ("advantages", "logprobs", "losses", "gradients", "optimizer", "weights", "metrics")

Arrays = dict[str, npt.NDArray[np.floating]]


@dataclass(frozen=True, slots=True)
class Side:
    """What one process has otherwise: variables, and how it computes."""

    variables: Mapping[str, str] = field(default_factory=dict)
    way: Way = field(default_factory=Way)


SIDES = {
    SAME: Side(),
    "ATen without vector instructions": Side({"ATEN_CPU_CAPABILITY": "default"}),
    "MKL's compatible code": Side({"MKL_CBWR": "COMPATIBLE"}),
    "oneDNN with SSE4.1": Side({"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    "two threads": Side(way=Way(threads=2)),
    "a sample at a time": Side(way=Way(rows=1)),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Which types of weights, and what they are held against."""

    dtypes: tuple[str, ...] = DTYPES
    sides: tuple[str, ...] = tuple(SIDES)

    @property
    def steps(self) -> int:
        """How many processes take steps."""
        return len(self.dtypes) * (len(self.sides) + 1)


@dataclass(frozen=True, slots=True)
class Apart:
    """How far a stage of a side lies from the same stage as it is without.

    Attributes:
        most: the greatest distance: of the largest number of its kind, or of the learning rate, of weights.
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
    model = folder / "model"
    make_model(model)
    found = []
    for dtype in plan.dtypes:
        recorded = _steps(folder, model, Side(), dtype)
        on_round()
        for name in plan.sides:
            now = _steps(folder, model, SIDES[name], dtype)
            found += [_apart(dtype, name, stage, recorded, now) for stage in STAGES]
            on_round()
    changed = [one.stage for one in found if one.side == SAME and one.found.verdict != "equal"]
    if changed:
        raise BenchError(f"the same step came out in two ways: {', '.join(changed)}")
    return found


def _steps(folder: Path, model: Path, side: Side, dtype: str) -> Arrays:
    file, way = folder / "side.npz", replace(side.way, dtype=dtype)
    words = module("rollbook.bench.bits_side", model, file, way.dtype, way.threads, way.rows)
    with Process("bits", words, folder, some_cores(2), side.variables) as process:
        process.ask()
    with np.load(file) as held:
        return dict(held)


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
        kind = name.rpartition(".")[2] if stage == "optimizer" else ""
        apart, largest = kinds.get(kind, (0.0, 0.0))
        apart = max(apart, float(np.abs(array - other[name]).max(initial=0.0)))
        kinds[kind] = apart, max(largest, float(np.abs(array).max(initial=0.0)))
    return [
        apart / (LR if stage == "weights" or kind == "main" else largest or 1.0)
        for kind, (apart, largest) in kinds.items()
    ]


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
