"""What `rollbook store retain`, `retire`, `erase` and `secrets` print."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.text import Text

from rollbook.cli.progress import progress
from rollbook.cli.runs import of_run
from rollbook.cli.terminal import MIB, Console, print_json, table_of
from rollbook.store.errors import UpkeepError
from rollbook.store.open import open_store
from rollbook.store.redaction import Scrubber
from rollbook.store.secret import SECRETS, store_secret
from rollbook.store.upkeep.erase import EraseReport, erase_trajectory
from rollbook.store.upkeep.find_secrets import NAMED, Secrets, find_secrets
from rollbook.store.upkeep.retain import RetainReport, retain
from rollbook.store.upkeep.retention_policy import EndedTraining, trainings_ended_by
from rollbook.transcript.text import visible


def run_retain(path: Path, keep: str, dry_run: bool, as_json: bool) -> None:
    """Apply a retention policy, and print what happens to each sealed unit."""
    report = retain(open_store(path), keep, dry_run=dry_run)
    if as_json:
        print_json(asdict(report) | {"dropped_bytes": report.dropped_bytes})
        return
    console = Console()
    for unit in report.units:
        newest = datetime.fromtimestamp(unit.newest_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
        events, size = unit.next_seq - unit.first_seq, unit.bytes / MIB
        going = "stays" if not unit.dropped else "would be dropped" if dry_run else "dropped"
        head = Text(f"{unit.lane}/{unit.unit}", style="bold")
        head.append(f"  {events} events, {size:.1f} MiB, newest {newest} UTC: {going}", style="not bold")
        console.print(head, soft_wrap=True)
        for reason in unit.why_kept:
            console.print(f"  {reason}", style="dim", soft_wrap=True)
    console.print(_sum_up(report))


def _sum_up(report: RetainReport) -> str:
    dropped = sum(unit.dropped for unit in report.units)
    verb = "would drop" if report.dry_run else "dropped"
    return f"{verb} {dropped} of {len(report.units)} sealed units, {report.dropped_bytes / MIB:.1f} MiB"


def run_erase(
    path: Path, trajectory: str, run: str | None, keep_tokens: bool, yes: bool, reason: str, as_json: bool
) -> None:
    """Erase a trajectory, and print what was done.

    Raises:
        UpkeepError: steps or a training need its tokens, and nobody said yes. Nothing was erased.
    """
    log = open_store(path)
    with of_run(log, run):
        ended = [] if keep_tokens or yes else trainings_ended_by(log, trajectory, run)
        if ended:
            what = "; and ".join(map(_ends, ended))
            raise UpkeepError(
                f"erasing the tokens of trajectory {trajectory!r} would end {what}. Nothing was erased: say "
                "--yes to erase them all the same, or --keep-tokens to erase the text alone"
            )
        report = erase_trajectory(log, trajectory, reason, run=run, keep_tokens=keep_tokens)
    if as_json:
        print_json(asdict(report))
        return
    for line in _lines(report):
        Console().print(line, soft_wrap=True)


def _ends(training: EndedTraining) -> str:
    """Lines that name the steps and resumes that an erasure would make impossible."""
    steps, resume = training.ended.steps, training.ended.resume
    parts = [f"the replay of {_ranges(steps)}"] if steps else []
    if resume is not None:
        back = f"it would have to go back, by --abandon-after {resume}"
        parts.append(f"going on with the training where it is ({back})")
    return f"{' and '.join(parts)}, of policy {training.policy!r} in run {training.run!r}"


def _ranges(steps: Sequence[int]) -> str:
    """`step 7`, or `12 steps (3, 8-18)`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    named = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{len(steps)} steps ({named})"


def _lines(report: EraseReport) -> list[str]:
    what = "text" if report.tokens_kept else "text and tokens"
    done = f"rewrote {', '.join(report.units)}" if report.units else "nothing was left to rewrite"
    lines = [
        f"erased the {what} of trajectory {report.name} ({report.trajectory_id}) of run {report.run}: "
        f"{report.events} events, {report.bodies} large values; {done}"
    ]
    if report.elsewhere:
        lines.append(f"other hosts erase it from {', '.join(report.elsewhere)} when they seal next")
    if report.shared_bodies:
        lines.append(
            f"{report.shared_bodies} large values stay, since requests of other trajectories hold them too"
        )
    if report.replays:
        left = ", ".join(report.replays)
        lines.append(f"its replays, or what judges were asked, hold its text too: erase {left} as well")
    if report.outputs:
        outputs = ", ".join(report.outputs)
        lines.append(f"what its agents printed is outside the store: delete {outputs} yourself")
    if not report.finished:
        lines.append("the trajectory is not finished: erase it again when it is")
    return lines


SHOWN = 200
"""Places that are printed; --json has all."""


def run_secrets(path: Path, as_of: str, run: str | None, as_json: bool) -> int:
    """Print where secrets are at a cut, without their values; the exit code: 0 if there are none, else 1.

    Raises:
        NotAStoreError: there is no store.
        CutError: no such cut.
    """
    log = open_store(path)
    with of_run(log, run):
        cut = log.cut(as_of, run)
    with progress("looking for secrets", sum(cut.values())) as advance:
        report = find_secrets(log, cut, Scrubber(_key(log.path)), advance)
    if as_json:
        print_json(report.as_json())
    else:
        _print(Console(), path, report)
    return 1 if report.formats else 0


def _key(store: Path) -> bytes:
    """The store's secret, or a temporary one if the store has none and cannot be written."""
    try:
        return store_secret(store, SECRETS)
    except OSError:
        return secrets.token_bytes(32)


def _print(console: Console, path: Path, report: Secrets) -> None:
    if not report.formats:
        console.print(f"no secrets in {report.events:,} events")
        return
    names = ("format", "digest", "count", "trajectory", "turn", "kind", "field")
    table = table_of(*names, overflow="fold")
    table.columns[names.index("digest")].no_wrap = True
    for place, count in list(report.places.items())[:SHOWN]:
        where = (place.trajectory_id or f"run {place.run}", place.turn_id or "", place.kind, place.field)
        shown = (place.format, place.digest.removeprefix("[secret:").rstrip("]"), f"{count:,}", *where)
        table.add_row(*(Text(visible(part)) for part in shown))
    console.print(table)
    more = sum(report.formats.values()) - sum(list(report.places.values())[:SHOWN])
    if more:
        console.print(f"and {more:,} more: --json lists up to 10,000 places")
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(report.formats.items()))
    console.print(f"found: {counts}. Revoke what still opens something: it is on disk, and in every copy.")
    if NAMED in report.formats:
        console.print(f"{NAMED}: recognised by the name of its field, or by its place in an address")
    for trajectory in report.trajectories[:20]:
        command = ["rollbook", "store", "erase", "--store", str(path), "--trajectory", trajectory]
        console.print(f"  {shlex.join(command)} --reason 'a leaked key'", soft_wrap=True)
    if len(report.trajectories) > 20:
        console.print(f"  and {len(report.trajectories) - 20:,} trajectories more, which --json lists")
