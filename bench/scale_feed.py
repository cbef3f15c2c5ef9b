"""From the log to the batches of a supervised pass, without a model; and the same from JSON lines.

`python -m rollbook.bench.scale_feed STORE` makes all batches of a store once, prints their
totals, and stays until its standard input ends, so that its memory can be measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from rollbook import store
from rollbook.bench.scale_turns import POLICY, RUN
from rollbook.store import Store

BATCH = 64


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """B samples padded to the longest, [B, T], and of each its length and reward [B]."""

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float64]
    lengths: list[int]


def trained_batches(log: Store) -> Iterator[Arrays]:
    """Each sample of the log once, in the batches of the first epoch of `rollbook train` with SFT.

    This is the only place here that depends on how the trainer makes its batches.
    """
    from rollbook.store.fold.history import History
    from rollbook.train.algorithms.sft import Sft
    from rollbook.train.batches.batch import build_batch, partition
    from rollbook.train.batches.experience import experience_of
    from rollbook.train.config.config import TrainConfig
    from rollbook.train.sources.source import make_source

    algorithm = Sft(name="sft", batch_size=BATCH)
    config = TrainConfig(run=RUN, policy=POLICY, model=Path(), steps=1, algorithm=algorithm)
    source = make_source(config, log, History(RUN, POLICY), "cut", log.head(), "", 0)
    seen: set[str] = set()
    while (selection := source.take(0, 0, lambda drops: None)) is not None:
        # Epochs have no end: the last batch of the first is filled up with samples of the second.
        by_leaf = {sample.leaf_turn_id: sample for sample in selection.samples}
        samples = [sample for leaf, sample in by_leaf.items() if leaf not in seen]
        seen.update(by_leaf)
        if not samples:
            return
        batch = build_batch(experience_of(samples, algorithm), partition(len(samples), None))
        [micro] = batch.micro_batches
        lengths = [len(sample) for sample in samples]
        yield Arrays(micro.tokens, micro.loss_mask, micro.rollout_logprobs, batch.rewards, lengths)


def rows_of(batches: Iterable[Arrays]) -> Iterator[dict[str, Any]]:
    """A row for each sample, as a user would keep it: ids, logprobs, mask, reward."""
    for batch in batches:
        for i, length in enumerate(batch.lengths):
            yield {
                "ids": batch.tokens[i, :length].tolist(),
                "logprobs": batch.logprobs[i, :length].tolist(),
                "mask": batch.loss_mask[i, :length].astype(int).tolist(),
                "reward": float(batch.rewards[i]),
            }


def write_rows(path: Path, batches: Iterable[Arrays]) -> int:
    """Write these samples as JSON lines; their tokens."""
    tokens = 0
    with path.open("wb") as file:
        for row in rows_of(batches):
            tokens += len(row["ids"])
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return tokens


def read_rows(path: Path, loads: Callable[[bytes], Any]) -> Iterator[Arrays]:
    """The batches of a file of JSON lines: a loop over its rows, as users write it."""
    held: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for line in file:
            held.append(loads(line))
            if len(held) == BATCH:
                yield _padded(held)
                held = []
    if held:
        yield _padded(held)


def _padded(rows: list[dict[str, Any]]) -> Arrays:
    lengths = [len(row["ids"]) for row in rows]
    shape = (len(rows), max(lengths))
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    logprobs = np.zeros(shape, np.float32)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[i, :length] = row["ids"]
        mask[i, :length] = row["mask"]
        logprobs[i, :length] = row["logprobs"]
    return Arrays(tokens, mask, logprobs, np.array([row["reward"] for row in rows]), lengths)


def main() -> None:
    """Make all batches of the store that is named, say how much they hold, and wait."""
    batches = tokens = 0
    for batch in trained_batches(store.open(Path(sys.argv[1]))):
        batches, tokens = batches + 1, tokens + sum(batch.lengths)
    print(orjson.dumps({"batches": batches, "tokens": tokens}).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
