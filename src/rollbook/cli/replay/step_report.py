"""What `rollbook replay step` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from rollbook.cli.progress import counted
from rollbook.cli.runs import of_run
from rollbook.cli.terminal import Console, print_json
from rollbook.replay.step.partial import Part
from rollbook.replay.step.step import replay_step
from rollbook.replay.verdict import Outcome, StageReplay, StepReplay, Verdict, compared, summary
from rollbook.store import Store
from rollbook.train.resume.promise import Promise

COLOURS = {
    Verdict.equal: "green",
    Verdict.within: "green",
    Verdict.differs: "red",
    Verdict.not_recorded: "dim",
    Verdict.not_proven: "yellow",
}
LATE = 3
"""Late rewards that are shown one by one."""


def replay_command(
    log: Store,
    step: int,
    run: str | None,
    policy: str,
    *,
    trust_parts: bool,
    one_rank: bool,
    part: Part | None,
    as_json: bool,
) -> int:
    """Replay a step and print the comparison; the exit code."""
    with of_run(log, run):
        how = {"trust_parts": trust_parts, "one_rank": one_rank}
        say = (lambda promise: None) if as_json else _say_promise
        with counted("replaying steps", shown=not as_json) as ran:
            result = replay_step(log, step, run, policy, **how, part=part, say=say, ran=ran)
    if as_json:
        print_json(described(result))
    else:
        show(Console(), result)
    return exit_code([result])


def exit_code(results: Iterable[StepReplay | None]) -> int:
    """0: all of these is as recorded; 1: something differs; 3: nothing does of what was compared, but not
    everything was. None is a step of which nothing was."""
    outcomes = {Outcome.nothing if one is None else one.outcome for one in results}
    if Outcome.differs in outcomes:
        return 1
    return 0 if outcomes <= {Outcome.bits, Outcome.within} else 3


def _say_promise(promise: Promise) -> None:
    """Say on standard error, before a replay starts, whether bits are promised."""
    console = Console(stderr=True)
    if promise.bits:
        console.tell("bits are promised here: nothing that is known to change them differs")
        return
    console.tell(("bits are not promised here", "yellow"))
    for reason in promise.reasons:
        console.tell(f"  {reason}")


def described(result: StepReplay) -> dict[str, object]:
    """A replay for machines."""
    return asdict(result) | {
        "bit_for_bit": result.bit_for_bit,
        "equal": result.equal,
        "differs_in": result.differs_in,
        "as_far_as": result.as_far_as,
        **compared(result),
    }


def show(console: Console, result: StepReplay) -> None:
    """Print a replay for people."""
    shown = result.differs_at_step if result.differs_at_step is not None else result.step
    what = "weights-only checkpoint" if result.weights_only else "checkpoint"
    how = "by the log alone, without a model"
    if result.from_version is not None:
        how = f"from the {what} of version {result.from_version}, {len(result.reran)} steps run again"
    console.print(f"run {result.run}, step {shown}: replayed {how}")
    for line in result.passed_over:
        console.tell(("passed over", "yellow"), f" {line}")
    console.print(stage_table(result.stages.values()))
    _tell_late(console, result)
    _tell_verdict(console, result)


def stage_table(stages: Iterable[StageReplay]) -> Table:
    """A row for each stage."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("stage", "recorded", "replayed", ""):
        table.add_column(name, overflow="fold")
    for one in stages:
        mark = Text(str(one.verdict), COLOURS[one.verdict])
        why = [one.why] if one.why else []
        if one.tolerance:
            why.append(f"tolerance {one.tolerance}")
        if why:
            mark.append(f": {'; '.join(why)}", "default")
        table.add_row(one.stage, (one.recorded or "")[:16], (one.replayed or "")[:16], mark)
    return table


def _tell_late(console: Console, result: StepReplay) -> None:
    for late in result.late[:LATE]:
        of = late["trajectory_id"] if late["turn_id"] is None else f"turn {late['turn_id']}"
        console.tell(
            ("late", "yellow"),
            f" reward {late['reward']:g} of {of}, by {late['source']!r}, came after the step was planned: "
            "it changes nothing here",
        )
    if len(result.late) > LATE:
        console.tell(("late", "yellow"), f" and {len(result.late) - LATE} more rewards")


def _tell_verdict(console: Console, result: StepReplay) -> None:
    first = result.first_difference
    if first is not None:
        at = result.step if result.differs_at_step is None else result.differs_at_step
        where = f", first at step {at} in stage "
        console.tell(f"step {result.step}: ", ("differs", "bold red"), where, (first.stage, "bold"))
        return
    said, sep, rest = summary(result).partition(": ")
    colour = "bold green" if exit_code([result]) == 0 else "bold yellow"
    console.tell(f"step {result.step}: ", (said, colour), sep + rest)
