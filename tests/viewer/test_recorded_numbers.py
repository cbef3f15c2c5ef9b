"""What a step recorded of each token is shown at that token, also where its advantages need a model."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.viewer.conftest import Viewer

from rollbook import store as rb
from rollbook.store.events import StepVectors

RECORD = {"vectors": ["logprobs", "losses", "entropies"]}
PLAIN, WITH_REFERENCE = 12, 13


@pytest.fixture(scope="module")
def recorded(view: Callable[..., Viewer], tmp_path_factory: pytest.TempPathFactory) -> Viewer:
    """A viewer of two further GRPO steps, of which the second has a reference."""
    log = rb.open(shutil.copytree(fabric.trained_path(), tmp_path_factory.mktemp("recorded") / "store"))
    fabric.append(log, fabric.rollout_records(2, 4, first=6, version=12))
    fabric.train(log, fabric.config(fabric.GRPO, seed=5, steps=1, record=RECORD))
    fabric.append(log, fabric.rollout_records(2, 4, first=8, version=13))
    algorithm = fabric.GRPO["algorithm"] | {"kl": 0.05, "reference_version": 12}
    fabric.train(log, fabric.config(fabric.GRPO, seed=6, steps=1, record=RECORD, algorithm=algorithm))
    return view(log)


def numbers(viewer: Viewer, step: int, stage: str) -> Any:
    """What a step recorded of each trained token."""
    [record] = [
        event.record
        for event in viewer.log.events_of([StepVectors.KIND])
        if isinstance(event.record, StepVectors) and (event.record.step, event.record.stage) == (step, stage)
    ]
    return np.frombuffer(base64.b64decode(record.values), "<f4")


@pytest.mark.parametrize("step", [PLAIN, WITH_REFERENCE])
def test_each_token_has_its_own(recorded: Viewer, step: int) -> None:
    """In the order of the batch: all samples' tokens together are all that were recorded."""
    page = recorded.json(f"/runs/demo/steps/actor/{step}/samples")
    assert (page["proven"] is None) == (step == WITH_REFERENCE)
    lines = sorted(
        (line for group in page["groups"] for line in group["samples"]), key=lambda s: s["position"]
    )
    shown: list[float] = []
    for line in lines:
        path = f"/trajectories/{line['trajectory_id']}/samples/{line['turn_id']}"
        query = {"run": "demo", "policy": "actor", "step": step}
        scales = {
            by: recorded.json(f"{path}/colours", by=by, **query) for by in ("mask", "entropy", "gap", "loss")
        }
        trained = [place for place, colour in enumerate(scales["mask"]["classes"]) if colour == "0"]
        for by in ("entropy", "gap", "loss"):
            coloured = [place for place, colour in enumerate(scales[by]["classes"]) if colour != "."]
            assert coloured == trained, by
        for place in trained[:2]:
            card = recorded.json(f"{path}/tokens/{place}", **query)
            shown.append(card["own_logprob"])
    recorded_logprobs = numbers(recorded, step, "logprobs").tolist()
    assert len(shown) == 2 * len(lines)
    assert [value for value in shown if value not in recorded_logprobs] == []
    assert shown[:2] == recorded_logprobs[:2]


def test_the_colour_is_the_number(recorded: Viewer) -> None:
    """The greater the loss, the hotter."""
    page = recorded.json(f"/runs/demo/steps/actor/{PLAIN}/samples")
    first = min((s for group in page["groups"] for s in group["samples"]), key=lambda s: s["position"])
    path = f"/trajectories/{first['trajectory_id']}/samples/{first['turn_id']}/colours"
    classes = recorded.json(path, by="loss", run="demo", policy="actor", step=PLAIN)["classes"]
    levels = [int(colour, 16) for colour in classes if colour != "."]
    losses = numbers(recorded, PLAIN, "losses")[: len(levels)]
    order = np.argsort(losses)
    assert np.diff(np.array(levels)[order]).min() >= 0
    assert max(levels) > min(levels)
