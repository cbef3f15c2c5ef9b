"""A story for lineages: agents, engines, syncs, drops, and steps of which some failed or were abandoned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.fakes.stories import fabric

from rollbook.store import events as kinds

A, B = "http://a:1", "http://b:1"


def lineage_story() -> dict[str, list[Any]]:
    """Lane -> events: six trajectories, and a run of four steps, of which one was tried twice and one
    abandoned."""
    turn, trajectory = fabric.T, fabric.records
    served: list[Any] = [kinds.PolicyActivated("actor", 0, A, "w0", "/model")]
    served += trajectory("one", [turn(), turn(parent=0), turn(parent=0, completion=(5, 6, 7))], reward=0.25)
    served += trajectory("two", reward=1.0)
    three = trajectory(
        "three", [turn(completion=(3, 4, 5)), turn(parent=0, delivered=False, version=1)], reward=0.0
    )
    spans = (kinds.VersionSpan("actor", 0, 0, 2), kinds.VersionSpan("actor", 1, 2, 3))
    served += [
        replace(r, version_spans=spans, policy_version=1)
        if isinstance(r, kinds.TurnCompleted) and r.turn_id == "three.0"
        else r
        for r in three
    ]
    four = trajectory("four", [turn(), turn(parent=0, version=None)])
    served += [*trajectory("five", [turn(version=2)], reward=1.0), *trajectory("six", reward=0.5), *four[:4]]
    cut = f"other={len(four) - 3},serve={len(served)}"
    late = [kinds.RewardAssigned("one", None, 1.0, "judge")]
    of_serve = fabric.events(served + late)
    adopted = [kinds.TrajectoryAdopted("four", "serve", of_serve[len(served) - 1].event_id), *four[4:]]
    lanes = {"other": adopted, "train": _steps(cut)}
    return {"serve": of_serve} | {lane: fabric.events(records) for lane, records in lanes.items()}


def _steps(cut: str) -> list[Any]:
    def planned(step: int, version: int, turns: list[str], attempt: int = 1, **more: Any) -> Any:
        plan = fabric.planned(step, version, attempt=attempt, turns=turns)
        return replace(plan, cut=cut, partition=[[[i] for i in range(len(turns))]], **more)

    def committed(step: int, version: int, attempt: int = 1) -> Any:
        record = fabric.committed(step, version, attempt=attempt)
        return replace(record, digests={"weights": f"w{version}"})

    def published(version: int, parent: int | None, digest: str) -> list[Any]:
        path = f"c/{version}"
        return [
            replace(fabric.checkpoint(version), weights_digest=digest),
            kinds.PolicyPublished("actor", version, parent, path, digest),
        ]

    def sync(version: int, engine: str, error: str | None = None) -> list[Any]:
        named = ("actor", version, f"{engine}/{version}", engine)
        if error is not None:
            return [kinds.SyncStarted(*named, "tensor"), kinds.SyncFailed(*named, error)]
        return [
            kinds.SyncStarted(*named, "tensor"),
            kinds.PolicyActivated("actor", version, engine, f"w{version}", "", f"name-{version}"),
            kinds.SyncFinished(*named, 4096, 0.25),
        ]

    six = [{"trajectory_id": "six", "run": fabric.RUN, "group": "g", "reward": 0.5, "tokens": 2}]
    cut_off = {"trajectory_id": "three", "turn_id": "three.1", "tokens": 4}
    return [
        *published(0, None, "w0"),
        kinds.SampleDropped("two", "two.0", "staleness", "recipe", 0, {"staleness": 3}),
        planned(0, 0, ["one.1", "one.2"]),
        committed(0, 1),
        *sync(1, A),
        *sync(1, B, "timed out"),
        planned(1, 1, ["three.1"]),
        kinds.StepFailed(1, 1, "actor", "out of memory"),
        planned(1, 1, ["three.1"], 2, samples=[cut_off], others=six),
        committed(1, 2, 2),
        *published(2, 0, "w2"),
        *sync(2, A),
        *sync(2, B),
        kinds.EvalFinished("actor", 2, "p", cut, cut, 1, 2, 1, 2, 2, {"reward": 0.75}),
        planned(2, 2, ["five.0"]),
        committed(2, 3),
        kinds.StepAbandoned(2, 1, "actor", 3, 2, 4),
        *published(4, 2, "w2"),
        planned(3, 4, ["five.0"]),
        committed(3, 5),
    ]
