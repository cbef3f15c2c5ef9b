"""The results of the proxy's benchmark, as figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rollbook.bench.figure import Figure, Spread, quantile, spread
from rollbook.bench.load_generator import ECHO
from rollbook.bench.proxy_workers import WorkersLap, workers_figures, workers_spreads

PROXY, STREAM, LITELLM = "proxy", "stream", "litellm"
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Lap:
    """One side's conversations of one round: rate, CPU milliseconds a turn by process, latencies."""

    turns_per_s: float
    cpu_ms: Mapping[str, float]
    whole_ms: Mapping[str, float]
    first_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """Milliseconds of one request through the proxy, and of the same ids straight from the engine."""

    through_ms: float
    direct_ms: float

    @property
    def added_ms(self) -> float:
        """The proxy's share."""
        return self.through_ms - self.direct_ms


@dataclass(frozen=True, slots=True)
class Big:
    """The outcome of the big bodies, and their cost."""

    count: int
    bytes: int
    failed: int
    reasons: Sequence[str]
    seconds: float
    peak_rss: int
    disk: int
    engine_peak_rss: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """How many turns were recorded, and how many of the recorded or expected ones are wrong or missing."""

    turns: int
    wrong: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was seen."""

    laps: Mapping[str, Sequence[Lap]]
    pairs: Sequence[Pair]
    long: Sequence[Mapping[int, Sequence[Pair]]]
    """By conversation: the turns looked at, each with its neighbours."""
    commit_ms: Sequence[float]
    recorded: Recorded
    peak_rss: Mapping[str, int]
    big: Big | None
    workers: Mapping[str, Sequence[WorkersLap]]
    """By side: laps of a proxy of one worker, and of two."""
    cores: int
    """For proxies, agents and engine."""


def figures(measured: Measured) -> list[Figure]:
    """The figures, in the order of their goals."""
    laps = measured.laps
    runs = len(laps[PROXY])
    with_load = "agents and engine on the same cores"
    shown = [
        Figure("proxy.turns_per_s", _rate(laps[PROXY]), "turns/s", with_load, None, runs),
        _against("proxy.stream_turns_per_s", laps, STREAM, PROXY, "not streamed"),
        _against("proxy.vs_echo", laps, PROXY, ECHO, "a FastAPI echo of the same bodies"),
    ]
    if LITELLM in laps:
        shown.append(_against("proxy.vs_litellm", laps, PROXY, LITELLM, "LiteLLM's proxy, not recording"))
    shown += _added(measured)
    shown.append(_long(measured.long))
    if measured.big is not None:
        shown.append(_big(measured.big))
    shown += workers_figures(measured.workers, measured.cores)
    cpu = [lap.cpu_ms["proxy"] for lap in laps[PROXY]]
    against = f"the echo: {median(lap.cpu_ms['echo'] for lap in laps[ECHO]):.2f} ms"
    shown.append(Figure("proxy.cpu_ms_per_turn", median(cpu), "ms", against, None, runs))
    of_all = f"of {measured.recorded.turns} turns compared with what the engine said"
    shown.append(Figure("proxy.recorded_wrong", measured.recorded.wrong, "turns", of_all, None, 1))
    return shown


def _rate(laps: Sequence[Lap]) -> float:
    return median(lap.turns_per_s for lap in laps)


def _against(name: str, laps: Mapping[str, Sequence[Lap]], ours: str, theirs: str, words: str) -> Figure:
    ratio = median(a.turns_per_s / b.turns_per_s for a, b in zip(laps[ours], laps[theirs], strict=True))
    against = f"{words}: {_rate(laps[theirs]):.0f} turns/s"
    return Figure(name, _rate(laps[ours]), "turns/s", against, ratio, len(laps[ours]))


def _added(measured: Measured) -> list[Figure]:
    pairs, commits = measured.pairs, measured.commit_ms
    added = [pair.added_ms for pair in pairs]
    direct = f"the engine asked directly, p50: {median(pair.direct_ms for pair in pairs):.2f} ms"
    durable = "the store alone: a turn's two events, appended and synced"
    return [
        *(
            Figure(f"proxy.added_p{percent}_ms", quantile(added, percent), "ms", direct, None, len(pairs))
            for percent in (50, 99)
        ),
        Figure("proxy.commit_p50_ms", quantile(commits, 50), "ms", durable, None, len(commits)),
    ]


def _typical(long: Sequence[Mapping[int, Sequence[Pair]]], turn: int) -> list[float]:
    """Added milliseconds at a turn, by conversation: the median of it and its neighbours."""
    return [median(pair.added_ms for pair in conversation[turn]) for conversation in long]


def _long(long: Sequence[Mapping[int, Sequence[Pair]]]) -> Figure:
    first, last = min(long[0]), max(long[0])
    early, late = _typical(long, first), _typical(long, last)
    ratio = median(b / a for a, b in zip(early, late, strict=True))
    name, against = f"proxy.turn{last}_vs_turn{first}", f"added at turn {first}: {median(early):.2f} ms"
    return Figure(name, median(late), "ms", against, ratio, len(long))


def _big(big: Big) -> Figure:
    against = (
        f"{big.count} at once, {big.bytes / 1e6:.1f} MB each: {big.seconds:.1f} s, "
        f"memory {big.peak_rss / GIB:.2f} GiB at its peak, {big.disk / GIB:.2f} GiB on disk"
    )
    if big.failed:
        against += f"; first: {big.reasons[0]}"
    return Figure("proxy.big_bodies_failed", big.failed, "requests", against, None, 1)


def spreads(measured: Measured) -> list[Spread]:
    """How much the rounds vary: rates, latencies, CPU by process, memory."""
    laps = measured.laps
    return [
        *_each(laps, "", "turns/s", lambda lap: {"": lap.turns_per_s}),
        *_each(laps, " latency", "ms", lambda lap: lap.whole_ms),
        *_each({STREAM: laps[STREAM]}, " first byte", "ms", lambda lap: lap.first_ms),
        *_each(laps, ", CPU a turn:", "ms", lambda lap: lap.cpu_ms),
        *(
            spread(f"added at turn {turn}", "ms", _typical(measured.long, turn))
            for turn in sorted(measured.long[0])
        ),
        spread("through the proxy, one in flight", "ms", [pair.through_ms for pair in measured.pairs]),
        spread("from the engine, one in flight", "ms", [pair.direct_ms for pair in measured.pairs]),
        spread("commit", "ms", measured.commit_ms),
        *(_memory(f"peak memory of {name}", size) for name, size in measured.peak_rss.items()),
        *workers_spreads(measured.workers),
        *(() if measured.big is None else _big_memory(measured.big)),
    ]


def _each(
    laps: Mapping[str, Sequence[Lap]], words: str, unit: str, values_of: Callable[[Lap], Mapping[str, float]]
) -> Iterable[Spread]:
    for side, side_laps in laps.items():
        for key in values_of(side_laps[0]):
            values = [values_of(lap)[key] for lap in side_laps]
            yield spread(f"{side}{words} {key}".rstrip(), unit, values)


def _memory(what: str, size: int) -> Spread:
    return spread(what, "MiB", [size / MIB])


def _big_memory(big: Big) -> Iterable[Spread]:
    yield _memory("peak memory of the proxy, big bodies", big.peak_rss)
    yield _memory("peak memory of the engine, big bodies", big.engine_peak_rss)
