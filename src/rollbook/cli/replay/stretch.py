"""`rollbook replay run` and `weights`: many steps of a training at once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.cli.options import (
    AsJson,
    FirstStep,
    LastStep,
    Policy,
    Ray,
    RayStore,
    Run,
    StoreOption,
    TrustParts,
    ray_workers,
)
from rollbook.cli.terminal import Console, print_json

if TYPE_CHECKING:
    from rollbook.replay.stretch.rebuild import Rebuilt
    from rollbook.replay.stretch.stretch import Break, StepRange, VerifiedStep


def replay_run(
    store: StoreOption,
    first: FirstStep = None,
    last: LastStep = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each from checkpoints of its own.")] = 1,
    ray: Ray = 0,
    ray_store: RayStore = None,
    run: Run = None,
    policy: Policy = "actor",
    trust_parts: TrustParts = False,
    json: AsJson = False,
) -> None:
    """Prove a stretch of a training: replay every step of it, from checkpoint to checkpoint.

    First, by the log alone, each step must start with the weights and the
    optimizer that the one before it ended with, and what was published and served
    must have the digest of a checkpoint or a step. Then each is run again, and all
    its stages compared. A segment ends at its first difference, since what
    follows starts from it; the next begins at its own checkpoint.

    Exit codes: 0 all is as recorded, 1 something differs, 2 no step can be
    replayed, 3 nothing differs of what was compared, but not everything was.
    """
    from rollbook import store as stores
    from rollbook.cli.progress import progress
    from rollbook.cli.replay.step import exit_code
    from rollbook.replay.stretch.stretch import history_of, prove_stretch

    if ray and jobs > 1:
        raise typer.BadParameter("--jobs are processes here: name one of the two", param_hint="--ray")
    workers, log = ray_workers(ray, ray_store), stores.open(store)
    cut = log.head()
    history = history_of(log, run, policy, cut)
    ends = min(history.steps) if first is None else first, max(history.steps) if last is None else last
    total = sum(ends[0] <= n <= ends[1] for n in history.steps)
    with progress("replaying steps", total, shown=not json) as advance:
        result = prove_stretch(
            log, history, *ends, jobs=jobs, workers=workers, cut=cut, trust_parts=trust_parts, done=advance
        )
    _show(result, as_json=json)
    if all(item.replay is None for item in result.steps):
        raise typer.Exit(2)
    raise typer.Exit(exit_code(item.replay for item in result.steps) if result.equal else 1)


def _show(result: StepRange, *, as_json: bool) -> None:
    if as_json:
        fields = _described(result.steps, result.broken) | {
            "unbacked": [asdict(item) for item in result.unbacked]
        }
        print_json(fields | {"run": result.run, "equal": result.equal})
        return
    console = Console()
    show_breaks(console, result.broken)
    for item in result.unbacked:
        console.tell(("not backed: ", "bold red"), str(item))
    _show_steps(console, result.steps)


def replay_weights(
    version: Annotated[int, typer.Argument(help="The policy version to rebuild.")],
    store: StoreOption,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write it to this new folder, as a checkpoint.")
    ] = None,
    restore: Annotated[
        bool, typer.Option("--restore", help="Write it into the store, as the checkpoint that it had.")
    ] = False,
    run: Run = None,
    policy: Policy = "actor",
    trust_parts: TrustParts = False,
    json: AsJson = False,
) -> None:
    """Rebuild a version that no checkpoint has, and prove each step's digests on the way.

    Weights are a fold of the log: the nearest checkpoint before the version, and
    the committed steps since, run again. So checkpoints between may be removed
    (checkpoint.keep_last of a CONFIG) and had again.

    Nothing is written unless all digests of the version's step are proven equal.

    Exit codes: 0 it is the version, 1 a step on the way differs, 2 it cannot be
    rebuilt, 3 nothing differs, but that it is the version is not proven here.
    """
    from rollbook import store as stores
    from rollbook.cli.progress import progress
    from rollbook.cli.replay.step import described, exit_code
    from rollbook.replay.stretch.rebuild import rebuild, steps_to
    from rollbook.replay.stretch.stretch import history_of

    log = stores.open(store)
    history = history_of(log, run, policy)
    steps = steps_to(log, history, version)
    with progress("running steps again", steps, shown=not json) as advance:
        rebuilt = rebuild(log, history, version, out, restore=restore, trust_parts=trust_parts, done=advance)
    if json:
        print_json(asdict(rebuilt) | {"proof": described(rebuilt.proof)})
    else:
        _show_rebuilt(Console(), rebuilt, asked=out is not None or restore)
    raise typer.Exit(0 if rebuilt.proven else exit_code([rebuilt.proof]) or 3)


def _show_rebuilt(console: Console, rebuilt: Rebuilt, *, asked: bool) -> None:
    """Print a version that was rebuilt, or what it is not.

    Args:
        asked: whether it was to be written.
    """
    from rollbook.replay.stretch.stretch import VerifiedStep

    proof, which = rebuilt.proof, f"version {rebuilt.policy_version} of policy {rebuilt.policy}"
    if not rebuilt.proven:
        _show_steps(console, [VerifiedStep(proof.differs_at_step or proof.step, proof)])
        if proof.equal:
            where = " and nothing was written" if asked else ""
            console.tell(f"{which} is ", ("not proven", "bold yellow"), where)
        return
    steps = len(proof.reran)
    how = "each bit for bit" if rebuilt.bits else "and its weights are the recorded bits"
    console.print(
        f"{which}, run {rebuilt.run}: from the checkpoint of version {proof.from_version}, {steps} "
        f"step{'s' * (steps != 1)} run again, {how}"
    )
    console.print(f"weights {rebuilt.weights_digest}", soft_wrap=True)
    if rebuilt.path is not None:
        console.print(f"written to {rebuilt.path}", soft_wrap=True)


def _described(steps: list[VerifiedStep], broken: list[Break]) -> dict[str, Any]:
    """A stretch for machines: of each step the verdict, and of the first that differs all of it."""
    from rollbook.cli.replay.step import described
    from rollbook.replay.verdict import summary_json

    def entry(step: VerifiedStep) -> dict[str, Any]:
        replay = step.replay
        if replay is None:
            return {"step": step.step, "verdict": "not proven", "why": step.why}
        if replay.equal:
            return {"step": step.step, "verdict": str(replay.outcome), **summary_json(replay)}
        return {"step": step.step, "verdict": "differs", "replay": described(replay)}

    return {"broken": [asdict(b) for b in broken], "steps": [entry(step) for step in steps]}


def show_breaks(console: Console, broken: list[Break]) -> None:
    """Print where the chain of digests does not hold."""
    for link in broken:
        console.tell(
            f"step {link.step} ",
            ("starts otherwise", "bold red"),
            f" than the step before it ended: {link.stage} {link.starts_with[:16]}, not "
            f"{link.ended_with[:16]}",
        )


def _show_steps(console: Console, steps: list[VerifiedStep]) -> None:
    """A line for each run of steps of the same verdict, and for each that differs."""
    lines: list[tuple[int, int, str, str]] = []
    for step in steps:
        verdict, why = _verdict(step)
        if lines and lines[-1][2:] == (verdict, why) and lines[-1][1] + 1 == step.step:
            lines[-1] = (lines[-1][0], step.step, verdict, why)
        else:
            lines.append((step.step, step.step, verdict, why))
    colours = {"differs": "bold red", "not proven": "yellow", "equal in part": "yellow"}
    for start, end, verdict, why in lines:
        named = f"step {start}" if start == end else f"steps {start} to {end}"
        more = why if why.startswith(":") else f" {why}" if why else ""
        console.tell(f"{named}: ", (verdict, colours.get(verdict, "bold green")), more)


def _verdict(step: VerifiedStep) -> tuple[str, str]:
    """The verdict on a step of a stretch, and a detail of it."""
    from rollbook.replay.verdict import summary

    if step.replay is None:
        return "not proven", step.why
    if (first := step.replay.first_difference) is not None:
        return "differs", f"first in stage {first.stage}" + (f": {first.why}" if first.why else "")
    text, sep, rest = summary(step.replay).partition(":")
    return text, sep + rest
