"""The results of the viewer's benchmark, as figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rollbook.bench.figure import Figure, Spread, quantile, spread
from rollbook.bench.view_browser import Live, Painted, Wire
from rollbook.bench.view_pages import Asked, Cold
from rollbook.bench.view_recording import Laps, recording_figure, recording_spreads

MB = 1e6
SEEN: Mapping[str, Callable[[Painted], float]] = {
    "painted": lambda visit: visit.painted_s,
    "all loaded": lambda visit: visit.loaded_s,
    "a jump to the middle": lambda visit: visit.scrolled_s,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        turns: of the store.
        grown_s: page -> seconds just after the log grew.
        searches: word -> seconds of each search, the rare word first.
        wires, painted: kind of tokens -> of a sample's page; nothing was painted without Chromium.
        laps: of the proxy.
        wheel, script: bytes of the package in a wheel; lines of its own script.
    """

    turns: int
    pages: Sequence[Asked]
    grown_s: Mapping[str, float]
    colds: Sequence[Cold]
    searches: Mapping[str, Sequence[float]]
    wires: Mapping[str, Wire]
    painted: Mapping[str, Sequence[Painted]]
    live: Live
    laps: Laps
    wheel: int
    script: int


def figures(measured: Measured) -> list[Figure]:
    """The figures, in the order of their goals."""
    size = f"{measured.turns:,} turns"
    (_, rare), (common, often) = measured.searches.items()
    page = f"{common!r}, the whole page; goal for its first rows <= 1 s"
    return [
        _slowest(measured.pages),
        _costliest(measured.pages),
        _grown(measured.grown_s),
        _cold(measured.colds),
        *([_paint(measured.painted)] if measured.painted else []),
        _bytes(measured.wires),
        *([_live(measured.live)] if measured.live.seen_ms else []),
        _search("rare", rare, f"a word of one turn of {size}; goal <= 2 s"),
        _search("common", often, page),
        Figure("view.wheel_mb", measured.wheel / MB, "MB", "goal <= 0.5", None, 1),
        Figure("view.js_lines", measured.script, "lines", "goal <= 400", None, 1),
        recording_figure(measured.laps),
    ]


def _p95_ms(page: Asked) -> float:
    return 1e3 * quantile(page.warm_s, 95)


def _slowest(pages: Sequence[Asked]) -> Figure:
    slowest, *others = sorted(pages, key=_p95_ms, reverse=True)
    beyond = sum(_p95_ms(page) > 200 for page in pages)
    after = ", ".join(f"{page.page} {_p95_ms(page):.0f}" for page in others[:2])
    against = f"{slowest.page}; then {after} ms; {beyond} of {len(pages)} pages beyond the goal <= 200"
    return Figure("view.page_p95_ms", _p95_ms(slowest), "ms", against, None, len(slowest.warm_s))


def _costliest(pages: Sequence[Asked]) -> Figure:
    first, second, *_ = sorted(pages, key=lambda page: page.cpu_s, reverse=True)
    against = (
        f"{first.page}; then {second.page} {1e3 * second.cpu_s:.0f} ms; a server's CPU for a reply, mean"
    )
    return Figure("view.page_cpu_ms", 1e3 * first.cpu_s, "ms", against, None, len(first.warm_s))


def _grown(grown_s: Mapping[str, float]) -> Figure:
    slowest = max(grown_s, key=lambda path: grown_s[path])
    against = f"{slowest}, just after the log grew; the median page: {1e3 * median(grown_s.values()):.0f} ms"
    return Figure("view.grown_ms", 1e3 * grown_s[slowest], "ms", against, None, 1)


def _cold(colds: Sequence[Cold]) -> Figure:
    ready = median(cold.ready_s for cold in colds)
    own = median(cold.page_s - cold.ready_s for cold in colds)
    cpu = median(cold.cpu_s for cold in colds)
    against = (
        f"from the process's start; it listens after {ready:.2f} s, the page itself takes {own:.2f} s; "
        f"{cpu:.2f} s of CPU; goal <= 1.5"
    )
    return Figure("view.cold_s", median(cold.page_s for cold in colds), "s", against, None, len(colds))


def _search(name: str, seconds: Sequence[float], against: str) -> Figure:
    return Figure(f"view.search_{name}_s", median(seconds), "s", against, None, len(seconds))


def _paint(painted: Mapping[str, Sequence[Painted]]) -> Figure:
    seconds = {kind: median(each.painted_s for each in visits) for kind, visits in painted.items()}
    worst = max(seconds, key=lambda kind: seconds[kind])
    against = f"{_each(seconds, 's')}; goal <= 1"
    return Figure("view.tokens_paint_s", seconds[worst], "s", against, None, len(painted[worst]))


def _bytes(wires: Mapping[str, Wire]) -> Figure:
    sizes = {kind: each.page / MB for kind, each in wires.items()}
    files = max(each.files for each in wires.values()) / MB
    against = f"{_each(sizes, 'MB')}; a first visit loads {files:.2f} MB of files besides; goal <= 0.3"
    return Figure("view.tokens_mb", max(sizes.values()), "MB", against, None, 1)


def _each(values: Mapping[str, float], unit: str) -> str:
    return ", ".join(f"{kind} tokens {value:.2f} {unit}" for kind, value in values.items())


def _live(live: Live) -> Figure:
    heard = quantile(live.heard_ms, 95)
    against = f"over the stream of lines alone: {heard:.0f} ms; goal <= 500"
    return Figure("view.live_p95_ms", quantile(live.seen_ms, 95), "ms", against, None, len(live.seen_ms))


def spreads(measured: Measured) -> list[Spread]:
    """How much all that varies."""
    painted, live = measured.painted, measured.live
    return [
        *(
            spread(f"{page.page}, {1e3 * page.cpu_s:.0f} ms of CPU", "ms", [1e3 * s for s in page.warm_s])
            for page in measured.pages
        ),
        spread("first replies of pages", "ms", [1e3 * page.first_s for page in measured.pages]),
        *(spread(f"{page}, after the log grew", "ms", [1e3 * s]) for page, s in measured.grown_s.items()),
        spread("pages, compressed", "KB", [page.bytes / 1e3 for page in measured.pages]),
        spread("a new process listens", "s", [cold.ready_s for cold in measured.colds]),
        spread("its first page is there", "s", [cold.page_s for cold in measured.colds]),
        spread("its CPU by then", "s", [cold.cpu_s for cold in measured.colds]),
        *(spread(f"search for {word}", "s", times) for word, times in measured.searches.items()),
        *(
            spread(f"{kind} tokens, {what}", "s", [of(each) for each in visits])
            for kind, visits in painted.items()
            for what, of in SEEN.items()
        ),
        spread("durable to its line's message", "ms", live.heard_ms),
        *([spread("durable to its line's paint", "ms", live.seen_ms)] if live.seen_ms else []),
        *recording_spreads(measured.laps),
    ]
