"""What `rollbook store checkpoints` prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from rollbook.cli.runs import of_run
from rollbook.cli.table import print_table
from rollbook.cli.terminal import print_json, say
from rollbook.store.open import open_store
from rollbook.store.upkeep.checkpoint_rule import Keep, keep_of
from rollbook.store.upkeep.checkpoints import HeldCheckpoint, list_checkpoints, remove_checkpoints

MIB = 1 << 20


def run_checkpoints(
    path: Path,
    run: str | None,
    policy: str | None,
    keep_last: int | None,
    keep_every: int | None,
    yes: bool,
    as_json: bool,
) -> None:
    """List checkpoints, or remove those that are not to be kept, and print which.

    Raises:
        BadParameter: they are to be removed, and nothing says which to keep.
        UpkeepError: there is none.
        LaneLockedError: somebody trains a policy of which some are to be removed.
    """
    log, keep = open_store(path), keep_of(keep_last, keep_every)
    if yes and keep is None:
        raise typer.BadParameter("goes with --keep-last or --keep-every", param_hint="--yes")
    gone: set[str] = set()
    with of_run(log, run):
        found = list_checkpoints(log, keep or Keep(1), run, policy)
        if yes and keep is not None:
            for key in sorted({(one.run, one.policy) for one in found if one.goes}):
                gone |= remove_checkpoints(log, keep, *key)
    if as_json:
        print_json([asdict(one) | {"goes": one.goes, "went": one.path in gone} for one in found])
        return
    verb = None if keep is None else "stays: it is being read" if yes else "would go"
    head = ["run", "policy", "version", "step", "MiB", "checkpoint", "needed"]
    print_table(head, [_row(one, "removed now" if one.path in gone else verb) for one in found])
    if keep is None:
        free = [one for one in found if one.goes]
        size = sum(one.bytes or 0 for one in free) / MIB
        say(f"nothing needs {len(free)} of them, {size:.1f} MiB: --keep-last and --keep-every say which go")
    else:
        going = [one for one in found if (one.path in gone if yes else one.goes)]
        size = sum(one.bytes or 0 for one in going) / MIB
        there = sum(one.bytes is not None for one in found)
        verb = "removed" if yes else "would remove"
        say(f"{verb} {len(going)} of {there} checkpoints, {size:.1f} MiB{'' if yes else ': --yes does'}")


def _row(one: HeldCheckpoint, verb: str | None) -> tuple[object, ...]:
    """A checkpoint's row.

    Args:
        verb: what becomes of one that the rule lets go; None: there is no rule.
    """
    if one.removed is not None:
        needed = f"removed ({one.removed})"
    elif one.bytes is None:
        needed = "its folder is gone"
    else:
        needed = "; ".join(one.why_kept) or verb or ""
    size = None if one.bytes is None else round(one.bytes / MIB, 1)
    path = one.path if one.optimizer else f"{one.path} (weights alone)"
    return (one.run, one.policy, one.policy_version, one.step, size, path, needed)
