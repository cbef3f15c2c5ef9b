"""Folds a trajectory's events into its facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rollbook.store.errors import CutError
from rollbook.store.events import (
    Event,
    LabelAdded,
    Logprobs,
    RewardAssigned,
    TrajectoryErased,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.fold.trajectory import Trajectory, Turn, fold
from rollbook.transcript import facts
from rollbook.transcript.facts import Answer, Label, Reward, TrajectoryFacts, TurnFacts
from rollbook.transcript.messages import call_names, read_message

CHAT_COMPLETIONS = "/v1/chat/completions"
ALL = slice(None)
"""All turns of a trajectory."""


def facts_of(events: Sequence[Event], places: slice = ALL) -> TrajectoryFacts:
    """The facts that are in the events of one trajectory.

    Args:
        places: of the turns that are to be among them; its tokens are those of all.

    Raises:
        CutError: its opening is not among them.
    """
    for trajectory in fold(events).values():
        return _Facts(trajectory, events).trajectory(places)
    raise CutError("the cut holds events of the trajectory, but not its opening: take a later one")


class _Facts:
    """Collected from all events of a trajectory, for the facts of its turns."""

    def __init__(self, trajectory: Trajectory, events: Iterable[Event]) -> None:
        self._trajectory = trajectory
        self._rewards = _in_force(trajectory.rewards)
        self._labels: dict[str | None, list[Label]] = {}
        self._times: dict[tuple[str, str], int] = {}
        self._erased: str | None = None
        for event in events:
            record = event.record
            match record:
                case LabelAdded():
                    label = Label(record.name, record.value, record.source)
                    self._labels.setdefault(record.turn_id, []).append(label)
                case TrajectoryErased():
                    self._erased = record.reason
                case TurnRequested() | TurnCompleted() | TurnFailed():
                    self._times[event.kind, record.turn_id] = event.time_us
                case TrajectoryOpened() | TrajectoryFinished():
                    self._times[event.kind, ""] = event.time_us
        self._calls = dict(
            pair
            for turn in trajectory.turns.values()
            for message in (*turn.requested.messages, turn.completed.reply if turn.completed else None)
            for pair in call_names(message)
        )

    def trajectory(self, places: slice) -> TrajectoryFacts:
        opened, finished = self._trajectory.opened, self._trajectory.finished
        turns = list(self._trajectory.turns.values())
        answers = [turn.completed for turn in turns if turn.completed is not None]
        sampled = sum(len(answer.completion_ids) for answer in answers)
        kinds = {_fidelity(turn) for turn in turns if turn.completed is not None}
        return TrajectoryFacts(
            name=opened.name,
            trajectory_id=opened.trajectory_id,
            run=self._trajectory.run,
            lane=self._trajectory.lane,
            group=opened.group,
            task=opened.task,
            split=opened.split,
            labels=opened.labels,
            added_labels=tuple(self._labels.get(None, ())),
            status=finished.status if finished else "open",
            success=finished.success if finished else None,
            opened_us=self._times[TrajectoryOpened.KIND, ""],
            finished_us=self._times.get((TrajectoryFinished.KIND, "")),
            erased=self._erased,
            rewards=self._rewards.get(None, ()),
            turns=tuple(self._turn(turn) for turn in turns[places]),
            tokens=sampled + sum(len(answer.prompt_ids) for answer in answers),
            sampled=sampled,
            fidelity=(kinds.pop() if len(kinds) == 1 else facts.MIXED) if kinds else None,
            origin=opened.origin,
        )

    def _turn(self, turn: Turn) -> TurnFacts:
        requested = turn.requested
        ended = turn.completed or turn.failed
        start = self._times[requested.KIND, turn.turn_id]
        latency = None if ended is None else (self._times[ended.KIND, turn.turn_id] - start) / 1000
        done = turn.completed is not None
        echo = self._echo_at(turn)
        return TurnFacts(
            number=turn.position + 1,
            turn_id=turn.turn_id,
            parent=requested.parent_turn_id,
            root_reason=requested.root_reason,
            base=requested.base_turn_id,
            shared_messages=requested.shared_messages,
            endpoint=str(requested.wire.get("endpoint") or CHAT_COMPLETIONS),
            choice=requested.wire.get("choice"),
            retry=requested.wire.get("retry"),
            requested_us=start,
            requested_model=requested.requested_model,
            sampling=requested.sampling,
            not_honoured=tuple(sorted(name for name, acted_on in requested.honoured.items() if not acted_on)),
            messages=tuple(
                read_message(message, self._calls, echo=place == echo)
                for place, message in enumerate(requested.messages)
            ),
            status=facts.COMPLETED if done else facts.FAILED if turn.failed else facts.RUNNING,
            error=turn.failed.error if turn.failed and not done else None,
            latency_ms=latency,
            delivered=turn.delivered,
            answer=_answer(turn),
            rewards=self._rewards.get(turn.turn_id, ()),
            labels=tuple(self._labels.get(turn.turn_id, ())),
        )

    def _echo_at(self, turn: Turn) -> int | None:
        """Which of the new messages repeats the reply of the turn that this one extends."""
        requested = turn.requested
        parent = self._trajectory.turns.get(requested.parent_turn_id or "")
        if parent is None:
            return None
        place = parent.requested.shared_messages + len(parent.requested.messages) - requested.shared_messages
        message: Any = requested.messages[place] if 0 <= place < len(requested.messages) else None
        return place if isinstance(message, dict) and message.get("role") == "assistant" else None


def _in_force(rewards: Iterable[tuple[str, RewardAssigned]]) -> dict[str | None, tuple[Reward, ...]]:
    """The last reward of each source that is not superseded, by turn (None: of the trajectory)."""
    superseded = {record.supersedes for _, record in rewards if record.supersedes}
    last: dict[str | None, dict[str, float]] = {}
    for event_id, record in rewards:
        if event_id not in superseded:
            last.setdefault(record.turn_id, {})[record.source] = record.reward
    return {
        turn_id: tuple(Reward(source, reward) for source, reward in sorted(by_source.items()))
        for turn_id, by_source in last.items()
    }


def _answer(turn: Turn) -> Answer | None:
    done = turn.completed
    if done is None:
        return None
    mean, lowest = mean_and_lowest(done.logprobs)
    return Answer(
        reply=read_message(done.reply, {}),
        finish_reason=done.finish_reason,
        flags=tuple(done.flags),
        policy=done.policy,
        spans=done.version_spans,
        fidelity=_fidelity(turn),
        prompt_tokens=done.prompt_length,
        context_ids=done.prompt_ids,
        completion_ids=done.completion_ids,
        logprobs=done.logprobs,
        mean_logprob=mean,
        min_logprob=lowest,
        timings=done.timings,
    )


def _fidelity(turn: Turn) -> str:
    if turn.tokens_erased:
        return facts.ERASED
    sampled = turn.completed is not None and len(turn.completed.completion_ids)
    return facts.EXACT if sampled else facts.TEXT_ONLY


def mean_and_lowest(logprobs: Logprobs | None) -> tuple[float | None, float | None]:
    """(mean, lowest) of the logprobs that are numbers; None where there is none."""
    if logprobs is None or not len(logprobs):
        return None, None
    lowest = logprobs.min()
    if lowest != lowest:  # one of them is no number
        return mean_and_lowest(logprobs[~np.isnan(logprobs)])
    with np.errstate(invalid="ignore"):  # infinities of both signs
        return float(logprobs.mean(dtype=np.float64)), float(lowest)
