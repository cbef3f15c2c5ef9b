"""A teacher behind an address: its answers are recorded, and replays take them from the log."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.engines.scoring import ScoringServer, scoring_server
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, EngineError, ReplayError, TrainError
from rollbook.store.events import StepCommitted, StepFailed, StepPlanned, StepVectors
from rollbook.train.batches import manifest_batch
from rollbook.train.batches.manifest_batch import ANSWERS, recorded_values

TAUGHT = {"name": "grpo", "groups": 1, "group_size": 4, "teacher_kl": 0.5}


@pytest.fixture
def served() -> Iterator[tuple[ScoringServer, str]]:
    """A server of a wider model, and its address."""
    with scoring_server(fabric.wide_folder()) as server:
        yield server


@pytest.fixture
def log(tmp_path: Path) -> Store:
    """Three groups of four, sampled at temperature 1."""
    store = rb.open(tmp_path / "store", create=True)
    items: list[Any] = []
    for i in range(12):
        turns = [fabric.T((5, 6 + i), (7, 8 + i, 9)), fabric.T((10,), (11 + i, 12), 0)]
        items += fabric.records(f"t{i}", turns, group=f"g{i // 4}", reward=float(i % 4))
    fabric.append(store, items)
    return store


def _config(url: str, **changes: Any) -> Any:
    given = {"algorithm": TAUGHT, "teacher": [{"engine": url}], "steps": 2} | changes
    return fabric.config(fabric.GRPO, **given)


def _answers(log: Store) -> list[StepVectors]:
    return [vectors for vectors in records_of(log, StepVectors) if vectors.stage == ANSWERS]


def test_its_answers_are_recorded(log: Store, served: tuple[ScoringServer, str], tmp_path: Path) -> None:
    """Before the step runs. They are the numbers of the same model in place, and a replay asks nobody."""
    server, url = served
    fabric.train(log, _config(url))
    plans = records_of(log, StepPlanned)
    assert [what["engine"] for plan in plans for what in plan.teachers] == [url] * 2
    asked = server.asked
    server.model = fabric.untied_folder()
    assert [replay_step(log, step).differs_in for step in (0, 1)] == [None, None]
    assert server.asked == asked
    place = rb.open(shutil.copytree(log.path, tmp_path / "place"))
    in_place = [{"model": str(fabric.wide_folder())}]
    settings = _config(url, teacher=in_place, record={"vectors": ["teacher_logprobs"]})
    fabric.train(place, settings.model_copy(update={"steps": 1}))
    (computed,) = [v for v in records_of(place, StepVectors) if v.stage == "teacher_logprobs"]
    used = {ref["turn_id"] for ref in records_of(place, StepPlanned)[2].samples}
    assert used.isdisjoint({ref["turn_id"] for plan in plans for ref in plan.samples})
    assert len(recorded_values(computed)) == len(recorded_values(_answers(log)[0])) == 20


def test_they_are_the_models(log: Store, served: tuple[ScoringServer, str]) -> None:
    """To rounding, those that the model gives in the policy's process."""
    _, url = served
    here = rb.open(shutil.copytree(log.path, log.path.parent / "here"))
    fabric.train(log, _config(url, steps=1))
    vectors = {"record": {"vectors": ["teacher_logprobs"]}}
    fabric.train(here, _config(url, steps=1, teacher=[{"model": str(fabric.wide_folder())}], **vectors))
    (computed,) = [v for v in records_of(here, StepVectors) if v.stage == "teacher_logprobs"]
    assert recorded_values(_answers(log)[0]) == pytest.approx(recorded_values(computed), abs=2e-5)


def test_killed_between_the_steps_of_a_batch(log: Store, served: tuple[ScoringServer, str]) -> None:
    """The first step's answers hold for all of them: the restart asks again for no token of that batch."""
    server, url = served
    whole = rb.open(shutil.copytree(log.path, log.path.parent / "whole"))
    algorithm = TAUGHT | {"mini_batches": 2, "whitening": "unbiased"}
    fabric.train(whole, _config(url, algorithm=algorithm))
    server.asked = 0
    with fabric.killed_at(1):
        fabric.train(log, _config(url, algorithm=algorithm))
    asked, server.asked = server.asked, 0
    fabric.train(log, _config(url, algorithm=algorithm))
    digests = [step.digests for step in records_of(whole, StepCommitted)]
    assert [step.digests for step in records_of(log, StepCommitted)] == digests
    assert (asked, server.asked, len(_answers(log))) == (4, 0, 1)
    assert [replay_step(log, step).differs_in for step in (0, 1)] == [None, None]


def test_forged_answers_are_named(log: Store, served: tuple[ScoringServer, str]) -> None:
    """Answers in the log that are not those the step was given."""
    fabric.train(log, _config(served[1], steps=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_batch, "recorded_values", lambda v: recorded_values(v) + np.float32(0.01))
        assert replay_step(log, 0).differs_in == "teacher_logprobs"


def test_answers_that_are_gone(log: Store, served: tuple[ScoringServer, str]) -> None:
    """The replay says what is missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollbook.train.loop.trainer.Trainer._note_answers", lambda *_: None)
        fabric.train(log, _config(served[1], steps=1))
    with pytest.raises(ReplayError, match="does not hold what the engine of its teacher answered"):
        replay_step(log, 0)


def test_other_weights_are_found(log: Store, served: tuple[ScoringServer, str]) -> None:
    """In the middle of a training, whose step then does not run, and at its next start."""
    server, url = served
    fabric.train(log, _config(url, steps=1))
    server.model = fabric.untied_folder()
    with pytest.raises(EngineError, match="serves other weights than its training began with"):
        fabric.train(log, _config(url))
    assert len(records_of(log, StepPlanned)) == 1
    server.model = fabric.wide_folder()
    answer = server.answer

    def restarts(route: str, body: Any) -> Any:
        given = answer(route, body)
        if route == "/generate":
            server.model = fabric.untied_folder()
        return given

    server.answer = restarts  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="serves other weights"):
        fabric.train(log, _config(url))
    assert [failed.step for failed in records_of(log, StepFailed)] == [1]
    assert len(records_of(log, StepCommitted)) == 1


def test_another_tokenizer_is_refused(log: Store, served: tuple[ScoringServer, str], tmp_path: Path) -> None:
    """By the text of ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    server, url = served
    policy = tmp_path / "policy"
    shutil.copytree(fabric.untied_folder(), policy)
    tokens = {f"token {i}": i for i in range(100)}
    Tokenizer(WordLevel(tokens, unk_token="token 0")).save(str(policy / "tokenizer.json"))
    fabric.train(log, _config(url, model=str(policy), steps=1))
    server.text = "word {}"
    with pytest.raises(TrainError, match="id 0 is 'token 0' to the policy and 'word 0' to the teacher"):
        fabric.train(log, _config(url, model=str(policy), steps=2))


def test_another_temperature(recorded: Callable[..., Store], served: tuple[ScoringServer, str]) -> None:
    """An SGLang tells logprobs of temperature 1 alone."""
    with pytest.raises(TrainError, match=r"was sampled at temperature 0\.8, and teacher"):
        fabric.train(recorded(), _config(served[1], steps=1))


def test_nobody_answers(log: Store) -> None:
    """Before a step is planned."""
    with pytest.raises(EngineError, match="is it running"):
        fabric.train(log, _config("http://127.0.0.1:9", steps=1))
    assert records_of(log, StepPlanned) == []


def test_its_key_is_not_there(log: Store) -> None:
    """The error names the key of the CONFIG."""
    teacher = [{"engine": "http://127.0.0.1:9", "key_env": "NO_SUCH_KEY"}]
    with pytest.raises(ConfigError, match=r"teacher\.key_env names NO_SUCH_KEY, which is not set"):
        fabric.train(log, _config("", teacher=teacher))
