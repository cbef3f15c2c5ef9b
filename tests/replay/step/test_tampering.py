"""A store that was changed: with valid checksums a replay names the stage, without them it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook.replay.step.compare import ORDER
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import CorruptionError
from rollbook.store.wal.frame import ALIGN, HEADER_FRAME, scan
from rollbook.train.step.stages import STAGES

Stores = Callable[..., Store]
SFT_STEP, GRPO_STEP = 5, 10


def _verdict(cli: Callable[..., Any], log: Store, step: int) -> dict[str, Any]:
    """The JSON of a replay that must end with exit code 1; stages before the named one are equal."""
    code, out, err = cli("replay", "step", step, "--store", log.path, "--json")
    assert code == 1, (code, err)
    values: dict[str, Any] = orjson.loads(out)
    assert values["bit_for_bit"] is False
    first = ORDER.index(values["differs_in"])
    same = {stage for stage, entry in values["stages"].items() if entry["verdict"] == "equal"}
    assert values["stages"].keys() & set(ORDER[:first]) <= same
    assert values["differs_in"] not in same
    return values


def _sampled(log: Store, step: int, *, leaf: bool = True) -> str:
    """A turn that a step trains: the leaf of its first sample, or the root of it."""
    turn_id: str = fabric.steps_of(log).steps[step].planned.samples[0]["turn_id"]
    return turn_id if leaf else turn_id.rpartition(".")[0] + ".0"


def test_rewriting_alone_changes_nothing(trained: Stores, tamper: Tamper) -> None:
    """The rewriting itself is faithful: with no record changed the files and the replay are the same."""
    log = trained()
    before = {f: f.read_bytes() for f in log.path.rglob("*.wal")}
    for lane in log.lanes():
        assert tamper.rewrite(log, lane, lambda event: None) == 0
    assert {f: f.read_bytes() for f in log.path.rglob("*.wal")} == before
    assert replay_step(log, GRPO_STEP).bit_for_bit


def test_a_changed_logprob_is_found(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Another stored logprob, by the last bit of a float, is found in old_logprobs."""
    log = trained()

    def change(record: Any) -> Any:
        logprobs = record.logprobs.copy()
        logprobs[0] = np.nextafter(logprobs[0], np.float32(0))
        return replace(record, logprobs=logprobs)

    tamper.event(log, "turn.completed", change, turn_id=_sampled(log, GRPO_STEP))
    values = _verdict(cli, log, GRPO_STEP)
    assert (values["differs_at_step"], values["differs_in"]) == (10, "old_logprobs")


def test_a_changed_reward_is_found(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Another reward is found in rewards, and shows in what follows from it."""
    log = trained()
    trajectory = fabric.steps_of(log).steps[GRPO_STEP].planned.samples[0]["trajectory_id"]
    tamper.event(
        log, "reward.assigned", lambda r: replace(r, reward=r.reward + 0.25), trajectory_id=trajectory
    )
    values = _verdict(cli, log, GRPO_STEP)
    assert values["differs_in"] == "rewards"
    differing = {stage for stage, entry in values["stages"].items() if entry["verdict"] == "differs"}
    assert {"rewards", "advantages", "losses", "gradients", "weights"} <= differing
    assert not {"samples", "old_logprobs", "logprobs"} & differing


@pytest.mark.more_but("10")
@pytest.mark.parametrize("step", [SFT_STEP, GRPO_STEP])
def test_one_completion_token(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]], step: int
) -> None:
    """Another token in a leaf's completion is found in samples, at the first step that used it."""
    log = trained()

    def change(record: Any) -> Any:
        ids = record.completion_ids.copy()
        ids[-1] ^= 1
        return replace(record, completion_ids=ids)

    tamper.event(log, "turn.completed", change, turn_id=_sampled(log, step))
    assert _verdict(cli, log, step)["differs_in"] == "samples"


@pytest.mark.more_but("completion_ids")
@pytest.mark.parametrize("field", ["completion_ids", "prompt_ids"])
def test_a_token_that_a_prompt_was_made_of(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]], field: str
) -> None:
    """A changed token inside a prompt contradicts the sha256 of what was sent: exit code 2."""
    log = trained()

    def change(record: Any) -> Any:
        ids = getattr(record, field).copy()
        ids[0] ^= 1
        return replace(record, **{field: ids})

    tamper.event(log, "turn.completed", change, turn_id=_sampled(log, GRPO_STEP, leaf=False))
    code, _, err = cli("replay", "step", GRPO_STEP, "--store", log.path)
    assert code == 2
    assert "does not fold to the ids sent" in err


def test_a_delivery_that_is_taken_back(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """An undelivered turn is not trained, so the mask of its sample differs: samples."""
    log = trained()
    turn_id = _sampled(log, GRPO_STEP)
    tamper.event(log, "turn.delivered", lambda r: replace(r, turn_id="nothing"), turn_id=turn_id)
    assert _verdict(cli, log, GRPO_STEP)["differs_in"] == "samples"


@pytest.mark.more_but("4-5-weights-*", "11-11-optimizer-*")
@pytest.mark.parametrize(("what", "stage"), [("weights", "input_weights"), ("optimizer", "input_optimizer")])
@pytest.mark.parametrize(("version", "step"), [(4, SFT_STEP), (11, 11)])
def test_one_number_of_a_checkpoint(
    trained: Stores,
    tamper: Tamper,
    cli: Callable[..., tuple[int, str, str]],
    what: str,
    stage: str,
    version: int,
    step: int,
) -> None:
    """A changed checkpoint, its manifest made to fit, is found at the first step that starts from it."""
    log = trained()
    tamper.checkpoint(log, version, what)
    values = _verdict(cli, log, step)
    assert (values["differs_at_step"], values["differs_in"]) == (version, stage)
    assert values["reran"] == [version], "it stops at the first step that differs"


@pytest.mark.more_but("seed", "lr", "order", "input", "clip")
@pytest.mark.parametrize(
    ("change", "stage"),
    [
        (lambda p: replace(p, learning_rate=p.learning_rate * 1.0001), "schedule"),
        (lambda p: replace(p, seed=p.seed + 1), "rng"),
        (lambda p: replace(p, optimizer=p.optimizer | {"betas": [0.9, 0.96]}), "training"),
        (lambda p: replace(p, optimizer=p.optimizer | {"clip_grad": 1e-3}), "training"),
        (lambda p: replace(p, optimizer=p.optimizer | {"weight_decay": 0.5}), "training"),
        (lambda p: replace(p, samples=p.samples[::-1]), "selection"),
        (lambda p: replace(p, partition=[[list(range(12))]]), "schedule"),
        (lambda p: replace(p, algorithm=p.algorithm | {"std_epsilon": 1e-3}), "schedule"),
        (lambda p: replace(p, algorithm=p.algorithm | {"clip_low": 0.0, "clip_high": 0.0}), "schedule"),
        (lambda p: replace(p, recipe=p.recipe | {"reward_source": "judge"}), "selection"),
        (lambda p: replace(p, input_digests=p.input_digests | {"input_weights": "0" * 64}), "input_weights"),
    ],
    ids=[
        "lr",
        "seed",
        "betas",
        "clip",
        "decay",
        "order",
        "partition",
        "epsilon",
        "bounds",
        "source",
        "input",
    ],
)
def test_a_changed_manifest_is_found(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]], change: Any, stage: str
) -> None:
    """Whatever decides a step's bits, changed in its manifest, is found in the stage it acts on."""
    log = trained()
    tamper.event(log, "step.planned", change, step=11)
    values = _verdict(cli, log, 11)
    assert (values["differs_at_step"], values["differs_in"]) == (11, stage)


@pytest.mark.more_but("samples", "advantages", "weights", "critic_weights")
@pytest.mark.parametrize("stage", STAGES[4:])
def test_each_recorded_digest_is_compared(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]], stage: str
) -> None:
    """A result that was recorded otherwise differs in just that stage, and so does its checkpoint."""
    log = trained()
    tamper.event(log, "step.committed", lambda r: replace(r, digests=r.digests | {stage: "0" * 64}), step=8)
    values = _verdict(cli, log, 8)
    differing = [s for s, entry in values["stages"].items() if entry["verdict"] == "differs"]
    assert differing == [stage, *(["checkpoint"] if stage in ("optimizer", "weights") else [])]


def test_another_environment_is_told(trained: Stores, tamper: Tamper) -> None:
    """A recorded environment that is not this one is listed with both values."""
    log = trained()
    tamper.environment(log, processor="abacus")
    result = replay_step(log, 8)
    assert result.bit_for_bit
    assert [line.partition(", here")[0] for line in result.environment] == ["processor: recorded 'abacus'"]


# Without valid checksums --------------------------------------------------------------------------


@pytest.mark.more_but("0.5-*")
@pytest.mark.parametrize("lane", ["serve", "train"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_flipped_byte_of_the_log(
    trained: Stores, cli: Callable[..., tuple[int, str, str]], lane: str, share: float
) -> None:
    """One changed byte of acknowledged events is refused, exit code 2, and the file is named."""
    log = trained()
    path = max((log.path / "lanes" / lane).glob("*.wal"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    frames = [f for f in scan(memoryview(bytes(data)), 0, len(data)) if f.kind != HEADER_FRAME]
    frame = frames[int(share * len(frames))]
    data[frame.offset + ALIGN + len(frame.payload) // 2] ^= 1
    path.write_bytes(data)
    code, out, err = cli("replay", "step", 0, "--store", log.path, "--json")
    assert (code, out) == (2, "")
    assert str(path) in err
    with pytest.raises(CorruptionError, match="checksum"):
        replay_step(log, 0)


@pytest.mark.more_but("model*")
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_flipped_byte_of_a_checkpoint(
    trained: Stores, cli: Callable[..., tuple[int, str, str]], file: str
) -> None:
    """One changed byte of a checkpoint is never started from: it is named, and one before it proves the step;
    the step that wrote it has another result than the file."""
    log = trained()
    path: Path = log.path / "checkpoints/demo/actor/v00000004" / file
    data = bytearray(path.read_bytes())
    data[-4096] ^= 1
    path.write_bytes(data)
    code, out, _ = cli("replay", "step", SFT_STEP, "--store", log.path, "--json")
    values = orjson.loads(out)
    assert (code, values["from_version"], values["reran"]) == (0, 0, [0, 1, 2, 3, 4, 5])
    assert len(values["passed_over"]) == 1
    assert "v00000004" in values["passed_over"][0]
    assert "damaged" in values["passed_over"][0]
    values = _verdict(cli, log, 3)
    assert values["differs_in"] == "checkpoint"
    assert "damaged" in values["stages"]["checkpoint"]["why"]
