"""Training and engines that share the devices: they take turns, and never both have their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.bench.scripted.job import Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.bench.scripted.weights import Fault
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.engines.weights.name import version_in
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, EngineError
from rollbook.store.events import StepCommitted, SyncFailed, SyncFinished, SyncStarted
from rollbook.testing.asgi import serving
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.sync.control import ASLEEP, WAKING

Stores = Callable[..., Store]
ROUTES = ("release_memory_occupation", "resume_memory_occupation", "continue_generation")


class Killed(Exception):
    """The process ends here."""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What trainers and engines give away and take, in order."""
    seen: list[str] = []
    for name in ("offload", "onload"):
        plain = getattr(TrainablePolicy, name)

        def noted(self: TrainablePolicy, name: str = name, plain: Any = plain) -> None:
            was = self._offloaded is not None
            plain(self)
            if was != (self._offloaded is not None):
                seen.append(name)

        monkeypatch.setattr(TrainablePolicy, name, noted)
    for name in ("_release_memory", "_resume_memory"):
        answer = getattr(ScriptedSGLang, name)

        def answered(self: ScriptedSGLang, body: Any, name: str = name, answer: Any = answer) -> Any:
            seen.append(f"{name.split('_')[1]} {'+'.join(body['tags'])}")
            return answer(self, body)

        monkeypatch.setattr(ScriptedSGLang, name, answered)
    return seen


@pytest.fixture
def engine(turns: list[str]) -> Iterator[tuple[ScriptedSGLang, str]]:
    """A server of the tiny model, which ends where its memory is asked for at the wrong time."""
    app = ScriptedSGLang(None, Options(model_path=str(fabric.model_folder()), weights="float32", log=10_000))
    with serving(app) as url:
        yield app, url


def _colocated(url: str, **changes: Any) -> Any:
    sync = {"engines": [url], "transport": "tensor"}
    return fabric.config(fabric.GRPO, **({"steps": 2, "mode": "colocate", "sync": sync} | changes))


CYCLE = ["release kv_cache+weights", "onload", "resume weights", "offload", "resume kv_cache"]


def test_they_take_turns(recorded: Stores, engine: tuple[ScriptedSGLang, str], turns: list[str]) -> None:
    """An engine has its cache only while the training's state is away; a sync begins as it falls asleep, and
    ends as it serves the version that was made meanwhile; steps are those of a training that shares
    nothing."""
    (app, url), log, alone = engine, recorded("together"), recorded("alone")
    fabric.train(log, _colocated(url), "tail")
    assert turns == ["release kv_cache+weights", *CYCLE[2:], *CYCLE, *CYCLE]
    assert (app.released, app.paused, version_in(app.weight_version)) == (set(), None, 2)
    kinds = (SyncStarted, StepCommitted, SyncFinished)
    order = [(type(r).__name__, r.policy_version) for r in records_of(log, *kinds)]
    names = ["SyncStarted", "StepCommitted", "SyncFinished"]
    assert order == [("SyncStarted", 0), ("SyncFinished", 0), *((name, v) for v in (1, 2) for name in names)]
    assert len({r.sync_id for r in records_of(log, SyncStarted)}) == 3
    fabric.train(alone, fabric.config(fabric.GRPO, steps=2), "tail")
    assert [s.digests for s in records_of(log, StepCommitted)] == [
        s.digests for s in records_of(alone, StepCommitted)
    ]
    assert replay_step(log, 1).differs_in is None


def test_with_a_critic_and_evaluations(
    recorded: Stores, engine: tuple[ScriptedSGLang, str], turns: list[str]
) -> None:
    """Both policies are away; for an evaluation engines fall asleep once more."""
    (app, url), logs = engine, [recorded("together"), recorded("alone")]
    changes = {
        "algorithm": {"name": "ppo", "groups": 8, "mini_batches": 2},
        "critic": {"lr": 0.01},
        "evaluation": {"every": 2},
    }
    for log in logs:
        turn = fabric.T([5, 6], [20, 21], version=0)
        fabric.append(log, fabric.records("held", [turn], split="eval", reward=1.0))
    fabric.train(logs[0], _colocated(url, **changes), "tail")
    fabric.train(logs[1], fabric.config(fabric.GRPO, steps=2, **changes), "tail")
    assert [s.digests for s in records_of(logs[0], StepCommitted)] == [
        s.digests for s in records_of(logs[1], StepCommitted)
    ]
    assert turns.count("offload") == turns.count("onload") + 2
    assert (app.released, version_in(app.weight_version)) == (set(), 2)


def test_a_trainer_that_was_killed_left_it_asleep(
    recorded: Stores, engine: tuple[ScriptedSGLang, str]
) -> None:
    """The next one gives back what the engine gave away, by what it calls its weights."""
    (app, url), log = engine, recorded()
    with fabric.killed_at(1, Killed):
        fabric.train(log, _colocated(url), "tail")
    assert (app.weight_version, app.released) == (ASLEEP, {"kv_cache", "weights"})
    fabric.train(log, _colocated(url), "tail")
    assert (app.released, app.paused, version_in(app.weight_version)) == (set(), None, 2)
    assert len(records_of(log, StepCommitted)) == 2


def test_killed_between_weights_and_cache(recorded: Stores, engine: tuple[ScriptedSGLang, str]) -> None:
    """An engine that has its weights again, and not its cache, gives the weights away once more."""
    (app, url), log = engine, recorded()
    app.faults.add(Fault("/weights_checker", "error", after=2, times=-1))
    with pytest.raises(EngineError):
        fabric.train(log, _colocated(url), "tail")
    assert (app.weight_version, app.released) == (WAKING, {"kv_cache"})
    app.faults.faults.clear()
    fabric.train(log, _colocated(url), "tail")
    assert (app.released, app.paused, version_in(app.weight_version)) == (set(), None, 2)


@pytest.mark.parametrize("restarted", [False, True])
def test_another_name_than_it_was_given(
    recorded: Stores, engine: tuple[ScriptedSGLang, str], monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """A proxy that was just comparing weights names them: the engine is asleep all the same. One that was
    started anew has the name that it starts with, and its memory."""
    (app, url), log = engine, recorded()
    answer = ScriptedSGLang._update_weight_version

    def renamed(self: ScriptedSGLang, body: Any) -> Any:
        reply = answer(self, body)
        if body["new_version"] == ASLEEP:
            self.weight_version = "default" if restarted else "demo/actor/0/0123456789ab"
            self.released = set() if restarted else self.released
        return reply

    monkeypatch.setattr(ScriptedSGLang, "_update_weight_version", renamed)
    app._routes["/update_weight_version"] = app._update_weight_version
    fabric.train(log, _colocated(url), "tail")
    assert (app.released, app.paused, version_in(app.weight_version)) == (set(), None, 2)
    assert len(records_of(log, StepCommitted)) == 2


def test_a_skipped_step_wakes_the_engine(
    recorded: Stores, engine: tuple[ScriptedSGLang, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the version that it had: it would wait for ever for the one that is not made."""
    from rollbook.store.errors import NotFiniteError
    from rollbook.train.loop import trainer

    (app, url), log = engine, recorded()
    run_step, failed = trainer.run_step, []

    def fails_once(*given: Any, **more: Any) -> Any:
        if not failed:
            failed.append(True)
            raise NotFiniteError("the loss is not finite", "losses")
        return run_step(*given, **more)

    monkeypatch.setattr(trainer, "run_step", fails_once)
    fabric.train(log, _colocated(url, on_not_finite="skip"), "tail")
    assert [r.policy_version for r in records_of(log, SyncFinished)] == [0, 0, 1, 2]
    assert [r.error for r in records_of(log, SyncFailed)] == ["version 1 was not made: version 0 is sent"]
    assert (app.released, version_in(app.weight_version)) == (set(), 2)


def test_it_needs_engines() -> None:
    """That are given each version."""
    with pytest.raises(ConfigError, match=r"name them in \[sync\], with sync_every = 1"):
        fabric.config(fabric.GRPO, mode="colocate")
    with pytest.raises(ConfigError, match="sync_every = 1"):
        _colocated("http://127.0.0.1:9", sync={"engines": ["http://127.0.0.1:9"], "sync_every": 2})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_given_back(tmp_path: Path, dtype: str) -> None:
    """Resident memory falls by what the policy holds, and steps afterwards are those of one that kept it."""
    fabric.make_model(tmp_path / "model")
    _widen(tmp_path / "model")
    shape = read_shape(tmp_path / "model")
    policies = [
        TrainablePolicy(shape, OptimizerConfig(lr=0.01), Build(4, torch.device("cpu"), 0, 1, dtype))
        for _ in range(2)
    ]
    weights = read_weights(tmp_path / "model")
    digests = []
    for away, policy in enumerate(policies):
        policy.load_weights(weights)
        _step(policy)
        if away:
            held = sum(4 * p.numel() for p in policy._parts.module.parameters()) * 3
            before = psutil.Process().memory_info().rss
            policy.offload()
            assert before - psutil.Process().memory_info().rss > 0.8 * held > 20 * 2**20
            policy.onload()
            assert digest_tensors(dict(policy.stream_weights()), tree=True) == digests[0][0]
        digests.append((policy.weights_digest().digest, policy.optimizer_digest().digest))
        _step(policy)
        digests.append((policy.weights_digest().digest, policy.optimizer_digest().digest))
    assert digests[:2] == digests[2:]


def _widen(folder: Any) -> None:
    """The tiny model, with a vocabulary that makes its tensors as large as a system gives back."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.vocab_size, config.hidden_size = 40_000, 64
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _step(policy: TrainablePolicy) -> None:
    for number, gradient in enumerate(policy.gradients().values()):
        gradient.fill_(0.01 * (number + 1))
    policy.optimizer_step(0.01)
