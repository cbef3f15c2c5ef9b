"""bench learning, in small: what it says of each algorithm is what its log holds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rollbook import store as rb
from rollbook.bench import learning
from rollbook.bench.learning import Learnt, Measured, Plan
from rollbook.bench.learning_courses import COURSES, Course
from rollbook.store.events import StepCommitted, StepPlanned
from rollbook.train.algorithms.registry import ALGORITHMS, recorded_algorithm

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
OFFLINE, BATCHES, HELD_OUT = 4, 2, 4
SMALL = Course("grpo", "grpo", keys={"groups": 2, "group_size": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stores are."""
    return tmp_path_factory.mktemp("learning")


def _measured(folder: Path) -> Measured:
    rounds: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollbook.demo.run.TEACHER_CONVERSATIONS", 12)
        patch.setattr(learning, "GROUPS", 2)
        patch.setattr(learning, "GROUP_SIZE", 2)
        patch.setitem(COURSES, "grpo", SMALL)
        plan = Plan(BATCHES, HELD_OUT, OFFLINE, ("grpo",))
        found = learning.measure(folder, plan, lambda: rounds.append(None))
    assert len(rounds) == plan.steps == 2
    return found


@pytest.fixture(scope="module")
def measured(folder: Path) -> Measured:
    """One algorithm, two rollout batches."""
    return _measured(folder)


def test_it_learns_in_a_store_of_its_own(measured: Measured, folder: Path) -> None:
    """So many steps of its algorithm after the same beginning, and its curve is the log's."""
    [one] = measured.learnt
    log = rb.open(folder / "grpo")
    records = [event.record for event in log.events()]
    plans = [r for r in records if isinstance(r, StepPlanned)][OFFLINE:]
    assert [(plan.algorithm["name"], len(plan.samples)) for plan in plans] == [("grpo", 4)] * BATCHES
    assert sum(isinstance(r, StepCommitted) for r in records) == OFFLINE + BATCHES
    assert one.replayed == {OFFLINE: True, OFFLINE + BATCHES - 1: True}
    held_out = [t for t in log.trajectories().values() if t.opened.split == "eval"]
    assert len(held_out) == 2 * HELD_OUT
    for at, reward in one.curve:
        rewards = [t.reward() for t in held_out if t.opened.name.startswith(f"held-out-{at}-")]
        assert reward == pytest.approx(sum(r or 0.0 for r in rewards) / HELD_OUT)
    assert [at for at, _ in one.curve] == [0, BATCHES]
    assert (folder / "learning.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_learnt_is_read_again(measured: Measured, folder: Path) -> None:
    """A further run in the folder takes no step."""
    before = rb.open(folder / "grpo").head()
    assert _measured(folder) == measured
    assert rb.open(folder / "grpo").head() == before


def test_preferences_are_right_over_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one problem, a right answer before a wrong one, one to one."""

    class Player:
        def work(self, jobs: list[dict[str, Any]]) -> list[float]:
            return [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]

    said: list[Any] = []

    def taken(request: httpx.Request) -> httpx.Response:
        said.append((request.url.path, json.loads(request.content)))
        return httpx.Response(201)

    client = httpx.Client(base_url="http://proxy", transport=httpx.MockTransport(taken))
    monkeypatch.setattr(httpx, "Client", lambda **options: client)
    monkeypatch.setattr(learning, "GROUPS", 2)
    monkeypatch.setattr(learning, "GROUP_SIZE", 4)
    demo = learning._demo(tmp_path, 0)
    learning._record_preferences(demo, SimpleNamespace(url=""), Player(), Plan(batches=1))  # type: ignore[arg-type]
    pairs = [(body["chosen"][-3:], body["rejected"][-3:]) for path, body in said if path == "/v1/preferences"]
    assert pairs == [("0-0", "0-1"), ("0-3", "0-2"), ("1-0", "1-3")]


def test_figures() -> None:
    """Reward at the end, what was gained, and the share of replays that were bit for bit."""
    one = Learnt("grpo", [(0, 0.25), (5, 0.75)], {4: True, 8: False})
    found = learning.outcome(Measured([one], Path("x")))
    values = {figure.figure: figure.value for figure in found.figures}
    assert values == {
        "learning.grpo.held_out": 0.75,
        "learning.grpo.gain": 0.5,
        "learning.grpo.replayed": 0.5,
    }


def test_every_algorithm_has_a_course() -> None:
    """But `sft`, from which all begin, `policy_gradient`, which is `grpo`, and `reward_model`, which is no
    policy; their keys are taken."""
    others = {"sft", "policy_gradient", "reward_model"}
    assert {one.algorithm for one in COURSES.values()} == set(ALGORITHMS) - others
    for one in COURSES.values():
        recorded_algorithm({"name": one.algorithm, **one.keys})
