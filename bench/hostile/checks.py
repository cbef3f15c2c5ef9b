"""Looks up everything acknowledged to honest clients in the log, through SQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rollbook import store
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.upkeep.verify import verify_store

OURS = "WHERE starts_with(trajectory, ?)"
TURNS = f"SELECT turn_id, trajectory, status, content, request FROM turns {OURS}"
TRAJECTORIES = f"SELECT trajectory, status, reward, turns FROM trajectories {OURS}"
REWARDS = f"SELECT event_id, trajectory, reward, source FROM rewards {OURS}"
IDS = f"SELECT trajectory_id FROM trajectories {OURS}"
Ack = Mapping[str, Any]


@dataclass(slots=True)
class Held:
    """The differences between a log and its acknowledgements.

    Attributes:
        lost: acknowledgements that are not there.
        changed: acknowledgements whose content in the log differs.
        damage: what `verify` reports for the lanes.
    """

    acks: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)


def read_acks(path: Path) -> list[Ack]:
    """The agents' acknowledgements, without a line that a kill of the agents cut off."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [orjson.loads(line) for line in lines]


def hold(folder: Path, acks: Iterable[Ack], name: str) -> Held:
    """Look up every acknowledgement in a store.

    Args:
        name: prefix of the names of honest trajectories; those of attackers are not read.
    """
    with store.connect(folder) as log:
        every = (TURNS, TRAJECTORIES, REWARDS, IDS)
        turns, trajectories, rewards, ids = (log.execute(query, [name]).fetchall() for query in every)
    opened = store.open(folder)
    held = compare(
        acks, turns, trajectories, rewards, asked(opened.trajectories(ids={row[0] for row in ids}).values())
    )
    held.damage = [f"lane {lane.lane}: {lane.fault}" for lane in verify_store(opened) if lane.fault]
    return held


def asked(trajectories: Iterable[Trajectory]) -> dict[str, str]:
    """The last message of each turn's request, as rebuilt from the log."""
    questions: dict[str, str] = {}
    for trajectory in trajectories:
        for turn in trajectory.turns.values():
            messages = trajectory.messages(turn)
            questions[turn.turn_id] = orjson.dumps(messages[-1:]).decode()
    return questions


def compare(
    acks: Iterable[Ack],
    turns: list[Any],
    trajectories: list[Any],
    rewards: list[Any],
    questions: Mapping[str, str],
) -> Held:
    """Compare acknowledgements with the rows of the log, and with the requests rebuilt from it. Pure."""
    held = Held()
    rows = {
        "turn": {row[0]: row[1:] for row in turns},
        "finish": {row[0]: row[1:] for row in trajectories},
        "reward": {row[0]: row[1:] for row in rewards},
    }
    named = {"turn": "turn_id", "finish": "trajectory", "reward": "event_id"}
    looks = {"turn": lambda ack, row: _turn(ack, row, questions), "finish": _finish, "reward": _reward}
    for ack in acks:
        held.acks += 1
        what = ack["what"]
        row = rows[what].get(ack[named[what]])
        if row is None:
            held.lost.append(f"{what} {ack[named[what]]!r} of {ack['trajectory']}")
        elif wrong := looks[what](ack, row):
            held.changed.append(f"{what} {ack[named[what]]!r} of {ack['trajectory']}: {wrong}")
    return held


def _turn(ack: Ack, row: tuple[Any, ...], questions: Mapping[str, str]) -> str:
    trajectory, status, content, request = row
    if (trajectory, status, content) != (ack["trajectory"], "completed", ack["text"]):
        return f"{(trajectory, status, content)}, not {ack['text']!r}"
    question = questions.get(ack["turn_id"], "nothing")
    if ack["question"] not in question:
        return f"its request asks {question}, not {ack['question']!r}"
    return "" if ack["mark"] in (request or "") else f"its request has no {ack['mark']}: {request}"


def _finish(ack: Ack, row: tuple[Any, ...]) -> str:
    status, reward, turns = row
    same = status == "completed" and reward == ack["reward"] and turns >= ack["turns"]
    return "" if same else f"{row}, not reward {ack['reward']} after {ack['turns']} turns"


def _reward(ack: Ack, row: tuple[Any, ...]) -> str:
    acknowledged = (ack["trajectory"], ack["reward"], ack["source"])
    return "" if row == acknowledged else f"{row}, not {acknowledged}"
