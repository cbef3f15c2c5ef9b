"""`rollbook export`: what the store holds, as files for others."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollbook.cli.groups import group_with
from rollbook.cli.options import AsJson, AsOf, Policy, Ray, RayStore, StoreOption, ray_workers
from rollbook.cli.terminal import print_json, say

if TYPE_CHECKING:
    from rollbook.train.checkpoints.export import ExportedModel


export_app = typer.Typer(
    cls=group_with("trajectories"),
    no_args_is_help=True,
    help="Write what the store holds to files for others: trajectories, a model, or its adapter.\n\n"
    "Options alone are those of trajectories: rollbook export --to out --format jsonl.",
)


@export_app.command("trajectories")
def trajectories(
    store: StoreOption,
    to: Annotated[
        Path, typer.Option("--to", "-o", help="File or folder to make; a folder that is there must be empty.")
    ],
    format: Annotated[
        Literal["parquet", "jsonl", "datasets"],
        typer.Option(help="Tables, chats with their tokens, or a folder for datasets.load_dataset."),
    ],
    as_of: AsOf = "head",
    run: Annotated[str | None, typer.Option("--run", help="Only this run.")] = None,
    split: Annotated[str, typer.Option(help="Only this split: train, eval or teacher.")] = "all",
    ray: Ray = 0,
    ray_store: RayStore = None,
    json: AsJson = False,
) -> None:
    """Write trajectories: Parquet tables, JSONL chats, or a Hugging Face dataset."""
    from rollbook.cli.progress import progress
    from rollbook.cli.runs import of_run
    from rollbook.store.interchange.export import export_store
    from rollbook.store.open import open_store

    only, workers = None if split == "all" else split, ray_workers(ray, ray_store)
    with of_run(open_store(store), run):
        done = export_store(
            store,
            to,
            format,
            as_of=as_of,
            run=run,
            split=only,
            progress=progress,
            workers=workers,
        )
    if json:
        print_json(done)
        return
    rows = ", ".join(f"{count} {name}" for name, count in done["rows"].items())
    say(f"wrote {to}: {rows}, as of {done['cut']}")


NewFolder = Annotated[
    Path, typer.Option("--to", "-o", help="Folder to make; one that is there must be empty.")
]
Version = Annotated[
    int | None, typer.Option(min=0, help="Policy version; default: the newest that has a checkpoint.")
]
OfRun = Annotated[str | None, typer.Option("--run", help="Run, where several have checkpoints.")]


@export_app.command("model")
def model(
    store: StoreOption,
    to: NewFolder,
    version: Version = None,
    run: OfRun = None,
    policy: Policy = "actor",
    json: AsJson = False,
) -> None:
    """Write a trained version as a Hugging Face model directory: config, tokenizer, safetensors.

    Its weights are compared with the digest in the log, before and after.

    rollbook export model --store runs --version 50 -o my-model-50
    """
    from rollbook.cli.runs import of_run
    from rollbook.store.open import open_store
    from rollbook.train.checkpoints.export import export_model

    log = open_store(store)
    with of_run(log, run):
        done = export_model(log, to, version, run, policy)
    size = f"({done.bytes / 2**20:.1f} MiB)"
    _say(done, "", f"{size}; its weights are those that the log names", as_json=json)


@export_app.command("adapter")
def adapter(
    store: StoreOption,
    to: NewFolder,
    version: Version = None,
    run: OfRun = None,
    policy: Policy = "actor",
    json: AsJson = False,
) -> None:
    """Write the factors of a training with [lora] as an adapter for PEFT, vLLM or SGLang.

    It is loaded beside the weights that it was trained beside; `export model` writes both in one.

    rollbook export adapter --store runs --version 50 -o my-adapter-50
    """
    from rollbook.cli.runs import of_run
    from rollbook.store.open import open_store
    from rollbook.train.checkpoints.export import export_adapter

    log = open_store(store)
    with of_run(log, run):
        done = export_adapter(log, to, version, run, policy)
    _say(done, "the adapter of ", f"({done.bytes / 2**20:.2f} MiB)", as_json=json)


def _say(done: ExportedModel, what: str, end: str, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    version = f"version {done.policy_version} of policy {done.policy}, run {done.run}"
    say(f"wrote {done.to}: {what}{version} {end}")
