"""Benchmarks: Rollbook compared with the machine's own limit, in one interleaved run each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollbook.bench.figure import Figure, Outcome, Spread
from rollbook.store.errors import ConfigError

__all__ = ["Figure", "Outcome", "Spread", "run_bench"]


BENCHES = (
    *(
        "append",
        "bits",
        "cluster",
        "device",
        "hostile",
        "learning",
        "loop",
        "materialize",
        "proxy",
        "recover",
        "replay",
    ),
    *("rollouts", "scale", "seal", "service", "sql", "sync", "tail", "train", "view"),
)
"""Names of the benchmarks, each a module here with `Plan`, `measure` and `outcome`."""
SHIPPED = ("append", "bits")
"""Those that are commands, too: of them it is the user's machine that they measure."""


class Benchmark(Protocol):
    """The interface of a benchmark's module. It is imported only when it runs, since benchmarks
    have different dependencies."""

    Plan: Callable[[], Any]
    """How much to measure; `steps` says how often `on_round` will be called, unless time runs out."""
    measure: Callable[[Path, Any, Callable[[], None]], Any]
    """Measure in a folder: (folder, plan, on_round)."""
    outcome: Callable[[Any], Outcome]
    """What was measured, as figures."""


def load(name: str) -> Benchmark:
    """The benchmark of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in BENCHES:
        raise ConfigError(f"no benchmark {name!r}: use one of {', '.join(BENCHES)}")
    return cast(Benchmark, import_module(f"{__name__}.{name}"))


def run_bench(name: str, folder: Path | None, as_json: bool, scale: float | None = None) -> None:
    """Run a benchmark in a new folder inside `folder` (default: the current one), and print it.

    Its files are removed again, except the large stores that some benchmarks make in a named
    folder. The figures go to stdout, progress to stderr.

    Args:
        scale: size of the measurement, for a benchmark that has sizes (hostile: times 100 kills
            and three rounds; learning: times 15 rollout batches; loop: times 200 kills; replay,
            scale, view: times a million turns; rollouts: times 1,000 hostile agents; sql: times
            100,000 turns).

    Raises:
        ConfigError: no such benchmark or folder, or a scale for a benchmark of one size.
    """
    benchmark = load(name)
    inside = Path.cwd() if folder is None else folder
    if not inside.is_dir():
        raise ConfigError(f"--folder {inside} is not a folder: name one on the disk to measure")
    plan = benchmark.Plan() if scale is None else _sized(name, benchmark, scale)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        _place(benchmark, inside, named=folder is not None) as scratch,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task(f"{name}: rounds", total=plan.steps)
        measured = benchmark.measure(Path(scratch), plan, lambda: progress.advance(bar))
    result = benchmark.outcome(measured)
    if as_json:
        print(orjson.dumps([f.as_json() for f in result.figures], option=orjson.OPT_INDENT_2).decode())
    else:
        _print(result)


def _place(benchmark: Benchmark, inside: Path, *, named: bool) -> AbstractContextManager[str | Path]:
    """Context: the folder to work in: a temporary one, or the named one itself, if its content is kept."""
    if named and getattr(benchmark, "KEEPS_STORES", False):
        return nullcontext(inside)
    return tempfile.TemporaryDirectory(prefix=".rollbook-bench-", dir=inside)


def _sized(name: str, benchmark: Benchmark, scale: float) -> Any:
    sized: Callable[[float], Any] | None = getattr(benchmark, "sized", None)
    if sized is None or scale <= 0:
        raise ConfigError(
            f"--scale {scale}: benchmark {name!r} has one size; hostile, learning, loop, replay, rollouts, "
            "scale, sql and view take any above 0"
        )
    return sized(scale)


def _print(result: Outcome) -> None:
    console = Console()
    spreads = Table("measured", "unit", box=None, header_style="bold", pad_edge=False)
    for name in ("min", "median", "max"):
        spreads.add_column(name, justify="right")
    for s in result.spreads:
        spreads.add_row(s.what, s.unit, *(_number(v) for v in (s.low, s.middle, s.high)))
    figures = Table("figure", box=None, header_style="bold", pad_edge=False)
    for name in ("value", "unit", "ratio", "runs", "against"):
        figures.add_column(name, justify="right" if name in ("value", "ratio", "runs") else "left")
    for f in result.figures:
        ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
        figures.add_row(f.figure, _number(f.value), f.unit, ratio, str(f.runs), f.against or "")
    console.print(spreads)
    console.print()
    console.print(figures)


def _number(value: float) -> str:
    if 0 < abs(value) < 0.005:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
