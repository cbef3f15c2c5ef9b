"""What `rollbook preflight` prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import psutil
from rich.table import Table
from rich.text import Text

from rollbook import store
from rollbook.cli.terminal import Console, print_json
from rollbook.store.cut import Cut
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.preflight import preflight


def run_preflight(config: TrainConfig, path: Path | None, source: str, as_of: str, as_json: bool) -> int:
    """Print the checks of a configuration; the exit code, 1 if one is red.

    Raises:
        CutError: no such cut.
    """
    log = None if path is None else store.open(path)
    cut: Cut = {} if log is None else log.cut(as_of, config.run)
    checks = preflight(config, log, cut, source, psutil.virtual_memory().total)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("check", "", "found", "lever"):
            table.add_column(name)
        for check in checks:
            lever = "" if check.verdict == "green" else check.lever
            table.add_row(check.name, Text(check.verdict, check.verdict), Text(check.said), Text(lever))
        Console().print(table)
    return int(any(check.verdict == "red" for check in checks))
