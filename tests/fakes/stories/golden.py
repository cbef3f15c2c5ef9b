"""The golden stores of the repository, each beside the lines of what was written into it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rollbook.store import Event
from rollbook.store.events.event_json import from_json

DATA = Path(__file__).parents[2] / "data"


def digest_of(name: str) -> str:
    """The beginning of the sha256 of a golden store's files, by name, and of its lines."""
    files = sorted(path for path in (DATA / name).rglob("*") if path.is_file())
    listed = "".join(f"{p.relative_to(DATA)} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in files)
    return hashlib.sha256(listed.encode() + (DATA / f"{name}.jsonl").read_bytes()).hexdigest()[:16]


def written_in(name: str) -> list[Event]:
    """The events that were written into a golden store, in order."""
    return [from_json(json.loads(line)) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
