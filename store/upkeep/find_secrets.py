"""Finds secrets in the log: keys of known formats anywhere, and values of secret names outside
conversations.

The log is read in its stored order, batch by batch, so memory is bounded whatever its length.
Results never contain a secret's value, only its digest: the same one that replaces the secret
where it was redacted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.cut import Cut
from rollbook.store.events import (
    BodyStored,
    LabelAdded,
    RewardAssigned,
    RunOpened,
    StepFailed,
    SyncFailed,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.events.blobs import KEY
from rollbook.store.events.erased import named_bodies
from rollbook.store.log.store import Store
from rollbook.store.redaction import ANY_KEY, Scrubber, conversation, find_keys, replace_outside, secrets_in

NAMED = "named"
"""The format of what only its name, or its place in an address, tells."""
LISTED = 10_000
"""Places that are listed; beyond them secrets are counted alone."""
_CONVERSATION = {
    TurnRequested.KIND: ("messages", "wire"),
    TurnCompleted.KIND: ("reply",),
    BodyStored.KIND: ("body",),
}
_BODIES = ("request", "upstream")
"""Fields that are an API's body: partly conversation."""
_TELLING = {
    kind.KIND
    for kind in (TurnRequested, TurnCompleted, TurnFailed, TrajectoryOpened, LabelAdded, RewardAssigned)
} | {RunOpened.KIND, StepFailed.KIND, SyncFailed.KIND}
"""Kinds that hold what clients, upstreams and settings say; of others keys alone are looked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The place of a secret, and its digest: equal digests mean the same secret."""

    format: str
    digest: str
    run: str
    trajectory_id: str | None
    turn_id: str | None
    kind: str
    field: str


@dataclass(slots=True)
class Secrets:
    """The secrets that were found: each place with its count; secrets per format; events that were read."""

    places: Counter[Finding] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    unlisted: int = 0
    events: int = 0

    @property
    def trajectories(self) -> list[str]:
        """Ids of the trajectories that hold one, in order of their first."""
        return list(dict.fromkeys(p.trajectory_id for p in self.places if p.trajectory_id is not None))

    def add(self, place: Finding) -> None:
        """Count one more."""
        self.formats[place.format] += 1
        if place in self.places or len(self.places) < LISTED:
            self.places[place] += 1
        else:
            self.unlisted += 1

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        places = [asdict(place) | {"count": count} for place, count in self.places.items()]
        values = {"secrets": places, "formats": dict(self.formats), "unlisted": self.unlisted}
        return values | {"trajectories": self.trajectories, "events": self.events}


def find_secrets(
    log: Store, cut: Cut, scrub: Scrubber, on_events: Callable[[int], None] = lambda count: None
) -> Secrets:
    """Every secret in the cut.

    Args:
        scrub: makes the digests.
        on_events: called with the number of events read.

    Raises:
        CutError: the cut holds more than the store.
        CorruptionError: acknowledged bytes are damaged.
    """
    secrets = Secrets()
    bodies: dict[str, list[tuple[str, str]]] = {}
    """Digest of a body -> (format, digest) of the keys in it: whoever names the body holds them."""
    for _, batch in log.batches(cut):
        for row in _rows(batch):
            for at, name, secret in _secrets_in_row(row):
                place = (name, scrub.digest(secret))
                if row["kind"] == BodyStored.KIND:
                    bodies.setdefault(row["extra"]["digest"], []).append(place)
                else:
                    secrets.add(_place(row, scrub.keys(at), *place))
            for digest in set(named_bodies(row["text"])) & bodies.keys() if bodies else ():
                for place in bodies[digest]:
                    secrets.add(_place(row, KEY, *place))
        secrets.events += batch.num_rows
        on_events(batch.num_rows)
    return secrets


def _place(row: Mapping[str, Any], at: str, format_: str, digest: str) -> Finding:
    return Finding(format_, digest, row["run"], row["trajectory_id"], row["turn_id"], row["kind"], at)


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows worth looking into: `extra` is read, `text` is its JSON; `keys` is whether it may hold one."""
    keys = pc.match_substring_regex(batch["extra"], ANY_KEY)
    wanted = pc.or_(keys, pc.is_in(batch["kind"], pa.array(sorted(_TELLING))))
    columns = ["kind", "run", "trajectory_id", "turn_id", "extra"]
    table = pa.table([*(batch[name] for name in columns), keys], [*columns, "keys"]).filter(wanted)
    for part in table.to_batches(max_chunksize=256):
        for row in part.to_pylist():
            yield row | {"extra": orjson.loads(row["extra"]), "text": row["extra"]}


def _secrets_in_row(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(place in the record, format, secret) of one event."""
    keys = row["keys"]
    shown = _CONVERSATION.get(row["kind"], ())
    for name, value in row["extra"].items():
        if name in shown:
            yield from _keys(value, name) if keys else ()
        elif name in _BODIES and isinstance(value, dict):
            yield from _keys(conversation(value), name) if keys else ()
            beside: list[tuple[str, Any]] = []
            replace_outside(value, lambda part, inner, beside=beside: beside.append((part, inner)) or inner)  # type: ignore[misc]
            for part, inner in beside:
                yield from _texts_of(part, inner, f"{name}.{part}")
        else:
            # A label says what its value is.
            label = str(row["extra"].get("name", name)) if name == "value" else name
            yield from _texts_of(label, value, name)


def _texts_of(name: str, value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Secrets of a field outside the conversation."""
    for secret in sorted(secrets_in({"": {name: value}})):
        formats = [match.format for match in find_keys(secret)]
        yield path, formats[0] if formats else NAMED, secret


def _keys(value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Keys of known formats in a conversation, by their path."""
    if isinstance(value, str):
        for key in find_keys(value):
            yield path, key.format, value[key.start : key.stop]
    elif isinstance(value, dict | list):
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _keys(inner, f"{path}.{name}")
