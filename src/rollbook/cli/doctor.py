"""What `rollbook doctor` prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rollbook import store
from rollbook.cli.runs import check_run, of_run, only_run
from rollbook.cli.show.terminal_text import visible
from rollbook.cli.terminal import Console, print_json, say
from rollbook.train.doctor.course import read_course
from rollbook.train.doctor.evidence import Course, Finding
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


def _print(course: Course, found: list[Finding], where: str) -> None:
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
