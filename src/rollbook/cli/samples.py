"""What `rollbook samples` prints."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from rollbook import store
from rollbook.cli.runs import check_run, of_run
from rollbook.cli.terminal import Console, print_json
from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import CutError
from rollbook.store.events import TrajectoryOpened
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
    trajectories = [
        t for t in log.trajectories(cut, _named(log, cut, trajectory)).values() if run in (None, t.run)
    ]
    if trajectory is not None and not trajectories:
        raise CutError(f"no trajectory {trajectory!r} at {as_of!r}; list them: select * from trajectories")
    samples = all_samples(trajectories)
    if as_json:
        print_json([s.as_json() for s in samples])
        return
    _print_table(samples)


def _named(log: Store, cut: Cut, wanted: str | None) -> list[str] | None:
    """Ids of the trajectories that are called so, by the client or by us; None where all are wanted."""
    if wanted is None or log.trajectories(cut, [wanted]):
        return None if wanted is None else [wanted]
    opened = (event.record for event in log.events_of([TrajectoryOpened.KIND], cut))
    return [r.trajectory_id for r in opened if isinstance(r, TrajectoryOpened) and r.name == wanted]


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
