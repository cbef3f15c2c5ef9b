"""What `rollbook replay` prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rollbook import store
from rollbook.cli.runs import of_run
from rollbook.cli.terminal import Console, print_json
from rollbook.replay.step import StepReplay, replay_step


def replay_command(
    step: int, path: Path, run: str | None, policy: str, trust_parts: bool, as_json: bool
) -> int:
    """Replay a step and print the comparison; the exit code, 0 if bit for bit and 1 if not."""
    log = store.open(path)
    with of_run(log, run):
        result = replay_step(log, step, run, policy, trust_parts=trust_parts)
    if as_json:
        values = asdict(result) | {"bit_for_bit": result.bit_for_bit}
        print_json(values)
    else:
        _print(result)
    return 0 if result.bit_for_bit else 1


def _print(result: StepReplay) -> None:
    console = Console()
    shown = result.differs_at_step if result.differs_at_step is not None else result.step
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("stage", "recorded", "replayed", ""):
        table.add_column(name)
    for stage, (recorded, found) in result.stages.items():
        same = recorded == found
        mark = Text("equal", "green") if same else Text("differs", "red")
        table.add_row(stage, (recorded or "")[:16], (found or "")[:16], mark)
    console.print(
        f"run {result.run}, step {shown}: replayed from the checkpoint of version "
        f"{result.from_version}, {len(result.reran)} steps run again"
    )
    console.print(table)
    for line in result.environment:
        console.tell(("environment", "yellow"), f" {line}")
    if result.bit_for_bit:
        console.tell(f"step {result.step}: ", ("bit for bit", "bold green"))
    else:
        where = f", first at step {result.differs_at_step} in stage "
        named = (result.differs_in or "", "bold")
        console.tell(f"step {result.step}: ", ("differs", "bold red"), where, named)
