"""Samples from references: tokens gathered from the columns of the log, without an object per event or token.

What comes out equals `samples_of` of the folded trajectory, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import CorruptionError, TrainError
from rollbook.store.events.erased import ERASED_TOKEN
from rollbook.store.fold.path_tokens import NO_VERSION
from rollbook.store.log.turn_tokens import TurnTokens
from rollbook.train.data.references import Bools, Ints, References
from rollbook.train.data.samples import Sample

_SPAN = ("version", "start", "end")


class Materializer:
    """Makes samples of a cut."""

    def __init__(self, log: Store, cut: Cut, references: References, run: str) -> None:
        self._tokens = TurnTokens(log.path, cut)
        self._references, self._run = references, run

    def samples(self, wanted: Sequence[int]) -> list[Sample]:
        """Samples by their numbers among the references, in this order.

        Raises:
            CorruptionError: a file is damaged, or a prompt does not fold to the ids that were sent.
            TrainError: one was erased since its reference was made.
        """
        if not len(wanted):
            return []
        of, turns = self._references, self._references.turns
        numbers = np.asarray(wanted, np.int64)
        counts = of.starts[numbers + 1] - of.starts[numbers]
        entries = _ranges(of.starts[numbers], counts)
        rows = of.path[entries]
        found, back = np.unique(rows, return_inverse=True)
        chosen = turns.take(pa.array(found))
        ids = of.trajectories["trajectory_id"].take(chosen["place"])
        table = self._tokens.read(
            chosen["completed_lane"].to_pylist(), chosen["completed_seq"].to_numpy(), ids.to_pylist()
        )
        turn = table.take(pa.array(back)).combine_chunks()
        temperature = chosen["temperature"].to_numpy()[back].astype(np.float32)
        arrays = _assemble(turn, of.sampled[entries], of.trained[entries], temperature)
        ends = np.cumsum(np.add.reduceat(arrays.turn_lengths, np.cumsum(counts) - counts))
        self._check(numbers, arrays.tokens, ends)
        return [
            self._sample(int(number), arrays, slice(int(end - length), int(end)))
            for number, length, end in zip(numbers, np.diff(ends, prepend=0), ends, strict=True)
        ]

    def _check(self, numbers: Ints, tokens: npt.NDArray[np.int32], ends: Ints) -> None:
        """See that each sample's prompt is the ids that were sent, by length and sha256."""
        of = self._references
        leaves = of.turns.take(pa.array(of.leaf[numbers]))
        lengths = leaves["prompt_length"].to_numpy()
        digests = leaves["prompt_sha256"].to_pylist()
        starts = np.concatenate([[0], ends[:-1]])
        for i, (start, end, length) in enumerate(zip(starts, ends, of.length[numbers], strict=True)):
            prompt = tokens[start : start + lengths[i]]
            same = end - start == length
            if same and digests[i] and not (prompt == ERASED_TOKEN).any():
                same = hashlib.sha256(np.ascontiguousarray(prompt, "<i4").data).digest() == digests[i]
            if not same:
                turn_id = leaves["turn_id"][i].as_py()
                raise CorruptionError(f"turn {turn_id}: its prompt does not fold to the ids sent")

    def _sample(self, number: int, arrays: _Arrays, at: slice) -> Sample:
        of = self._references
        ref = of.ref(number)
        if not ref.erased and (arrays.tokens[at] == ERASED_TOKEN).any():
            raise TrainError(
                f"trajectory {ref.name!r} was erased while it was trained on: start again, and the training "
                "goes on without it"
            )
        path = of.path[of.starts[number] : of.starts[number + 1]]
        turn_ids = tuple(of.turns["turn_id"].take(pa.array(path)).to_pylist())
        return Sample(
            run=self._run,
            trajectory_id=ref.trajectory_id,
            name=ref.name,
            leaf_turn_id=ref.leaf_turn_id,
            turn_ids=turn_ids,
            group=ref.group,
            split=ref.split,
            tokens=arrays.tokens[at],
            loss_mask=arrays.loss_mask[at],
            logprobs=arrays.logprobs[at],
            versions=arrays.versions[at],
            temperatures=arrays.temperatures[at],
            reward=ref.reward,
            rewards={t: of.turn_rewards[t] for t in turn_ids if t in of.turn_rewards},
            erased=ref.erased,
        )


class _Arrays:
    """The tokens of many turns, one after the other: the prompt's own part of each, then what it sampled."""

    __slots__ = ("logprobs", "loss_mask", "temperatures", "tokens", "turn_lengths", "versions")

    tokens: npt.NDArray[np.int32]
    loss_mask: Bools
    logprobs: npt.NDArray[np.float32]
    versions: Ints
    temperatures: npt.NDArray[np.float32]
    turn_lengths: Ints


def _assemble(
    turn: pa.Table, sampled: Bools, trained: Bools, temperature: npt.NDArray[np.float32]
) -> _Arrays:
    prompt, prompts = _flat(turn["prompt_ids"])
    completion, completions = _flat(turn["completion_ids"])
    lengths = np.stack([prompts, completions], axis=1).ravel()
    total = int(lengths.sum())
    is_sampled = np.repeat(np.tile([False, True], len(turn)), lengths)
    made = _Arrays()
    made.turn_lengths = prompts + completions
    made.tokens = np.empty(total, np.int32)
    made.tokens[is_sampled], made.tokens[~is_sampled] = completion, prompt
    mask = np.repeat(trained, completions)
    made.loss_mask = np.zeros(total, np.bool_)
    made.loss_mask[is_sampled] = mask
    made.logprobs = np.zeros(total, np.float32)
    made.logprobs[is_sampled] = np.where(mask, _logprobs(turn["logprobs"], completions), np.float32(0))
    made.versions = np.full(total, NO_VERSION, np.int64)
    made.versions[is_sampled] = _versions(turn["version_spans"], completions, sampled)
    made.temperatures = np.ones(total, np.float32)
    made.temperatures[is_sampled] = np.repeat(np.where(sampled, temperature, np.float32(1)), completions)
    return made


def _flat(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], Ints]:
    """The values of all lists, and the length of each; a null is an empty list."""
    lists = column.combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    return lists.flatten().to_numpy(), lengths


def _logprobs(column: pa.ChunkedArray, completions: Ints) -> npt.NDArray[np.float32]:
    """A logprob for each sampled token, NaN for those of turns without."""
    lists = column.combine_chunks()
    given = lists.is_valid().to_numpy(zero_copy_only=False)
    values = lists.flatten().to_numpy()
    if given.all():
        return values
    whole = np.full(int(completions.sum()), np.nan, np.float32)
    whole[np.repeat(given, completions)] = values
    return whole


def _versions(column: pa.ChunkedArray, completions: Ints, sampled: Bools) -> Ints:
    """The version of each sampled token, by the spans of its turn; `NO_VERSION` where none says."""
    lists = column.combine_chunks()
    counts = lists.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    spans = lists.flatten()
    versions = np.full(int(completions.sum()), NO_VERSION, np.int64)
    if not len(spans):
        return versions
    version, start, end = (
        spans.field(name).to_numpy().astype(np.int64) for name in ("version", "start", "end")
    )
    before = np.repeat(np.cumsum(completions) - completions, counts)
    kept = np.repeat(sampled, counts) & (end > start)
    version, start, size = version[kept], (before + start)[kept], (end - start)[kept]
    versions[_ranges(start, size)] = np.repeat(version, size)
    return versions


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, ... of each, `count` of them, one after the other."""
    total = int(counts.sum())
    ends = np.cumsum(counts)
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)
