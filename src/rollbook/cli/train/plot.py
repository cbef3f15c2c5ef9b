"""`rollbook plot`: the metrics of steps, read from the log, a panel each.

With `--tensorboard`: the curves of trainings as TensorBoard's files, from the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollbook.cli.options import AsJson, AsOf, Policy, StoreOption
from rollbook.cli.terminal import print_json, say
from rollbook.transcript.text import visible

if TYPE_CHECKING:
    from rollbook.store.cut import Cut
    from rollbook.store.log.store import Store
    from rollbook.store.sql.sandbox import Connection


def plot(
    store: StoreOption,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; its ending says what: .png, .svg or .pdf.")
    ] = Path("training.png"),
    runs: Annotated[
        list[str] | None, typer.Option("--run", help="Runs to compare; default: all that have steps.")
    ] = None,
    policy: Policy = "actor",
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Columns of the view metrics, a panel each; default: the dashboard."),
    ] = None,
    by: Annotated[
        Literal["step", "version"], typer.Option(help="Over steps, or over policy versions.")
    ] = "step",
    first: Annotated[int, typer.Option("--from", min=0, help="First step or version that is drawn.")] = 0,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            help="Write TensorBoard's files into this folder instead, RUN/POLICY each: all metrics."
        ),
    ] = None,
    as_of: AsOf = "head",
    json: AsJson = False,
) -> None:
    """Draw the course of trainings from the log, several runs side by side: reward, held-out reward, loss,
    KL, entropy, lengths, staleness, speed.

    A panel for each metric of which there are values. Steps that were
    abandoned are left out.

    rollbook plot --store runs -o math.svg
    rollbook plot --store runs --run math-1 --run math-2 --metric reward --metric entropy --by version
    rollbook plot --store runs --tensorboard curves
    """
    if tensorboard is not None:
        write_curves(store, tensorboard, runs or [], policy, as_of, json)
        return
    wanted = Wanted(runs or [], policy, metrics or [], by, first)
    run_plot(store, output, wanted, as_of, json)


DASHBOARD = (
    *(
        "reward",
        "loss",
        "entropy",
        "kl",
        "old_kl",
        "gradient_norm",
        "length_mean",
        "truncated",
        "staleness_mean",
    ),
    *(
        "engine_logprob_gap",
        "preference_accuracy",
        "score_mean",
        "value_loss",
        "explained_variance",
        "tokens_s",
    ),
)
"""The metrics that are drawn unless others are named."""
HELD_OUT = "held-out reward"
TITLES = {"tokens_s": "trained tokens a second", "length_mean": "trained tokens of a sample, mean"}
ENDINGS = (".png", ".svg", ".pdf")
Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be drawn.

    Attributes:
        runs: empty: all that have steps. metrics: empty: the dashboard. by: `step` or `version`; first: of
            these.
    """

    runs: Sequence[str]
    policy: str
    metrics: Sequence[str]
    by: str
    first: int


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of a run, over steps or versions; dashed if it is of held-out trajectories.

    Attributes:
        partial: places of points whose evaluation is not whole; begun: where the training became another one.
    """

    run: str
    metric: str
    points: Points
    partial: frozenset[int] = frozenset()
    begun: tuple[int, ...] = ()

    @property
    def panel(self) -> str:
        """The metric whose panel it is in."""
        return "reward" if self.metric == HELD_OUT else self.metric


def run_plot(path: Path, output: Path, wanted: Wanted, as_of: str, as_json: bool) -> None:
    """Draw, and say what was drawn.

    Raises:
        ConfigError: no such metric, ending, folder or step, or no matplotlib.
        CutError: no such run or cut.
    """
    from rollbook.cli.runs import check_run
    from rollbook.store.errors import ConfigError
    from rollbook.store.open import open_store

    _check(output, wanted.metrics)
    log = open_store(path)
    cut = log.cut(as_of, wanted.runs[0] if len(wanted.runs) == 1 else None)
    for run in wanted.runs:
        check_run(log, run, cut)
    curves = read_curves(log, cut, wanted)
    if not curves:
        raise ConfigError(
            f"policy {visible(wanted.policy)!r} has no committed step with such metrics: train first, or "
            "name another --policy, --run or --from"
        )
    draw(curves, output, wanted.by)
    panels, drawn = _panels(curves), list(dict.fromkeys(curve.run for curve in curves))
    if as_json:
        print_json({"file": str(output), "runs": drawn, "panels": panels})
    else:
        say(f"{output}: {', '.join(panels)} of {', '.join(map(visible, drawn))}")


def drawn_metrics() -> list[str]:
    """The metrics that can be drawn."""
    from rollbook.store.sql.training_views import METRICS

    numbers = [column.name for column in METRICS.columns if column.type in ("DOUBLE", "BIGINT")]
    return [name for name in numbers if name != "step"]


def _check(output: Path, metrics: Sequence[str]) -> None:
    from rollbook.store.errors import ConfigError

    drawn = drawn_metrics()
    if unknown := [name for name in metrics if name not in drawn]:
        raise ConfigError(f"--metric {visible(unknown[0])}: there are {', '.join(drawn)}")
    if output.suffix not in ENDINGS:
        raise ConfigError(f"--output {output}: name a file that ends in {', '.join(ENDINGS)}")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: {output.absolute().parent} is no folder")


def read_curves(log: Store, cut: Cut, wanted: Wanted) -> list[Curve]:
    """The curves that have a value, panel by panel.

    Raises:
        CorruptionError: a file is damaged.
    """
    from rollbook.store.cut import format_cut
    from rollbook.store.sql.query import connect_at

    metrics = list(dict.fromkeys(wanted.metrics or DASHBOARD))
    with connect_at(log, format_cut(cut)) as connection:
        points = _steps(connection, wanted, metrics)
        held_out, partial = _held_out(connection, wanted) if "reward" in metrics else ({}, {})
        begun = _begun(connection, wanted)
    runs = list(dict.fromkeys(wanted.runs)) or sorted({run for run, _ in points})
    curves = []
    for metric in metrics:
        for run in runs:
            curves.append(Curve(run, metric, points.get((run, metric), []), begun=begun.get(run, ())))
        for run in runs if metric == "reward" else ():
            curves.append(Curve(run, HELD_OUT, held_out.get(run, []), frozenset(partial.get(run, ()))))
    return [curve for curve in curves if curve.points]


def _steps(connection: Connection, wanted: Wanted, metrics: Sequence[str]) -> dict[tuple[str, str], Points]:
    at = "step" if wanted.by == "step" else "policy_version"
    rows = connection.execute(
        f"SELECT run, {at}, {', '.join(metrics)} FROM metrics "
        f"WHERE policy = $policy AND status = 'committed' AND {at} >= $first ORDER BY run, step",
        {"policy": wanted.policy, "first": wanted.first},
    ).fetchall()
    points: dict[tuple[str, str], Points] = {}
    for run, place, *values in rows:
        for metric, value in zip(metrics, values, strict=True):
            if value is not None:
                points.setdefault((run, metric), []).append((place, value))
    return points


def _begun(connection: Connection, wanted: Wanted) -> dict[str, tuple[int, ...]]:
    """Run -> the steps, or versions, with which its training became another one."""
    at = "step" if wanted.by == "step" else "policy_version"
    rows = connection.execute(_BEGUN.format(at=at), {"policy": wanted.policy, "first": wanted.first})
    begun: dict[str, tuple[int, ...]] = {}
    for run, place in rows.fetchall():
        begun[run] = (*begun.get(run, ()), place)
    return begun


_BEGUN = """
    SELECT run, {at} AS place FROM (
        SELECT run, step, policy_version, phase, lag(phase) OVER (PARTITION BY run ORDER BY step) AS before
        FROM steps WHERE policy = $policy AND status = 'committed')
    WHERE before <> phase AND place >= $first ORDER BY run, place"""


def _held_out(connection: Connection, wanted: Wanted) -> tuple[dict[str, Points], dict[str, list[int]]]:
    """Mean rewards of trajectories of split `eval`, at the step that starts from the version that sampled
    them; and at which of these the evaluation is not whole. A reward model samples none."""
    at = "coalesce(step, last + 1)" if wanted.by == "step" else "version"
    rows = connection.execute(_HELD_OUT.format(at=at), {"policy": wanted.policy, "first": wanted.first})
    points: dict[str, Points] = {}
    partial: dict[str, list[int]] = {}
    for run, place, value, whole in rows.fetchall():
        points.setdefault(run, []).append((place, value))
        if not whole:
            partial.setdefault(run, []).append(place)
    return points, partial


_HELD_OUT = """
    WITH judged AS (
        SELECT run, policy_version AS version, arg_max(coalesce(whole, true), time) AS whole
        FROM evaluations WHERE policy = $policy GROUP BY ALL
    ), held AS (
        SELECT run, max_version AS version, avg(reward) AS reward FROM trajectories
        WHERE split = 'eval' AND reward IS NOT NULL AND max_version IS NOT NULL GROUP BY ALL
    ), done AS (
        SELECT run, step, policy_version AS version FROM steps
        WHERE policy = $policy AND status = 'committed' AND algorithm IS DISTINCT FROM 'reward_model'
    )
    SELECT run, {at} AS place, reward, coalesce(whole, true)
    FROM held JOIN (SELECT run, max(step) AS last FROM done GROUP BY ALL) USING (run)
         LEFT JOIN done USING (run, version) LEFT JOIN judged USING (run, version)
    WHERE place >= $first ORDER BY run, place"""


def _mark(axes: Any, curve: Curve, color: str) -> None:
    """Draw open rings where evaluations are not whole, dotted lines where the training became another."""
    for number, place in enumerate(curve.begun):
        label = f"{visible(curve.run)}, another training" if number == 0 else None
        axes.axvline(place, color=color, linestyle=":", linewidth=1, label=label)
    partial = [point for point in curve.points if point[0] in curve.partial]
    if partial:
        places, values = zip(*partial, strict=True)
        rings = {"marker": "o", "linestyle": "", "markerfacecolor": "white", "markersize": 8}
        axes.plot(places, values, color=color, label=f"{visible(curve.run)}, NOT WHOLE", zorder=3, **rings)


def _panels(curves: Sequence[Curve]) -> list[str]:
    return list(dict.fromkeys(curve.panel for curve in curves))


def draw(curves: Sequence[Curve], output: Path, by: str) -> None:
    """Draw a panel for each metric, a line for each run.

    Raises:
        ConfigError: matplotlib is missing.
    """
    from rollbook.cli.pictures import pyplot

    plots = pyplot()
    panels, runs = _panels(curves), list(dict.fromkeys(curve.run for curve in curves))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (4.6 * columns, 2.9 * rows)
    figure, grid = plots.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    places: list[Any] = list(grid.flat)
    for panel, axes in zip(panels, places, strict=False):
        for curve in (item for item in curves if item.panel == panel):
            color = f"C{runs.index(curve.run) % 10}"
            steps, values = zip(*curve.points, strict=True)
            held = curve.metric == HELD_OUT
            label = f"{visible(curve.run)}, held out" if held else visible(curve.run)
            mark = {"marker": "o", "linestyle": "--"} if held else {"marker": "." if len(steps) < 60 else ""}
            axes.plot(steps, values, color=color, markersize=4, linewidth=1.2, label=label, **mark)
            _mark(axes, curve, color)
        axes.set_title(TITLES.get(panel, panel.replace("_", " ")), fontsize="medium")
        axes.set_xlabel("optimizer step" if by == "step" else "policy version", fontsize="small")
        axes.tick_params(labelsize="small")
        axes.grid(alpha=0.3)
    places[0].legend(fontsize="small")
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(output, dpi=130)
    plots.close(figure)


def write_curves(
    path: Path, folder: Path, runs: Sequence[str], policy: str, as_of: str, as_json: bool
) -> None:
    """Write a file for each run, in the place of one that was written before, and say what was written.

    Raises:
        ConfigError: no step or evaluation of the policy is committed, or TensorBoard is missing.
        CutError: no such run or cut.
        CorruptionError: a file of the log is damaged.
    """
    from rollbook.cli.runs import check_run
    from rollbook.store.errors import ConfigError
    from rollbook.store.events import EvalFinished, StepCommitted
    from rollbook.store.open import open_store
    from rollbook.store.safe_paths import place_inside
    from rollbook.train.curves.reporter import EventFile, messages, read_points

    messages()
    log = open_store(path)
    cut = log.cut(as_of, runs[0] if len(runs) == 1 else None)
    for run in runs:
        check_run(log, run, cut)
    recorded_runs = {e.run for e in log.events_of([StepCommitted.KIND, EvalFinished.KIND], cut)}
    written: dict[str, int] = {}
    for run in list(dict.fromkeys(runs)) or sorted(recorded_runs):
        if points := read_points(log, cut, run, policy):
            with EventFile(place_inside(folder, f"{run}/{policy}"), points):
                written[run] = len(points)
    if not written:
        raise ConfigError(
            f"policy {visible(policy)!r} has no committed step: train first, or name another --policy, --run"
        )
    if as_json:
        print_json({"folder": str(folder), "points": written})
        return
    counted = ", ".join(f"{count} points of {visible(run)}" for run, count in written.items())
    say(f"{folder}: {counted}; look with: tensorboard --logdir {folder}")
