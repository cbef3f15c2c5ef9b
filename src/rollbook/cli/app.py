"""The one command, `rollbook`. Each sub-command imports what it needs when it runs."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollbook import __version__
from rollbook.cli.bench import bench, demo
from rollbook.cli.errors import EPILOG, run
from rollbook.cli.export import export_app
from rollbook.cli.keys import keys_app
from rollbook.cli.lineage.commands import lineage_app
from rollbook.cli.online.rollout import rollout
from rollbook.cli.online.run import run_online
from rollbook.cli.options import (
    STORE_VARIABLE,
    AsJson,
    AsOf,
    LeaveOut,
    LiteralGroup,
    RowFormat,
    RowKeys,
    Run,
    RunOfStep,
    SkipBad,
    Source,
    StoreOption,
    TemplateKwargs,
)
from rollbook.cli.replay.bisect import replay_bisect
from rollbook.cli.replay.bundle import export_app as replay_export_app
from rollbook.cli.replay.bundle import open_bundle
from rollbook.cli.replay.rollout import rollout as replay_rollout
from rollbook.cli.replay.serve import replay_serve
from rollbook.cli.replay.step import replay_step
from rollbook.cli.replay.stretch import replay_run, replay_weights
from rollbook.cli.replay.what_if import what_if
from rollbook.cli.serve import ServeCommand, serve
from rollbook.cli.store.store import store_app
from rollbook.cli.train.plot import plot
from rollbook.cli.train.score import score
from rollbook.cli.train.train import train

app = typer.Typer(
    cls=LiteralGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The ledger of agent rollouts: record agent traffic, query it with SQL, train on it, "
    "replay any step bit for bit.",
    epilog=EPILOG,
)
replay_app = typer.Typer(no_args_is_help=True, help="Re-run what the log says happened, and compare.")
app.add_typer(replay_app, name="replay")
replay_app.add_typer(replay_export_app, name="export")
replay_app.command("open")(open_bundle)
replay_app.command("serve")(replay_serve)
recipe_app = typer.Typer(no_args_is_help=True, help="What recipes make of a log.")
app.add_typer(recipe_app, name="recipe")
app.add_typer(store_app, name="store")
app.add_typer(keys_app, name="keys")
app.add_typer(export_app, name="export")
app.add_typer(lineage_app, name="lineage")
app.command(cls=ServeCommand)(serve)
replay_app.command("step")(replay_step)
replay_app.command("rollout")(replay_rollout)
replay_app.command("run")(replay_run)
replay_app.command("weights")(replay_weights)
replay_app.command("bisect")(replay_bisect)
replay_app.command("what-if")(what_if)


class Format(StrEnum):
    """How `rollbook sql` prints its rows."""

    table = "table"
    json = "json"
    csv = "csv"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rollbook {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help='E.g. "select * from trajectories".')],
    store: StoreOption,
    format: Annotated[Format, typer.Option(help="How to print the rows.")] = Format.table,
    as_of: AsOf = "head",
    run: RunOfStep = None,
    allow_files: Annotated[
        bool, typer.Option("--allow-files", help="Let the query open and write other files, and extensions.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="Model, or its name at the hub, whose tokenizer gives tokens their text."),
    ] = None,
) -> None:
    """Query the live log with SQL (DuckDB). A query reads the store, and nothing else of this machine.

    Views: events, runs, trajectories, turns, tokens, rewards, preferences, paths,
    outliers, bodies, launches; policies, syncs, activations, steps, metrics, evaluations,
    samples, drops, lineage, ledger.
    Their columns: docs/sql.md, or rollbook sql "describe turns".
    """
    from rollbook.cli.sql import run_query

    run_query(store, query, format.value, as_of, run, allow_files, model)


@app.command()
def tail(
    store: Annotated[
        Path | None,
        typer.Option(help=f"Folder of the store, if it is on this machine; without --url: {STORE_VARIABLE}."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Or the address of a `rollbook serve`.")] = None,
    start: Annotated[
        str, typer.Option("--from", help="What to leave out: head, step:N, lane=count,..., or empty.")
    ] = "empty",
    kinds: Annotated[
        str, typer.Option(help="Only events of these kinds, such as turn.completed,turn.failed; a line each.")
    ] = "",
    run: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    follow: Annotated[bool, typer.Option(help="Go on as the log grows.")] = True,
    events: Annotated[
        bool, typer.Option("--events", help="A line per event instead of one per turn.")
    ] = False,
    key: Annotated[
        str | None, typer.Option(envvar="ROLLBOOK_API_KEY", help="For --url: the proxy's API key.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON for machines: an event per line.")] = False,
) -> None:
    """Watch agents: a line per turn as it becomes durable, and per outcome, reward and new version.

    A turn's line: time (UTC), trajectory, its number there, which turn it
    extends or why it is a root, prompt + completion tokens, policy version,
    finish reason, latency, mean logprob, and how the reply begins.
    """
    from rollbook.cli.tail import run_tail

    if store is None and url is None and (named := os.environ.get(STORE_VARIABLE)):
        store = Path(named)
    run_tail(store, url, start, kinds, run, follow, events, json, key)


@app.command()
def show(
    trajectory: Annotated[str, typer.Argument(help="The client's name of it, our id, or the id's end.")],
    store: StoreOption,
    as_of: AsOf = "head",
    run: Run = None,
    tokens: Annotated[
        bool | None,
        typer.Option("--tokens/--no-tokens", help="Each token, coloured by logprob. Default: with --model."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model, or its name at the hub, whose tokenizer has the tokens' text.")
    ] = None,
    turn: Annotated[
        str | None, typer.Option(help="Only this turn, all of it: its number, id, or the id's end.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Shorten nothing.")] = False,
    json: AsJson = False,
) -> None:
    """Look at one trajectory: its outcome, and its turns as a tree, each with messages, reply and tokens.

    A turn's line says which turn it extends, or why it is a root; then its
    finish reason, prompt + completion tokens, the policy versions that
    sampled them, their mean and lowest logprob, whether the client has the
    reply, and how long it took. Beneath: the messages it added, the reply.

    rollbook show task-7 --store runs
    rollbook show task-7 --store runs --turn 3 --model ./my-model
    rollbook show task-7 --store runs --as-of step:12 --json
    """
    from rollbook.cli.show.command import run_show

    run_show(store, trajectory, as_of, run, tokens, model, turn, full, json)


@app.command()
def samples(
    store: StoreOption,
    trajectory: Annotated[
        str | None, typer.Option(help="Only this trajectory: the client's name or the id.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="What this recipe, or the recipe of this CONFIG, keeps and drops.")
    ] = None,
    as_of: AsOf = "head",
    run: Run = None,
    json: AsJson = False,
) -> None:
    """Print training samples: tokens, loss mask, logprobs, policy versions of each path.

    With --recipe: which of them a training would use at the cut, and which rule drops each of the others.

    rollbook samples --store runs --trajectory task-7 --json
    rollbook samples --store runs --recipe grpo.toml --as-of step:12
    """
    if recipe is not None:
        from rollbook.cli.samples import print_recipe

        if trajectory is not None:
            raise typer.BadParameter(
                "goes without --recipe, which is about all of a run", param_hint="--trajectory"
            )
        print_recipe(store, recipe, as_of, run, json)
        return
    from rollbook.cli.samples import print_samples

    print_samples(store, trajectory, as_of, run, json)


@recipe_app.command("diff")
def recipe_diff(
    a: Annotated[Path, typer.Argument(help="A recipe file, or a CONFIG.")],
    b: Annotated[Path, typer.Argument(help="The other one.")],
    store: StoreOption,
    as_of: AsOf = "head",
    run: Run = None,
    json: AsJson = False,
) -> None:
    """How the samples that two recipes keep at a cut differ, and by which rules.

    rollbook recipe diff grpo.toml fresh.toml --store runs --as-of step:12
    """
    from rollbook.cli.samples import print_difference

    print_difference(store, a, b, as_of, run, json)


@app.command()
def ledger(
    store: StoreOption,
    run: Run = None,
    as_of: AsOf = "head",
    by_version: Annotated[bool, typer.Option("--by-version", help="A line per version, too.")] = False,
    json: AsJson = False,
) -> None:
    """Where every sampled token went, and whether what was dropped is like what was trained.

    generated = trained + dropped (by a rule) + waiting (finished, unused)
    + in flight (still open) + kept out (for a reason), at every cut. The last
    line says that it balances; exit code 1: it does not. See docs/ledger.md.
    """
    from rollbook.cli.show.ledger import run_ledger

    raise typer.Exit(run_ledger(store, run, as_of, by_version, json))


app.command()(train)


@app.command()
def preflight(
    config: Annotated[Path, typer.Argument(help="TOML file; see configs/.")],
    store: Annotated[
        Path | None,
        typer.Option(envvar="ROLLBOOK_STORE", help="The log to train on; absent: none is looked at."),
    ] = None,
    source: Annotated[Source, typer.Option(help="cut: the log as it is; tail: as it grows.")] = Source.cut,
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
    from rollbook.cli.train.doctor import run_preflight
    from rollbook.train.config.files import load_config

    raise typer.Exit(run_preflight(load_config(config, set_ or []), store, source.value, as_of, reward, json))


@app.command()
def doctor(
    store: StoreOption,
    run: Run = None,
    policy: Annotated[str, typer.Option(help="Which line of weights.")] = "actor",
    as_of: AsOf = "head",
    json: AsJson = False,
) -> None:
    """Name the failures of which a policy's newest training has signs: what was seen, and what acts on it.

    Exit code 0: no sign of failure; 1: some. The numbers are in the view `metrics`.

    rollbook doctor --store runs --run math-1
    """
    from rollbook.cli.train.doctor import run_doctor

    raise typer.Exit(run_doctor(store, run, policy, as_of, json))


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help='JSONL of {"messages": [...]}; with --model any file, folder or pattern of common shapes.'
        ),
    ],
    store: StoreOption,
    run: Annotated[str, typer.Option(help="Run to add the chats to.")],
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder whose tokenizer and chat template make tokens to train on."),
    ] = None,
    lane: Annotated[str, typer.Option(help="Lane to write; one process each.")] = "import",
    split: Annotated[str, typer.Option(help="Split of chats that name none.")] = "teacher",
    skip_bad: SkipBad = False,
    leave_out: LeaveOut = "",
    format: RowFormat = "auto",
    key: RowKeys = None,
    chat_template_kwargs: TemplateKwargs = "",
    show: Annotated[
        int | None, typer.Option(min=0, help="Show so many of the first samples, trained tokens marked.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Add chats, and with --model prompts with completions and preferences, as trajectories with tokens.

    It says which shape the rows have, and shows the first of them as it will be trained, before it writes.
    docs/importing.md has the shapes.

    rollbook import chats.jsonl.gz --store runs --run sft --model ./my-model
    rollbook import math.parquet --store runs --run sft --model ./my-model --key completion=solution
    """
    from rollbook.cli.importing import run_import

    run_import(
        file,
        store,
        run,
        lane,
        split,
        model,
        skip_bad,
        leave_out,
        format,
        key or [],
        show,
        json,
        chat_template_kwargs,
    )


app.command("run")(run_online)
for command in (plot, rollout, score, bench, demo):
    app.command()(command)


def main() -> None:
    """Entry point: see `cli_errors` for what is said of errors, and the exit codes."""
    run(app)


if __name__ == "__main__":
    main()
