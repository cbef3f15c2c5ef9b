"""bench learning, in small: what it says of each algorithm is what its log holds."""

from __future__ import annotations

import json
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rollbook import store as rb
from rollbook.bench import learning, learning_play
from rollbook.bench.learning import Learnt, Measured
from rollbook.bench.learning_courses import COURSES, REWARD_MODEL, SCORES
from rollbook.bench.learning_play import Plan
from rollbook.demo.processes import Agent, Server
from rollbook.demo.run import Demo
from rollbook.demo.task import parse
from rollbook.store.events import RewardAssigned, StepCommitted, StepPlanned
from rollbook.train.algorithms.registry import ALGORITHMS, recorded_algorithm

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
OFFLINE, BATCHES, HELD_OUT, REWARD = 4, 2, 4, 2
NAMES = ("grpo", "grpo_scored")
SMALL = {"groups": 2, "group_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stores are."""
    return tmp_path_factory.mktemp("learning")


def _any_preferences(demo: Demo, server: Server, agent: Agent, plan: Plan) -> None:
    """Preferences of a policy that is never right: the first of two rollouts."""
    jobs = demo.jobs("pairs-0", demo.problems("online-0", 4, held_out=False), "teacher", 2)
    agent.work(jobs)
    for chosen, rejected in zip(jobs[::2], jobs[1::2], strict=True):
        body = {"chosen": chosen["id"], "rejected": rejected["id"]}
        httpx.post(f"{server.url}/v1/preferences", json=body).raise_for_status()


def _measured(folder: Path) -> Measured:
    rounds: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollbook.demo.run.TEACHER_CONVERSATIONS", 12)
        patch.setattr(learning_play, "GROUPS", 2)
        patch.setattr(learning_play, "GROUP_SIZE", 4)
        patch.setattr(learning_play, "_record_preferences", _any_preferences)
        patch.setattr(learning_play, "REWARD_MODEL", replace(REWARD_MODEL, keys={"batch_size": 2}))
        for name in NAMES:
            patch.setitem(COURSES, name, replace(COURSES[name], keys=SMALL))
        plan = Plan(BATCHES, HELD_OUT, OFFLINE, REWARD, ("two_calls",), NAMES)
        result = learning.measure(folder, plan, lambda: rounds.append(None))
    assert len(rounds) == plan.steps == 3
    return result


@pytest.fixture(scope="module")
def measured(folder: Path) -> Measured:
    """Two algorithms, two rollout batches of each, on the longer task."""
    return _measured(folder)


def test_it_learns_in_a_store_of_its_own(measured: Measured, folder: Path) -> None:
    """So many steps of its algorithm after the same beginning, and its curve is the log's."""
    learnt = measured.learnt[0]
    assert (learnt.task, learnt.name) == ("two_calls", "grpo")
    log = rb.open(folder / "two_calls" / "grpo")
    records = [event.record for event in log.events()]
    plans = [r for r in records if isinstance(r, StepPlanned)][OFFLINE:]
    assert [(plan.algorithm["name"], len(plan.samples)) for plan in plans] == [("grpo", 8)] * BATCHES
    assert sum(isinstance(r, StepCommitted) for r in records) == OFFLINE + BATCHES
    assert learnt.replayed == {OFFLINE: True, OFFLINE + BATCHES - 1: True}
    held_out = [t for t in log.trajectories().values() if t.opened.split == "eval"]
    assert len(held_out) == 2 * HELD_OUT
    for at, reward in learnt.curve:
        rewards = [t.reward() for t in held_out if t.opened.name.startswith(f"held-out-{at}-")]
        assert reward == pytest.approx(sum(r or 0.0 for r in rewards) / HELD_OUT)
    assert [at for at, _ in learnt.curve] == [0, BATCHES]
    assert (folder / "learning.png").read_bytes()[:4] == b"\x89PNG"
    question = next(t.opened.task for t in log.trajectories().values() if t.opened.split == "train")
    assert len(parse(str(question)).steps) == 2


def test_scores_stand_in_the_place_of_rewards(measured: Measured, folder: Path) -> None:
    """A reward model learns first; each step waits for its scores of the rollouts, and goes by them."""
    assert measured.learnt[1].name == "grpo_scored"
    log = rb.open(folder / "two_calls" / "grpo_scored")
    records = [event.record for event in log.events()]
    plans = [r for r in records if isinstance(r, StepPlanned)]
    assert [(plan.policy, plan.algorithm["name"]) for plan in plans[OFFLINE:]] == [
        *[("reward", "reward_model")] * REWARD,
        *[("actor", "grpo")] * BATCHES,
    ]
    assert {plan.recipe["reward_source"] for plan in plans[-BATCHES:]} == {SCORES}
    scored = [r for r in records if isinstance(r, RewardAssigned) and r.source == SCORES]
    used = {sample["trajectory_id"] for plan in plans[-BATCHES:] for sample in plan.samples}
    assert used <= {r.trajectory_id for r in scored}
    assert len({r.reward for r in scored}) > 2  # scores, not right or wrong


def test_what_is_learnt_is_read_again(measured: Measured, folder: Path) -> None:
    """A further run in the folder takes no step."""
    stores = [rb.open(folder / "two_calls" / name) for name in NAMES]
    before = [log.head() for log in stores]
    assert _measured(folder) == measured
    assert [log.head() for log in stores] == before


def test_preferences_are_right_over_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one problem, a right answer before a wrong one, one to one."""

    class Player:
        def work(self, jobs: list[dict[str, Any]]) -> list[float]:
            return [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]

    requests: list[Any] = []

    def taken(request: httpx.Request) -> httpx.Response:
        requests.append((request.url.path, json.loads(request.content)))
        return httpx.Response(201)

    client = httpx.Client(base_url="http://proxy", transport=httpx.MockTransport(taken))
    monkeypatch.setattr(httpx, "Client", lambda **options: client)
    monkeypatch.setattr(learning_play, "GROUPS", 2)
    monkeypatch.setattr(learning_play, "GROUP_SIZE", 4)
    monkeypatch.setattr(learning_play, "PAIRS_TIMES", 1)
    demo = learning._demo(tmp_path, "one_call", 0)
    learning_play._record_preferences(demo, SimpleNamespace(url=""), Player(), Plan(batches=1))  # type: ignore[arg-type]
    pairs = [
        (body["chosen"][-3:], body["rejected"][-3:]) for path, body in requests if path == "/v1/preferences"
    ]
    assert pairs == [("0-0", "0-1"), ("0-3", "0-2"), ("1-0", "1-3")]


def test_the_reference_is_the_policy_whose_rollouts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first policy, not the model from before it learnt to imitate; in every stretch of the training."""
    trained: list[Any] = []
    monkeypatch.setattr(learning_play, "Agent", lambda folder, url: nullcontext())
    for name in ("_play_held_out", "_record_preferences"):
        monkeypatch.setattr(learning_play, name, lambda *_: None)
    monkeypatch.setattr(learning_play, "_train", lambda demo, text: trained.append(tomllib.loads(text)))
    demo = learning._demo(tmp_path, "one_call", 0)
    plan = Plan(batches=15, offline_steps=7)
    learning_play.from_preferences(demo, SimpleNamespace(url=""), COURSES["dpo"], plan)  # type: ignore[arg-type]
    assert [config["algorithm"]["reference_version"] for config in trained] == [7, 7]
    assert [config["steps"] for config in trained] == [COURSES["dpo"].steps(batch) for batch in (10, 15)]


def test_figures() -> None:
    """Reward at the end, what was gained, and the share of replays that were bit for bit."""
    learnt = Learnt("one_call", "grpo", [(0, 0.25), (5, 0.75)], {4: True, 8: False})
    outcome = learning.outcome(Measured([learnt], Path("x")))
    values = {figure.figure: figure.value for figure in outcome.figures}
    assert values == {
        "learning.one_call.grpo.held_out": 0.75,
        "learning.one_call.grpo.gain": 0.5,
        "learning.one_call.grpo.replayed": 0.5,
    }


def test_every_algorithm_has_a_course() -> None:
    """But `sft`, from which all begin, and `policy_gradient`, which is `grpo`; their keys are taken."""
    courses = [*COURSES.values(), REWARD_MODEL]
    assert {course.algorithm for course in courses} == set(ALGORITHMS) - {"sft", "policy_gradient"}
    for course in courses:
        recorded_algorithm({"name": course.algorithm, **course.keys})
