"""The results of the sync's benchmark, as figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from rollbook.bench.figure import Figure, Spread, spread
from rollbook.bench.rounds import Laps, walls
from rollbook.bench.sync_spans import Labelled

BYTES, DISK, TENSOR, DISTRIBUTED = "bytes", "disk", "tensor", "distributed"
MB = 1e6


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a sync's parts.

    Attributes:
        before: until the engine is asked to pause: a checkpoint, a digest, what it holds.
        transfer: from its pause until it has all tensors and its cache is flushed.
        verify: until its checksums are there and compared.
        paused: from its pause until it goes on.
    """

    before: float
    transfer: float
    verify: float
    paused: float

    @classmethod
    def of(cls, begun: float, laps: Sequence[tuple[str, float, float]]) -> Self:
        """From the times at which each route was called and answered."""
        asked = {route: start for route, start, _ in laps}  # the last of each
        answered = {route: end for route, _, end in laps}
        pause, checked = asked["/pause_generation"], asked["/weights_checker"]
        relabelled, ended = asked["/update_weight_version"], answered["/continue_generation"]
        return cls(pause - begun, checked - pause, relabelled - checked, ended - pause)


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured.

    Attributes:
        laps: of each side, one a round.
        parts: transport -> of each counted sync.
        bytes: of all weights.
        differences: the largest logprob difference after each sync.
    """

    laps: Laps
    parts: Mapping[str, Sequence[Parts]]
    bytes: int
    differences: Sequence[float]
    labelled: Labelled


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def figures(measured: Measured) -> tuple[Figure, ...]:
    """The figures that have goals."""
    seconds = {side: walls(laps) for side, laps in measured.laps.items()}
    rounds, count = len(seconds[DISK]), len(measured.differences)
    against = {DISK: (BYTES, "sync.disk_vs_bytes", "writing, syncing and reading the bytes")}
    against |= {name: (DISK, f"sync.{name}_vs_disk", "disk") for name in (TENSOR, DISTRIBUTED)}
    timed = tuple(
        Figure(
            *(figure, median(seconds[side]), "s"),
            f"{what}: {median(seconds[other]):.2f} s",
            _ratio(seconds[side], seconds[other]),
            rounds,
        )
        for side, (other, figure, what) in against.items()
    )
    labelled = measured.labelled
    exact = Figure(
        *("sync.max_abs_logprob_diff", max(measured.differences), "nat"),
        *("the trainer's own forward, after each verified sync", None, count),
    )
    wrong = Figure(
        *("sync.mislabelled_tokens", labelled.wrong, "tokens"),
        f"{labelled.tokens} tokens made during {labelled.updates} updates",
        None,
        labelled.updates,
    )
    return exact, *timed, wrong


def spreads(measured: Measured) -> tuple[Spread, ...]:
    """Seconds and rates of each part."""
    size = measured.bytes / MB
    shown = [spread("bytes, whole", "s", walls(measured.laps[BYTES]))]
    for name, parts in measured.parts.items():
        whole = walls(measured.laps[name])
        shown += [spread(f"{name}, whole", "s", whole)]
        shown += [spread(f"{name}, whole", "MB/s", [size / s for s in whole])]
        for part in ("before", "transfer", "verify"):
            values = [float(getattr(lap_parts, part)) for lap_parts in parts]
            shown.append(spread(f"{name}, {part}", "s", values))
        shown.append(spread(f"{name}, transfer", "MB/s", [size / lap_parts.transfer for lap_parts in parts]))
        shown.append(spread(f"{name}, engine paused", "s", [lap_parts.paused for lap_parts in parts]))
    shown.append(spread("logprob difference", "1e-6 nat", [1e6 * d for d in measured.differences]))
    return tuple(shown)
