"""Random trajectories with everything that a turn may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from tests.fakes.stories import fabric

from rollbook.store import events as kinds
from rollbook.store.settings import AppendSettings

SMALL = AppendSettings(segment_bytes=1 << 16)


def forest(rng: np.random.Generator, name: str) -> list[Any]:
    """A trajectory of up to 12 turns with everything that a turn may be."""
    turns: list[Any] = []
    for i in range(int(rng.integers(1, 12))):
        parent = int(rng.integers(-1, i)) if rng.random() < 0.3 else i - 1
        while parent >= 0 and turns[parent].failed:
            parent -= 1
        count = int(rng.integers(1, 9))
        logprobs = None if rng.random() < 0.1 else rng.uniform(-5, -1, count).astype(np.float32)
        if logprobs is not None and rng.random() < 0.05:
            logprobs[0] = np.nan
        turns.append(
            fabric.T(
                rng.integers(1, 90, int(rng.integers(0 if parent >= 0 else 1, 5))).tolist(),
                rng.integers(1, 90, count).tolist(),
                parent if parent >= 0 else None,
                logprobs,
                None if rng.random() < 0.1 else int(rng.integers(0, 9)),
                float(rng.choice([0.0, 0.7, 1.0])),
                rng.random() > 0.1,
                i > 0 and rng.random() < 0.05,
            )
        )
    reward = float(rng.normal()) if rng.random() < 0.8 else None
    split = str(rng.choice(["train", "train", "teacher", "eval"]))
    group = None if rng.random() < 0.3 else f"g{rng.integers(4)}"
    records = fabric.records(
        name, turns, group=group, split=split, reward=reward, finished=rng.random() > 0.1
    )
    return [_odd(rng, record) for record in records]


def _odd(rng: np.random.Generator, record: Any) -> Any:
    """Now and then a completion of several versions, of a part without any, or of altered logits."""
    if not isinstance(record, kinds.TurnCompleted):
        return record
    count, at = len(record.completion_ids), int(rng.integers(0, 3))
    if record.version_spans and count > at and rng.random() < 0.3:
        spans = (kinds.VersionSpan("actor", 3, 0, at), kinds.VersionSpan("actor", 1, at, count - count % 2))
        record = replace(record, version_spans=tuple(s for s in spans if s.end > s.start))
    if rng.random() < 0.1:
        record = replace(record, logprob_semantics=record.logprob_semantics | {"altered": ["grammar"]})
    return record
