"""Writes tests/data/format-1-later: fields that came later than their kinds of events, as the release that
wrote this first does.

    python tests/data/make_golden_later.py

It is never written again. Lane `serve` has a sealed segment with a launch whose proxy was away, a turn that
an upstream answered and an evaluation that is not whole, and a live one with others, a turn that failed, and
a sample that was dropped. What they say is in `format-1-later.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from golden_store import write_golden

from rollbook.store.events import (
    EvalFinished,
    LaunchEnded,
    LaunchStarted,
    SampleDropped,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
    token_ids,
)
from rollbook.store.fold.trajectory import prompt_sha256

FOLDER = Path(__file__).parent / "format-1-later"
STORE_ID = "01900000-0000-7000-8000-000000000018"
REPLY = {"role": "assistant", "content": "4"}


def _launch(launch: str, attempt: int, places: int, proxy_away: bool) -> list[Any]:
    """A launch of the rollouts of an evaluation, which failed."""
    place, status = {"epoch": 0, "task": "task-7", "sample": 0}, "infra_error"
    clocks = dict.fromkeys(("start", "idle", "total", "scoring"))
    started = ("t1", launch, "rollouts.eval.8", place, attempt, "subprocess", {}, "host-17", clocks)
    return [
        LaunchStarted(*started, places=places),
        LaunchEnded("t1", launch, status, "connection refused", proxy_away=proxy_away),
    ]


def _asked(turn: str, parent: str | None) -> TurnRequested:
    messages = [{"role": "user", "content": "2+2?"}]
    reason = None if parent else "first_turn"
    return TurnRequested(
        *("t1", turn, f"r-{turn}", parent, reason, None, 0, messages, {}, "m", {}, {}, f"c-{turn}")
    )


def _evaluation(version: int, trajectories: int, *, whole: bool) -> EvalFinished:
    return EvalFinished(
        *("actor", version, "p", "serve=9", "serve=40", 0, 0, trajectories, version, version),
        *({"reward": 0.5}, 32, whole),
    )


def segments() -> list[list[Any]]:
    """The records of both segments."""
    ids, nothing = np.array([1, 2, 2**31 - 1], np.int32), token_ids([])
    said = {"id": "chatcmpl-é", "usage": {"prompt_tokens": 9, "completion_tokens": 1}, "choice": {"index": 0}}
    return [
        [
            TrajectoryOpened("t1", "rollouts.eval.8-0-task-7-0", None, "task-7", "eval"),
            *_launch("l1", 1, 32, True),
            _asked("u0", None),
            TurnCompleted(
                *("t1", "u0", None, None, nothing, nothing, None, (), 0, prompt_sha256(nothing), "stop"),
                *(REPLY, {}, ["without_tokens"], {}, said),
            ),
            _evaluation(8, 22, whole=False),
        ],
        [
            *_launch("l2", 2, 64, False),
            _asked("u1", None),
            TurnFailed("t1", "u1", "the engine is gone", ids, 3, prompt_sha256(ids)),
            SampleDropped("t2", "v0", "newer_version", "rd", 3, {"version": 2}, 4, 2, "serve=9"),
            _evaluation(16, 32, whole=True),
        ],
    ]


def main() -> None:
    """Write the store."""
    write_golden(FOLDER, STORE_ID, "serve", segments())


if __name__ == "__main__":
    main()
