"""`rollbook replay export` and `rollbook replay open`: one step in one file, and what it proves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollbook.cli.options import AsJson, Policy, Run, StoreOption
from rollbook.cli.terminal import MIB, Console, print_json, say

if TYPE_CHECKING:
    from rollbook.replay.verdict import StepReplay
    from rollbook.store.interchange.bundle import Bundle


export_app = typer.Typer(no_args_is_help=True, help="Write what a replay needs to one file, for others.")


@export_app.command("step")
def export_step(
    step: Annotated[int, typer.Argument(help="Number of the optimizer step.")],
    store: StoreOption,
    to: Annotated[Path, typer.Option("--to", "-o", help="File to make, such as step-10.rollbook.")],
    run: Run = None,
    policy: Policy = "actor",
    without: Annotated[
        Literal["optimizer", "weights"] | None,
        typer.Option(
            help="Leave out the optimizer: proven up to the gradients; or all weights: up to the losses "
            "where the step recorded vectors, else up to the advantages."
        ),
    ] = None,
    redact_text: Annotated[
        bool, typer.Option("--redact-text", help="Leave out all text; token ids and numbers stay.")
    ] = False,
    trust_parts: Annotated[
        bool, typer.Option("--trust-parts", help="Import parts of one's own that the manifest names.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Write one step as a bundle: a file that is replayed anywhere, without this store.

    It holds the step's manifest, its trajectories, the nearest checkpoint and
    the steps from there, each file with its sha256. Token ids are text to
    whoever has the tokenizer, which is in it too.

    rollbook replay export step 10 --store runs -o step-10.rollbook
    rollbook replay open step-10.rollbook
    """
    from rollbook.cli.runs import of_run
    from rollbook.replay.bundles.bundle import export_step as export
    from rollbook.store.open import open_store

    log = open_store(store)
    with of_run(log, run):
        done = export(
            *(log, to, step, run, policy),
            redact=redact_text,
            without=without,
            trust_parts=trust_parts,
        )
    if json:
        print_json(asdict(done))
        return
    say(f"wrote {done.to} ({done.bytes / MIB:.1f} MiB): {_what(done.bundle)}")
    say(f"sha256 {done.sha256}")


def open_bundle(
    file: Annotated[Path, typer.Argument(help="A bundle, made by rollbook replay export step.")],
    extract: Annotated[
        Path | None, typer.Option(help="Folder to make of it: a store that every other command reads.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Replay the step, or only check the file.")
    ] = True,
    trust_parts: Annotated[
        bool,
        typer.Option("--trust-parts", help="Import and run parts of one's own that the manifest names."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Check every byte of a bundle, and replay its step: bit for bit, or the first stage that differs.

    Exit code 0: all that the bundle can prove is equal; 1: something differs;
    2: it is damaged, or holds what no bundle does. Nothing in it is run.

    rollbook replay open step-10.rollbook
    rollbook replay open step-10.rollbook --extract step-10
    rollbook sql "select * from trajectories" --store step-10
    """
    from rollbook.replay.bundles.bundle import opened_bundle, replay_bundle

    with opened_bundle(file, extract) as (bundle, log):
        result = replay_bundle(bundle, log, trust_parts=trust_parts) if replay else None
    _tell_opening(bundle, result, extract, json)
    raise typer.Exit(1 if result is not None and not result.equal else 0)


def _what(bundle: Bundle) -> str:
    """What a bundle is of, and what was left out of it."""
    count = f"{len(bundle.steps)} {'step' if len(bundle.steps) == 1 else 'steps'} to run"
    start = f"from the checkpoint of version {bundle.from_version}"
    parts = [
        *(["by the log alone"] if bundle.from_version is None else [start, count]),
        f"{bundle.trajectories:,} trajectories",
        *(["without text"] if bundle.redacted else []),
        *(f"without the {what}" for what in bundle.without),
        *([f"up to the {bundle.up_to}"] if bundle.up_to is not None else []),
    ]
    return f"step {bundle.step} of run {bundle.run}, " + ", ".join(parts)


def _tell_opening(bundle: Bundle, result: StepReplay | None, extract: Path | None, as_json: bool) -> None:
    from rollbook.cli.replay.step import described, show

    if as_json:
        print_json({"bundle": asdict(bundle), "replay": None if result is None else described(result)})
        return
    say(f"whole: {_what(bundle)}")
    if extract is not None:
        say(f"extracted to {extract}, a store: rollbook store info --store {extract}")
    if result is not None:
        show(Console(), result)
