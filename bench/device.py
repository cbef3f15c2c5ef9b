"""`device.*`: what a training step and its record cost on a GPU, or where there is none on the CPU.

The trainer's step, with and without what it records, takes turns with a plain loop over the same model in
transformers, and with products of matrices, whose rate is the device's own limit; a digest of a step's state
takes turns with reading its memory. All of it ends within ten minutes: a size that does not fit into them,
or into the device's memory, is left out, and a figure says why.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

from rollbook.bench.device_side import DIGEST, MODEL, NAME, PRODUCT, READ, product_flops
from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.processes import BenchError, Process, module, some_cores
from rollbook.bench.rounds import order, times_faster
from rollbook.bench.train_sides import (
    BARE,
    OURS,
    PLAIN_PACKED,
    SMALL,
    Size,
    best_attention,
    samples,
)
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.select.samples import Sample

TRAINERS = (PLAIN_PACKED, BARE, OURS)
CLOSE = {"float32": 1e-3, "bfloat16": 0.05}
"""By how much the first losses may differ: they are of the same samples and weights."""
VOCAB = 32_768
LATE = "no time was left"


@dataclass(frozen=True, slots=True)
class Course:
    """A size, and how it is measured.

    Attributes:
        name: of its figures.
        rounds: in which each side takes a step that counts.
        samples: of a step.
        most: tokens of a micro-batch.
    """

    name: str
    size: Size
    rounds: int
    samples: int = 32
    most: int = 2048


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and what is measured there.

    Attributes:
        kind: torch's.
        dtype: of weights and activations.
        floats: that are digested.
        cores: that each side may use.
    """

    kind: str
    dtype: str
    courses: tuple[Course, ...]
    floats: int
    cores: int


CPU = Device("cpu", "float32", (Course("6m", SMALL, 3),), 1 << 26, 2)
CUDA = Device(
    "cuda",
    "bfloat16",
    (
        Course("100m", Size(768, 12, 12, VOCAB), 7, 128, 16_384),
        Course("500m", Size(1536, 14, 12, VOCAB), 5, 128, 16_384),
        Course("1500m", Size(2048, 24, 16, VOCAB), 3, 128, 8192),
    ),
    1_500_000_000,
    16,
)


def device_here() -> Device:
    """The GPU, if there is one."""
    import torch

    return CUDA if torch.cuda.is_available() else CPU


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and within how many seconds."""

    device: Device = field(default_factory=device_here)
    digest_rounds: int = 5
    seconds: float = 540.0

    @property
    def steps(self) -> int:
        """All rounds, each with one that warms up."""
        courses = sum(course.rounds + 1 for course in self.device.courses)
        return courses + self.digest_rounds + 1


@dataclass(frozen=True, slots=True)
class Laps:
    """What the sides took for a size.

    Attributes:
        trained, flops: trained tokens of a step, and its floating-point operations.
        seconds: of each side's turns, round by round.
        manifest: of those of `OURS`, for what it records.
    """

    trained: int
    flops: int
    seconds: dict[str, list[float]]
    manifest: list[float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        name: of the device.
        digests: seconds of digesting and reading, round by round.
        left_out: size -> why it was not measured.
    """

    device: Device
    name: str
    digests: dict[str, list[float]]
    laps: dict[str, Laps]
    left_out: dict[str, str]


def step_flops(shape: ModelShape, batch: Sequence[Sample]) -> int:
    """Floating-point operations of a step, as if each token's outputs were needed: 6 for each weight and
    token, 2 of them forward (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), and those of attention,
    which is causal (`ModelShape.work`)."""
    return 3 * sum(shape.work(len(sample)) for sample in batch)


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Digest, then take steps, size by size.

    Raises:
        BenchError: a digest failed, or all sizes did.
    """
    device, until = plan.device, time.monotonic() + plan.seconds
    with Process(DIGEST, _words(DIGEST, device), folder, some_cores(device.cores)) as side:
        measured = Measured(device, side.ask(what=NAME), {}, {}, {})
        _digest(side, plan, measured.digests, on_round)
    for course in device.courses:
        try:
            measured.laps[course.name] = _laps(folder, device, course, until, on_round)
        except BenchError as error:
            measured.left_out[course.name] = LATE if time.monotonic() >= until else _reason(error)
    if not measured.laps:
        raise BenchError("\n".join(f"{name}: {why}" for name, why in measured.left_out.items()))
    return measured


def _reason(error: BenchError) -> str:
    """Which side failed, and the last line that it wrote."""
    first, *rest = str(error).splitlines()
    return f"{first}: {rest[-1]}" if rest else first


def _digest(side: Process, plan: Plan, digests: dict[str, list[float]], on_round: Callable[[], None]) -> None:
    for number in range(-1, plan.digest_rounds):  # the first one warms up
        for what in order((DIGEST, READ), max(number, 0)):
            seconds = side.ask(what=what, floats=plan.device.floats)["seconds"]
            if number >= 0:
                digests.setdefault(what, []).append(seconds)
        on_round()


def _laps(folder: Path, device: Device, course: Course, until: float, on_round: Callable[[], None]) -> Laps:
    """Take turns with a size.

    Raises:
        BenchError: a side failed, its loss is another one, or no time is left.
    """
    model, batch, sides = folder / course.name, samples(course.samples), dict[str, Process]()
    with ExitStack() as stack:
        stack.enter_context(_ended_at(until, sides))
        losses: dict[str, float] = {}
        for name in (PRODUCT, *TRAINERS):
            if time.monotonic() >= until:
                raise BenchError(LATE)
            words = _words(name, device, model, course)
            sides[name] = stack.enter_context(Process(name, words, folder, some_cores(device.cores)))
            if name == PRODUCT:
                sides[name].ask(what=MODEL, folder=str(model), size=asdict(course.size))
            first = _turn(sides[name])
            losses |= {name: first["loss"]} if name != PRODUCT else {}
        check_losses(losses, CLOSE[device.dtype])
        on_round()
        trained = sum(sample.trained for sample in batch)
        laps = Laps(trained, step_flops(read_shape(model), batch), {name: [] for name in sides}, [])
        _take_turns(sides, course.rounds, until, laps, on_round)
    return laps


def _take_turns(
    sides: Mapping[str, Process], rounds: int, until: float, laps: Laps, on_round: Callable[[], None]
) -> None:
    """Turns of all, as many rounds as there is time for; one at least.

    Raises:
        BenchError: a side failed.
    """
    for number in range(rounds):
        answers: dict[str, Any] = {}
        try:
            for name in order(list(sides), number):
                sides[name].ask(what=PRODUCT)  # memory that others had meanwhile comes back slowly
                answers[name] = _turn(sides[name])
        except BenchError:
            if number and time.monotonic() >= until:
                return
            raise
        for name, answer in answers.items():
            laps.seconds[name].append(answer["seconds"])
        laps.manifest.append(answers[OURS]["manifest"])
        on_round()


def _turn(side: Process) -> Any:
    """A step, or products, after which the memory is others'."""
    return side.ask(what=PRODUCT, rest=True)


@contextlib.contextmanager
def _ended_at(until: float, sides: Mapping[str, Process]) -> Iterator[None]:
    """A context at whose time all sides are ended, whatever they do: who waits for one is told so."""

    def end() -> None:
        for side in list(sides.values()):
            side.child.kill()

    timer = Timer(max(until - time.monotonic(), 0), end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_losses(losses: Mapping[str, float], close: float) -> None:
    """Check that all sides do the same work.

    Raises:
        BenchError: a loss is another one.
    """
    wanted = losses[PLAIN_PACKED]
    for name, loss in losses.items():
        if not abs(loss - wanted) <= close:
            raise BenchError(f"{name}: its first loss is {loss}, that of {PLAIN_PACKED} {wanted}")


def _words(side: str, device: Device, model: Path | None = None, course: Course | None = None) -> list[str]:
    if side not in TRAINERS:
        return module("rollbook.bench.device_side", device.kind, device.dtype)
    assert course is not None
    how = (device.kind, device.dtype, course.samples, course.most)
    return module("rollbook.bench.train_sides", side, str(model), *how)


def outcome(measured: Measured) -> Outcome:
    """Speeds as ratios of rounds."""
    device, digests = measured.device, measured.digests
    products = [s for laps in measured.laps.values() for s in laps.seconds[PRODUCT]]
    rate = product_flops(device.kind) / median(products) / 1e12
    gb = {what: 4e-9 * device.floats / median(seconds) for what, seconds in digests.items()}
    why = "; ".join(f"{name}: {reason}" for name, reason in measured.left_out.items())
    sizes = (figure for course in measured.laps for figure in _figures(measured, course))
    laps_of = {
        f"{name}_{course}": s for course, laps in measured.laps.items() for name, s in laps.seconds.items()
    }
    return Outcome(
        (
            Figure(
                "device.product", rate, "TFLOP/s", f"{measured.name}: {device.dtype}", None, len(products)
            ),
            *sizes,
            Figure(
                *("device.digest", gb[DIGEST], "GB/s", f"reading: {gb[READ]:.1f} GB/s"),
                *(times_faster(digests[DIGEST], digests[READ]), len(digests[DIGEST])),
            ),
            Figure("device.left_out", len(measured.left_out), "sizes", why or None, None, 1),
        ),
        tuple(spread(name, "s", seconds) for name, seconds in (laps_of | digests).items()),
    )


def _figures(measured: Measured, course: str) -> list[Figure]:
    """The figures of a size."""
    laps, device = measured.laps[course], measured.device
    seconds, rounds = laps.seconds, len(laps.manifest)
    rate = {name: laps.trained / median(s) for name, s in seconds.items()}
    share = median(part / whole for part, whole in zip(laps.manifest, seconds[OURS], strict=True))
    used = [laps.flops / s for s in seconds[OURS]]
    limit = [product_flops(device.kind) / s for s in seconds[PRODUCT]]
    peer = f"{PLAIN_PACKED}, {best_attention(device.kind)}: {rate[PLAIN_PACKED]:.0f} tokens/s"
    product = f"a product of {device.dtype}: {median(limit) / 1e12:.2f} TFLOP/s"
    speed = "trained tokens/s"
    return [
        Figure(
            *(f"device.train_vs_transformers_{course}", rate[BARE], speed, peer),
            *(times_faster(seconds[BARE], seconds[PLAIN_PACKED]), rounds),
        ),
        Figure(
            *(f"device.recorded_{course}", rate[OURS], speed, f"{BARE}: {rate[BARE]:.0f} tokens/s"),
            *(times_faster(seconds[OURS], seconds[BARE]), rounds),
        ),
        Figure(f"device.replayability_share_{course}", share, "share of a step", OURS, None, rounds),
        Figure(
            *(f"device.flops_used_{course}", median(used) / 1e12, "TFLOP/s", product),
            *(median(flops / most for flops, most in zip(used, limit, strict=True)), rounds),
        ),
    ]
