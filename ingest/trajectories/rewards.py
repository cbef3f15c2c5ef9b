"""Rewards: with the finish of a trajectory, or at any time, from any source.

A reward is a new event, also when it comes late or takes another one's place: what was trained before keeps
the one it had at its cut.

Who judges a trajectory is shown its conversations and its rewards, as plain JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollbook.ingest.fields import AssignReward
from rollbook.ingest.trajectories.live import Contents
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, RewardAssigned
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.interchange.paths import paths

RESPONSE_PREFIX = "chatcmpl-"
"""A chat reply's id is this and its turn's; the other endpoints' have prefixes of their own."""
_PREFIXES = (RESPONSE_PREFIX, "cmpl-", "resp_", "msg_")


def turn_of_reply(trajectory: Trajectory, reply_id: str | None) -> str | None:
    """The turn whose reply has this id; None for none.

    Raises:
        RequestError: 422, the trajectory has no such turn.
    """
    if reply_id is None:
        return None
    turn_id: str | None = _without_prefix(reply_id)
    if turn_id not in trajectory.turns:
        turn_id = _turn_of_upstream(trajectory, reply_id)
    if turn_id is None:
        text = (
            f"turn is {reply_id!r}, which is no reply of this trajectory: send the id of one of its replies"
        )
        raise RequestError(422, "unknown_turn", text)
    return turn_id


def _turn_of_upstream(trajectory: Trajectory, reply_id: str) -> str | None:
    """The turn that an upstream answered under this id; of several choices the first."""
    for turn in trajectory.turns.values():
        if turn.completed is not None and turn.completed.upstream.get("id") == reply_id:
            return turn.turn_id
    return None


def _without_prefix(reply_id: str) -> str:
    prefix = next((p for p in _PREFIXES if reply_id.startswith(p)), "")
    return reply_id.removeprefix(prefix)


def assigned_reward(trajectory: Trajectory, body: AssignReward, by: str | None = None) -> RewardAssigned:
    """The record of one more reward for the trajectory, or for one of its turns. Pure.

    Args:
        by: the name of the key that assigns it.

    Raises:
        RequestError: 422, it names a turn or a reward that the trajectory does not have.
    """
    turn_id = turn_of_reply(trajectory, body.turn)
    if body.supersedes is not None:
        _check_superseded(trajectory, body, turn_id)
    trajectory_id = trajectory.opened.trajectory_id
    return RewardAssigned(trajectory_id, turn_id, body.reward, body.source, body.supersedes, by)


def repeated(trajectory: Trajectory, record: RewardAssigned) -> str | None:
    """The event that already holds a reward, where its request is sent again; None: the reward is new.

    A source that gives one number after another may return to an earlier one: so without `supersedes`
    only its last one can be repeated.
    """
    about = [
        (event_id, known)
        for event_id, known in trajectory.rewards
        if (known.source, known.turn_id) == (record.source, record.turn_id)
    ]
    candidates = about[-1:] if record.supersedes is None else about
    return next((event_id for event_id, known in candidates if known == record), None)


def _check_superseded(trajectory: Trajectory, body: AssignReward, turn_id: str | None) -> None:
    earlier = dict(trajectory.rewards).get(body.supersedes or "")
    if earlier is None:
        text = (
            f"supersedes is {body.supersedes!r}, which is no reward of this trajectory: send the event_id "
            "that was given when it was assigned"
        )
        raise RequestError(422, "unknown_reward", text)
    if (earlier.turn_id, earlier.source) != (turn_id, body.source):
        target = "the trajectory" if earlier.turn_id is None else f"turn {earlier.turn_id}"
        text = f"the reward to supersede is of {target} and from {earlier.source!r}: a new one must be so too"
        raise RequestError(422, "other_reward", text)


def turn_rewards(
    known: Contents,
    trajectory_id: str,
    rewards: Sequence[float] | Mapping[str, float] | None,
    by: str | None = None,
) -> list[RewardAssigned]:
    """The rewards of single turns that a finish gives: in turn order, or by the ids of their replies. Pure.

    Raises:
        RequestError: 422, they do not fit the trajectory's completed turns.
    """
    if rewards is None:
        return []
    completed = known.completed
    if isinstance(rewards, Mapping):
        pairs = [(known.replies.get(key, _without_prefix(key)), value) for key, value in rewards.items()]
        unknown = [turn_id for turn_id, _ in pairs if turn_id not in completed]
        if unknown:
            text = f"turn_rewards names {unknown[0]!r}, which is no reply of this trajectory"
            raise RequestError(422, "wrong_turn_rewards", text)
    else:
        if len(rewards) != len(completed):
            text = f"turn_rewards holds {len(rewards)} rewards, but {len(completed)} turns completed"
            raise RequestError(422, "wrong_turn_rewards", text)
        pairs = list(zip(completed, rewards, strict=True))
    return [RewardAssigned(trajectory_id, turn_id, value, by=by) for turn_id, value in pairs]


def description(trajectory: Trajectory) -> Json:
    """A trajectory's opening, state, conversations and rewards, earlier rewards first.

    A conversation is a path of its turns: the messages as last sent, then the last reply. What was
    erased is left out.
    """
    replaced = {reward.supersedes for _, reward in trajectory.rewards}
    opened = trajectory.opened
    return {
        "id": opened.name,
        **{"trajectory_id": opened.trajectory_id, "run": trajectory.run, "group": opened.group},
        **{"task": opened.task, "split": trajectory.split, "labels": opened.labels},
        "status": "open" if trajectory.finished is None else trajectory.finished.status,
        "success": None if trajectory.finished is None else trajectory.finished.success,
        "turns": len(trajectory.turns),
        "conversations": [{"messages": path.messages, "tools": path.tools} for path in paths(trajectory)],
        "rewards": [
            {
                **{"event_id": event_id, "source": reward.source, "reward": reward.reward},
                **{"turn_id": reward.turn_id, "superseded": event_id in replaced},
            }
            for event_id, reward in trajectory.rewards
        ],
    }
