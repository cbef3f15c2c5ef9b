"""Random histories of a log, in whose every corner the ledger has something to decide."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tests.fakes.stories.records import step_planned, turn_completed

from rollbook.store import Event
from rollbook.store import events as kinds
from rollbook.store.cut import format_cut
from rollbook.store.events.erased import TOKENS_ERASED
from rollbook.store.fold.trajectory import prompt_sha256

RUNS = ("demo", "other")
SPLITS = ("train", "train", "train", "eval", "teacher", "quarantine")
RULES = ("erased", "staleness", "zero_variance", "other_path")


@dataclass
class Told:
    """A trajectory as far as it was told."""

    id: str
    run: str
    lane: str
    split: str
    last_event: str = ""
    whole: dict[str, list[int]] = field(default_factory=dict)
    """Completed turn -> the ids of its prompt and its completion."""
    parents: dict[str, str | None] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    """Completed turns not delivered yet."""
    finished: bool = False

    def leaves(self) -> list[str]:
        """Completed turns that no completed turn extends."""
        inner = {self.parents[turn_id] for turn_id in self.whole}
        return [turn_id for turn_id in self.whole if turn_id not in inner]

    def last_leaf(self) -> str:
        """The last of them that was delivered, or the last."""
        return ([leaf for leaf in self.leaves() if leaf not in self.waiting] or self.leaves())[-1]


class History:
    """A log of several lanes that grows by one random thing at a time.

    Args:
        odd: with erased tokens, and with plans whose cut does not hold what they name.
    """

    def __init__(self, rng: random.Random, *, odd: bool = True) -> None:
        self._rng, self._odd = rng, odd
        self.lanes: dict[str, list[Event]] = defaultdict(list)
        self.instants: list[dict[str, int]] = [{}]
        """The closed cuts, in order."""
        self.trajectories: list[Told] = []
        self._attempts: dict[tuple[str, str, int], int] = defaultdict(int)
        self._steps: dict[tuple[str, str], int] = defaultdict(int)
        self._number = 0

    def tell(self, count: int) -> None:
        """So many further things happen."""
        deeds = (self._open, self._turn, self._turn, self._turn, self._turn, self._deliver, self._finish)
        for _ in range(count):
            self._rng.choice((*deeds, self._finish, self._adopt, self._step, self._step, self._reward))()
            self.instants.append({lane: len(events) for lane, events in self.lanes.items()})

    @property
    def head(self) -> dict[str, int]:
        """The cut that holds all of it."""
        return self.instants[-1]

    def events(self, cut: dict[str, int]) -> list[Event]:
        """Lane by lane, as a store hands them out."""
        return [e for lane in sorted(cut) for e in self.lanes[lane][: cut[lane]]]

    def some_cut(self) -> dict[str, int]:
        """Any cut, closed or not."""
        if self._rng.random() < 0.6:
            return dict(self._rng.choice(self.instants))
        return {lane: self._rng.randint(0, len(events)) for lane, events in self.lanes.items()}

    def _append(self, lane: str, run: str, record: Any) -> Event:
        self._number += 1
        event = Event(record, run, f"e{self._number}", self._number, lane, len(self.lanes[lane]))
        self.lanes[lane].append(event)
        return event

    def _write(self, trajectory: Told, record: Any, lane: str | None = None) -> None:
        event = self._append(lane or trajectory.lane, trajectory.run, record)
        if lane is None:
            trajectory.last_event = event.event_id

    def _pick(self, *, finished: bool) -> Told | None:
        fit = [t for t in self.trajectories if t.finished == finished]
        return self._rng.choice(fit) if fit else None

    def _open(self) -> None:
        name = f"t{len(self.trajectories)}"
        trajectory = Told(name, self._rng.choice(RUNS), self._rng.choice("ab"), self._rng.choice(SPLITS))
        self.trajectories.append(trajectory)
        self._write(trajectory, kinds.TrajectoryOpened(name, name, None, None, trajectory.split))

    def _turn(self) -> None:
        trajectory = self._pick(finished=False)
        if trajectory is None:
            return
        rng, turn_id = self._rng, f"{trajectory.id}.{_name(self._rng)}"
        parent = rng.choice([None, *trajectory.whole, *list(trajectory.whole)[-1:]])
        ask: Any = ("r", parent, None, None, 0, [], {}, None, {}, {}, "c")
        self._write(trajectory, kinds.TurnRequested(trajectory.id, turn_id, *ask))
        trajectory.parents[turn_id] = parent
        end = rng.random()
        if end < 0.08:
            self._write(trajectory, kinds.TurnFailed(trajectory.id, turn_id, "gone"))
        elif end < 0.94:
            if rng.random() < 0.05:
                self._move(trajectory)
            self._write(trajectory, self._completed(trajectory, turn_id, parent))
            if rng.random() < 0.75:
                self._write(trajectory, kinds.TurnDelivered(trajectory.id, turn_id, "sent"))
            else:
                trajectory.waiting.append(turn_id)

    def _completed(self, trajectory: Told, turn_id: str, parent: str | None) -> Any:
        rng = self._rng
        count = rng.choice((0, 1, 2, 3, 4, 5))
        sent = [*(trajectory.whole[parent] if parent else []), 7, 8]
        ids = list(range(count))
        trajectory.whole[turn_id] = [*sent, *ids]
        erased = self._odd and rng.random() < 0.06
        policy, version, spans = self._spans(count)
        semantics: Any = {"temperature": 1.0}
        if rng.random() < 0.3:
            semantics["altered"] = rng.choice(([], ["logit_bias"], False, None, True))
        done = turn_completed(
            trajectory.id,
            turn_id,
            policy=policy,
            policy_version=version,
            prompt_ids=np.array([7, 8], np.int32),
            completion_ids=np.array(ids, np.int32),
            logprobs=None if erased else np.full(count, -1, np.float32),
            version_spans=spans,
            prompt_length=len(sent),
            prompt_sha256=prompt_sha256(np.array(sent, np.int32)),
            reply={"content": 'say "altered" tokens_erased'},
            logprob_semantics=semantics,
            flags=[TOKENS_ERASED] if erased else ["malformed_tool_call"],
        )
        return replace(done, completion_ids=np.full(count, -1, np.int32)) if erased else done

    def _spans(self, count: int) -> tuple[str | None, int | None, tuple[kinds.VersionSpan, ...]]:
        """The typed columns, and spans over all, part or none of so many tokens."""
        rng = self._rng
        if rng.random() < 0.15 or not count:
            return *rng.choice(((None, None), ("actor", 3))), ()
        if rng.random() < 0.5:
            return "actor", 1, (kinds.VersionSpan("actor", 1, 0, count),)
        edges = sorted(rng.sample(range(count + 1), min(count + 1, rng.randint(2, 3))))
        pairs = itertools.pairwise(edges)
        spans = [kinds.VersionSpan(rng.choice(("actor", "critic")), rng.randint(0, 2), *p) for p in pairs]
        return spans[-1].policy, spans[-1].version, tuple(spans)

    def _deliver(self) -> None:
        late = [t for t in self.trajectories if t.waiting]
        if late:
            trajectory = self._rng.choice(late)
            turn_id = trajectory.waiting.pop(self._rng.randrange(len(trajectory.waiting)))
            self._write(trajectory, kinds.TurnDelivered(trajectory.id, turn_id, "echoed"))

    def _finish(self) -> None:
        trajectory = self._pick(finished=False)
        if trajectory is not None and trajectory.whole:
            trajectory.finished = True
            status = self._rng.choice(("completed", "aborted", kinds.VOID))
            self._write(trajectory, kinds.TrajectoryFinished(trajectory.id, status))

    def _adopt(self) -> None:
        """Another lane writes an open trajectory from here on, perhaps one that wrote it before."""
        trajectory = self._pick(finished=False)
        if trajectory is not None:
            self._move(trajectory)

    def _move(self, trajectory: Told) -> None:
        lane = self._rng.choice([lane for lane in "abc" if lane != trajectory.lane])
        adopted = kinds.TrajectoryAdopted(trajectory.id, trajectory.lane, trajectory.last_event)
        trajectory.lane = lane
        self._write(trajectory, adopted)

    def _reward(self) -> None:
        if self.trajectories:
            trajectory = self._rng.choice(self.trajectories)
            self._write(trajectory, kinds.RewardAssigned(trajectory.id, None, 1.0, "judge"), "judge")

    def _step(self) -> None:
        """An attempt at a step: drops, a plan perhaps, and an end perhaps; or drops that no plan follows."""
        rng, lane = self._rng, self._rng.choice(("train", "train2"))
        run, policy = rng.choice(RUNS), rng.choice(("actor", "critic"))
        step = self._steps[run, policy]
        attempt = self._attempts[run, policy, step] + 1
        names = [
            (t.id, leaf) for t in self.trajectories if t.finished and t.run == run for leaf in t.leaves()
        ]
        recipe = {"paths": "last"} if rng.random() < 0.3 else {}
        if recipe:
            names = [
                (t.id, t.last_leaf()) for t in self.trajectories if t.finished and t.run == run and t.whole
            ]
        rng.shuffle(names)
        used = rng.randint(0, len(names))
        for trajectory_id, turn_id in names[used : used + rng.randint(0, 2)]:
            drop = kinds.SampleDropped(trajectory_id, turn_id, rng.choice(RULES), "r", step, {}, attempt)
            self._append(lane, run, drop)
        if rng.random() < 0.25:
            return
        self._attempts[run, policy, step] = attempt
        cut = {lane: len(events) for lane, events in self.lanes.items()}
        self._append(lane, run, self._plan(step, attempt, policy, names[:used], cut, recipe))
        end = rng.random()
        if end < 0.7:
            self._steps[run, policy] += 1
            self._append(lane, run, kinds.StepCommitted(step, attempt, policy, step + 1, {}, {}))
            if rng.random() < 0.2:
                taken_back = kinds.StepAbandoned(step, attempt, policy, step + 1, step, step + 2)
                self._append(rng.choice(("train", "train2")), run, taken_back)
        elif end < 0.85:
            self._append(lane, run, kinds.StepFailed(step, attempt, policy, "out of memory"))

    def _plan(
        self,
        step: int,
        attempt: int,
        policy: str,
        names: Sequence[tuple[str, str]],
        cut: dict[str, int],
        recipe: dict[str, str],
    ) -> Any:
        samples = [{"trajectory_id": t, "turn_id": leaf} for t, leaf in names]
        if self._odd and self._rng.random() < 0.05:
            cut = {}  # one that says nothing of its samples
        return step_planned(
            step,
            attempt=attempt,
            policy=policy,
            policy_version=step,
            phase="phase",
            cut=format_cut(cut),
            recipe=recipe,
            recipe_digest="digest",
            samples=samples,
            algorithm={"name": "sft"},
        )


def _name(rng: random.Random) -> str:
    """A name that sorts by nothing, so that turn order cannot be guessed from it."""
    return f"{rng.getrandbits(32):08x}"
