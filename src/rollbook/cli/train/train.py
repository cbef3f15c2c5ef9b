"""`rollbook train`: trains, or says with `--plan` what memory a configuration will need."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from rollbook.cli.options import AsOf, LeaveOut, RowFormat, RowKeys, SkipBad, Source, StoreOption
from rollbook.cli.terminal import Console, print_json, say, table_of

if TYPE_CHECKING:
    from rollbook.train.config.config import TrainConfig
    from rollbook.train.doctor.memory import Need

AbandonAfter = Annotated[
    int | None,
    typer.Option(min=0, help="Give up the steps after this version, and go on from its checkpoint."),
]
RanksOption = Annotated[
    int | None, typer.Option(min=1, help="Processes; absent: as many as the sizes of parallel need.")
]
Launch = Annotated[
    Literal["here", "ray"],
    typer.Option(help="Where ranks run: on this host, or where Ray places them."),
]
Strategy = Annotated[
    Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
    typer.Option(help="With --launch ray: how it spreads ranks over nodes."),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="First import this file of chats, or what is new in it: docs/importing.md."),
]
Keys = Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set optimizer.lr=1e-4.")]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print what holds, defaults included, and train nothing.")
]
Plan = Annotated[
    bool, typer.Option("--plan", help="Print the memory that each rank will need, and train nothing.")
]
PlaceWithin = Annotated[
    float, typer.Option(min=0, help="With --launch ray: seconds to wait for room in the cluster.")
]


def train(
    config: Annotated[Path, typer.Argument(help="TOML file; see configs/.")],
    store: StoreOption,
    source: Source = "cut",
    as_of: AsOf = "head",
    lane: Annotated[str, typer.Option(help="Lane to write; one process each.")] = "train",
    set_: Keys = None,
    abandon_after: AbandonAfter = None,
    ranks: RanksOption = None,
    launch: Launch = "here",
    strategy: Strategy = "PACK",
    place_within: PlaceWithin = 60.0,
    data: Data = None,
    format: RowFormat = "auto",
    key: RowKeys = None,
    skip_bad: SkipBad = False,
    leave_out: LeaveOut = "",
    show_config: ShowConfig = False,
    plan: Plan = False,
    json: Annotated[bool, typer.Option("--json", help="With --plan: one JSON object.")] = False,
) -> None:
    """Train from the log. Every step is planned and committed as events, so it can be replayed.

    SIGINT and SIGTERM end it after the step in hand, with a checkpoint; the same command goes on. Where it
    cannot, --abandon-after VERSION goes on all the same: what later steps consumed may be used again.
    With --launch ray, Ray places the ranks on the nodes of its cluster; this process is rank 0.
    Under torchrun or Slurm the same command finds its rank in the environment. See docs/ranks.md.
    With --data FILE, rank 0 imports it first with the tokenizer of CONFIG's model; what is there stays.
    The keys of CONFIG are in docs/configuration.md.
    """
    from rollbook.train.config.files import load_config

    if json and not plan:
        raise typer.BadParameter("goes with --plan alone", param_hint="--json")
    settings = load_config(config, set_ or [])
    if show_config:
        from rollbook.train.config.files import as_toml

        say(as_toml(settings))
        return
    if plan:
        print_plan(settings, store, as_of, ranks, as_json=json)
        return
    placing, rows = (launch, strategy, place_within), (data, format, key or [], skip_bad, leave_out)
    _train(settings, store, source, as_of, lane, abandon_after, ranks, placing, rows)


def _train(
    config: TrainConfig,
    store: Path,
    source: str,
    as_of: str,
    lane: str,
    abandon_after: int | None,
    ranks: int | None,
    placing: tuple[str, str, float],
    rows: tuple[Path | None, str, list[str], bool, str],
) -> None:
    """Train, after the import that was asked for."""
    from rollbook.cli.train.training import run_train

    (file, shape, keys, skip_bad, leave_out), (launch, strategy, within_s) = rows, placing
    bring = None
    if file is not None:
        from rollbook.cli.importing import training_data

        if source != "cut" or as_of != "head":
            raise typer.BadParameter("goes with --source cut, as of head", param_hint="--data")
        bring = training_data(file, config, store, shape, keys, skip_bad=skip_bad, leave_out=leave_out)
    elif keys or skip_bad or leave_out or shape != "auto":
        options = "--format, --key, --skip-bad and --leave-out"
        raise typer.BadParameter("goes with --data alone", param_hint=options)
    placed = (strategy, within_s) if launch == "ray" else None
    run_train(config, store, source, as_of, lane, abandon_after, ranks, placed, bring)


PARTS = ("weights", "gradients", "optimizer", "reference", "activations", "logits", "total")


def print_plan(config: TrainConfig, path: Path, as_of: str, ranks: int | None, *, as_json: bool) -> None:
    """Print the ranks, the batch, and the memory that a rank of each pipeline stage needs.

    Raises:
        ConfigError: the ranks cannot be shared out as [parallel] says.
        CutError: no such cut.
        ModelError: the model cannot be read, or not be split so.
    """
    from rollbook import store
    from rollbook.engines.hub import model_folder
    from rollbook.train.doctor.memory import need_of
    from rollbook.train.doctor.preflight import read_recorded
    from rollbook.train.model.memory import parameters
    from rollbook.train.model.shape import shape_to_train

    sizes, log = config.parallel, store.open(path)
    count = ranks or sizes.fewest
    copies = sizes.copies(count)
    shape = shape_to_train(model_folder(config.model, weights=False), config.algorithm.head_width)
    recorded = read_recorded(log, log.cut(as_of, config.run), config)
    longest = recorded.longest or shape.context
    need = need_of(config, shape, longest, count)
    if as_json:
        stages = [asdict(rank) | {"state": rank.state, "total": rank.total} for rank in need.stages]
        print_json({"ranks": count, "copies": copies, "longest_sample": longest, "stages": stages})
        return
    ranks_text = f"{count} rank{'s' * (count > 1)}"
    layout = sizes.described(count)
    if count > 1:
        ranks_text += f" ({', '.join(f'{key} {size}' for key, size in layout.items())})"
    of_model = f"{shape.family}, {shape.layers} layers, {parameters(shape):,} parameters in {config.dtype}"
    say(f"{of_model}; {ranks_text}")
    source = "in the log" if recorded.longest else "the model's context: the log has no samples yet"
    say(f"forward passes of {need.passes.removesuffix(',')}; longest sample: {longest} tokens ({source})")
    Console().print(_table(need))
    say(_room(config, need, count))


def _table(need: Need) -> Table:
    """A column for one rank of each pipeline stage."""
    small = max(rank.total for rank in need.stages) < 1 << 30
    count = len(need.stages)
    stages = (f">stage {stage + 1}" if count > 1 else ">" for stage in range(count))
    table = table_of(f"{'MiB' if small else 'GiB'} of a rank", *stages)
    for part in PARTS:
        sizes = (getattr(rank, part) / (1 << 20 if small else 1 << 30) for rank in need.stages)
        table.add_row(part, *(f"{size:.2f}" for size in sizes))
    table.add_row("parameters", *(f"{rank.parameters:,}" for rank in need.stages))
    return table


def _room(config: TrainConfig, need: Need, count: int) -> str:
    """What there is for it."""
    import psutil
    import torch

    from rollbook.train.model.model import choose_device

    most = max(rank.total for rank in need.stages) / 2**30
    device = choose_device(config.device)
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"a GPU here has {there:.1f} GiB, of which a rank takes {most:.2f} GiB beside torch itself"
    all_of = need.of_all("total", count) / 2**30
    there = psutil.virtual_memory().total / 2**30
    return f"all ranks together take {all_of:.2f} GiB beside torch itself; this machine has {there:.1f} GiB"
