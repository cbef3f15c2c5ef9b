"""`rollbook replay bisect`: the first bad step of a training, and what made it bad."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.options import AsJson, FirstStep, LastStep, Policy, Run, StoreOption, TrustParts
from rollbook.cli.terminal import Console, print_json, table_of

if TYPE_CHECKING:
    from rollbook.replay.stretch.contributions import Contributions
    from rollbook.replay.stretch.first_bad import Predicate
    from rollbook.store import Store
    from rollbook.store.fold.history import History


def replay_bisect(
    store: StoreOption,
    metric: Annotated[
        str | None, typer.Option(help="A metric of steps, as the view metrics has it: gradient_norm, kl, ...")
    ] = None,
    above: Annotated[float | None, typer.Option(help="A step is bad where the metric is above this.")] = None,
    below: Annotated[float | None, typer.Option(help="A step is bad where the metric is below this.")] = None,
    where: Annotated[
        str | None, typer.Option(help='A step is bad where this SQL holds: "kl > 0.1 and reward < 0.2".')
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Samples to show.")] = 10,
    first: FirstStep = None,
    last: LastStep = None,
    run: Run = None,
    policy: Policy = "actor",
    trust_parts: TrustParts = False,
    json: AsJson = False,
) -> None:
    """Find the first bad step of a training.

    With --metric or --where a step is bad by what the log says of it. The first
    such step is named, and of a metric the samples that contribute most: what it
    would be without each of them, by passes of the model over each alone.

    Without either a step is bad if its replay differs. Steps that follow
    checkpoints are bisected, then those between two run in order, so of a
    thousand steps with a checkpoint every 50 at most 56 are run. It takes for
    granted that from the first bad step on all are, as where code or a machine
    changed; `rollbook replay run` looks at every step.

    Exit codes: 0 none is bad, 1 one is, 2 a step that is needed cannot be replayed.
    """
    from rollbook import store as stores
    from rollbook.replay.stretch.first_bad import Predicate, threshold
    from rollbook.replay.stretch.stretch import history_of

    log = stores.open(store)
    history = history_of(log, run, policy)
    ends = min(history.steps) if first is None else first, max(history.steps) if last is None else last
    if metric is None and where is None:
        raise typer.Exit(_by_replays(log, history, ends, trust_parts=trust_parts, as_json=json))
    bad = threshold(metric, above=above, below=below) if metric is not None else Predicate(where or "")
    if metric is not None and where is not None:
        bad = Predicate(f"({bad.condition}) AND (\n{where}\n)")
    raise typer.Exit(_by_log(log, history, bad, ends, metric, top, trust_parts=trust_parts, as_json=json))


def _by_replays(
    log: Store, history: History, ends: tuple[int, int], *, trust_parts: bool, as_json: bool
) -> int:
    from rollbook.cli.progress import progress
    from rollbook.cli.replay.step import described, show
    from rollbook.cli.replay.stretch import show_breaks
    from rollbook.replay.stretch.first_bad import find_first_bad

    total = sum(ends[0] <= n <= ends[1] for n in history.steps)
    with progress("replaying steps", total) as advance:
        result = find_first_bad(log, history, *ends, trust_parts=trust_parts, ran=lambda step: advance(1))
    if as_json:
        first = None if result.first is None else described(result.first)
        print_json(asdict(result) | {"first": first})
    else:
        console = Console()
        show_breaks(console, result.broken)
        steps = f"{len(result.ran)} of {total} steps were run"
        if result.first is None:
            console.tell(("none of those that were run differs", "bold green"), f": {steps}")
        else:
            console.tell(
                f"step {result.first.step} is the first that ", ("differs", "bold red"), f": {steps}"
            )
            show(console, result.first)
    return 1 if result.first is not None or result.broken else 0


def _by_log(
    log: Store,
    history: History,
    bad: Predicate,
    ends: tuple[int, int],
    metric: str | None,
    top: int,
    *,
    trust_parts: bool,
    as_json: bool,
) -> int:
    from rollbook.cli.progress import progress
    from rollbook.replay.stretch.contributions import GRADIENT_NORM, contributions
    from rollbook.replay.stretch.first_bad import Predicate, first_step_where

    within = Predicate(f"step BETWEEN {ends[0]} AND {ends[1]} AND (\n{bad.condition}\n)")
    step = first_step_where(log, history.run, history.policy, within)
    if step is None:
        if as_json:
            print_json({"run": history.run, "step": None})
        else:
            Console().tell(("none", "bold green"), f": no step from {ends[0]} to {ends[1]} is so")
        return 0
    if metric is None:
        if as_json:
            print_json({"run": history.run, "step": step, "condition": bad.condition})
        else:
            Console().tell("step ", (str(step), "bold red"), f" is the first where {bad.condition}")
        return 1
    recorded = history.steps[step].committed.metrics.get(metric)
    passes = len(history.steps[step].planned.samples) * (2 if metric == GRADIENT_NORM else 1)
    with progress("passing samples", passes) as advance:
        result = contributions(log, history, step, metric, trust_parts=trust_parts, done=advance)
    if as_json:
        print_json(asdict(result) | {"run": history.run, "recorded": recorded})
    else:
        _show(result, recorded, top)
    return 1


def _show(result: Contributions, recorded: object, top: int) -> None:
    console = Console()
    console.tell("step ", (str(result.step), "bold red"), f" is the first: {result.metric} {recorded}")
    numbers = (">reward", ">tokens", ">without it", ">change")
    table = table_of(">sample", "trajectory", "group", *numbers)
    for sample in result.samples[:top]:
        without = "none" if sample.without is None else f"{sample.without:.4g}"
        named = (str(sample.sample), sample.trajectory, sample.group or "")
        table.add_row(*named, f"{sample.reward:g}", str(sample.tokens), without, f"{sample.change:+.4g}")
    console.print(table)
    if len(result.samples) > top:
        console.print(f"and {len(result.samples) - top} more samples (--top)")
