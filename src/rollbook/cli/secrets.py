"""`rollbook store secrets`: prints the secrets that were found, and the remedies."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rollbook.cli.progress import progress
from rollbook.cli.runs import of_run
from rollbook.cli.show.terminal_text import visible
from rollbook.cli.terminal import Console, print_json
from rollbook.store.open import open_store
from rollbook.store.redaction import Scrubber
from rollbook.store.secret import SECRETS, store_secret
from rollbook.store.upkeep.find_secrets import NAMED, Secrets, find_secrets

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
        found = find_secrets(log, cut, Scrubber(_key(log.path)), advance)
    if as_json:
        print_json(found.as_json())
    else:
        _print(Console(), path, found)
    return 1 if found.formats else 0


def _key(store: Path) -> bytes:
    """The store's secret, or a temporary one if the store has none and cannot be written."""
    try:
        return store_secret(store, SECRETS)
    except OSError:
        return secrets.token_bytes(32)


def _print(console: Console, path: Path, found: Secrets) -> None:
    if not found.formats:
        console.print(f"no secrets in {found.events:,} events")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("format", "digest", "count", "trajectory", "turn", "kind", "field"):
        table.add_column(name, overflow="fold", no_wrap=name == "digest")
    for place, count in list(found.places.items())[:SHOWN]:
        where = (place.trajectory_id or f"run {place.run}", place.turn_id or "", place.kind, place.field)
        shown = (place.format, place.digest.removeprefix("[secret:").rstrip("]"), f"{count:,}", *where)
        table.add_row(*(Text(visible(part)) for part in shown))
    console.print(table)
    more = sum(found.formats.values()) - sum(list(found.places.values())[:SHOWN])
    if more:
        console.print(f"and {more:,} more: --json lists up to 10,000 places")
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(found.formats.items()))
    console.print(f"found: {counts}. Revoke what still opens something: it is on disk, and in every copy.")
    if NAMED in found.formats:
        console.print(f"{NAMED}: recognised by the name of its field, or by its place in an address")
    for trajectory in found.trajectories[:20]:
        command = ["rollbook", "store", "erase", "--store", str(path), "--trajectory", trajectory]
        console.print(f"  {shlex.join(command)} --reason 'a leaked key'", soft_wrap=True)
    if len(found.trajectories) > 20:
        console.print(f"  and {len(found.trajectories) - 20:,} trajectories more, which --json lists")
