"""Which sampled sequences a client's data are, so that what trained a step is known. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rollbook.store.events import Json, TokenIds
from rollbook.train.tenants.wire import Datum, Pass

TARGETS, ADVANTAGES = "target_tokens", "advantages"
MOST_KNOWN = 1 << 18
"""Sequences that are known by their tokens; of more, the newest."""


def turn_of(sequence_id: str) -> str:
    """The id of a sequence's turn."""
    return f"{sequence_id}-0"


def key_of(ids: TokenIds) -> str:
    """The key of a prompt and what was sampled behind it, by their tokens."""
    return xxhash.xxh3_128_hexdigest(ids.astype("<i4").tobytes())


@dataclass(slots=True)
class Origin:
    """A sequence that was sampled.

    Attributes:
        version: of the policy that sampled it.
        rewarded: whether an operation carried an advantage for it.
    """

    sequence_id: str
    version: int
    rewarded: bool = False


class Origins:
    """The sequences of all clients, by their ids and by their tokens."""

    def __init__(self) -> None:
        self._by_tokens = OrderedDict[tuple[str | None, str], Origin]()
        self._by_id: dict[tuple[str | None, str], Origin] = {}

    def add(self, owner: str | None, sequence_id: str, key: str, version: int) -> None:
        """Note a sequence of an owner's."""
        origin = Origin(sequence_id, version)
        if (before := self._by_tokens.pop((owner, key), None)) is not None:
            self._by_id.pop((owner, before.sequence_id), None)
        self._by_tokens[owner, key] = self._by_id[owner, sequence_id] = origin
        if len(self._by_tokens) > MOST_KNOWN:
            (other, _), oldest = self._by_tokens.popitem(last=False)
            self._by_id.pop((other, oldest.sequence_id), None)

    def rows(self) -> list[tuple[str | None, str, str, int, bool]]:
        """(owner, key, sequence, version, whether it was rewarded) of each, in order."""
        known = self._by_tokens.items()
        return [(owner, key, o.sequence_id, o.version, o.rewarded) for (owner, key), o in known]

    def restore(self, owner: str | None, key: str, sequence_id: str, version: int, rewarded: bool) -> None:
        """Note a sequence that was noted before, with one of these rows."""
        self.add(owner, sequence_id, key, version)
        self._by_id[owner, sequence_id].rewarded = rewarded

    def reward(self, owner: str | None, sequence_ids: Sequence[str]) -> None:
        """Note that an operation carried advantages for sequences."""
        for sequence_id in sequence_ids:
            if (origin := self._by_id.get((owner, sequence_id))) is not None:
                origin.rewarded = True

    def of(self, owner: str | None, datum: Datum) -> list[Origin]:
        """The sequences that a datum is of: those that its spans name, or the one that has its tokens."""
        named = dict.fromkeys(span.sequence_id for span in datum.input_spans if span.sampled)
        if named:
            return [origin for name in named if (origin := self._by_id.get((owner, name))) is not None]
        targets = datum.inputs.get(TARGETS)
        if targets is None or targets.ndim != 1 or not len(targets):
            return []
        origin = self._by_tokens.get((owner, key_of(np.append(datum.tokens, targets[-1]))))
        return [] if origin is None else [origin]


def settings_of_data(sent: Pass, origins: Origins, owner: str | None) -> Json:
    """What an event says of the data of a pass: its turns, by datum, their versions, and what is the first
    advantage of each."""
    found = [origins.of(owner, datum) for datum in sent.data]
    turns = [[(o.sequence_id, turn_of(o.sequence_id)) for o in own] or None for own in found]
    rewards = {}
    for datum, own in zip(sent.data, found, strict=True):
        if len(own) == 1 and not own[0].rewarded and ADVANTAGES in datum.inputs:
            rewards[own[0].sequence_id] = advantage_of(datum)
    targets = sum(datum.inputs[TARGETS].size for datum in sent.data)
    versions = [origin.version for own in found for origin in own]
    return {"targets": targets, "turns": turns, "versions": versions, "rewards": rewards}


def advantage_of(datum: Datum) -> float:
    """The mean of a datum's advantages where there are any; 0 where there are none."""
    values = datum.inputs[ADVANTAGES]
    return float(values[values != 0].mean(dtype=np.float64)) if (values != 0).any() else 0.0
