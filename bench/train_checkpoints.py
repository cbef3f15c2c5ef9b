"""How long checkpoints delay a training over ranks, and how soon it resumes on another layout.

A training of the 105M model on two ranks that shard matrices writes checkpoints in each way, in
turns. It continues from the last one; so does a training on one rank, which must reach the same
result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from safetensors.torch import load_file

from rollbook.bench.checkpoint_sides import WAYS
from rollbook.bench.figure import Figure, Spread, spread
from rollbook.bench.processes import BenchError, Process, module, some_cores
from rollbook.bench.rounds import order

SAME = 1e-6
"""By how much layouts may differ in the next step's loss and gradient norm (relative) and in weights."""
WHOLE, OVERLAPPED, SHARDED, BOTH = WAYS


@dataclass(frozen=True, slots=True)
class CheckpointLaps:
    """What was measured.

    Attributes:
        held: seconds that checkpoints held training up, by way of writing, round by round.
        resume_s: until a process on one rank is ready to go on from a checkpoint of two; begin_s: until one
            on two ranks is ready to begin with the model.
        apart: the largest difference of a weight after the next step.
    """

    held: dict[str, list[float]] = field(default_factory=dict)
    resume_s: float = 0.0
    begin_s: float = 0.0
    apart: float = 0.0


def run_checkpoints(folder: Path, model: Path, rounds: int, on_round: Callable[[], None]) -> CheckpointLaps:
    """Write checkpoints in turns, and resume from one.

    Raises:
        BenchError: a process failed, or the layouts' next steps differ.
    """
    held: dict[str, list[float]] = {way: [] for way in WAYS}
    begun = time.perf_counter()
    with _side("two", 2, model, folder) as two_ranks:
        two_ranks.ask(do="begin")
        begin_s = time.perf_counter() - begun
        two_ranks.ask(do="step")
        for number in range(rounds):
            for way in order(list(WAYS), number):
                answer = two_ranks.ask(do="write", way=way)
                held[way].append(answer["seconds"])
                two_ranks.ask(do="remove", path=answer["path"])
            on_round()
        path = two_ranks.ask(do="write", way=SHARDED)["path"]
        first = two_ranks.ask(do="step")
        two_ranks.ask(do="save", to=str(folder / "two.safetensors"))
    begun = time.perf_counter()
    with _side("one", 1, model, folder) as one_rank:
        one_rank.ask(do="resume", path=path)
        resume_s = time.perf_counter() - begun
        second = one_rank.ask(do="step")
        one_rank.ask(do="save", to=str(folder / "one.safetensors"))
    for name, value in first.items():
        if abs(second[name] - value) > SAME * abs(value):
            raise BenchError(f"the next step's {name} is {second[name]} on one rank, on two {value}")
    return CheckpointLaps(held, resume_s, begin_s, _apart(folder))


def _side(name: str, count: int, model: Path, folder: Path) -> Process:
    place = folder / f"checkpoints-{name}"
    place.mkdir()
    words = module("rollbook.bench.checkpoint_sides", str(count), model, place)
    return Process(name, words, folder, some_cores(2))


def _apart(folder: Path) -> float:
    """The largest difference of a weight.

    Raises:
        BenchError: it is too large.
    """
    single, sharded = (load_file(folder / f"{name}.safetensors") for name in ("one", "two"))
    largest = max(float((tensor - sharded[name]).abs().max()) for name, tensor in single.items())
    if largest > SAME or single.keys() != sharded.keys():
        raise BenchError(f"after the next step a weight on one rank differs from that on two by {largest:g}")
    return largest


def checkpoint_figures(laps: CheckpointLaps) -> list[Figure]:
    """How long a checkpoint delays training, compared with the plain way; how soon another layout
    resumes."""
    if not laps.held:
        return []
    middle = {way: median(seconds) for way, seconds in laps.held.items()}
    against = f"{WHOLE}: {middle[WHOLE]:.2f} s"
    names = {OVERLAPPED: "train.checkpoint_held_overlap_s", BOTH: "train.checkpoint_held_s"}
    rounds = len(laps.held[WHOLE])
    going_on = (
        f"tensor 2 to 1 rank; beginning on tensor 2: {laps.begin_s:.1f} s; weights {laps.apart:.1g} apart"
    )
    return [
        *(
            Figure(name, middle[way], "s", against, _part(laps.held[way], laps.held[WHOLE]), rounds)
            for way, name in names.items()
        ),
        Figure("train.resume_s", laps.resume_s, "s", going_on, None, 1),
    ]


def _part(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def checkpoint_spreads(laps: CheckpointLaps) -> list[Spread]:
    """How much the rounds vary."""
    return [spread(f"checkpoint, {way}", "s held", seconds) for way, seconds in laps.held.items()]
