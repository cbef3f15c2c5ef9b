"""What `rollbook preflight` prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import psutil
import typer
from rich.table import Table
from rich.text import Text

from rollbook import store
from rollbook.cli.terminal import Console, print_json
from rollbook.store.cut import Cut
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.preflight import preflight


def run_preflight(
    config: TrainConfig, path: Path | None, source: str, as_of: str, reward: str | None, as_json: bool
) -> int:
    """Print the checks of a configuration; the exit code, 1 if one is red.

    Raises:
        CutError: no such cut.
        BadParameter: a reward function has no completions to be tried on.
    """
    if reward is not None and path is None:
        raise typer.BadParameter(
            "is tried on recorded completions: name their store with --store", param_hint="--reward"
        )
    log = None if path is None else store.open(path)
    cut: Cut = {} if log is None else log.cut(as_of, config.run)
    checks = preflight(config, log, cut, source, psutil.virtual_memory().total, reward)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("check", "", "found"):
            table.add_column(name)
        for check in checks:
            levers = "" if check.verdict == "green" else f"\nlevers: {check.lever}"
            table.add_row(check.name, Text(check.verdict, check.verdict), Text(check.said + levers))
        Console().print(table)
    return int(any(check.verdict == "red" for check in checks))
