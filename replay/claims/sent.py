"""Compares what engines reported that they hold of a version with what that version's weights give.

`policy.activated` has the engine's own checksums, and how it holds tensors. From that and the
weights the checksums follow (`engines.weights.compare`), so that neither the trainer that sent the
weights nor the verification of its sync has to be believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
import torch

from rollbook.engines.weights.compare import expected_ranks_digest
from rollbook.replay.claims.activations import Activated
from rollbook.replay.verdict import Place, StageReplay, Verdict
from rollbook.store.digest import digest_json
from rollbook.store.errors import FormatError

Comparison = Literal["equal", "differs", "not recorded"]


@dataclass(frozen=True, slots=True)
class Sent:
    """An engine that was given a version, and what it must hold of it.

    Attributes:
        event_id: of its `policy.activated`.
        recorded_weights, found_weights: the digest of the version's weights, by Hugging Face names.
        recorded_checksums, found_checksums: `ranks_digest` of what the engine reported, and of what
            these weights give there. The first is empty for an engine in the process that recorded it,
            the second None where it cannot be known.
    """

    engine: str
    event_id: str
    recorded_weights: str
    found_weights: str
    recorded_checksums: str
    found_checksums: str | None

    @property
    def verdict(self) -> Comparison:
        """`not recorded` where the digests of weights are equal and checksums cannot be compared."""
        if self.recorded_weights != self.found_weights:
            return "differs"
        if self.found_checksums is None:
            return "not recorded"
        return "equal" if self.found_checksums == self.recorded_checksums else "differs"


def sent_differences(
    activated: Sequence[Activated],
    weights_digest: str,
    stream: Callable[[], Iterable[tuple[str, torch.Tensor]]],
) -> list[Sent]:
    """Compare every engine that served a version with the version's weights, in the order of the events.

    Args:
        activated: the version's.
        weights_digest: of these weights, which `digest_stream` gives.
        stream: gives the weights again by Hugging Face names, one tensor at a time; it is called once
            for each way in which engines hold them.

    Raises:
        FormatError: an event describes its engine in a way this release does not know; it is named.
    """
    digests: dict[bytes, str] = {}
    compared = []
    for event, record in activated:
        checksums = None
        if record.checksums and record.held is not None:
            held = orjson.dumps(record.held, option=orjson.OPT_SORT_KEYS)
            if held not in digests:
                try:
                    digests[held] = expected_ranks_digest(stream(), record.held)
                except FormatError as error:
                    raise FormatError(f"event {event.event_id}, {event.kind}: {error}") from error
            checksums = digests[held]
        weights = (record.weights_digest, weights_digest)
        compared.append(Sent(record.engine, event.event_id, *weights, record.checksums, checksums))
    return compared


def sent(compared: Sequence[Sent]) -> StageReplay | None:
    """The stage `sent`; None where no engine was given the version."""
    if not compared:
        return None
    recorded = [[entry.engine, entry.recorded_weights, entry.recorded_checksums] for entry in compared]
    due = [
        [entry.engine, entry.found_weights, entry.found_checksums or entry.recorded_checksums]
        for entry in compared
    ]
    digests = digest_json(recorded), digest_json(due)
    odd = next((entry for entry in compared if entry.verdict == "differs"), None)
    if odd is not None:
        checksums = odd.recorded_weights == odd.found_weights
        both = (
            (odd.recorded_checksums, odd.found_checksums)
            if checksums
            else (
                odd.recorded_weights,
                odd.found_weights,
            )
        )
        what = "checksums" if checksums else "weights"
        place = Place(key=f"{what} of engine {odd.engine}", recorded=both[0], replayed=both[1])
        return StageReplay("sent", Verdict.differs, *digests, why=place.in_words(), place=place)
    unknown = sorted({entry.engine for entry in compared if entry.verdict == "not recorded"})
    why = f"how {', '.join(unknown)} held them was not recorded" if unknown else ""
    return StageReplay("sent", Verdict.equal, *digests, why=why)
