"""A trajectory as who judges it sees it: its conversations and its rewards, as plain JSON values. Pure."""

from __future__ import annotations

from rollbook.store.events import Json
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.interchange.paths import paths


def description(trajectory: Trajectory) -> Json:
    """What it was, how far it is, what was said, and each reward, the later ones behind the earlier.

    A conversation is a path of its turns: the messages as last sent, then the last reply. What was erased is
    left out.
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
