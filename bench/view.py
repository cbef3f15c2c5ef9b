"""`bench view`: the viewer over a store of a million turns, and a run of a thousand steps.

The store is that of `bench scale` (`scale_store`); with `--folder` both use the same one, and it stays.
What is asked is a copy whose sealed files are links.

- `view.page_p95_ms`: the slowest page, warm (`view_pages`). All pages are in the table, with those that htmx
  loads into others. Searches for words have figures of their own, and the SQL console is asked for its form:
  what a query takes is the query's.
- `view.page_cpu_ms`: the page that costs its server the most CPU, which other work does not change.
- `view.grown_ms`: the slowest page just after the log grew: then it is read at a new cut.
- `view.cold_s`: a new process, from its start until `/view/runs` is there.
- `view.search_rare_s`, `view.search_common_s`: a search of all text for a word that stands in one turn, and
  for one that stands in most; small letters, which are found in any case.
- `view.tokens_paint_s`, `view.tokens_mb`: a sample of 131,072 tokens (`view_browser`): from navigation to the
  first contentful paint of a Chromium that was never there, and its page's bytes, compressed; of random
  tokens and of text, whichever is worse.
- `view.live_p95_ms`: from when a turn is durable until its line is painted on the live page in Chromium.
- `view.recording_ratio`: the proxy's turns per second beside ten open live pages (`view_recording`).
- `view.wheel_mb`, `view.js_lines`: what the package of the viewer is in a wheel; lines of its own script.

Without Chromium the two figures that need it are left out, and said to be.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import rollbook
from rollbook import store
from rollbook.bench.figure import Outcome
from rollbook.bench.processes import some_cores
from rollbook.bench.scale_store import borrowed, store_in
from rollbook.bench.view_browser import (
    Live,
    Painted,
    Wire,
    chromium,
    sample_address,
    visit,
    watch_live,
    wire,
    write_samples,
)
from rollbook.bench.view_outcome import Measured, figures, spreads
from rollbook.bench.view_pages import (
    Asked,
    Cold,
    Viewer,
    ask_grown,
    ask_pages,
    script_lines,
    search,
    shipped_bytes,
    start_cold,
    things,
    visits,
)
from rollbook.bench.view_recording import Load, record
from rollbook.bench.view_turns import Turn, Written, trajectory
from rollbook.store import Store

if TYPE_CHECKING:
    from playwright.sync_api import Browser

KEEPS_STORES = True
"""With `--folder`, what is made stays in it."""
LANE = "view-bench"
RARE, COMMON = "quokkaviewbench", "self"
"""A word of one turn, which is added, and a word of most turns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        turns: of the store.
        cores: for the viewer, and for a proxy with its engine and agents.
        asks, seconds: of each page, whichever end first; one ask at least.
        starts: of new processes.
        searches: for each word.
        tokens, visits: of a sample, and how often it is visited.
        live_turns: that are waited for on the live page.
        load: of the proxy, in each lap.
    """

    turns: int = 1_000_000
    cores: int = 2
    asks: int = 24
    seconds: float = 6.0
    starts: int = 5
    searches: int = 5
    tokens: int = 131_072
    visits: int = 5
    live_turns: int = 120
    load: Load = field(default_factory=Load)

    @property
    def steps(self) -> int:
        """How often `on_round` is called, unless time runs out."""
        pages = len(visits()) + 1
        return 1 + pages + self.starts + self.searches + self.visits + 1 + self.load.limit.rounds


def sized(scale: float) -> Plan:
    """A plan of `scale` times a million turns."""
    plan = Plan()
    return replace(plan, turns=max(round(plan.turns * scale), 1_000))


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Make the store in `folder` if it is not there, and measure.

    Raises:
        OSError: the disk refuses, for instance because it is full.
        BenchError: a page is not answered with 200, or an agent got another reply than the engine gave.
        AssertionError: a search does not find what is there; a page or a stream does not show what it has to.
    """
    made = store_in(folder, plan.turns)
    on_round()
    with tempfile.TemporaryDirectory(prefix=".rollbook-bench-", dir=folder) as inside:
        scratch = Path(inside)
        with borrowed(made.path, scratch) as copy:
            seen = _Seeing(store.open(copy), scratch, some_cores(plan.cores), plan, on_round)
            pages, searches, grown = seen.pages()
            colds = seen.starts()
            wires, painted, live = seen.in_a_browser()
        (scratch / "proxy").mkdir()
        laps = record(scratch / "proxy", plan.load, plan.cores, on_round)
    package = Path(rollbook.__file__).parent / "viewer"
    return Measured(
        turns=made.turns,
        pages=pages,
        grown_s=grown,
        colds=colds,
        searches=searches,
        wires=wires,
        painted=painted,
        live=live,
        laps=laps,
        wheel=shipped_bytes(package),
        script=script_lines(package),
    )


@dataclass(frozen=True, slots=True)
class _Seeing:
    """What is measured on the store of so many turns."""

    log: Store
    scratch: Path
    cores: str
    plan: Plan
    on_round: Callable[[], None]

    def _viewer(self, *words: object) -> Viewer:
        return Viewer(self.log.path, self.scratch, self.cores, *words)

    def _add(self, words: str) -> None:
        """Add a trajectory of one turn, which says these words."""
        with self.log.writer(LANE) as writer:
            writer.append(trajectory("added", [Turn("What was there?", words)]).events).result()

    def pages(self) -> tuple[list[Asked], dict[str, list[float]], dict[str, float]]:
        """(all pages, warm; word -> seconds of searches for it; page -> seconds just after the log grew)"""
        self._add(f"before the {RARE} came")
        named = things(self.log, self.plan.asks + 1)
        with self._viewer() as viewer:
            pages = ask_pages(viewer, named, self.plan.asks, self.plan.seconds, self.on_round)
            searches = self._searches(viewer)
            grown = ask_grown(viewer, named, lambda: self._add("nothing"))
            self.on_round()
        return pages, searches, grown

    def _searches(self, viewer: Viewer) -> dict[str, list[float]]:
        """The first round warms up."""
        seconds: dict[str, list[float]] = {RARE: [], COMMON: []}
        for number in range(-1, self.plan.searches):
            for word, found in seconds.items():
                took = search(viewer, word, 1)
                found += [took] if number >= 0 else []
            if number >= 0:
                self.on_round()
        return seconds

    def starts(self) -> list[Cold]:
        """New processes."""
        colds = []
        for _ in range(self.plan.starts):
            colds.append(start_cold(self.log.path, self.scratch, self.cores))
            self.on_round()
        return colds

    def in_a_browser(self) -> tuple[dict[str, Wire], dict[str, list[Painted]], Live]:
        """(kind of tokens -> bytes of its sample's page; kind -> visits of it; turns that came live)"""
        model = self.scratch / "model"
        with self.log.writer(LANE) as writer, chromium() as browser:
            samples = write_samples(writer, model, self.plan.tokens)
            with self._viewer("--model", model) as viewer:
                wires = {kind: wire(viewer, sample) for kind, sample in samples.items()}
                painted = {} if browser is None else self._visits(viewer, browser, samples)
                live = watch_live(viewer, browser, writer, self.plan.live_turns)
                self.on_round()
        return wires, painted, live

    def _visits(
        self, viewer: Viewer, browser: Browser, samples: Mapping[str, Written]
    ) -> dict[str, list[Painted]]:
        """The first round warms up."""
        painted: dict[str, list[Painted]] = {kind: [] for kind in samples}
        for number in range(-1, self.plan.visits):
            for kind, sample in samples.items():
                seen = visit(browser, viewer.url + sample_address(sample), self.plan.tokens)
                painted[kind] += [seen] if number >= 0 else []
            if number >= 0:
                self.on_round()
        return painted


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    return Outcome(tuple(figures(measured)), tuple(spreads(measured)))
