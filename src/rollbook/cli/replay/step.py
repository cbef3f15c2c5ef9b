"""`rollbook replay step`: its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.options import AsJson, Policy, Run, StoreOption, TrustParts
from rollbook.cli.replay.what_if import OneRank, Recipe, Rescore, Set, what_if

if TYPE_CHECKING:
    from rollbook.replay.step.partial import Part
    from rollbook.store import Store

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
    from rollbook.cli.replay.step_report import replay_command

    asked = (first, last, sample, group, micro_batch)
    if recipe is not None or set_ or rescore is not None:
        if any(asked) or no_model:
            raise typer.BadParameter("is about all of a step", param_hint="--recipe, --set, --rescore")
        own = (step, store, None, recipe, set_, rescore)
        what_if(*own, run=run, policy=policy, trust_parts=trust_parts, one_rank=one_rank, json=json)
    log = stores.open(store)
    part = None
    if any(asked) or no_model:
        part = _part(log, step, run, policy, asked, no_model=no_model)
    raise typer.Exit(
        replay_command(
            log, step, run, policy, trust_parts=trust_parts, one_rank=one_rank, part=part, as_json=json
        )
    )


_Asked = tuple[str | None, str | None, list[str] | None, list[str] | None, list[int] | None]


def _part(log: Store, step: int, run: str | None, policy: str, asked: _Asked, *, no_model: bool) -> Part:
    """The part of the step that is asked for.

    Raises:
        ReplayError: there is no such stage, sample, group or micro-batch.
    """
    from rollbook.replay.step.compare import ORDER
    from rollbook.replay.step.partial import FORWARD, Part, chosen
    from rollbook.replay.step.step import history_with
    from rollbook.store.cut import parse_cut
    from rollbook.store.errors import ReplayError

    first, last, samples, groups, micro_batches = asked
    for stage in (first, last):
        if stage is not None and stage not in ORDER:
            raise ReplayError(f"there is no stage {stage!r}; there are {', '.join(ORDER)}")
    plan = history_with(log, step, run, policy).steps[step].planned
    named: dict[str, str | None] = {}
    if groups:
        ids = {ref["trajectory_id"] for ref in plan.samples}
        found = log.trajectories(parse_cut(plan.cut), ids)
        named = {trajectory_id: t.opened.group for trajectory_id, t in found.items()}
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
