"""What turns of a log record of the experts that their tokens went to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.events import Json
from rollbook.train.data.path_columns import PathColumns
from rollbook.train.data.routing import FitCheck, Mixture

TOGETHER = 64
"""Trajectories that are read at a time: their records take some 30 times the room of their tokens."""

Texts = npt.NDArray[np.str_]


def routed_turns(log: Store, cut: Cut, trajectories: Iterable[str]) -> Iterator[tuple[str, Json, int]]:
    """Of every turn with routed experts of these trajectories its id, the experts, and where its tokens end
    in its path. Erased turns have none.

    Raises:
        CorruptionError: a file that may hold one is damaged.
    """
    ids = sorted(set(trajectories))
    for start in range(0, len(ids), TOGETHER):
        for trajectory in log.trajectories(cut, ids[start : start + TOGETHER]).values():
            for turn in trajectory.turns.values():
                done = turn.completed
                if done is not None and done.routed_experts and not turn.tokens_erased:
                    yield turn.turn_id, done.routed_experts, done.prompt_length + len(done.completion_ids)


def misrouted_paths(
    log: Store, cut: Cut, trajectories: pa.Table, turns: pa.Table, paths: PathColumns, mixture: Mixture | None
) -> Texts:
    """Of each path why the model cannot replay what its turns record; empty if it can, or if nobody asks.

    Raises:
        CorruptionError: a file that may hold one is damaged.
    """
    count = len(paths.starts) - 1
    if mixture is None or not count:
        return np.zeros(count, np.str_)
    check, ids = FitCheck(mixture), trajectories["trajectory_id"].to_pylist()
    routed = routed_turns(log, cut, ids)
    wrong = {turn_id: check.of_turn(turn_id, stored, end) for turn_id, stored, end in routed}
    each = [wrong.get(turn_id, "") for turn_id in turns["turn_id"].to_pylist()]
    bounds = zip(paths.starts[:-1].tolist(), paths.starts[1:].tolist(), strict=True)
    of_paths = (paths.path[start:end].tolist() for start, end in bounds)
    return np.array([next((each[row] for row in rows if each[row]), "") for rows in of_paths], np.str_)
