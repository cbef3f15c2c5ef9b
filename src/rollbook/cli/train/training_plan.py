"""What `rollbook train --plan` prints: what a configuration will need, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table

from rollbook import store
from rollbook.cli.terminal import Console, print_json, say
from rollbook.engines.hub import model_folder
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.memory import Need, need_of
from rollbook.train.doctor.recorded import read_recorded
from rollbook.train.model.memory import parameters
from rollbook.train.model.model import choose_device
from rollbook.train.model.shape import shape_to_train

PARTS = ("weights", "gradients", "optimizer", "reference", "activations", "logits", "total")


def print_plan(config: TrainConfig, path: Path, as_of: str, ranks: int | None, *, as_json: bool) -> None:
    """Print the ranks, the batch, and the memory that a rank of each pipeline stage needs.

    Raises:
        ConfigError: the ranks cannot be shared out as [parallel] says.
        CutError: no such cut.
        ModelError: the model cannot be read, or not be split so.
    """
    sizes, log = config.parallel, store.open(path)
    count = ranks or sizes.fewest
    copies = sizes.copies(count)
    shape = shape_to_train(model_folder(config.model, weights=False), config.algorithm.head_width)
    seen = read_recorded(log, log.cut(as_of, config.run), config)
    longest = seen.longest or shape.context
    need = need_of(config, shape, longest, count)
    if as_json:
        print_json(_as_json(need, count, copies, longest))
        return
    said = f"{count} rank{'s' * (count > 1)}"
    layout = sizes.described(count)
    if count > 1:
        said += f" ({', '.join(f'{key} {size}' for key, size in layout.items())})"
    of_model = f"{shape.family}, {shape.layers} layers, {parameters(shape):,} parameters in {config.dtype}"
    say(f"{of_model}; {said}")
    found = "in the log" if seen.longest else "the model's context: the log has no samples yet"
    say(f"forward passes of {need.passes.removesuffix(',')}; longest sample: {longest} tokens ({found})")
    Console().print(_table(need))
    say(_room(config, need, count))


def _as_json(need: Need, count: int, copies: int, longest: int) -> Any:
    stages = [asdict(rank) | {"state": rank.state, "total": rank.total} for rank in need.stages]
    return {
        "ranks": count,
        "copies": copies,
        "longest_sample": longest,
        "stages": stages,
    }


def _table(need: Need) -> Table:
    """A column for one rank of each pipeline stage."""
    small = max(rank.total for rank in need.stages) < 1 << 30
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"{'MiB' if small else 'GiB'} of a rank")
    for stage in range(len(need.stages)):
        table.add_column(f"stage {stage + 1}" if len(need.stages) > 1 else "", justify="right")
    for part in PARTS:
        sizes = (getattr(rank, part) / (1 << 20 if small else 1 << 30) for rank in need.stages)
        table.add_row(part, *(f"{size:.2f}" for size in sizes))
    table.add_row("parameters", *(f"{rank.parameters:,}" for rank in need.stages))
    return table


def _room(config: TrainConfig, need: Need, count: int) -> str:
    """What there is for it."""
    most = max(rank.total for rank in need.stages) / 2**30
    device = choose_device(config.device)
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"a GPU here has {there:.1f} GiB, of which a rank takes {most:.2f} GiB beside torch itself"
    all_of = need.of_all("total", count) / 2**30
    there = psutil.virtual_memory().total / 2**30
    return f"all ranks together take {all_of:.2f} GiB beside torch itself; this machine has {there:.1f} GiB"
