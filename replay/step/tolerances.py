"""How near a stage comes where bits are not promised, and whether two sets of numbers are that near,
also counted in units in the last place. Pure.

Stated for a step that begins with the recorded weights and optimizer: where these differ, so may
all else.

`rollbook bench bits` measures how far results lie apart with other instructions
(`ATEN_CPU_CAPABILITY=default`, `MKL_CBWR=COMPATIBLE`, `ONEDNN_MAX_CPU_ISA=SSE41`), two threads, and
other micro-batches, for a Qwen3 of 2 million parameters. The largest differences that it found, in
float32 and in bfloat16, relative to the largest number of each stage: logprobs 2e-7 and 5e-4;
losses 9.3e-7 and 3.3e-3; gradients 5e-7 and 4.9e-3; moments 5.1e-7 and 5e-3; metrics, relative to
their own values, 5.3e-7 and 5.5e-4; weights, relative to the learning rate, 0.034 and 2.2, as root
mean square 5.3e-5 and 0.067. Tolerances allow some ten times that, since models are larger, and for
weights what a step of Adam may do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Verdict = Literal["equal", "equal within", "differs"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far each number of a stage may be off, and still count as equal within it: the sum of these
    terms.

    Attributes:
        why: how the numbers come about.
        rtol: of the recorded number itself.
        atol: for every number.
        of_largest: of the largest recorded number of the set.
        of_rate: of the step's learning rate.
        typical: the most that all numbers together may use of what they may be off, as root mean
            square; less than 1 where few may be far off.
    """

    why: str
    rtol: float = 0.0
    atol: float = 0.0
    of_largest: float = 0.0
    of_rate: float = 0.0
    typical: float = 1.0

    @property
    def exact(self) -> bool:
        """Whether nothing but the same bits will do."""
        return not (self.rtol or self.atol or self.of_largest or self.of_rate)

    def __str__(self) -> str:
        terms = {"rate": self.of_rate, "largest": self.of_largest, "own": self.rtol}
        parts = [f"{name} x {share:g}" for name, share in terms.items() if share]
        return " + ".join([*parts, f"{self.atol:g}"] if self.atol else parts)


_KEPT = Tolerance("kept: by the log, a checkpoint or the step before")
_PURE = Tolerance(
    "float64 of numpy in a fixed order, by + - * / and roots, which every processor rounds alike"
)
_FORWARD = Tolerance("a forward pass: products of matrices add up in the order of the instructions at hand")
_BACKWARD = Tolerance("a backward pass, over the same products")
_DERIVED = Tolerance(
    "float64 of numpy, of numbers that a forward pass gave; not measured but reckoned from these"
)
_STEP = Tolerance(
    "a step of Adam moves a number by about the rate whichever sign its gradient has: where that is near 0, "
    "by a rate in either direction",
    of_rate=2.5,
    typical=0.02,
)

TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("input_weights", "input_optimizer", "reference_weights", "critic_input_weights"),
                *("critic_input_optimizer", "rng", "samples", "routed_experts", "old_logprobs", "rewards"),
                "margins",
            ),
            _KEPT,
        ),
        **dict.fromkeys(("advantages", "returns"), _PURE),
        **dict.fromkeys(
            ("proximal_logprobs", "reference_logprobs", "values", "logprobs", "scores", "batch_score"),
            replace(_FORWARD, of_largest=1e-5, atol=1e-6),
        ),
        "importance_weights": replace(_DERIVED, rtol=2e-4),
        **dict.fromkeys(("losses", "value_losses"), replace(_FORWARD, of_largest=2e-5, atol=1e-5)),
        **dict.fromkeys(("gradients", "critic_gradients"), replace(_BACKWARD, of_largest=2e-5)),
        **dict.fromkeys(("optimizer", "critic_optimizer"), replace(_BACKWARD, of_largest=5e-5)),
        **dict.fromkeys(("weights", "critic_weights"), replace(_STEP, rtol=2.4e-7)),
        "metrics": replace(_FORWARD, rtol=2e-5, atol=1e-5),
    }
)
"""Stage -> tolerance, where weights and activations are float32; `metrics` are those of the step."""
NARROW: Mapping[str, Tolerance] = MappingProxyType(
    {
        **TOLERANCES,
        **dict.fromkeys(
            ("proximal_logprobs", "reference_logprobs", "values", "logprobs", "scores", "batch_score"),
            replace(_FORWARD, of_largest=5e-3, atol=1e-3),
        ),
        "importance_weights": replace(_DERIVED, rtol=0.1),
        **dict.fromkeys(("losses", "value_losses"), replace(_FORWARD, of_largest=3e-2, atol=5e-3)),
        **dict.fromkeys(("gradients", "critic_gradients"), replace(_BACKWARD, of_largest=5e-2)),
        **dict.fromkeys(("optimizer", "critic_optimizer"), replace(_BACKWARD, of_largest=0.1)),
        **dict.fromkeys(("weights", "critic_weights"), replace(_STEP, rtol=2**-7, typical=0.1)),
        "metrics": replace(_FORWARD, rtol=1e-2, atol=1e-3),
    }
)
"""The same where they are bfloat16."""

_WHOLE = ("values", "reference_logprobs", "proximal_logprobs", "importance_weights")
"""Stages of forward passes that advantages may be made of."""
_FIELDS = ("optimizer", "critic_optimizer")
"""Stages of several kinds of numbers, told apart by the end of their names; each is compared for itself."""
_OF_WEIGHTS = ("input_weights", "reference_weights", "critic_input_weights", "weights", "critic_weights")
"""Stages whose numbers are of the type of the weights; all others are float32 or float64."""
_WEIGHTS = "main"
"""The kind that is weights: those in float32, beside narrower ones."""
_ORDER: tuple[Verdict, ...] = ("equal", "equal within", "differs")


@dataclass(frozen=True, slots=True)
class Worst:
    """The number that uses most of what it may be off.

    Attributes:
        name, index: its array, and where in it.
        recorded, replayed: both values.
        ulps: units in the last place between them; None for integers and booleans.
        share: of what it may be off; infinite where it may not be off at all.
    """

    name: str
    index: tuple[int, ...]
    recorded: float
    replayed: float
    ulps: int | None
    share: float

    def __str__(self) -> str:
        where = f"{self.name}[{', '.join(map(str, self.index))}]" if self.index else self.name
        apart = "" if self.ulps is None else f", {self.ulps} ulp apart"
        return f"{where}: recorded {self.recorded!r}, found {self.replayed!r}{apart}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two sets of arrays compare.

    Attributes:
        verdict: `equal` bit for bit, `equal within` a tolerance, or `differs`.
        worst: the number that is off most, if any bits are not the same.
        unlike: why the sets cannot be compared number by number: names, shapes or types; else empty.
    """

    verdict: Verdict
    worst: Worst | None = None
    unlike: str = ""


def tolerance_of(stage: str, stages: Collection[str] = (), dtype: str = "float32") -> Tolerance:
    """The tolerance of a stage; an unknown stage has to be the same.

    Args:
        stages: those of its step: advantages are exact unless a model's numbers went into them.
        dtype: of the step's weights and activations.
    """
    table = TOLERANCES if dtype == "float32" else NARROW
    tolerance = table.get(stage, _KEPT)
    if stage in ("advantages", "returns") and not set(_WHOLE).isdisjoint(stages):
        largest = max(table[name].of_largest for name in _WHOLE)
        return replace(_DERIVED, of_largest=10 * largest)
    return tolerance


def compare_stage(
    stage: str,
    recorded: Arrays,
    replayed: Arrays,
    *,
    stages: Collection[str] = (),
    dtype: str = "float32",
    rate: float = 0.0,
) -> Comparison:
    """Compare what a stage was with what it is now. Arguments as of `tolerance_of` and `compare`."""
    if stage not in _FIELDS:
        held = dtype if stage in _OF_WEIGHTS else None
        return compare(recorded, replayed, tolerance_of(stage, stages, dtype), rate=rate, dtype=held)
    results = []
    for field in sorted({_field(name) for name in (*recorded, *replayed)}):
        before, now = (
            {n: a for n, a in arrays.items() if _field(n) == field} for arrays in (recorded, replayed)
        )
        tolerance = tolerance_of("weights" if field == _WEIGHTS else stage, stages, dtype)
        if field == _WEIGHTS:
            tolerance = replace(tolerance, rtol=TOLERANCES["weights"].rtol)
        results.append(compare(before, now, tolerance, rate=rate))
    return max(results, key=_rank, default=Comparison("equal"))


def _field(name: str) -> str:
    return name.rpartition(".")[2]


def _rank(comparison: Comparison) -> tuple[int, float]:
    return _ORDER.index(comparison.verdict), comparison.worst.share if comparison.worst is not None else 0.0


def compare(
    recorded: Arrays, replayed: Arrays, tolerance: Tolerance, *, rate: float = 0.0, dtype: str | None = None
) -> Comparison:
    """Compare two sets of named arrays.

    Args:
        rate: the step's learning rate.
        dtype: type in which distances are counted: `bfloat16` where float32 arrays hold such numbers;
            None: the arrays' own.
    """
    unlike = _unlike(recorded, replayed)
    if unlike:
        return Comparison("differs", unlike=unlike)
    largest = max((_largest(array) for array in recorded.values()), default=0.0)
    worst: Worst | None = None
    squares, count = 0.0, 0
    for name, array in recorded.items():
        count += array.size
        if np.array_equal(_bytes(array), _bytes(replayed[name])):
            continue
        shares = _shares(array, replayed[name], tolerance, largest, rate)
        with np.errstate(over="ignore"):  # it is far off then in any case
            squares += float(np.square(shares).sum())
        candidate = _worst_of(name, array, replayed[name], shares, dtype)
        if worst is None or candidate.share > worst.share:
            worst = candidate
    if worst is None:
        return Comparison("equal")
    within = not tolerance.exact and worst.share <= 1 and squares <= tolerance.typical**2 * count
    return Comparison("equal within" if within else "differs", worst)


def _unlike(recorded: Arrays, replayed: Arrays) -> str:
    """Why two sets cannot be compared number by number; empty if they can."""
    if recorded.keys() != replayed.keys():
        return f"in one of both alone: {', '.join(_few(recorded.keys() ^ replayed.keys()))}"
    for name, array in recorded.items():
        other = replayed[name]
        if (array.dtype, array.shape) != (other.dtype, other.shape):
            return f"{name}: recorded {array.dtype} {array.shape}, found {other.dtype} {other.shape}"
    return ""


def _few(names: Iterable[str]) -> list[str]:
    listed = sorted(names)
    return [*listed[:3], f"and {len(listed) - 3} more"] if len(listed) > 3 else listed


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _largest(array: Array) -> float:
    """The largest number of an array, whatever its sign; 0 where none is finite."""
    return float(np.abs(array, where=np.isfinite(array), out=np.zeros(array.shape)).max(initial=0.0))


def _shares(recorded: Array, replayed: Array, tolerance: Tolerance, largest: float, rate: float) -> Array:
    """For each number, how much it uses of what it may be off; 0 for equal ones, float64."""
    before, now = recorded.astype(np.float64), replayed.astype(np.float64)
    may = tolerance.atol + tolerance.of_largest * largest + tolerance.of_rate * rate
    with np.errstate(all="ignore"):
        shares = np.abs(before - now) / (may + tolerance.rtol * np.abs(before))
    same = (before == now) | (np.isnan(before) & np.isnan(now))
    return np.where(same, 0.0, np.where(np.isfinite(before) & np.isfinite(now), shares, np.inf))


def _worst_of(name: str, recorded: Array, replayed: Array, shares: Array, dtype: str | None) -> Worst:
    at = np.unravel_index(int(shares.argmax()), shares.shape)
    before, now = recorded[at], replayed[at]
    apart = None
    if np.issubdtype(recorded.dtype, np.floating):
        apart = int(ulps(np.asarray(before), np.asarray(now), dtype))
    return Worst(name, tuple(map(int, at)), float(before), float(now), apart, float(shares[at]))


Floats = npt.NDArray[np.floating[Any]]
Ulps = npt.NDArray[np.uint64]

NEVER = 2**64 - 1
"""The distance of a number from what is none (NaN)."""

_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


def ulps(left: Floats, right: Floats, dtype: str | None = None) -> Ulps:
    """How many steps from one number to the next each pair lies apart; uint64, in the arrays' shape.

    0.0 and -0.0 are one number, and so are all NaN. Infinity is the number after the largest.

    Args:
        left, right: arrays of one shape and type.
        dtype: float64, float32, float16 or bfloat16; None: the arrays' own. Numbers of bfloat16 come as
            float32, which has all of them.

    Raises:
        ValueError: the arrays have two types or shapes, or a type that is none of these.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        raise ValueError(
            f"{left.dtype} {left.shape} and {right.dtype} {right.shape} are not compared number by number"
        )
    name = dtype or str(left.dtype)
    if name not in _BITS or (name if name != "bfloat16" else "float32") != str(left.dtype):
        raise ValueError(f"no distance in {name} of arrays of {left.dtype}: choose of {', '.join(_BITS)}")
    first, second = _places(left, name), _places(right, name)
    apart = np.where(first > second, first - second, second - first)
    missing = np.isnan(left), np.isnan(right)
    apart[missing[0] != missing[1]] = NEVER
    apart[missing[0] & missing[1]] = 0
    return apart


def _places(values: Floats, name: str) -> Ulps:
    """The place of each value in the order of all numbers of the type, from the lowest on."""
    width = values.dtype.itemsize * 8
    bits = np.ascontiguousarray(values).view(f"u{width // 8}").astype(np.uint64)
    bits >>= np.uint64(width - _BITS[name])
    half = np.uint64(1 << (_BITS[name] - 1))
    return np.where(bits >= half, half - (bits - half), half + bits).reshape(values.shape)
