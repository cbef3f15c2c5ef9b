"""What a log holds for a training that begins: trajectories that no step has used, without their
tokens.

A training that uses each sample once begins after a cut. What finished before the cut is known
by its references, and what still runs is read as events, since more events of it follow; all
else is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.events import Event
from rollbook.store.fold.history import History
from rollbook.store.sql.query import connect_at
from rollbook.train.batches.materialize import Materializer
from rollbook.train.select.references import references_over
from rollbook.train.select.routing import Mixture
from rollbook.train.select.sample_ref import SampleRef
from rollbook.train.select.samples import Sample
from rollbook.train.sources.selection import Choosing

_OPEN = """
    SELECT trajectory_id, lane, opened FROM internal.trajectory_scalars
    WHERE run = $run AND list_contains($splits, split) AND finished IS NULL"""

_SPENT = """
    SELECT "group", count(*) FROM internal.trajectory_scalars JOIN used USING (trajectory_id)
    WHERE finished IS NOT NULL AND "group" IS NOT NULL GROUP BY "group" """


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished trajectory of the backlog.

    Attributes:
        began: position in the order in which trajectories of the backlog were opened.
        status: with which it finished.
        samples: of its paths, those that hold something to train on, or did until it was erased.
    """

    trajectory_id: str
    group: str | None
    began: int
    status: str
    samples: tuple[SampleRef, ...]


class Backlog:
    """The backlog of a training at a cut.

    Args:
        mixture: of a model that is to replay the routing that turns record; None: it is not.

    Attributes:
        cut: at which it was read.
        spent: group -> members of it that were used.
        opened: open trajectory -> its position in the order of opening.
    """

    def __init__(
        self, log: Store, cut: Cut, config: Choosing, history: History, mixture: Mixture | None = None
    ) -> None:
        self.cut = cut
        self._log, self._used = log, history.consumed() | history.dropped
        grouped = "groups" in config.algorithm.needs
        # Of a trajectory in a group all samples are used together; else each is used by itself.
        used = history.used_trajectories() if grouped else set()
        recipe = config.recipe
        with connect_at(log, format_cut(cut)) as connection:
            args = (config.run, recipe, used, mixture, config.policy)
            self._references = references_over(connection, log, cut, *args)
            params = {"run": config.run, "splits": sorted(recipe.splits)}
            running = connection.read(_OPEN, params).fetchall()
            connection.register("used", pa.table({"trajectory_id": pa.array(sorted(used), pa.string())}))
            self.spent: dict[str, int] = dict(connection.read(_SPENT).fetchall())
        if recipe.paths != "all":
            self._references = self._references.without_paths_of(history.trained_trajectories())
        ids = self._references.trajectories
        self._rows = {
            trajectory_id: row for row, trajectory_id in enumerate(ids["trajectory_id"].to_pylist())
        }
        ended = zip(*(ids[n].to_pylist() for n in ("opened_lane", "opened", "trajectory_id")), strict=True)
        begun = sorted([*ended, *((lane, opened, running_id) for running_id, lane, opened in running)])
        self._began = {trajectory_id: place for place, (_, _, trajectory_id) in enumerate(begun)}
        self.opened = {running_id: self._began[running_id] for running_id, _, _ in running}
        self._materializer = Materializer(log, cut, self._references, config.run, routing=mixture is not None)
        self._numbers: dict[str, int] = {}

    @property
    def lanes(self) -> list[str]:
        """The lanes in which its finished trajectories ended."""
        lanes: list[str] = self._references.trajectories["finished_lane"].unique().to_pylist()
        return lanes

    def __len__(self) -> int:
        return len(self._began)

    def __contains__(self, trajectory_id: str) -> bool:
        """Whether a trajectory is finished, and was not forgotten."""
        return trajectory_id in self._rows

    def ended(self) -> Iterator[Ended]:
        """The finished trajectories in order of ending, those of which something was used first."""
        references = self._references
        ids = references.trajectories.select(["finished_lane", "finished_seq"])
        leaves = references.turns["turn_id"].take(pa.array(references.leaf))
        touched = pc.is_in(leaves, pa.array(sorted(self._used), pa.string())).to_numpy(zero_copy_only=False)
        fresh = np.ones(references.trajectories.num_rows, np.bool_)
        fresh[references.trajectory[touched]] = False
        places = {lane: place for place, lane in enumerate(sorted(set(ids["finished_lane"].to_pylist())))}
        lanes = np.array([places[lane] for lane in ids["finished_lane"].to_pylist()], np.int64)
        for row in np.lexsort([ids["finished_seq"].to_numpy(), lanes, fresh]):
            yield self._ended(int(row))

    def _ended(self, row: int) -> Ended:
        references = self._references
        trajectory_id, group, status = (
            references.trajectories[name][row].as_py() for name in ("trajectory_id", "group_key", "status")
        )
        first, end = np.searchsorted(references.trajectory, [row, row + 1])
        numbers = [i for i in range(first, end) if references.trained_tokens[i] > 0 or references.erased[i]]
        samples = tuple(references.ref(i) for i in numbers)
        self._numbers |= zip((sample.leaf_turn_id for sample in samples), numbers, strict=True)
        return Ended(trajectory_id, group, self._began[trajectory_id], status, samples)

    def samples(self, refs: Sequence[SampleRef]) -> list[Sample]:
        """The samples, with their tokens.

        Raises:
            CorruptionError, TrainError: as `Materializer.samples`.
        """
        return self._materializer.samples([self._numbers[ref.leaf_turn_id] for ref in refs])

    def events(self, trajectories: Collection[str]) -> list[Event]:
        """All events of these trajectories at the cut, lane by lane.

        Raises:
            CorruptionError: a file that may hold one is damaged.
        """
        return self._log.events_about(trajectories, self.cut) if trajectories else []

    def forget(self, trajectory_id: str) -> None:
        """Forget a trajectory: no step will ask for it, or its events were read."""
        self._rows.pop(trajectory_id, None)
