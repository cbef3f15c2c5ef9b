"""What attempts at steps did with the samples of a trajectory, read from their manifests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollbook.lineage.records import Drop, RewardComparison, Use
from rollbook.store.cut import Cut, holds, parse_cut
from rollbook.store.events import Event, Json
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.store.sql.sandbox import Connection
from rollbook.train.select.samples import Sample, samples_of

_NAMING = """
    SELECT run, policy, step, attempt, status, policy_version, output_version, manifest FROM steps
    WHERE contains(manifest, $named) ORDER BY run, policy, step, attempt"""
"""Manifests that name a trajectory. They are JSON without spaces, so that its id is there between quotes."""
_DROPS = """
    SELECT run, policy, step, attempt, steps.status, turn_id, rule, detail
    FROM (SELECT * FROM drops WHERE trajectory_id = $id)
    LEFT JOIN (SELECT run, policy, step, attempt, status FROM steps) steps USING (run, policy, step, attempt)
    ORDER BY run, policy, step, attempt, turn_id"""


@dataclass(frozen=True, slots=True, eq=False)
class Consumed:
    """A use of a sample, the cut that its step was planned at, and the sample as the step had it.

    Attributes:
        sample, trajectory: null where the log does not hold it at that cut any more.
    """

    use: Use
    cut: Cut
    trajectory: Trajectory | None
    sample: Sample | None


@dataclass(frozen=True, slots=True)
class NamingAttempt:
    """A manifest that names a trajectory, and the columns of its attempt."""

    run: str
    policy: str
    step: int
    attempt: int
    status: str
    input_version: int
    output_version: int | None
    manifest: Json


def read_naming(connection: Connection, trajectory_id: str) -> list[NamingAttempt]:
    """The attempts whose manifests name a trajectory."""
    named = orjson.dumps(trajectory_id).decode()
    rows: list[tuple[Any, ...]] = connection.execute(_NAMING, {"named": named}).fetchall()
    return [NamingAttempt(*(*row[:-1], orjson.loads(row[-1]))) for row in rows]


def consumed_by(attempt: NamingAttempt, trajectory_id: str, events: Sequence[Event]) -> Iterator[Consumed]:
    """The samples of a trajectory that an attempt consumed, each made again from the trajectory's events.

    Pure. It is what the trainer does: the events of the manifest's cut, the recipe's paths and rewards.
    """
    refs = [
        (position, ref)
        for position, ref in enumerate(attempt.manifest["samples"])
        if ref["trajectory_id"] == trajectory_id
    ]
    if not refs:
        return
    cut = parse_cut(attempt.manifest["cut"])
    held = [event for event in events if holds(cut, event.lane, event.seq)]
    trajectory = fold(held).get(trajectory_id)
    recipe = attempt.manifest["recipe"]
    paths, source = recipe.get("paths", "all"), recipe.get("reward_source", "agent")
    samples = [] if trajectory is None else samples_of(trajectory, source, paths)
    by_leaf = {sample.leaf_turn_id: sample for sample in samples}
    places = places_of(attempt.manifest["partition"])
    for position, ref in refs:
        sample = by_leaf.get(ref["turn_id"])
        if sample is not None and "tokens" in ref:
            sample = sample.within(ref["tokens"])
        known = sample is not None and not sample.erased
        use = Use(
            *(attempt.run, attempt.policy, attempt.step, attempt.attempt, attempt.status, ref["turn_id"]),
            *(position, *places.get(position, (0, 0)), attempt.input_version, attempt.output_version),
            sample.trained if sample is not None and known else None,
        )
        yield Consumed(use, cut, trajectory, sample)


def places_of(partition: Sequence[Sequence[Sequence[int]]]) -> dict[int, tuple[int, int]]:
    """Position in the batch -> (rank, micro-batch) that it was given to."""
    return {
        position: (rank, number)
        for rank, micro_batches in enumerate(partition)
        for number, positions in enumerate(micro_batches)
        for position in positions
    }


def compared_by(attempt: NamingAttempt, trajectory_id: str) -> Iterator[RewardComparison]:
    """The comparison of an attempt's samples with a trajectory that it did not train on, if there was one."""
    for other in attempt.manifest.get("others") or ():
        if other["trajectory_id"] == trajectory_id:
            yield RewardComparison(
                *(attempt.run, attempt.policy, attempt.step, attempt.attempt, attempt.status),
                other.get("reward"),
            )


def read_drops(connection: Connection, trajectory_id: str) -> tuple[Drop, ...]:
    """The samples of a trajectory that rules kept out of attempts."""
    rows: list[tuple[Any, ...]] = connection.execute(_DROPS, {"id": trajectory_id}).fetchall()
    return tuple(Drop(*(*row[:-1], orjson.loads(row[-1] or "{}"))) for row in rows)
