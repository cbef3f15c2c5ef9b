"""Compares what engines said that they hold of a version with what that version's weights say that they must.

`policy.activated` has the engine's own checksums, and how it holds tensors. From that and the weights the
checksums follow (`ingest.engines.weights.expected`), so that neither the trainer that sent them nor the
verification of its sync is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import orjson
import torch

from rollbook.ingest.engines.weights.expected import expected_ranks_digest
from rollbook.store import Store
from rollbook.store.errors import FormatError
from rollbook.store.events import Event, PolicyActivated

Verdict = Literal["equal", "differs", "not recorded"]


@dataclass(frozen=True, slots=True)
class Sent:
    """An engine that was given a version, and what it must hold of it.

    Attributes:
        event_id: of its `policy.activated`.
        recorded_weights, found_weights: the digest of the version's weights, by Hugging Face names.
        recorded_checksums, found_checksums: `ranks_digest` of what the engine said that it holds, and of what
            these weights are there. The first is empty for an engine in the process that recorded it, the
            second None where it cannot be known.
    """

    engine: str
    event_id: str
    recorded_weights: str
    found_weights: str
    recorded_checksums: str
    found_checksums: str | None

    @property
    def verdict(self) -> Verdict:
        """`not recorded` where the digests of weights are equal and checksums cannot be compared."""
        if self.recorded_weights != self.found_weights:
            return "differs"
        if self.found_checksums is None:
            return "not recorded"
        return "equal" if self.found_checksums == self.recorded_checksums else "differs"


def sent_differences(
    log: Store,
    run: str,
    policy: str,
    version: int,
    weights_digest: str,
    stream: Callable[[], Iterable[tuple[str, torch.Tensor]]],
) -> list[Sent]:
    """Compare every engine that served a version with the version's weights, in the order of the events.

    Args:
        weights_digest: of these weights, which `digest_stream` gives.
        stream: gives the weights again by Hugging Face names, one tensor at a time; it is called once for
            each way in which engines hold them.

    Raises:
        FormatError: an event says of its engine what this release does not know; the event is named.
        CorruptionError: the log is damaged.
    """
    found: dict[bytes, str] = {}
    compared = []
    for event, record in _activated(log, run, policy, version):
        checksums = None
        if record.checksums and record.held is not None:
            held = orjson.dumps(record.held, option=orjson.OPT_SORT_KEYS)
            if held not in found:
                try:
                    found[held] = expected_ranks_digest(stream(), record.held)
                except FormatError as error:
                    raise FormatError(f"event {event.event_id}, {event.kind}: {error}") from error
            checksums = found[held]
        weights = (record.weights_digest, weights_digest)
        compared.append(Sent(record.engine, event.event_id, *weights, record.checksums, checksums))
    return compared


def _activated(log: Store, run: str, policy: str, version: int) -> list[tuple[Event, PolicyActivated]]:
    """The events that say that an engine serves the version; their ids sort by time, across lanes too."""
    found = [
        (event, event.record)
        for event in log.events_of([PolicyActivated.KIND])
        if event.run == run
        and isinstance(event.record, PolicyActivated)
        and (event.record.policy, event.record.policy_version) == (policy, version)
    ]
    return sorted(found, key=lambda one: one[0].event_id)
