"""The results of the online loop's benchmark, as figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rollbook.bench.figure import Figure, Spread, quantile, spread
from rollbook.bench.loop_kills import Killed
from rollbook.bench.loop_lap import Lap

ON_POLICY, STREAMING, BUDGET, ASYNC = "on-policy", "streaming", "staleness budget", "partial rollout"
NO_ADMISSION = "no admission"
RATIOS = {
    ASYNC: "loop.async_vs_onpolicy",
    STREAMING: "loop.streaming_vs_onpolicy",
    BUDGET: "loop.budget_vs_onpolicy",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs by setting, one a round, and the stores whose processes were killed."""

    laps: Mapping[str, Sequence[Lap]]
    killed: Sequence[Killed]


def figures(measured: Measured) -> Iterator[Figure]:
    """The figures, in the order of their goals."""
    laps = measured.laps
    for name, figure in RATIOS.items():
        if laps.get(name) and laps.get(ON_POLICY):
            ours, theirs = ([lap.turns_per_s for lap in laps[side]] for side in (name, ON_POLICY))
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            against = f"on-policy: {median(theirs):.0f} turns/s"
            yield Figure(figure, median(ours), "turns/s", against, ratio, len(ours))
    every = [lap for side in laps.values() for lap in side]
    admitted = [lap for name in (BUDGET, ASYNC) for lap in laps.get(name, ())]
    if admitted:
        value = _share(admitted)
        yield Figure("loop.dropped_share", value, "of tokens", _otherwise(laps), None, len(admitted))
    if every:
        samples, cuts = sum(len(lap.staleness) for lap in every), sum(lap.cuts for lap in every)
        stale, left = sum(lap.stale for lap in every), sum(lap.unaccounted for lap in every)
        yield Figure("loop.stale", float(stale), "samples", f"{samples} trained", None, len(every))
        yield Figure("loop.unaccounted", float(left), "tokens", f"{cuts} cuts", None, len(every))
    if measured.killed:
        yield _lost_or_doubled(measured.killed)


def _share(laps: Sequence[Lap]) -> float:
    return sum(lap.dropped for lap in laps) / max(sum(lap.generated for lap in laps), 1)


def _otherwise(laps: Mapping[str, Sequence[Lap]]) -> str | None:
    held = laps.get(NO_ADMISSION)
    return f"without admission, oldest first: {_share(held):.3f}" if held else None


def _lost_or_doubled(killed: Sequence[Killed]) -> Figure:
    kills = sum(store_kills.kills for store_kills in killed)
    against = f"{sum(store_kills.samples for store_kills in killed)} samples, {kills} kills"
    wrong = float(sum(len(store_kills.wrong) for store_kills in killed))
    return Figure("loop.lost_or_doubled", wrong, "violations", against, None, kills)


def spreads(measured: Measured) -> Iterator[Spread]:
    """How much the runs vary, where a step's time went, and which processes were killed when."""
    for name, laps in measured.laps.items():
        if not laps:
            continue
        yield spread(f"{name}: turns", "1/s", [lap.turns_per_s for lap in laps])
        for what in ("wait_s", "step_s", "sync_s"):
            values = [value for lap in laps for value in getattr(lap, what)]
            if values:
                yield spread(f"{name}: {what.removesuffix('_s')}", "s", values)
        ages = [age for lap in laps for age in lap.staleness]
        middle = float(quantile(ages, 50))
        yield Spread(f"{name}: staleness", "versions", float(min(ages)), middle, float(max(ages)))
        yield spread(f"{name}: dropped for age", "%", [100 * lap.dropped_share for lap in laps])
    if measured.killed:
        yield from _kills(measured.killed)


def _kills(killed: Sequence[Killed]) -> Iterator[Spread]:
    when = sum((store_kills.when for store_kills in killed), Counter[tuple[str, str]]())
    for (who, after), count in sorted(when.items()):
        yield _one(f"kills: {who}, {after}", "kills", count)
    for what in ("answered", "repeats", "steps", "ends"):
        yield spread(
            f"a store of kills: {what}", "", [float(getattr(store_kills, what)) for store_kills in killed]
        )
    yield spread("a store of kills: time", "s", [store_kills.seconds for store_kills in killed])


def _one(what: str, unit: str, count: int) -> Spread:
    return Spread(what, unit, float(count), float(count), float(count))
