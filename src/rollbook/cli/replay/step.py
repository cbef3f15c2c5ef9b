"""`rollbook replay step`: a past step taken again, and how it compares with what was recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rollbook.cli.options import AsJson, Policy, Run, StoreOption, TrustParts
from rollbook.cli.replay.what_if import OneRank, Recipe, Rescore, Set, what_if
from rollbook.cli.terminal import Console, print_json, table_of

if TYPE_CHECKING:
    from rollbook.replay.step.partial import Part
    from rollbook.replay.verdict import StageReplay, StepReplay
    from rollbook.store import Store
    from rollbook.train.resume.promise import Promise

First = Annotated[str | None, typer.Option("--from", help="First stage to show and judge.")]
Last = Annotated[
    str | None, typer.Option("--to", help="Last stage; nothing beyond is run. E.g. advantages, losses.")
]
Samples = Annotated[
    list[str] | None,
    typer.Option(
        "--sample", help="Only this sample: its place in the step, or (the end of) an id. Up to losses."
    ),
]
Groups = Annotated[list[str] | None, typer.Option("--group", help="Only samples of this group.")]
MicroBatches = Annotated[
    list[int] | None, typer.Option("--micro-batch", help="Only samples of this micro-batch.")
]
NoModel = Annotated[
    bool,
    typer.Option(
        "--no-model", help="By the log alone, up to losses: logprobs as recorded ([record] vectors)."
    ),
]


def replay_step(
    step: Annotated[int, typer.Argument(help="Number of the optimizer step.")],
    store: StoreOption,
    run: Run = None,
    policy: Policy = "actor",
    first: First = None,
    last: Last = None,
    sample: Samples = None,
    group: Groups = None,
    micro_batch: MicroBatches = None,
    no_model: NoModel = False,
    trust_parts: TrustParts = False,
    one_rank: OneRank = False,
    recipe: Recipe = None,
    set_: Set = None,
    rescore: Rescore = None,
    json: AsJson = False,
) -> None:
    """Re-run a past optimizer step from the log and compare every stage bit for bit.

    Beside what is computed it is seen whether the recipe chooses these samples
    at the step's cut and drops those (selection), whether learning rate, seed
    and micro-batches follow from the configuration (schedule), and whether the
    checkpoint that was written is what the step made. The first sample, token
    or tensor that differs is named, as far as the step recorded it.

    With --recipe, --set or --rescore the step is also taken by that rule, and
    the two are shown side by side: `rollbook replay what-if` says more.

    Exit codes: 0 all is as recorded, 1 something differs, 2 it cannot be
    replayed, 3 nothing differs of what was compared, but not everything was.
    """
    from rollbook import store as stores

    selection = (first, last, sample, group, micro_batch)
    if recipe is not None or set_ or rescore is not None:
        if any(selection) or no_model:
            raise typer.BadParameter("is about all of a step", param_hint="--recipe, --set, --rescore")
        own = (step, store, None, recipe, set_, rescore)
        what_if(*own, run=run, policy=policy, trust_parts=trust_parts, one_rank=one_rank, json=json)
    log = stores.open(store)
    part = None
    if any(selection) or no_model:
        part = _part(log, step, run, policy, selection, no_model=no_model)
    how = {"trust_parts": trust_parts, "one_rank": one_rank, "part": part}
    raise typer.Exit(replay_command(log, step, run, policy, how, as_json=json))


_Asked = tuple[str | None, str | None, list[str] | None, list[str] | None, list[int] | None]


def _part(log: Store, step: int, run: str | None, policy: str, selection: _Asked, *, no_model: bool) -> Part:
    """The part of the step that is asked for.

    Raises:
        ReplayError: there is no such stage, sample, group or micro-batch.
    """
    from rollbook.replay.step.compare import ORDER
    from rollbook.replay.step.partial import FORWARD, Part, chosen
    from rollbook.replay.step.step import history_with
    from rollbook.store.cut import parse_cut
    from rollbook.store.errors import ReplayError

    first, last, samples, groups, micro_batches = selection
    for stage in (first, last):
        if stage is not None and stage not in ORDER:
            raise ReplayError(f"there is no stage {stage!r}; there are {', '.join(ORDER)}")
    plan = history_with(log, step, run, policy).steps[step].planned
    named: dict[str, str | None] = {}
    if groups:
        ids = {ref["trajectory_id"] for ref in plan.samples}
        trajectories = log.trajectories(parse_cut(plan.cut), ids)
        named = {trajectory_id: t.opened.group for trajectory_id, t in trajectories.items()}
    places = chosen(
        plan, named, samples=samples or (), groups=groups or (), micro_batches=micro_batches or ()
    )
    bounded = places is not None or no_model
    last = last or (FORWARD[-1] if bounded else ORDER[-1])
    part = Part(first or ORDER[0], last, places, model=not no_model)
    if bounded and not part.passes_alone:
        what = "some samples are" if places is not None else "the log alone is"
        raise ReplayError(f"--to {last}: {what} replayed up to {FORWARD[-1]}, for what follows is of all")
    return part


LATE = 3
"""Late rewards that are shown one by one."""


def replay_command(
    log: Store, step: int, run: str | None, policy: str, how: dict[str, Any], *, as_json: bool
) -> int:
    """Replay a step and print the comparison; the exit code.

    Args:
        how: what `replay_step` is given besides.
    """
    from rollbook.cli.progress import counted
    from rollbook.cli.runs import of_run
    from rollbook.replay.step.step import replay_step

    with of_run(log, run):
        say = (lambda promise: None) if as_json else _say_promise
        with counted("replaying steps", shown=not as_json) as ran:
            result = replay_step(log, step, run, policy, **how, say=say, ran=ran)
    if as_json:
        print_json(described(result))
    else:
        show(Console(), result)
    return exit_code([result])


def exit_code(results: Iterable[StepReplay | None]) -> int:
    """0: all of these are as recorded; 1: something differs; 3: nothing that was compared differs, but not
    everything was compared. None stands for a step of which nothing was."""
    from rollbook.replay.verdict import Outcome

    outcomes = {Outcome.nothing if result is None else result.outcome for result in results}
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
    from rollbook.replay.verdict import summary_json

    return asdict(result) | {
        "bit_for_bit": result.bit_for_bit,
        "equal": result.equal,
        "differs_in": result.differs_in,
        "as_far_as": result.as_far_as,
        **summary_json(result),
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
    from rollbook.replay.verdict import Verdict

    colours = {
        Verdict.equal: "green",
        Verdict.within: "green",
        Verdict.differs: "red",
        Verdict.not_recorded: "dim",
        Verdict.not_proven: "yellow",
    }
    table = table_of("stage", "recorded", "replayed", "", overflow="fold")
    for stage in stages:
        mark = Text(str(stage.verdict), colours[stage.verdict])
        why = [stage.why] if stage.why else []
        if stage.tolerance:
            why.append(f"tolerance {stage.tolerance}")
        if why:
            mark.append(f": {'; '.join(why)}", "default")
        table.add_row(stage.stage, (stage.recorded or "")[:16], (stage.replayed or "")[:16], mark)
    return table


def _tell_late(console: Console, result: StepReplay) -> None:
    for late in result.late[:LATE]:
        target = late["trajectory_id"] if late["turn_id"] is None else f"turn {late['turn_id']}"
        console.tell(
            ("late", "yellow"),
            f" reward {late['reward']:g} of {target}, by {late['source']!r}, came after the step was "
            "planned: it changes nothing here",
        )
    if len(result.late) > LATE:
        console.tell(("late", "yellow"), f" and {len(result.late) - LATE} more rewards")


def _tell_verdict(console: Console, result: StepReplay) -> None:
    from rollbook.replay.verdict import summary

    first = result.first_difference
    if first is not None:
        at = result.step if result.differs_at_step is None else result.differs_at_step
        where = f", first at step {at} in stage "
        console.tell(f"step {result.step}: ", ("differs", "bold red"), where, (first.stage, "bold"))
        return
    text, sep, rest = summary(result).partition(": ")
    colour = "bold green" if exit_code([result]) == 0 else "bold yellow"
    console.tell(f"step {result.step}: ", (text, colour), sep + rest)
