"""`view.recording_ratio`: a proxy under load, beside a viewer with ten open live pages and without one.

The proxy, its engine and its agents are those of `bench proxy`; the viewer shows the proxy's own store, on
the same cores, and its live pages are streams over HTTP that ask for their parts as the page does. Before
each lap a viewer is started and its pages are opened; of one side it ends before the lap begins, so that
the proxy has had as long a rest, and its sealer as much to do. The sides take turns. A lap beside live
pages counts only if every page had a line for each of its turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rollbook.bench import proxy
from rollbook.bench.figure import Figure, Spread, spread
from rollbook.bench.processes import Process
from rollbook.bench.proxy_outcome import PROXY
from rollbook.bench.rounds import Limit, order
from rollbook.bench.view_live import LivePages
from rollbook.bench.view_pages import Viewer

ALONE, WATCHED = "alone", "watched"


@dataclass(frozen=True, slots=True)
class Load:
    """How much the proxy gets to do in a lap, and beside how many pages."""

    limit: Limit = field(default_factory=lambda: Limit(10, 150.0))
    pages: int = 10
    concurrency: int = 64
    trajectories: int = 64
    turns: int = 8


@dataclass(frozen=True, slots=True)
class Lap:
    """Conversations of a lap.

    Attributes:
        cpu_ms, viewer_ms: CPU milliseconds a turn, of the proxy and of the viewer.
    """

    turns_per_s: float
    cpu_ms: float
    viewer_ms: float


Laps = Mapping[str, Sequence[Lap]]


def record(folder: Path, load: Load, cores: int, on_round: Callable[[], None]) -> Laps:
    """The laps of both sides.

    Raises:
        BenchError: a process failed, or an agent got another reply than the engine gave.
        AssertionError: a live page was not told of a turn.
    """
    stage = proxy.Stage.set(folder, proxy.Plan(cores=cores))
    laps: dict[str, list[Lap]] = {ALONE: [], WATCHED: []}
    with ExitStack() as stack:
        agents = stack.enter_context(stage.python("load", "load_generator", folder / "material.json"))
        engine = stack.enter_context(stage.engine())
        server, url = stage.proxy(engine.url(), "store")
        stack.enter_context(server)
        command = {"do": "turns", "concurrency": load.concurrency, "trajectories": load.trajectories}
        command |= {"turns": load.turns, "url": url, "path": proxy.CHAT, "kind": PROXY, "finish": True}
        recording = _Recording(
            agents, server, command, partial(Viewer, folder / "store", folder, stage.cores)
        )
        recording.lap(-1)  # warms up, and is what live pages begin with
        deadline = time.monotonic() + load.limit.seconds
        for number in range(load.limit.rounds):
            for side in order(list(laps), number):
                laps[side].append(recording.lap_of(side, number, load.pages))
            on_round()
            if time.monotonic() >= deadline:
                break
    return laps


class _Recording:
    """Laps of a proxy, its engine and its agents.

    Args:
        view: starts a viewer of its store.
    """

    def __init__(
        self, agents: Process, server: Process, command: Mapping[str, Any], view: Callable[[], Viewer]
    ) -> None:
        self._agents, self._server, self._command, self._view = agents, server, command, view
        self._laps = 0

    def lap_of(self, side: str, number: int, count: int) -> Lap:
        """A lap of a side; beside live pages, all of which are told of every turn, or after them."""
        with self._view() as viewer, LivePages(viewer.url, count) as pages:
            pages.wait(1)
            if side == WATCHED:
                before = max(pages.counts)
                lap = self.lap(number, viewer.process)
                pages.wait(before + self._command["trajectories"] * self._command["turns"])
                return lap
        return self.lap(number)

    def lap(self, number: int, viewer: Process | None = None) -> Lap:
        """Conversations that are not those of any lap before; those of a round are alike."""
        self._laps += 1
        before = self._server.cpu_s(), viewer.cpu_s() if viewer else 0.0
        seed, name = proxy.SEED * (number + 2), f"lap-{self._laps}"
        report = self._agents.ask(**self._command, name=name, seed=seed)
        if report["wrong"]:
            raise self._agents.failed(f"got {report['wrong']} wrong replies: {report['reasons']}")
        after = self._server.cpu_s(), viewer.cpu_s() if viewer else 0.0
        turns = report["turns"]
        cpu_ms, viewer_ms = (1e3 * (b - a) / turns for a, b in zip(before, after, strict=True))
        return Lap(turns / report["wall_s"], cpu_ms, viewer_ms)


def recording_figure(laps: Laps) -> Figure:
    """The turns per second beside live pages, as a part of those without. Pure."""
    pairs = list(zip(laps[WATCHED], laps[ALONE], strict=True))
    ratio = median(watched.turns_per_s / alone.turns_per_s for watched, alone in pairs)
    rate, cpu = ({side: median(of(lap) for lap in laps[side]) for side in laps} for of in (_rate, _cpu))
    viewer = median(lap.viewer_ms for lap in laps[WATCHED])
    against = (
        f"{rate[WATCHED]:.0f} beside ten live pages, {rate[ALONE]:.0f} turns/s without; CPU a turn "
        f"{cpu[WATCHED]:.2f} and {cpu[ALONE]:.2f} ms, the viewer's {viewer:.2f} ms; goal >= 0.95"
    )
    return Figure("view.recording_ratio", ratio, "", against, ratio, len(pairs))


def _rate(lap: Lap) -> float:
    return lap.turns_per_s


def _cpu(lap: Lap) -> float:
    return lap.cpu_ms


def recording_spreads(laps: Laps) -> list[Spread]:
    """How much the laps vary. Pure."""
    return [
        *(spread(f"proxy, {side}", "turns/s", [lap.turns_per_s for lap in laps[side]]) for side in laps),
        *(spread(f"proxy, {side}, CPU a turn", "ms", [lap.cpu_ms for lap in laps[side]]) for side in laps),
        spread("viewer, CPU a turn", "ms", [lap.viewer_ms for lap in laps[WATCHED]]),
    ]
