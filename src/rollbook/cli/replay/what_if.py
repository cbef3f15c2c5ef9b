"""`rollbook replay what-if`: a recorded step and the same step by another rule, side by side."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rollbook.cli.options import AsJson, Policy, Run, StoreOption, TrustParts
from rollbook.cli.terminal import Console, print_json, say, table_of
from rollbook.transcript.text import visible

if TYPE_CHECKING:
    from rollbook.replay.what_if.side_by_side import Differences, SampleSides, StepSides
    from rollbook.replay.what_if.what_if import WhatIf, WhatIfRequest, Written

Recipe = Annotated[Path | None, typer.Option("--recipe", help="A recipe file, or a CONFIG for its recipe.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A key of algorithm, recipe or optimizer: algorithm.clip_high=0.3."),
]
Rescore = Annotated[
    str | None,
    typer.Option("--rescore", help="Reward function, module:function; it is imported and called."),
]
To = Annotated[int | None, typer.Option("--to", help="Go on to this step, with weights of its own.")]
OneRank = Annotated[
    bool, typer.Option("--one-rank", help="In one process, whatever layout the step was taken in.")
]
Write = Annotated[
    bool, typer.Option("--write", help="Record the function's rewards, beside those that are there.")
]
Source = Annotated[str | None, typer.Option(help="Source of the new rewards; absent: the function's name.")]
Replace = Annotated[
    bool, typer.Option("--replace", help="With --write: supersede other rewards of that source.")
]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="New folder for the last weights, as a model.")]


def what_if(
    step: Annotated[int, typer.Argument(help="Number of the optimizer step.")],
    store: StoreOption,
    to: To = None,
    recipe: Recipe = None,
    set_: Set = None,
    rescore: Rescore = None,
    write: Write = False,
    source: Source = None,
    replace: Replace = False,
    out: Out = None,
    run: Run = None,
    policy: Policy = "actor",
    trust_parts: TrustParts = False,
    one_rank: OneRank = False,
    json: AsJson = False,
) -> None:
    """Take a recorded step by another recipe, algorithm, optimizer or reward, beside what was recorded.

    Both sides start from the same state. The recorded one is a replay; the
    other chooses anew among the samples that the step took or let go. Shown are
    samples in and out by rule, rewards and advantages, metrics, and how alike
    the two gradients are. With --to the other side goes on with its own
    weights: an offline run from recorded traffic. Nothing is written without
    --write or -o.

    Exit codes: 0 done, 1 the recorded side is not as recorded, 2 it cannot be done.

    rollbook replay what-if 12 --store runs --set algorithm.clip_high=0.3
    rollbook replay what-if 12 --to 40 --store runs --recipe fresh.toml -o other-model
    rollbook replay what-if 12 --store runs --rescore my_rewards:score --write
    """
    if rescore is None and (write or source or replace):
        raise typer.BadParameter(
            "goes with --rescore module:function", param_hint="--write, --source, --replace"
        )
    if replace and not write:
        raise typer.BadParameter("goes with --write", param_hint="--replace")
    from rollbook.replay.what_if.changes import Changes
    from rollbook.replay.what_if.what_if import WhatIfRequest, rescoring
    from rollbook.train.config.files import load_recipe

    made = None if rescore is None else rescoring(rescore, source)
    other = None if recipe is None else load_recipe(recipe).recipe
    changes = Changes(other, tuple(set_ or ()), None if made is None else made.source)
    asked = WhatIfRequest(step, step if to is None else to, changes, made, trust_parts, one_rank, out)
    raise typer.Exit(run_what_if(store, asked, run, policy, write=write, replaces=replace, as_json=json))


SHOWN = 20
"""Samples listed on a terminal; `--json` has all."""
LEAST = 3
"""Least similar tensors that are listed."""
SIDES = ("recorded", "other")
_COLUMNS = (
    *(("step", 6), ("samples", 12), ("came", 5), ("went", 5), ("loss", 21), ("reward", 17)),
    *(("cosine", 9), ("kl", 10), ("apart", 10)),
)
"""Of the line of a step, where there are several; with their widths."""


def run_what_if(
    path: Path,
    request: WhatIfRequest,
    run: str | None,
    policy: str,
    *,
    write: bool,
    replaces: bool,
    as_json: bool,
) -> int:
    """Take the steps by the other rule and print both sides; the exit code, 0 if the recorded one is as
    recorded.

    Args:
        write, replaces: whether the function's rewards are recorded, and whether they supersede others of
            their source.

    Raises:
        RollbookError: it cannot be done: see `what_if` and `write_rewards`.
    """
    from rollbook.cli.runs import of_run
    from rollbook.replay.what_if.what_if import what_if, write_rewards
    from rollbook.store.errors import ConfigError
    from rollbook.store.open import open_store

    if request.out is not None and os.path.lexists(request.out):
        raise ConfigError(f"--out {request.out}: it exists, and nothing is written over: name another folder")
    log = open_store(path)
    lines = request.last > request.first and not as_json
    if lines:
        say("".join(name.rjust(width) for name, width in _COLUMNS))
    with of_run(log, run):
        result = what_if(log, request, run, policy, say_line if lines else lambda sides: None)
    written = None
    if request.rescoring is not None and write:
        written = write_rewards(log, result.run, request.rescoring, result.reward_source, replaces=replaces)
    if as_json:
        print_json(described(result) | {"written": None if written is None else asdict(written)})
    else:
        _show(Console(), result, written, request.out)
    return 0 if result.proven else 1


def described(result: WhatIf) -> dict[str, object]:
    """Both sides for machines."""
    return asdict(result) | {"proven": result.proven}


def say_line(sides: StepSides) -> None:
    """Print a step in a line."""
    counts = [_number(sides.metric(side, "samples") or 0) for side in SIDES]
    values = (
        *(str(sides.step), " / ".join(counts), str(len(sides.came)), str(len(sides.went))),
        *(_both(sides, "loss"), _both(sides, "reward")),
        *(_number(None if sides.gradients is None else sides.gradients.whole.cosine),),
        *(_number(sides.kl), _number(sides.apart)),
    )
    say("".join(value.rjust(width) for value, (_, width) in zip(values, _COLUMNS, strict=True)))


def _show(console: Console, result: WhatIf, written: Written | None, out: Path | None) -> None:
    first, last = result.steps[0], result.steps[-1]
    which = f"step {first.step}" if first is last else f"steps {first.step} to {last.step}"
    console.print(
        f"run {result.run}, {which}: what was recorded, and another rule, both from the checkpoint of "
        f"version {result.from_version}, {len(result.reran)} steps run again before"
    )
    if first is last:
        _show_step(console, first)
    if not result.proven:
        wrong = next((step for step in result.steps if not step.equal), None)
        stage = "" if wrong is None else f" in stage {wrong.differs_in}"
        console.tell(
            ("not proven", "bold red"),
            f" step {result.differs_at} is not as recorded{stage} when it is run again: "
            f"rollbook replay step {result.differs_at} says more",
        )
    if written is not None:
        console.print(
            f"{written.written} rewards of source {written.source} recorded, of which {written.replaced} "
            f"supersede others; {written.already} were there already"
        )
    if out is not None:
        console.print(f"the other side's weights after step {last.step}: {out}")


def _show_step(console: Console, sides: StepSides) -> None:
    console.print(_metric_table(sides))
    both = sum(sample.recorded is not None and sample.other is not None for sample in sides.samples)
    console.print(f"samples: {both} on both sides, {_moved(sides)}")
    for side in SIDES:
        if rules := sides.let_go[side]:
            console.print(f"let go, {side}: {_counted(rules)}")
    for what, differences in (("rewards", sides.rewards), ("advantages", sides.advantages)):
        console.print(f"{what}: {_describe(differences)}")
    _show_gradients(console, sides)
    kl = "" if sides.kl is None else f"; KL to the recorded ones {_number(sides.kl)}"
    console.print(f"weights after the step: {_number(sides.apart)} of their norm apart{kl}")
    _show_samples(console, sides.samples)


def _metric_table(sides: StepSides) -> Table:
    table = table_of("metric", *(f">{side}" for side in SIDES), ">difference")
    names = dict.fromkeys(name for side in SIDES for name in sides.metrics[side] or {})
    for name in names:
        first, second = (sides.metric(side, name) for side in SIDES)
        if first is None and second is None:
            continue
        apart = None if first is None or second is None else second - first
        table.add_row(name, _number(first), _number(second), _number(apart) if apart else "")
    return table


def _show_gradients(console: Console, sides: StepSides) -> None:
    if sides.gradients is None:
        console.tell(("no step", "yellow"), " on the other side: no sample is left of those that there were")
        return
    whole = sides.gradients.whole
    console.print(f"gradients: cosine {_number(whole.cosine)}, norms {_pair(whole.norms)}")
    for tensor in sides.gradients.tensors[:LEAST]:
        console.print(
            f"  least alike: {tensor.name}, cosine {_number(tensor.cosine)}, norms {_pair(tensor.norms)}"
        )


def _show_samples(console: Console, samples: Sequence[SampleSides]) -> None:
    """The samples that differ the most first: those of one side, then by the advantage."""
    table = table_of("sample of", ">reward", ">other", ">advantage", ">other", ">tokens", ">other")
    table.add_column("", no_wrap=True)
    for sample in sorted(samples, key=_alike)[:SHOWN]:
        first, second = sample.recorded, sample.other
        cells = [
            _number(None if side is None else getattr(side, what))
            for what in ("reward", "advantage", "tokens")
            for side in (first, second)
        ]
        mark = "" if not sample.why else f"{'came: was' if first is None else 'went:'} {sample.why}"
        table.add_row(visible(sample.trajectory), *cells, mark)
    console.print(table)
    if len(samples) > SHOWN:
        console.print(f"and {len(samples) - SHOWN} more: --json lists all")


def _alike(sample: SampleSides) -> float:
    if sample.recorded is None or sample.other is None:
        return float("-inf")
    first, second = sample.recorded.advantage, sample.other.advantage
    return 0.0 if first is None or second is None else -abs(second - first)


def _moved(sides: StepSides) -> str:
    """How many came and went, and why."""
    parts = []
    for what, moved in (("came", sides.came), ("went", sides.went)):
        rules = _counted(Counter(sample.why for sample in moved))
        parts.append(f"{len(moved)} {what}" + (f" ({rules})" if rules else ""))
    return ", ".join(parts)


def _counted(rules: Mapping[str, int]) -> str:
    return ", ".join(f"{rule} {count}" for rule, count in rules.items())


def _describe(differences: Differences) -> str:
    if not differences.compared:
        return "none on both sides"
    like = "" if differences.correlation is None else f", correlation {_number(differences.correlation)}"
    return (
        f"mean difference {_number(differences.mean)} over {differences.compared} samples, "
        f"{differences.flips} of another sign{like}"
    )


def _both(sides: StepSides, name: str) -> str:
    return " / ".join(_number(sides.metric(side, name)) for side in SIDES)


def _pair(values: tuple[float, float]) -> str:
    return " and ".join(map(_number, values))


def _number(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
