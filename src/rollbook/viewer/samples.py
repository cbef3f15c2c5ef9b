"""A sample, token by token: what was sampled by which version, how likely, what was trained and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollbook.lineage.records import TokenLineage
from rollbook.lineage.trajectories import (
    ALTERED,
    ERASED,
    OTHER_SAMPLE,
    UNDELIVERED,
    token_lineage,
    why_untrained,
)
from rollbook.store.errors import RequestError
from rollbook.store.events import TokenIds
from rollbook.store.fold.paths import leaves, path_to
from rollbook.store.fold.trajectory import Trajectory
from rollbook.train.select.samples import Sample, samples_of
from rollbook.viewer.consumed import ConsumedSample, consumed_sample
from rollbook.viewer.pages import Page, Query, missing, whole_number
from rollbook.viewer.snapshots import Snapshot

COLOURS = ("logprob", "gap", "entropy", "version", "mask", "advantage", "loss")
"""By what tokens may be coloured."""
VECTORS = '[record] vectors = ["logprobs", "losses", "entropies"]'
"""What a CONFIG says for steps to record numbers of each token."""
LEVELS = 16
"""Colours of a scale; the class of a token is one hexadecimal digit."""
PLAIN = "."
"""The class of a token that a scale has no value of."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one turn that are of one kind.

    Attributes:
        turn_id, number: of the turn, which is the path's so manieth, from 1.
        sampled: whether the turn's model call sampled them; else its prompt added them.
        trained: of them.
        why: they were not trained; empty where they were, or are of a prompt.
        start: place of the first in the path.
        texts: of each, null without a tokenizer; ids: of each.
    """

    turn_id: str
    number: int
    sampled: bool
    trained: int
    why: str
    start: int
    ids: Sequence[int]
    texts: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Scale:
    """A colouring of a sample's tokens.

    Attributes:
        by: what of; kind: sequential, diverging or categorical, which says what the colours mean.
        classes: a character for each token, its colour as a hexadecimal digit or `PLAIN`.
        legend: (colour, what it stands for), from the least.
        why: there is no value of any token; empty if there is.
    """

    by: str
    kind: str
    classes: str
    legend: Sequence[tuple[str, str]]
    why: str


@dataclass(frozen=True, slots=True)
class SamplePage:
    """A sample: a path of a trajectory, from its root to this leaf.

    Attributes:
        step: that it is shown as consumed by; None: as it is now.
        number, paths: this is the trajectory's so manieth path of so many; before, behind: the leaves of
            those beside it.
    """

    run: str
    trajectory: str
    trajectory_id: str
    turn_id: str
    group: str | None
    split: str
    reward: float | None
    policy: str
    step: int | None
    advantage: float | None
    length: int
    sampled: int
    trained: int
    number: int
    paths: int
    before: str | None
    behind: str | None
    parts: Sequence[Part]
    scale: Scale
    colours: Sequence[str]


def read_sample(snapshot: Snapshot, query: Query) -> SamplePage:
    """A sample of a trajectory, by its leaf turn; with `step`, as that step of `policy` had it.

    Raises:
        RequestError: 404, the log does not hold it.
    """
    found = _sample(snapshot, query)
    sample, consumed = found.sample, found.consumed
    parts = _parts(snapshot, found.trajectory, sample)
    at = found.leaves.index(sample.leaf_turn_id)
    return SamplePage(
        run=sample.run,
        trajectory=sample.name,
        trajectory_id=sample.trajectory_id,
        turn_id=sample.leaf_turn_id,
        group=sample.group,
        split=sample.split,
        reward=sample.reward,
        policy=query.get("policy") or "actor",
        step=None if consumed is None else consumed.step,
        advantage=None if consumed is None else consumed.advantage,
        length=len(sample),
        sampled=sum(len(part.ids) for part in parts if part.sampled),
        trained=sample.trained,
        number=at + 1,
        paths=len(found.leaves),
        before=found.leaves[at - 1] if at > 0 else None,
        behind=found.leaves[at + 1] if at + 1 < len(found.leaves) else None,
        parts=parts,
        scale=_scale(query.get("by") or COLOURS[0], found),
        colours=COLOURS,
    )


def read_scale(snapshot: Snapshot, query: Query) -> Scale:
    """A colouring of a sample's tokens."""
    return _scale(query.get("by") or COLOURS[0], _sample(snapshot, query))


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    trajectory: Trajectory
    sample: Sample
    consumed: ConsumedSample | None
    leaves: Sequence[str]


def _sample(snapshot: Snapshot, query: Query) -> _Found:
    trajectory_id, leaf = query["trajectory_id"], query["turn_id"]
    step = whole_number(query, "step")
    trajectory = snapshot.store.trajectory(trajectory_id, snapshot.cut)
    if trajectory is None:
        raise missing(f"trajectory {trajectory_id!r}", "was it dropped, or is its id cut short?")
    done, parents = trajectory.completed()
    ends = [done[at].turn_id for at in leaves(parents)]
    if step is not None:
        policy = query.get("policy") or "actor"
        consumed = consumed_sample(snapshot, query.get("run") or trajectory.run, policy, step, leaf)
        return _Found(trajectory, consumed.sample, consumed, ends if leaf in ends else [*ends, leaf])
    if leaf not in ends:
        raise missing(f"sample {leaf!r} of trajectory {trajectory.opened.name!r}", "its page lists its turns")
    return _Found(trajectory, _sample_to(trajectory, leaf), None, ends)


def _sample_to(trajectory: Trajectory, leaf: str) -> Sample:
    """The sample that a leaf ends, made without the others: a trajectory may have thousands."""
    done, parents = trajectory.completed()
    ends = leaves(parents)
    at = next(end for end in ends if done[end].turn_id == leaf)
    through: dict[int, int] = {}
    for earlier in ends[: ends.index(at)]:
        node = earlier
        while node >= 0 and through.setdefault(node, earlier) == earlier:
            node = parents[node]
    path = path_to(at, parents)
    kept = set(path)
    # What earlier paths own of this one, that which goes along with it for longest owns all of.
    if (last := next((node for node in reversed(path) if node in through), None)) is not None:
        kept |= set(path_to(through[last], parents))
    few = replace(trajectory, turns={done[node].turn_id: done[node] for node in sorted(kept)})
    return next(sample for sample in samples_of(few) if sample.leaf_turn_id == leaf)


def _parts(snapshot: Snapshot, trajectory: Trajectory, sample: Sample) -> list[Part]:
    texts = token_texts(snapshot, sample.run, sample.tokens)
    parts: list[Part] = []
    for number, (turn_id, (start, end)) in enumerate(
        zip(sample.turn_ids, pairwise((0, *sample.turn_ends)), strict=True), 1
    ):
        turn = trajectory.turns[turn_id]
        assert turn.completed is not None
        middle = min(max(turn.completed.prompt_length, start), end)
        for first, last, sampled in ((start, middle, False), (middle, end, True)):
            if first < last:
                trained = int(sample.loss_mask[first:last].sum())
                why = "" if trained or not sampled else why_untrained(turn, sample)
                ids = sample.tokens[first:last].tolist()
                parts.append(
                    Part(turn_id, number, sampled, trained, why, first, ids, [texts.get(i) for i in ids])
                )
    return parts


def token_texts(snapshot: Snapshot, run: str, tokens: TokenIds) -> dict[int, str | None]:
    """The text of each token id that occurs among a run's tokens; null without a tokenizer."""
    query = "SELECT id, token_text($run, id) AS text FROM (SELECT unnest($ids::INTEGER[]) AS id)"
    ids = np.unique(tokens).tolist()
    return {row["id"]: row["text"] for row in snapshot.rows(query, run=run, ids=ids)}


# Colours ----------------------------------------------------------------------------------------------


def _scale(by: str, found: _Found) -> Scale:
    sample, consumed = found.sample, found.consumed
    match by:
        case "logprob":
            known = sample.loss_mask & np.isfinite(sample.logprobs)
            surprise = np.where(known, -sample.logprobs.astype(np.float64), np.nan)
            return _sequential(by, surprise, "nats", "the engine gave no logprob")
        case "version":
            return _versions(sample)
        case "mask":
            return _mask(found)
        case "advantage":
            given = None if consumed is None else consumed.of_tokens(consumed.advantages)
            return _diverging(by, given, "it is of no step here, or needs a model: see the step")
        case "gap":
            own = None if consumed is None else consumed.of_tokens(consumed.vectors.get("logprobs"))
            gap = None if own is None else own - sample.logprobs
            return _diverging(by, gap, f"no step recorded them: train with {VECTORS}")
        case "entropy":
            entropy = None if consumed is None else consumed.of_tokens(consumed.vectors.get("entropies"))
            return _sequential(by, entropy, "nats", f"no step recorded it: train with {VECTORS}")
        case "loss":
            loss = None if consumed is None else consumed.of_tokens(consumed.vectors.get("losses"))
            return _diverging(by, loss, f"no step recorded them: train with {VECTORS}")
    raise RequestError(400, "bad_query", f"by={by[:40]!r}: use {', '.join(COLOURS)}")


def _sequential(by: str, values: Floats | None, unit: str, why: str) -> Scale:
    """From 0 to the 99th percentile."""
    if values is None or not np.isfinite(values).any():
        return Scale(by, "sequential", "", (), why)
    top = max(float(np.percentile(values[np.isfinite(values)], 99)), 1e-6)
    levels = np.clip(np.nan_to_num(values, nan=-1) / top * LEVELS, -1, LEVELS - 1)
    legend = [(f"{at:x}", f"{top * at / LEVELS:.2g} {unit}") for at in (0, 5, 10, 15)]
    return Scale(by, "sequential", _classes(np.where(np.isfinite(values), np.floor(levels), -1)), legend, "")


def _diverging(by: str, values: Floats | None, why: str) -> Scale:
    """From minus to plus the 99th percentile of what is not 0; the middle two colours are near 0."""
    if values is None or not np.isfinite(values).any():
        return Scale(by, "diverging", "", (), why)
    top = max(float(np.percentile(np.abs(values[np.isfinite(values)]), 99)), 1e-9)
    levels = np.clip(np.floor((np.nan_to_num(values) / top + 1) * LEVELS / 2), 0, LEVELS - 1)
    legend = [(f"{at:x}", f"{top * (at - 7.5) / 7.5:+.2g}") for at in (0, 4, 11, 15)]
    return Scale(by, "diverging", _classes(np.where(np.isfinite(values), levels, -1)), legend, "")


def _versions(sample: Sample) -> Scale:
    """A colour a version, the oldest first; again from the first beyond 16."""
    known = np.unique(sample.versions[sample.versions >= 0])
    if not known.size:
        return Scale("version", "categorical", "", (), "no token's version is known")
    at = np.searchsorted(known, sample.versions) % LEVELS
    legend = [(f"{i:x}", f"version {version}") for i, version in enumerate(known[:LEVELS].tolist())]
    return Scale("version", "categorical", _classes(np.where(sample.versions >= 0, at, -1)), legend, "")


_REASONS = ("trained", UNDELIVERED, ALTERED, OTHER_SAMPLE, ERASED)


def _mask(found: _Found) -> Scale:
    sample = found.sample
    values = np.full(len(sample), -1.0)
    for turn_id, (start, end) in zip(sample.turn_ids, pairwise((0, *sample.turn_ends)), strict=True):
        turn = found.trajectory.turns[turn_id]
        assert turn.completed is not None
        begin = max(turn.completed.prompt_length, start)
        trained = sample.loss_mask[begin:end]
        values[begin:end] = np.where(trained, 0, _REASONS.index(why_untrained(turn, sample)))
    legend = [(f"{at:x}", reason) for at, reason in enumerate(_REASONS) if (values == at).any()]
    return Scale("mask", "categorical", _classes(values), [*legend, (PLAIN, "prompt")], "")


def _classes(levels: npt.NDArray[Any]) -> str:
    """A character for each level, -1 as `PLAIN`."""
    table = np.frombuffer(f"{PLAIN}0123456789abcdef".encode(), np.uint8)
    return table[levels.astype(np.int64) + 1].tobytes().decode()


# A token --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenCard:
    """A token of a sample.

    Attributes:
        place: in the path; bytes: its text's in hexadecimal, null without a tokenizer.
        lineage: where it comes from and what it led to; None of a prompt's token.
        advantage, own_logprob: of the step that it is shown as consumed by, and the trainer's logprob there.
    """

    place: int
    token_id: int
    text: str | None
    bytes: str | None
    trained: bool
    lineage: TokenLineage | None
    advantage: float | None
    own_logprob: float | None


def read_token(snapshot: Snapshot, query: Query) -> TokenCard:
    """A token of a sample, by its place in the path.

    Raises:
        RequestError: 404, the path is shorter.
    """
    found, place = _sample(snapshot, query), whole_number(query, "place") or 0
    sample = found.sample
    if place >= len(sample):
        raise missing(f"token {place} of this sample", f"it has {len(sample)}, counted from 0")
    token_id = int(sample.tokens[place])
    at = next(at for at, end in enumerate(sample.turn_ends) if place < end)
    turn = found.trajectory.turns[sample.turn_ids[at]]
    assert turn.completed is not None
    index, lineage = place - turn.completed.prompt_length, None
    if index >= 0:
        with snapshot.connection.cursor() as cursor:
            log, trajectory_id = snapshot.store, sample.trajectory_id
            lines, turn_id = snapshot.lines(), turn.turn_id
            lineage = token_lineage(
                log, cursor, snapshot.cut, trajectory_id, turn_id, index, lines=lines, shares=False
            )
    text = token_texts(snapshot, sample.run, sample.tokens[place : place + 1]).get(token_id)
    consumed = found.consumed
    return TokenCard(
        place,
        token_id,
        text,
        None if text is None else _bytes_of(text).hex(" "),
        bool(sample.loss_mask[place]),
        lineage,
        _at(consumed, place, None if consumed is None else consumed.advantages),
        _at(consumed, place, None if consumed is None else consumed.vectors.get("logprobs")),
    )


_PARTIAL = re.compile(rb"\\x([89a-f][0-9a-f])")
"""A byte of a character of which a token holds a part, in the text that `token_text` gives it."""


def _bytes_of(text: str) -> bytes:
    return _PARTIAL.sub(lambda found: bytes.fromhex(found[1].decode()), text.encode(errors="replace"))


def _at(consumed: ConsumedSample | None, place: int, values: Floats | None) -> float | None:
    """The value of a token among those of trained tokens; None where it has none."""
    whole = None if consumed is None else consumed.of_tokens(values)
    return None if whole is None or not np.isfinite(whole[place]) else float(whole[place])


PAGES = (
    Page("/trajectories/{trajectory_id}/samples/{turn_id}", "sample.html", read_sample),
    Page("/trajectories/{trajectory_id}/samples/{turn_id}/colours", "colours.html", read_scale),
    Page("/trajectories/{trajectory_id}/samples/{turn_id}/tokens/{place}", "token.html", read_token),
)
