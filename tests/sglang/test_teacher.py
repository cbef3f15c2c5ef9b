"""A real server as a teacher: what it says of the policy's tokens, and how a training learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of
from tests.sglang import model
from tests.sglang.server import SglangServer

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import EngineError, TrainError
from rollbook.store.events import StepPlanned, StepVectors
from rollbook.train.batches.manifest_batch import ANSWERS, recorded_values
from rollbook.train.step.teacher_engine import TeacherEngine, check_text, weights_of
from rollbook.train.sync.control import EngineControl

TAUGHT = {"name": "distillation", "groups": 4}


@pytest.fixture
def student(models: dict[str, Path], tmp_path: Path) -> Path:
    """A policy of half the teacher's width, with its tokenizer."""
    return model.make(tmp_path / "student", "dense", 9, tied=True, like=models["dense"], hidden=32)


@pytest.fixture
def log(tmp_path: Path) -> Store:
    """Eight trajectories of two turns, sampled at temperature 1."""
    store = rb.open(tmp_path / "store", create=True)
    random, items = np.random.default_rng(1), list[Any]()
    for i in range(8):
        prompt, completion, more, answer = random.integers(4, 90, (4, 5)).tolist()
        turns = [fabric.T(prompt, completion), fabric.T(more, answer, 0)]
        items += fabric.records(f"t{i}", turns, reward=0.0)
    fabric.append(store, items)
    return store


def _config(student: Path, teacher: dict[str, Any], **changes: Any) -> Any:
    given: dict[str, Any] = {"algorithm": TAUGHT, "teacher": [teacher], "steps": 2, "model": str(student)}
    return fabric.config(fabric.GRPO, **(given | changes))


def test_a_training_learns_from_it(
    dense: SglangServer, models: dict[str, Path], student: Path, log: Store
) -> None:
    """Its answers are, to rounding, what the same model says in place; the steps replay without it."""
    fabric.train(log, _config(student, {"engine": dense.url}))
    answers = [recorded_values(v) for v in records_of(log, StepVectors) if v.stage == ANSWERS]
    assert [replay_step(log, step).differs_in for step in (0, 1)] == [None, None]
    in_place = rb.open(log.path.parent / "place", create=True)
    kept = [event for event in log.events() if event.kind.startswith(("trajectory", "turn"))]
    with in_place.writer("serve") as writer:
        writer.append(kept).result()
    settings = _config(student, {"model": str(models["dense"])}, record={"vectors": ["teacher_logprobs"]})
    fabric.train(in_place, settings)
    computed = [recorded_values(v) for v in records_of(in_place, StepVectors)]
    named = [[[r["turn_id"] for r in p.samples] for p in records_of(s, StepPlanned)] for s in (log, in_place)]
    assert named[0] == named[1]
    assert np.concatenate(answers) == pytest.approx(np.concatenate(computed), abs=3e-5)
    assert np.abs(np.concatenate(answers)).max() > 1


def test_other_weights_have_other_checksums(dense: SglangServer, models: dict[str, Path]) -> None:
    """A server that loads others is found by them."""
    control = EngineControl(dense.url)
    teacher = TeacherEngine(control, weights_of(control))
    teacher.check_weights()
    control.update_from_disk(str(models["dense-next"]), flush=True)
    try:
        with pytest.raises(EngineError, match="serves other weights than its training began with"):
            teacher.check_weights()
    finally:
        control.update_from_disk(str(models["dense"]), flush=True)
    teacher.check_weights()
    teacher.close()


def test_its_text_is_compared(dense: SglangServer, models: dict[str, Path], tmp_path: Path) -> None:
    """Of its own tokenizer it says the same; of one with other tokens not."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    control = EngineControl(dense.url)
    check_text(control, models["dense"])
    vocabulary = Tokenizer.from_file(str(models["dense"] / "tokenizer.json")).get_vocab_size()
    other = {f"token {i}": i for i in range(vocabulary)}
    Tokenizer(WordLevel(other, unk_token="token 0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TrainError, match=f"teacher {dense.url} has another tokenizer than the policy"):
        check_text(control, tmp_path)
    control.close()
