"""What `rollbook doctor` and `rollbook preflight` print."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from rollbook import store
from rollbook.cli.runs import check_run, of_run, only_run
from rollbook.cli.terminal import Console, print_json, say, visible
from rollbook.store.cut import Cut
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.evidence import Finding, TrainingCourse, read_course
from rollbook.train.doctor.signs import findings


def run_doctor(path: Path, run: str | None, policy: str, as_of: str, as_json: bool) -> int:
    """Print the failures of which a training's log has signs; the exit code, 0 if there are none and 1 if
    some.

    Raises:
        CutError: no such run or cut.
    """
    log = store.open(path)
    run = run or only_run(log)
    with of_run(log, run):
        cut = log.cut(as_of, run)
    check_run(log, run, cut)
    course = read_course(log, cut, run, policy)
    found = findings(course)
    if as_json:
        print_json(
            {"run": run, "policy": policy, "steps": len(course.rows), "findings": [*map(asdict, found)]}
        )
    else:
        _print(course, found, f"run {visible(run)}, policy {visible(policy)}")
    return 1 if found else 0


def _print(course: TrainingCourse, found: list[Finding], where: str) -> None:
    console = Console()
    if not course.rows:
        say(f"{where}: no committed step")
    for one in found:
        steps = "" if one.steps is None else f" (steps {one.steps[0]} to {one.steps[1]})"
        console.tell((one.name, "bold red"), f"{steps}: {visible(one.said)}")
        say(f"  look:   {one.sql}")
        say(f"  levers: {'; '.join(one.levers)}")
    if course.rows and not found:
        steps = f", no sign of failure in {len(course.rows)} steps"
        console.tell(f"{where}: ", ("healthy", "bold green"), steps)


def run_preflight(
    config: TrainConfig, path: Path | None, source: str, as_of: str, reward: str | None, as_json: bool
) -> int:
    """Print the checks of a configuration; the exit code, 1 if one is red.

    Raises:
        CutError: no such cut.
        BadParameter: a reward function has no completions to be tried on.
    """
    if reward is not None and path is None:
        raise typer.BadParameter(
            "is tried on recorded completions: name their store with --store", param_hint="--reward"
        )
    log = None if path is None else store.open(path)
    cut: Cut = {} if log is None else log.cut(as_of, config.run)
    import psutil

    from rollbook.train.doctor.preflight import preflight

    checks = preflight(config, log, cut, source, psutil.virtual_memory().total, reward)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("check", "", "found"):
            table.add_column(name)
        for check in checks:
            levers = "" if check.verdict == "green" else f"\nlevers: {check.lever}"
            table.add_row(check.name, Text(check.verdict, check.verdict), Text(check.said + levers))
        Console().print(table)
    return int(any(check.verdict == "red" for check in checks))
