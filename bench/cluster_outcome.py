"""The results of the benchmark of several hosts, as figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rollbook.bench.figure import Figure, Outcome, Spread, quantile, spread

OBJECTS, NATS = "objects", "nats"


@dataclass(frozen=True, slots=True)
class Lap:
    """Turns a second of a proxy, and CPU milliseconds of it a turn."""

    turns_per_s: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Rounds:
    """What rounds of faults over a medium have shown."""

    medium: str
    ack: str
    count: int
    replies: int
    apart: bool
    lost: int
    doubled: int
    changed: int
    lost_with_disks: int
    worst_s: float
    orphaned: int
    wrong: Sequence[str]


@dataclass(slots=True)
class Measured:
    """All of it.

    Attributes:
        local, shipped: laps of a proxy without and with a medium, in turn.
        storage_cores: of the server of object storage, while the second one worked.
        ack_ms: of each append, by the medium's acknowledgement, a list a run.
        visible_ms: medium -> from an event's making until another host's process saw it, a list a run.
        catchup_mb_s: medium -> of a host that joins, a run each.
        adopted_s: until what a dead host had open answered again, a run each.
        more: of other benchmarks of several hosts.
    """

    cores: str
    local: list[Lap] = field(default_factory=list)
    shipped: list[Lap] = field(default_factory=list)
    storage_cores: float = 0.0
    ack_ms: list[list[float]] = field(default_factory=list)
    visible_ms: dict[str, list[list[float]]] = field(default_factory=dict)
    catchup_mb_s: dict[str, list[float]] = field(default_factory=dict)
    adopted_s: list[float] = field(default_factory=list)
    rounds: list[Rounds] = field(default_factory=list)
    more: list[Outcome] = field(default_factory=list)


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    found = [Outcome(tuple(_figures(measured)), tuple(_spreads(measured))), *measured.more]
    return Outcome(
        tuple(figure for one in found for figure in one.figures),
        tuple(line for one in found for line in one.spreads),
    )


def _figures(measured: Measured) -> list[Figure]:
    figures: list[Figure] = []
    if measured.local:
        figures += _proxy(measured)
    if measured.ack_ms:
        figures.append(
            Figure(
                "cluster.ack_p99_ms",
                median(quantile(run, 99) for run in measured.ack_ms),
                "ms",
                f"p50: {median(quantile(run, 50) for run in measured.ack_ms):.1f} ms; three servers of NATS "
                "on this disk, each commit synced; one event of 14 KB at a time",
                None,
                len(measured.ack_ms),
            )
        )
    for medium, runs in measured.visible_ms.items():
        p50 = median(quantile(run, 50) for run in runs)
        figures.append(
            Figure(
                f"cluster.visible_p99_ms.{medium}",
                median(quantile(run, 99) for run in runs),
                "ms",
                f"p50: {p50:.0f} ms; 200 events/s of 14 KB",
                None,
                len(runs),
            )
        )
    for medium, speeds in measured.catchup_mb_s.items():
        figures.append(
            Figure(f"cluster.catchup_mb_s.{medium}", median(speeds), "MB/s", None, None, len(speeds))
        )
    if measured.adopted_s:
        against = f"longest: {max(measured.adopted_s):.1f} s; a lease of 6 s"
        runs_of = len(measured.adopted_s)
        figures.append(Figure("cluster.adopted_s", median(measured.adopted_s), "s", against, None, runs_of))
    return figures + _kept(measured.rounds)


def _proxy(measured: Measured) -> list[Figure]:
    pairs = list(zip(measured.shipped, measured.local, strict=True))
    speed = [ours.turns_per_s / theirs.turns_per_s for ours, theirs in pairs]
    cpu = [ours.cpu_ms / theirs.cpu_ms for ours, theirs in pairs]
    shared = (
        f"{measured.cores}; the storage server took {measured.storage_cores:.2f} of a core beside, "
        "which is not counted"
    )
    without = median(lap.turns_per_s for lap in measured.local)
    without_cpu = median(lap.cpu_ms for lap in measured.local)
    return [
        Figure(
            "cluster.vs_local",
            median(lap.turns_per_s for lap in measured.shipped),
            "turns/s",
            f"without a medium: {without:.0f} turns/s; {shared}",
            median(speed),
            len(pairs),
        ),
        Figure(
            "cluster.cpu",
            median(lap.cpu_ms for lap in measured.shipped),
            "ms/turn",
            f"without a medium: {without_cpu:.2f} ms; {shared}",
            median(cpu),
            len(pairs),
        ),
    ]


def _kept(rounds: Sequence[Rounds]) -> list[Figure]:
    figures = []
    by_name: Mapping[str, Sequence[int]] = {
        "lost": [one.lost for one in rounds],
        "doubled": [one.doubled for one in rounds],
        "changed": [one.changed for one in rounds],
        "wrong": [len(one.wrong) for one in rounds],
    }
    if not rounds:
        return []
    told = "; ".join(
        f"{one.count} rounds over {one.medium}, ack {one.ack}: {one.replies} replies"
        + (f", {one.orphaned} orphaned" if one.orphaned else "")
        + (
            f", {one.lost_with_disks} went with a disk, {one.worst_s:.2f} s old at most"
            if one.lost_with_disks
            else ""
        )
        for one in rounds
    )
    told += "" if rounds[0].apart else "; hosts were folders, as no namespaces could be had"
    wrong = [text for one in rounds for text in one.wrong]
    for name, counts in by_name.items():
        against = "; ".join([told, *wrong[:3]]) if name == "wrong" and wrong else told
        runs = sum(one.count for one in rounds)
        figures.append(Figure(f"cluster.{name}", float(sum(counts)), "", against, None, runs))
    return figures


def _spreads(measured: Measured) -> list[Spread]:
    spreads = []
    if measured.local:
        spreads += [
            spread("without a medium", "turns/s", [lap.turns_per_s for lap in measured.local]),
            spread("shipping to object storage", "turns/s", [lap.turns_per_s for lap in measured.shipped]),
        ]
    spreads += [
        spread(f"visible over {medium}, p99", "ms", [quantile(run, 99) for run in runs])
        for medium, runs in measured.visible_ms.items()
    ]
    if measured.ack_ms:
        spreads.append(spread("acknowledged by NATS, p99", "ms", [quantile(r, 99) for r in measured.ack_ms]))
    spreads += [
        spread(f"catching up over {medium}", "MB/s", speeds)
        for medium, speeds in measured.catchup_mb_s.items()
    ]
    if measured.adopted_s:
        spreads.append(spread("adopted", "s", measured.adopted_s))
    return spreads
