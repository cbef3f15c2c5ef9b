"""A store that has an answer to every question of docs/sql.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.records import step_planned, turn_completed, turn_requested
from tokenizers import Tokenizer, models

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.fold.trajectory import prompt_sha256


def _ids(*values: int) -> Any:
    return np.array(values, np.int32)


def _trajectory(name: str, reward: float, version: int, *, logprob: float, delivered: bool) -> list[Any]:
    """A finished trajectory of two turns, the second one a child of the first."""
    key, root, child = f"id-{name}", f"{name}-1", f"{name}-2"
    question = [{"role": "user", "content": "2+2?"}]
    followup = [{"role": "assistant", "content": "four"}, {"role": "user", "content": "a digit, please"}]
    span = (kinds.VersionSpan("actor", version, 0, 2),)
    ask = ({"temperature": 1.0}, "m", {"max_new_tokens": 2, "temperature": 1.0, "seed": 0}, {}, "key")

    def done(turn_id: str, delta: Any, prompt: Any, ids: Any, text: str) -> Any:
        return turn_completed(
            key,
            turn_id,
            policy_version=version,
            prompt_ids=delta,
            completion_ids=ids,
            logprobs=np.array([-0.5, logprob], np.float32),
            version_spans=span,
            prompt_length=len(prompt),
            prompt_sha256=prompt_sha256(prompt),
            reply={"role": "assistant", "content": text},
            logprob_semantics={"temperature": 1.0},
            timings={"held_us": 0, "engine_us": 900},
            upstream={"usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}
            if version
            else {},
        )

    return [
        kinds.TrajectoryOpened(key, name, name.rsplit("-", 1)[0], "2+2", "train"),
        kinds.TurnRequested(key, root, f"r-{root}", None, "first_turn", None, 0, question, *ask),
        done(root, _ids(1, 2), _ids(1, 2), _ids(3, 4), "four"),
        kinds.TurnDelivered(key, root, "sent"),
        kinds.TurnRequested(key, child, f"r-{child}", root, None, root, 1, followup, *ask),
        done(child, _ids(5), _ids(1, 2, 3, 4, 5), _ids(6, 4), "4"),
        *([kinds.TurnDelivered(key, child, "sent")] if delivered else []),
        kinds.RewardAssigned(key, None, reward),
        kinds.TrajectoryFinished(key, "completed", reward > 0),
    ]


def _step(step: int, attempt: int, names: list[str]) -> Any:
    refs = [{"trajectory_id": f"id-{name}", "turn_id": f"{name}-2"} for name in names]
    return step_planned(
        step,
        attempt=attempt,
        policy_version=step,
        phase="phase",
        cut="serve=27",
        recipe={"reward_source": "agent"},
        recipe_digest="recipe",
        samples=refs,
        partition=[[[0, 1]]],
        algorithm={"name": "grpo"},
        optimizer={"lr": 0.001},
        learning_rate=0.001,
        seed=7,
        input_digests={"input_weights": f"w{step}"},
    )


def _train_records() -> list[Any]:
    written: list[Any] = []
    for version in (0, 1, 2):
        path = f"checkpoints/demo/actor/v{version:08d}"
        written.append(kinds.CheckpointWritten("actor", version, path, f"w{version}", None, "phase", 9))
        written.append(
            kinds.PolicyPublished("actor", version, version - 1 if version else None, path, f"w{version}")
        )
    results: Any = ({"weights": "w1"}, {"loss": 0.5, "trained_tokens": 6})
    return [
        kinds.RunOpened("train", {"run": "demo"}, environment={"device": "cpu"}),
        *written[:2],
        _step(0, 1, ["task-1-0", "task-1-1"]),
        kinds.StepFailed(0, 1, "actor", "out of memory"),
        _step(0, 2, ["task-1-0", "task-1-1"]),
        kinds.StepCommitted(0, 2, "actor", 1, *results),
        *written[2:4],
        kinds.SampleDropped("id-task-2-0", "task-2-0-2", "staleness", "recipe", 1, {"staleness": 3}),
        _step(1, 1, ["task-2-1"]),
        kinds.StepCommitted(1, 1, "actor", 2, {"weights": "w2"}, {"loss": 0.25, "trained_tokens": 2}),
        *written[4:],
    ]


def _launches(launch_id: str, attempt: int, ended: Any) -> list[Any]:
    """A launch that began and ended."""
    place, isolation = {"epoch": 0, "task": "task-1", "sample": 1}, {"processes": "session"}
    launch = ("id-task-1-1", launch_id, "nightly", place, attempt, "subprocess", isolation, "host-17")
    return [kinds.LaunchStarted(*launch, {"total": 60}), ended]


def _upkeep_records() -> list[Any]:
    """What the processes that look after a store write."""
    return [
        kinds.BodyStored("d1", "a long system prompt"),
        kinds.CursorMoved("dashboard", "serve=3"),
        kinds.TrajectoryAdopted("id-broken", "serve", "e"),
        kinds.LabelAdded("id-task-1-0", None, "reviewed", True, "a person"),
        kinds.SyncStarted("actor", 1, "s1", "embedded", "disk"),
        kinds.SyncFinished("actor", 1, "s1", "embedded", 4096, 0.25),
        kinds.SyncStarted("actor", 2, "s2", "embedded", "disk"),
        kinds.SyncFailed("actor", 2, "s2", "embedded", "timed out"),
        kinds.StepRetired(99, "actor", "never made"),
        kinds.StepAbandoned(99, 1, "critic", 100, 98, 101),
        kinds.SegmentDropped("elsewhere", 1, 1, 0, 4, "older than 7 d"),
        kinds.SegmentRepaired("elsewhere", 2, "00000002-00000002.1", 4, 8, "checksum mismatch"),
        kinds.EventOrphaned("id-elsewhere", "gone", 4, {"kind": "label.added", "value": "v"}),
        kinds.TrajectoryErased("id-elsewhere", True, "a leaked key", 4),
        kinds.EngineControlled("embedded", "pause_generation", {"mode": "abort"}, None, "ops"),
        kinds.PreferenceAdded("id-task-1-0", "id-task-2-0", 1.0, "a person"),
        kinds.EvalStarted("actor", 0, "p"),
        kinds.EvalSampled("actor", 0, "rollouts.eval.0", 64),
        kinds.EvalFinished(
            *("actor", 2, "phase", "serve=27", "serve=27", 4, 96, 1, 1, 1), {"loss": 0.375, "reward": 1.0}
        ),
        kinds.StopFired(
            "actor", 2, "phase", {"metric": "loss", "below": 0.3}, [{"policy_version": 2, "value": 0.25}]
        ),
        kinds.StepVectors(99, 1, "critic", "logprobs", "AAAAvwAAAL8="),
        kinds.CheckpointRemoved(
            *("actor", 1, "checkpoints/demo/actor/v00000001", "w1", None, "[checkpoint] keep_last 1")
        ),
        *_launches("l1", 1, kinds.LaunchEnded("id-task-1-1", "l1", "infra_error", "no room")),
        *_launches("l2", 2, kinds.LaunchEnded("id-task-1-1", "l2", "done", seconds=2.5)),
        kinds.LaunchLeaked("id-task-1-1", "l2", [{"pid": 4711, "command": "sleep 99"}], "end"),
    ]


def _replay_records() -> list[Any]:
    """A replay of a trajectory that has only begun, and a judgement of it that has."""
    origin = {"trajectory_id": "id-task-1-0", "turn_id": "task-1-0-1", "how": "repeated"}
    wire = {"endpoint": "/v1/chat/completions", "repeats": origin["turn_id"]}
    request = (
        None,
        "first_turn",
        None,
        0,
        [{"role": "user", "content": "what is 2+2"}],
        {},
        "m",
        {},
        {},
        "key",
    )
    return [
        kinds.TrajectoryOpened(
            "id-replay",
            "replay/id-replay",
            split=kinds.REPLAY,
            origin=origin | {"policy": "actor", "policy_version": 1},
        ),
        kinds.TurnRequested("id-replay", "r1", "r-r1", *request, wire),
        kinds.TrajectoryOpened(
            *("id-judge", "task-1-0.sound.1", None, None, kinds.JUDGE, {"scorer": "sound"}, None),
            {"trajectory_id": "id-task-1-0", "how": "judged"},
        ),
        kinds.TurnRequested("id-judge", "j1", "r-j1", *request, {"endpoint": "/v1/chat/completions"}),
    ]


def _service_records() -> list[Any]:
    model = ("s1:train:0:0", "s1:train:0", 0)
    return [
        kinds.SessionOpened("s1", None, {"sdk_version": "0.38.0"}),
        kinds.OperationAccepted(*model, "create_model", {"base_model": "tiny"}, "d1", {"seed": 1}),
        kinds.OperationEnded(*model, {"model_id": "s1:train:0"}, None, {"adapter": "d2"}),
        kinds.SamplerOpened("s1:sample:0", "s1", "tiny", None, None, 0, "d3", None),
        kinds.SessionEnded("s1", {"reason": {"type": "success"}}),
        kinds.WeightsChanged("s1:train:0", "tinker://s1:train:0/weights/a", "checkpoints/s1/1", "published"),
        kinds.WeightsCopied(
            *("s2:train:0", "tinker://s2:train:0/weights/a", "tinker://s1:train:0/weights/a", "s1:train:0"),
            *(1, 1, "checkpoints/s1/1", {"adapter": "d2"}, None, None),
        ),
        kinds.WeightsFreed("s1:train:0", 1, "checkpoints/s1/1", 4096),
        kinds.LaneOrdered(1),
    ]


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer of seven words, where a checkpoint of the run has its own."""
    folder.mkdir(parents=True)
    words = ["a", "what", "is", "four", "4", "digit", "please"]
    Tokenizer(models.WordLevel(dict(zip(words, range(7), strict=True)), "a")).save(
        str(folder / "tokenizer.json")
    )


@pytest.fixture(scope="session")
def one_of_everything(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store at DIR/demo-store with at least one event of every kind, told as one short story."""
    log = rb.open(tmp_path_factory.mktemp("docs") / "demo-store", create=True)
    records = [
        kinds.RunOpened("serve", {"port": 8000}, "model"),
        kinds.PolicyActivated("actor", 0, "embedded", "w0", "/model"),
        *_trajectory("task-1-0", 1.0, 0, logprob=-12.0, delivered=True),
        *_trajectory("task-1-1", 0.0, 0, logprob=-0.1, delivered=True),
        *_trajectory("task-2-0", 1.0, 0, logprob=-0.1, delivered=False),
        *_trajectory("task-2-1", 1.0, 1, logprob=-0.1, delivered=True),
        kinds.RewardAssigned("id-task-2-1", "task-2-1-1", 0.5, "judge"),
        kinds.TrajectoryOpened("id-broken", "broken"),
        turn_requested("id-broken", "b1", request_id="r-b1", root_reason="first_turn", context_key="key"),
        kinds.TurnFailed("id-broken", "b1", "EngineError('generation failed')"),
    ]
    lanes = {"serve": records, "train": _train_records(), "upkeep": _upkeep_records()}
    for lane, entries in (lanes | {"replay": _replay_records(), "service": _service_records()}).items():
        with log.writer(lane) as writer:
            writer.append([Event(record, "demo") for record in entries]).result(30)
    _write_tokenizer(log.path / "checkpoints" / "demo" / "actor" / "v00000000")
    held = {e.kind for e in log.events()}
    assert held == set(kinds.RECORDS), f"add an event of {set(kinds.RECORDS) - held}"
    return log
