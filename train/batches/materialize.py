"""Builds samples from references: tokens are gathered from the columns of the log, without an
object per event or token.

The result equals `samples_of` of the folded trajectory, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import CorruptionError, TrainError
from rollbook.store.events.erased import ERASED_TOKEN
from rollbook.store.fold.path_tokens import NO_VERSION
from rollbook.store.log.turn_tokens import TurnTokens, TurnViews
from rollbook.train.select.references import References, routed_turns
from rollbook.train.select.sample_ref import SampleRef
from rollbook.train.select.samples import OF_ANOTHER, Bools, Ints, Sample

_T = TypeVar("_T", bound=np.generic)
_CHOSEN = ["place", "completed_lane", "completed_seq", "turn_id", "temperature"]
_LEAF = ["turn_id", "prompt_length", "prompt_sha256"]
"""Columns of turns, of all that a sample is made of, and of its last one."""


class Materializer:
    """Materializes samples at a cut.

    Args:
        references: the samples that there are.
        run: that is trained.
        routing: samples have the experts that their turns record, too; else none.
    """

    def __init__(
        self, log: Store, cut: Cut, references: References, run: str, *, routing: bool = False
    ) -> None:
        self._log, self._cut, self._routing = log, cut, routing
        self._tokens = TurnTokens(log.path, cut)
        self._references, self._run = references, run

    def samples(self, wanted: Sequence[int]) -> list[Sample]:
        """The samples with the given numbers among the references, in this order.

        Raises:
            CorruptionError: a file is damaged, or a prompt does not fold to the ids that were
                sent.
            TrainError: one was erased since its reference was made.
        """
        if not len(wanted):
            return []
        references, turns = self._references, self._references.turns
        numbers = np.asarray(wanted, np.int64)
        counts = references.starts[numbers + 1] - references.starts[numbers]
        entries = _ranges(references.starts[numbers], counts)
        rows = references.path[entries]
        unique, back = np.unique(rows, return_inverse=True)
        chosen = turns.select(_CHOSEN).take(pa.array(unique))
        ids = references.trajectories["trajectory_id"].take(chosen["place"])
        turn = self._tokens.read(
            chosen["completed_lane"].to_pylist(), chosen["completed_seq"].to_numpy(), ids.to_pylist()
        )
        turn = (
            _mark_others(turn, chosen["turn_id"].to_pylist(), references.others)
            if references.others
            else turn
        )
        temperature = chosen["temperature"].to_numpy()[back].astype(np.float32)
        arrays = _assemble(
            turn, back.tolist(), references.sampled[entries], references.trained[entries], temperature
        )
        ends = np.cumsum(np.add.reduceat(arrays.turn_lengths, np.cumsum(counts) - counts))
        self._check(numbers, arrays, ends)
        turn_ids = turns["turn_id"].take(pa.array(rows)).to_pylist()
        turn_ends = np.cumsum(arrays.turn_lengths)
        last, path_ends = 0, np.cumsum(counts).tolist()
        samples = []
        for ref, start, end, path_end in zip(
            references.refs(numbers), [0, *ends[:-1].tolist()], ends.tolist(), path_ends, strict=True
        ):
            within = tuple((turn_ends[last:path_end] - start).tolist())
            samples.append(
                self._sample(ref, arrays, slice(start, end), tuple(turn_ids[last:path_end]), within)
            )
            last = path_end
        return self._with_routing(samples) if self._routing else samples

    def _with_routing(self, samples: list[Sample]) -> list[Sample]:
        ids = [sample.trajectory_id for sample in samples]
        held = {turn_id: stored for turn_id, stored, _ in routed_turns(self._log, self._cut, ids)}
        return [
            replace(s, routed={turn_id: held[turn_id] for turn_id in s.turn_ids if turn_id in held})
            for s in samples
        ]

    def _check(self, numbers: Ints, arrays: _Arrays, ends: Ints) -> None:
        """Check that each sample's prompt is the ids that were sent, by length and sha256."""
        references = self._references
        leaves = references.turns.select(_LEAF).take(pa.array(references.leaf[numbers]))
        lengths = leaves["prompt_length"].to_numpy()
        digests = leaves["prompt_sha256"].to_pylist()
        starts = np.concatenate([[0], ends[:-1]])
        for i, (start, end, length) in enumerate(zip(starts, ends, references.length[numbers], strict=True)):
            prompt = arrays.tokens[start : start + lengths[i]]
            same = end - start == length
            if same and digests[i] and not (arrays.some_erased and (prompt == ERASED_TOKEN).any()):
                same = hashlib.sha256(np.ascontiguousarray(prompt, "<i4").data).digest() == digests[i]
            if not same:
                turn_id = leaves["turn_id"][i].as_py()
                raise CorruptionError(f"turn {turn_id}: its prompt does not fold to the ids sent")

    def _sample(
        self,
        ref: SampleRef,
        arrays: _Arrays,
        at: slice,
        turn_ids: tuple[str, ...],
        turn_ends: tuple[int, ...],
    ) -> Sample:
        if arrays.some_erased and not ref.erased and (arrays.tokens[at] == ERASED_TOKEN).any():
            raise TrainError(
                f"trajectory {ref.name!r} was erased while it was trained on: start again, and the training "
                "goes on without it"
            )
        references = self._references
        versions = arrays.versions[at]
        return Sample(
            run=ref.run,
            trajectory_id=ref.trajectory_id,
            name=ref.name,
            leaf_turn_id=ref.leaf_turn_id,
            turn_ids=turn_ids,
            turn_ends=turn_ends,
            group=ref.group,
            split=ref.split,
            tokens=arrays.tokens[at],
            loss_mask=arrays.loss_mask[at],
            logprobs=arrays.logprobs[at],
            versions=versions if ref.run == self._run else np.full_like(versions, NO_VERSION),
            temperatures=arrays.temperatures[at],
            reward=ref.reward,
            rewards={t: references.turn_rewards[t] for t in turn_ids if t in references.turn_rewards},
            success=ref.success,
            truncated=ref.truncated,
            erased=ref.erased,
            status=ref.status,
            preferred=ref.preferred,
            misrouted=ref.misrouted,
            stranger=ref.stranger,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Arrays:
    """The tokens of many turns, one after the other: the prompt's own part of each, then what it sampled.

    Attributes:
        turn_lengths: of each turn; the other arrays have a value for each token.
        some_erased: whether there is an erased token among them.
    """

    turn_lengths: Ints
    tokens: npt.NDArray[np.int32]
    loss_mask: Bools
    logprobs: npt.NDArray[np.float32]
    versions: Ints
    temperatures: npt.NDArray[np.float32]
    some_erased: bool


def _mark_others(
    turns: TurnViews, ids: Sequence[str], others: Mapping[str, Sequence[tuple[int, int]]]
) -> TurnViews:
    """The turns with the tokens of other policies marked: a version says nothing of those."""
    spans = (
        [*held, *((OF_ANOTHER, start, end) for start, end in others.get(turn_id, ()))]
        for held, turn_id in zip(turns.spans, ids, strict=True)
    )
    return replace(turns, spans=list(spans))


def _assemble(
    turns: TurnViews,
    rows: Sequence[int],
    sampled: Bools,
    trained: Bools,
    temperature: npt.NDArray[np.float32],
) -> _Arrays:
    """The arrays of the turns in these rows; the other arguments have a value for each row."""
    prompts, completions = ([views[i] for i in rows] for views in (turns.prompts, turns.completions))
    sizes = np.array([len(ids) for ids in prompts], np.int64)
    sampled_sizes = np.array([len(ids) for ids in completions], np.int64)
    lengths = _in_turn(sizes, sampled_sizes)
    turn_lengths = sizes + sampled_sizes
    starts = np.cumsum(turn_lengths) - sampled_sizes
    tokens = np.concatenate([ids for both in zip(prompts, completions, strict=True) for ids in both])
    logprobs = np.zeros(len(tokens), np.float32)
    for i, start in zip(np.flatnonzero(trained).tolist(), starts[trained].tolist(), strict=True):
        values = turns.logprobs[rows[i]]
        logprobs[start : start + sampled_sizes[i]] = np.nan if values is None else values
    hot = np.where(sampled, temperature, np.float32(1))
    return _Arrays(
        turn_lengths=turn_lengths,
        tokens=tokens,
        loss_mask=np.repeat(_in_turn(np.zeros_like(trained), trained), lengths),
        logprobs=logprobs,
        versions=_versions([turns.spans[i] for i in rows], starts, sampled, len(tokens)),
        temperatures=np.repeat(_in_turn(np.ones_like(hot), hot), lengths),
        some_erased=bool((tokens == ERASED_TOKEN).any()),
    )


def _in_turn(first: npt.NDArray[_T], second: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Values of two arrays, interleaved: [2 N]."""
    return np.stack([first, second], axis=1).ravel()


def _versions(
    spans: Sequence[Sequence[tuple[int, int, int]]], starts: Ints, sampled: Bools, total: int
) -> Ints:
    """The version of each token [total], by the spans of its turn; `NO_VERSION` where none says.

    Args:
        starts: where each turn's sampled tokens begin.
    """
    versions = np.full(total, NO_VERSION, np.int64)
    for i, start in zip(np.flatnonzero(sampled).tolist(), starts[sampled].tolist(), strict=True):
        for version, first, end in spans[i]:
            versions[start + first : start + end] = version
    return versions


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """The ranges start, start + 1, ... with `count` numbers each, concatenated."""
    total = int(counts.sum())
    ends = np.cumsum(counts)
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)
