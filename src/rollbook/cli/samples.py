"""What `rollbook samples` prints."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from rollbook import store
from rollbook.cli.runs import check_run, of_run
from rollbook.cli.show.finding import openings_of
from rollbook.cli.terminal import Console, print_json
from rollbook.store.errors import CutError
from rollbook.train.data.samples import Sample, all_samples


def print_samples(path: Path, trajectory: str | None, as_of: str, run: str | None, as_json: bool) -> None:
    """Print every root-to-leaf path at a cut as an aligned sample.

    Raises:
        CutError: no such run, or no such trajectory at that cut.
    """
    log = store.open(path)
    with of_run(log, run):
        cut = log.cut(as_of, run)
    if run is not None:
        check_run(log, run, cut)
    ids = None if trajectory is None else [o.trajectory_id for o in openings_of(log, cut, trajectory)]
    trajectories = [t for t in log.trajectories(cut, ids).values() if run in (None, t.run)]
    if trajectory is not None and not trajectories:
        raise CutError(f"no trajectory {trajectory!r} at {as_of!r}; list them: select * from trajectories")
    samples = all_samples(trajectories)
    if as_json:
        print_json([s.as_json() for s in samples])
        return
    _print_table(samples)


def _print_table(samples: list[Sample]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("trajectory", "split", "group"):
        table.add_column(name)
    for name in ("turns", "tokens", "trained", "versions", "logprob", "reward"):
        table.add_column(name, justify="right")
    for s in samples:
        versions = s.versions[s.versions >= 0]
        span = f"{versions.min()}..{versions.max()}" if versions.size else ""
        total = float(s.logprobs.sum())
        table.add_row(
            s.name,
            s.split,
            s.group or "",
            str(len(s.turn_ids)),
            str(len(s)),
            str(int(s.loss_mask.sum())),
            span,
            "" if total != total else f"{total:.3f}",
            "" if s.reward is None else f"{s.reward:g}",
        )
    Console().print(table)
