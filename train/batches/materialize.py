"""Builds samples from references: tokens are gathered from the columns of the log, without an
object per event or token.

The result equals `samples_of` of the folded trajectory, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import CorruptionError, TrainError
from rollbook.store.events.erased import ERASED_TOKEN
from rollbook.store.fold.path_tokens import NO_VERSION
from rollbook.store.log.turn_tokens import Lists, TurnLists, TurnTokens
from rollbook.train.select.references import References, routed_turns
from rollbook.train.select.sample_ref import SampleRef
from rollbook.train.select.samples import OF_ANOTHER, Bools, Ints, Sample

_T = TypeVar("_T", bound=np.generic)
_CHOSEN = ["place", "completed_lane", "completed_seq", "turn_id", "temperature", "min_version"]
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
        # Columns say which version sampled a turn if one sampled all of it.
        self._mixed = not pc.all(references.turns["one_version"], skip_nulls=False, min_count=0).as_py()
        self._tokens = TurnTokens(log.path, cut, spans=self._mixed)
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
        references = self._references
        numbers = np.asarray(wanted, np.int64)
        counts = references.starts[numbers + 1] - references.starts[numbers]
        entries = _ranges(references.starts[numbers], counts)
        chosen = references.turns.select(_CHOSEN).take(pa.array(references.path[entries]))
        ids = references.trajectories["trajectory_id"].take(chosen["place"])
        turns = self._tokens.read(
            chosen["completed_lane"].to_pylist(), chosen["completed_seq"].to_numpy(), ids.to_pylist()
        )
        turn_ids = chosen["turn_id"].to_pylist()
        others = [references.others.get(turn_id, ()) for turn_id in turn_ids] if references.others else None
        temperature = chosen["temperature"].to_numpy().astype(np.float32)
        version = None if self._mixed else chosen["min_version"].fill_null(NO_VERSION).to_numpy()
        flags = references.sampled[entries], references.trained[entries]
        arrays = _assemble(turns, *flags, temperature, version, others)
        turn_ends, path_ends = np.cumsum(arrays.turn_lengths), np.cumsum(counts)
        ends = turn_ends[path_ends - 1]
        starts = np.concatenate([[0], ends[:-1]])
        self._check(numbers, arrays, starts, ends)
        within = (turn_ends - np.repeat(starts, counts)).tolist()
        samples, last = list[Sample](), 0
        for ref, start, end, path_end in zip(
            references.refs(numbers), starts.tolist(), ends.tolist(), path_ends.tolist(), strict=True
        ):
            path = (tuple(turn_ids[last:path_end]), tuple(within[last:path_end]))
            samples.append(self._sample(ref, arrays, slice(start, end), *path))
            last = path_end
        return self._with_routing(samples) if self._routing else samples

    def _with_routing(self, samples: list[Sample]) -> list[Sample]:
        ids = [sample.trajectory_id for sample in samples]
        held = {turn_id: stored for turn_id, stored, _ in routed_turns(self._log, self._cut, ids)}
        return [
            replace(s, routed={turn_id: held[turn_id] for turn_id in s.turn_ids if turn_id in held})
            for s in samples
        ]

    def _check(self, numbers: Ints, arrays: _Arrays, starts: Ints, ends: Ints) -> None:
        """Check that each sample's prompt is the ids that were sent, by length and sha256.

        Args:
            starts, ends: of each sample's tokens.
        """
        references = self._references
        leaves = references.turns.select(_LEAF).take(pa.array(references.leaf[numbers]))
        lengths = leaves["prompt_length"].to_numpy()
        digests = leaves["prompt_sha256"].to_pylist()
        right = ends - starts == references.length[numbers]
        for i, (start, end) in enumerate(zip(starts.tolist(), (starts + lengths).tolist(), strict=True)):
            prompt = arrays.tokens[start:end]
            same = bool(right[i])
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


def _assemble(
    turns: TurnLists,
    sampled: Bools,
    trained: Bools,
    temperature: npt.NDArray[np.float32],
    version: Ints | None,
    others: Sequence[Sequence[tuple[int, int]]] | None,
) -> _Arrays:
    """The arrays of these turns; the other arguments have a value for each.

    Args:
        version: that sampled all of the turn, `NO_VERSION` where none is known; None: the spans tell.
        others: where tokens begin and end that other policies sampled; None: they sampled none.

    Raises:
        CorruptionError: a turn has another number of logprobs than of sampled tokens.
    """
    sizes, sampled_sizes = turns.prompts.lengths, turns.completions.lengths
    lengths = _in_turn(sizes, sampled_sizes)

    def spread(first: npt.NDArray[_T], second: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """A value for each token, of values for each turn's prompt and completion."""
        return np.repeat(_in_turn(first, second), lengths)

    nothing, cold = np.zeros_like(trained), np.ones_like(temperature)
    given = trained & turns.has_logprobs
    if (turns.logprobs.lengths != sampled_sizes)[given].any():
        raise CorruptionError("a turn has another number of logprobs than of sampled tokens")
    tokens = turns.prompts.woven(turns.completions)
    return _Arrays(
        turn_lengths=sizes + sampled_sizes,
        tokens=tokens,
        loss_mask=spread(nothing, trained),
        logprobs=_logprobs(turns, given, trained),
        versions=_versions(turns, lengths, sampled, version, others),
        temperatures=spread(cold, np.where(sampled, temperature, cold)),
        some_erased=bool((tokens == ERASED_TOKEN).any()),
    )


def _logprobs(turns: TurnLists, given: Bools, trained: Bools) -> npt.NDArray[np.float32]:
    """The logprob of each token: 0 where it is not trained, NaN where it is and none is given."""
    held, sizes = turns.logprobs, turns.completions.lengths
    longest = max(turns.prompts.lengths.max(initial=0), sizes.max(initial=0))
    arrays = [*held.arrays, np.zeros(longest, np.float32), np.full(longest, np.nan, np.float32)]
    none, start = len(held.arrays), np.zeros_like(sizes)
    prompts = Lists(arrays, start + none, start, turns.prompts.lengths)
    array = np.where(given, held.array, none + trained)
    sampled = Lists(arrays, array, np.where(given, held.begin, start), np.where(given, held.end, sizes))
    return prompts.woven(sampled)


def _in_turn(first: npt.NDArray[_T], second: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Values of two arrays, interleaved: [2 N]."""
    return np.stack([first, second], axis=1).ravel()


def _versions(
    turns: TurnLists,
    lengths: Ints,
    sampled: Bools,
    version: Ints | None,
    others: Sequence[Sequence[tuple[int, int]]] | None,
) -> Ints:
    """The version of each token, by that of its turn or by the turn's spans; `NO_VERSION` where none says.

    Args:
        lengths: int64 [2 N], of each turn's prompt and completion.
        version, others: as of `_assemble`.
    """
    nothing = np.full(len(sampled), NO_VERSION, np.int64)
    whole = nothing if version is None else np.where(sampled, version, nothing)
    versions = np.repeat(_in_turn(nothing, whole), lengths)
    if version is not None and others is None:
        return versions
    at, starts = np.flatnonzero(sampled), (np.cumsum(lengths)[::2])[sampled]
    held, counts, last = turns.spans.of(sampled).joined().tolist(), turns.spans.lengths[sampled], 0
    for turn, start, count in zip(at.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for number, first, end in held[last : last + count]:
            versions[start + first : start + end] = number
        for first, end in others[turn] if others else ():
            versions[start + first : start + end] = OF_ANOTHER
        last += count
    return versions


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """The ranges start, start + 1, ... with `count` numbers each, concatenated."""
    total = int(counts.sum())
    ends = np.cumsum(counts)
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)
