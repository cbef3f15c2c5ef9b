"""`rollbook doctor` and `rollbook preflight`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rollbook.cli.options import AsJson, AsOf, Policy, Run, Source, StoreOption
from rollbook.cli.terminal import Console, print_json, say, table_of
from rollbook.transcript.text import visible

if TYPE_CHECKING:
    from rollbook.store.cut import Cut
    from rollbook.train.doctor.check import Check
    from rollbook.train.doctor.evidence import Finding, TrainingCourse


def preflight(
    config: Annotated[Path, typer.Argument(help="TOML file; see configs/.")],
    store: Annotated[
        Path | None,
        typer.Option(envvar="ROLLBOOK_STORE", help="The log to train on; absent: none is looked at."),
    ] = None,
    source: Source = "cut",
    as_of: AsOf = "head",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a key.")] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="Reward function, module:function, to try on recorded completions."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Check a CONFIG before a training: model, memory, batch, normalization, KL, staleness, data, rewards.

    Exit code 1: a check is red, so the training would fail or teach nothing.
    --reward imports your function and gives it up to 64 completions of the log,
    each as a line of `rollbook export --format jsonl`, for up to 30 s.

    rollbook preflight grpo.toml --store runs --source tail
    rollbook preflight grpo.toml --store runs --reward my_rewards:score
    """
    from rollbook.train.config.files import load_config

    settings = load_config(config, set_ or [])
    if reward is not None and store is None:
        raise typer.BadParameter(
            "is tried on recorded completions: name their store with --store", param_hint="--reward"
        )
    import psutil

    from rollbook.store.open import open_store
    from rollbook.train.doctor.preflight import preflight

    log = None if store is None else open_store(store)
    cut: Cut = {} if log is None else log.cut(as_of, settings.run)
    checks = preflight(settings, log, cut, source, psutil.virtual_memory().total, reward)
    if json:
        print_json([asdict(check) for check in checks])
    else:
        _print_checks(checks)
    raise typer.Exit(int(any(check.verdict == "red" for check in checks)))


def _print_checks(checks: list[Check]) -> None:
    table = table_of("check", "", "found")
    for check in checks:
        levers = "" if check.verdict == "green" else f"\nlevers: {check.lever}"
        table.add_row(check.name, Text(check.verdict, check.verdict), Text(check.said + levers))
    Console().print(table)


def doctor(
    store: StoreOption,
    run: Run = None,
    policy: Policy = "actor",
    as_of: AsOf = "head",
    json: AsJson = False,
) -> None:
    """Name the failures of which a policy's newest training has signs: what was seen, and what acts on it.

    Exit code 0: no sign of failure; 1: some. The numbers are in the view `metrics`.

    rollbook doctor --store runs --run math-1
    """
    from rollbook.cli.errors import querying
    from rollbook.cli.runs import cut_of, only_run
    from rollbook.store.cut import format_cut
    from rollbook.store.open import open_store
    from rollbook.store.sql.query import connect_at
    from rollbook.train.doctor.evidence import read_course
    from rollbook.train.doctor.signs import findings

    log = open_store(store)
    run = run or only_run(log)
    cut = format_cut(cut_of(log, as_of, run))
    with connect_at(log, cut) as connection, querying(connection):
        course = read_course(connection, run, policy)
    signs = findings(course)
    if json:
        print_json(
            {"run": run, "policy": policy, "steps": len(course.rows), "findings": [*map(asdict, signs)]}
        )
    else:
        _print(course, signs, f"run {visible(run)}, policy {visible(policy)}")
    raise typer.Exit(1 if signs else 0)


def _print(course: TrainingCourse, signs: list[Finding], where: str) -> None:
    console = Console()
    if not course.rows:
        say(f"{where}: no committed step")
    for sign in signs:
        steps = "" if sign.steps is None else f" (steps {sign.steps[0]} to {sign.steps[1]})"
        console.tell((sign.name, "bold red"), f"{steps}: {visible(sign.said)}")
        say(f"  look:   {sign.sql}")
        say(f"  levers: {'; '.join(sign.levers)}")
    if course.rows and not signs:
        steps = f", no sign of failure in {len(course.rows)} steps"
        console.tell(f"{where}: ", ("healthy", "bold green"), steps)
