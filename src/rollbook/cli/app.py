"""The one command, `rollbook`: its commands, in the order of its help.

A command's module holds its options and what it does. It is imported when the command is called, and imports
what the command needs when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rollbook import __version__
from rollbook.cli.errors import EPILOG, run
from rollbook.cli.groups import Announced, group_of

COMMANDS = {
    "serve": Announced(
        "serve:serve",
        "Record agents: OpenAI's and Anthropic's APIs, and all that passes becomes durable events.",
    ),
    "sql": Announced(
        "sql:sql",
        "Query the live log with SQL (DuckDB). A query reads the store, and nothing else of this machine.",
    ),
    "tail": Announced(
        "tail:tail",
        "Watch agents: a line per turn as it becomes durable, and per outcome, reward and new version.",
    ),
    "show": Announced(
        "show.command:show",
        "Look at one trajectory: its outcome, and its turns as a tree, each with messages, reply and tokens.",
    ),
    "samples": Announced(
        "samples:samples",
        "Print training samples: tokens, loss mask, logprobs, policy versions of each path.",
    ),
    "ledger": Announced(
        "show.ledger:ledger",
        "Where every sampled token went, and whether what was dropped is like what was trained.",
    ),
    "train": Announced(
        "train.train:train",
        "Train from the log. Every step is planned and committed as events, so it can be replayed.",
    ),
    "preflight": Announced(
        "train.doctor:preflight",
        "Check a CONFIG before a training: model, memory, batch, normalization, KL, staleness, data, "
        "rewards.",
    ),
    "doctor": Announced(
        "train.doctor:doctor",
        "Name the failures of which a policy's newest training has signs: what was seen, and what acts on "
        "it.",
    ),
    "import": Announced(
        "importing:import_",
        "Add chats, and with --model prompts with completions and preferences, as trajectories with tokens.",
    ),
    "run": Announced(
        "online.run:run_online",
        "Train online with one command: engines, proxy, trainer and rollouts.",
    ),
    "plot": Announced(
        "train.plot:plot",
        "Draw the course of trainings from the log, several runs side by side: reward, held-out reward, "
        "loss, KL, entropy, lengths, staleness, speed.",
    ),
    "rollout": Announced(
        "online.rollout:rollout",
        "Run agents on tasks: started, watched and scored, each a trajectory of the proxy's log.",
    ),
    "score": Announced(
        "train.score:score",
        "Reward finished trajectories by a model: each that has no reward of the source gets one, as an "
        "event.",
    ),
    "bench": Announced(
        "bench:bench",
        "Measure this machine: how fast its disk takes events, or how far its processor's numbers lie apart.",
    ),
    "demo": Announced(
        "bench:demo",
        "See all of it in a few minutes: record, query, train offline and online, replay.",
    ),
    "replay": Announced("replay.group:replay_app", "Re-run what the log says happened, and compare."),
    "recipe": Announced("samples:recipe_app", "What recipes make of a log."),
    "store": Announced("store.store:store_app", "Look at a store's files, and look after them."),
    "keys": Announced(
        "keys:keys_app",
        "Keys that open a proxy, each for what its role is for: operator, writer, judge or reader.",
    ),
    "export": Announced(
        "export:export_app",
        "Write what the store holds to files for others: trajectories, a model, or its adapter.",
    ),
    "lineage": Announced(
        "lineage.command:lineage_app",
        "Where a token, sample, step, policy version or trajectory comes from, and all that it led to. See "
        "docs/lineage.md.",
    ),
    "view": Announced("view:view_app", "Look at a log in a browser, or write a page of it to a file."),
    "service": Announced(
        "service:service_app",
        "Serve training to clients of the Tinker API: they own data, losses and the loop.",
    ),
}

app = typer.Typer(
    cls=group_of(COMMANDS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The ledger of agent rollouts: record agent traffic, query it with SQL, train on it, "
    "replay any step bit for bit.",
    epilog=EPILOG,
)


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


def main() -> None:
    """Entry point: see `cli_errors` for what is said of errors, and the exit codes."""
    run(app)


if __name__ == "__main__":
    main()
