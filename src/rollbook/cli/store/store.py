"""`rollbook store ...`: commands on a store's files. Each imports what it needs when it runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson, AsOf, Policy, Run, RunOfStep, StoreOption
from rollbook.cli.terminal import MIB, Console, print_json, say

NewStore = Annotated[Path, typer.Option("--store", help="Folder to make; it must not exist yet.")]
Endpoint = Annotated[str | None, typer.Option(help="URL of an S3-compatible service that is not AWS.")]

store_app = typer.Typer(no_args_is_help=True, help="Look at a store's files, and look after them.")


@store_app.command("info")
def store_info(store: StoreOption, json: AsJson = False) -> None:
    """Lanes, segments and checkpoints of a store."""
    from rollbook.cli.store.info import print_info

    print_info(store, json)


@store_app.command("seal")
def store_seal(
    store: StoreOption,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until interrupted.")] = False,
    json: AsJson = False,
    parent: Annotated[int | None, typer.Option(help="End with this process.", hidden=True)] = None,
) -> None:
    """Make closed segments into Parquet, merge small units, remove what was replaced.

    `rollbook serve` does this by itself. Exit code 1: a lane is damaged, and was left as it is; or tables
    ([iceberg] in store.toml) were not published.
    """
    from rollbook.cli.store.seal import run_seal

    raise typer.Exit(run_seal(store, watch, json, parent))


@store_app.command("verify")
def store_verify(
    store: StoreOption,
    weights: Annotated[
        bool, typer.Option("--weights", help="Read checkpoints too, and compare them with the log.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Read every byte of the log and check it: checksums, chains, order; and that every answered turn has
    its request and its trajectory's opening. Exit code 1: something is damaged, or missing.

    With --weights: that every checkpoint is what the log says, and that what was published and served has the
    digest of a checkpoint or of the step that made it.
    """
    from rollbook.cli.store.verify import run_verify

    raise typer.Exit(run_verify(store, weights, json))


@store_app.command("repair")
def store_repair(store: StoreOption, json: AsJson = False) -> None:
    """Remove damaged WAL files whose events are in sealed units that are whole, and say so in the log.

    It verifies the store for that, and changes no other file. Exit code 1: something is still damaged.
    """
    from rollbook.cli.store.verify import run_repair

    raise typer.Exit(run_repair(store, json))


@store_app.command("secrets")
def store_secrets(
    store: StoreOption, as_of: AsOf = "head", run: RunOfStep = None, json: AsJson = False
) -> None:
    """Find secrets in the log: keys of known formats, and passwords by their names. Never says one.

    Exit code 1: there are some; it says how to erase them.
    """
    from rollbook.cli.store.retention import run_secrets

    raise typer.Exit(run_secrets(store, as_of, run, json))


@store_app.command("upload")
def store_upload(store: StoreOption, json: AsJson = False) -> None:
    """Move sealed files to object storage ([remote] in store.toml); the sealer does this by itself."""
    from rollbook.cli.store.info import run_upload

    run_upload(store, json)


@store_app.command("publish")
def store_publish(
    store: StoreOption,
    anew: Annotated[
        bool, typer.Option("--anew", help="Make the tables anew, whatever the catalog has by their names.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Make Iceberg tables of the sealed units, for other engines, or bring them up to date: rollbook.turns,
    rollbook.marks and rollbook.scalars, in the catalog's database. Files are named where they lie.

    With publish = true under [iceberg] in store.toml the sealer does this by itself.

    rollbook store publish --store runs --json
    """
    from rollbook.cli.store.publish import run_publish

    run_publish(store, anew, json)


@store_app.command("attach")
def store_attach(
    store: NewStore,
    remote: Annotated[str, typer.Option(help="s3://bucket/prefix/STORE-ID, as upload prints it.")],
    endpoint: Endpoint = None,
    json: AsJson = False,
) -> None:
    """Make a store that reads what another one moved to object storage."""
    from rollbook.store.upkeep.attach import attach

    report = attach(store, remote, endpoint)
    if json:
        print_json(report)
        return
    say(f"{store} reads {remote}: {report.units} units, {report.bytes / MIB:.1f} MiB, which stay there")
    for lane, events in report.lanes.items():
        say(f"lane {lane}: {events} events, to the end of its last uploaded unit")
    for address in report.unfinished:
        say(f"{address}: an upload that was cut short; it has no manifest, and nobody reads it")


@store_app.command("join")
def store_join(
    url: Annotated[
        str, typer.Argument(help="Its medium and id: s3://bucket/prefix/STORE-ID, nats://host/STORE-ID.")
    ],
    store: NewStore,
    endpoint: Endpoint = None,
    remote: Annotated[
        str | None, typer.Option(help="s3://bucket/prefix of sealed files, where they are not in the medium.")
    ] = None,
    remote_endpoint: Annotated[
        str | None, typer.Option(help="URL of the S3-compatible service that has them.")
    ] = None,
    ack: Annotated[
        str, typer.Option(help="local: acknowledge what this disk has; medium: what the medium has, too.")
    ] = "local",
    lease_s: Annotated[
        float,
        typer.Option(min=0, help="So long may this host be silent before others take over; 0: for ever."),
    ] = 6.0,
    follow: Annotated[
        list[str] | None, typer.Option(help="Lanes to copy, by names with *; may be given several times.")
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Make the store, of an id of your choice, if there is none.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Make a folder of this host one of the hosts of a store that others write. See docs/cluster.md.

    Its store.toml then names the medium; every command of it follows the other hosts from there on.

    rollbook store join s3://rollouts/team/0192... --store runs
    """
    from rollbook.cli.store.hosts import run_join
    from rollbook.store.errors import ConfigError
    from rollbook.store.settings import RemoteSettings, medium_settings

    settings = medium_settings(endpoint=endpoint, ack=ack, lease_s=lease_s, follow=follow or ["*"])
    if remote is None and remote_endpoint is not None:
        raise ConfigError(f"--remote-endpoint {remote_endpoint}: say with --remote what is there")
    elsewhere = None if remote is None else RemoteSettings(uri=remote, endpoint=remote_endpoint)
    run_join(store, url, settings, elsewhere, json, make=create)


@store_app.command("follow")
def store_follow(
    store: StoreOption,
    once: Annotated[bool, typer.Option("--once", help="End once all is here that is there now.")] = False,
) -> None:
    """Copy other hosts' lanes to this one as they grow, and ship what is left in this one's.

    Every command follows for as long as it runs; this one does so where none else does.
    """
    from rollbook.cli.store.hosts import run_follow

    run_follow(store, once)


@store_app.command("hosts")
def store_hosts(store: StoreOption, json: AsJson = False) -> None:
    """The hosts of a store: each one's lanes, how far they are here, and whether their processes run."""
    from rollbook.cli.store.hosts import run_hosts

    run_hosts(store, json)


@store_app.command("leave")
def store_leave(store: StoreOption, json: AsJson = False) -> None:
    """Make a folder a store of this host alone again, with all that the other hosts wrote. End these
    first."""
    from rollbook.cli.store.hosts import run_leave

    run_leave(store, json)


@store_app.command("sizing")
def store_sizing(
    hosts: Annotated[
        str, typer.Option(help="How many hosts write; several numbers with commas.")
    ] = "10,100,1000",
    events_s: Annotated[float, typer.Option(min=0.001, help="Events of a host, a second.")] = 200.0,
    event_kb: Annotated[float, typer.Option(min=0.001, help="Of an event, in thousands of bytes.")] = 14.0,
    followers: Annotated[int, typer.Option(min=0, help="Hosts that copy all lanes.")] = 2,
    pace_s: Annotated[float, typer.Option(min=0.01, help="Seconds between two chunks of a lane.")] = 0.25,
    keep_s: Annotated[float, typer.Option(min=60, help="How long chunks stay ([medium] keep_s).")] = 604800.0,
    json: AsJson = False,
) -> None:
    """What object storage is asked for by so many hosts, and what that costs a month, without the sealed
    files.

    rollbook store sizing --hosts 20 --events-s 50 --followers 1
    """
    from rollbook.cli.store.hosts import run_sizing
    from rollbook.store.hosts.sizing import Load

    load = Load(1, events_s, event_kb, followers, pace_s, keep_s=keep_s)
    run_sizing(hosts, load, json)


@store_app.command("rebuild-catalog")
def store_rebuild_catalog(store: StoreOption, json: AsJson = False) -> None:
    """Make the catalog anew from the store's files, even where its database is gone or broken."""
    from rollbook.cli.store.info import run_rebuild

    run_rebuild(store, json)


@store_app.command("checkpoints")
def store_checkpoints(
    store: StoreOption,
    run: Annotated[str | None, typer.Option("--run", help="Only of this run.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Only of this line of weights.")] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Keep so many of the newest that training resumes from.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Of so many versions in a row keep the first, too.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what the two options do not keep.")] = False,
    json: AsJson = False,
) -> None:
    """List checkpoints: what needs each, and which were removed. With --keep-last or --keep-every it says
    which would go; with --yes they do.

    What something needs stays: training's next start, references, the beginning of a configuration, engines.
    A training does the same by itself: checkpoint.keep_last and checkpoint.keep_every in its CONFIG.

    rollbook store checkpoints --store runs --keep-last 2 --keep-every 100
    """
    from rollbook.cli.store.info import run_checkpoints

    run_checkpoints(store, run, policy, keep_last, keep_every, yes, json)


@store_app.command("retain")
def store_retain(
    store: StoreOption,
    keep: Annotated[str, typer.Option(help="How much: 7d, 12h, 500GiB or versions:20.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: AsJson = False,
) -> None:
    """Drop old sealed units that nothing needs any more; says of each other one why it stays."""
    from rollbook.cli.store.retention import run_retain

    run_retain(store, keep, dry_run, json)


@store_app.command("retire")
def store_retire(
    store: StoreOption,
    run: Annotated[str, typer.Option(help="Run of the steps.")],
    reason: Annotated[str, typer.Option(help="Why, for the log.")],
    policy: Policy = "actor",
    steps: Annotated[str | None, typer.Option(help="Steps A-B, or one step.")] = None,
    before_version: Annotated[
        int | None, typer.Option(help="Steps that started from a version below this.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Give steps up for replay, so that `rollbook store retain` may drop what only they needed."""
    from rollbook.cli.runs import of_run
    from rollbook.store.open import open_store
    from rollbook.store.upkeep.retire import parse_steps, retire_steps

    chosen = None if steps is None else parse_steps(steps)
    log = open_store(store)
    with of_run(log, run):
        report = retire_steps(log, run, policy, reason, steps=chosen, before_version=before_version)
    if json:
        print_json(asdict(report))
        return
    whose = f"of policy {policy} in run {run}"
    earlier = f"; {report.before} were retired before" if report.before else ""
    Console().print(f"retired {len(report.steps)} steps {whose}{earlier}")


@store_app.command("erase")
def store_erase(
    store: StoreOption,
    trajectory: Annotated[str, typer.Option(help="The client's name of the trajectory, or its id.")],
    reason: Annotated[str, typer.Option(help="Why, for the log; not the text itself.")],
    run: Run = None,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Keep token ids and logprobs: trainable, replayable.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Also where steps can then not be replayed, or a training not go on."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Remove the text of one trajectory from every file of the store.

    Where training used it, the steps are named that could not be replayed then, and nothing is done without
    --yes (exit code 2).
    """
    from rollbook.cli.store.retention import run_erase

    run_erase(store, trajectory, run, keep_tokens, yes, reason, json)
