"""Bundles of steps: one file that is replayed anywhere, bit for bit, and from which nothing else is run."""

from __future__ import annotations

import hashlib
import io
import re
import shlex
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook import store as rb
from rollbook.replay.bundles.bundle import export_step, opened_bundle, replay_bundle
from rollbook.replay.step.step import replay_step
from rollbook.replay.verdict import StepReplay, Verdict
from rollbook.store import Store
from rollbook.store.errors import InterchangeError, ReplayError, TrainError
from rollbook.store.events import RewardAssigned, StepPlanned, TrajectoryOpened, TurnCompleted, TurnRequested
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import SealSettings
from rollbook.train.algorithms import parts

Stores = Callable[..., Store]
MARK = "PLANTED"


def _sealed(log: Store) -> Store:
    """The store with all of its events in units, and no WAL file."""
    for lane in log.lanes():
        assert list(seal_closed(log.path, lane, SealSettings(), all_of_it=True))
        for path in (log.path / "lanes" / lane).glob("*.wal"):
            path.unlink()
    return log


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of step 10, made of a store that is gone."""
    folder = tmp_path_factory.mktemp("plain")
    log = rb.open(shutil.copytree(fabric.trained_path(), folder / "store"))
    export_step(log, folder / "step-10.rollbook", 10)
    shutil.rmtree(log.path)
    return folder / "step-10.rollbook"


@pytest.fixture(scope="module")
def of_critic(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Four steps of PPO, two on each rollout batch, with a critic and a reference. Never write to it."""
    log = fabric.record_store(tmp_path_factory.mktemp("critic") / "store", teachers=0)
    algorithm = {"name": "ppo", "groups": 4, "mini_batches": 2, "kl": 0.1}
    settings = fabric.config(fabric.GRPO, steps=4, algorithm=algorithm, critic={"lr": 0.01})
    fabric.train(log, settings)
    return log


def test_what_would_take_too_much_memory(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed files are refused by the headers of their pages, before any of them is decoded."""
    monkeypatch.setattr("rollbook.replay.bundles.bundle.PAGE_BYTES", 10)
    monkeypatch.setattr("rollbook.replay.bundles.bundle.end_with_units", None)
    refusal = r"sealed/.*\.parquet cannot be read: .*has a page of \d+ bytes, of 10"
    with pytest.raises(InterchangeError, match=refusal), opened_bundle(plain):
        pass


# Replayed -----------------------------------------------------------------------------------------


def _not_proven(result: StepReplay) -> set[str]:
    return {stage.stage for stage in result.unproven}


@pytest.mark.more_but("7-4-*")
@pytest.mark.parametrize(
    ("step", "base", "reran", "sealed"),
    [(0, 0, [0], False), (7, 4, [4, 5, 6, 7], True), (10, 9, [9, 10], True), (11, 11, [11], False)],
)
def test_it_replays_without_its_store(
    trained: Stores, tmp_path: Path, step: int, base: int, reran: list[int], sealed: bool
) -> None:
    """Supervised and GRPO steps, after a checkpoint and in between, equal the record in every stage."""
    log = _sealed(trained()) if sealed else trained()
    steps = fabric.steps_of(log).steps
    named = {ref["trajectory_id"] for number in reran for ref in steps[number].planned.samples}
    head, size = log.head(), sum(f.stat().st_size for f in log.path.rglob("*") if f.is_file())
    done = export_step(log, tmp_path / "one.rollbook", step)
    assert done.sha256 == hashlib.sha256((tmp_path / "one.rollbook").read_bytes()).hexdigest()
    assert done.bytes == (tmp_path / "one.rollbook").stat().st_size < size / 4
    shutil.rmtree(log.path)
    with opened_bundle(tmp_path / "one.rollbook") as (bundle, opened):
        assert bundle == done.bundle
        assert (bundle.from_version, list(bundle.steps), bundle.cut) == (base, reran, steps[step].planned.cut)
        assert set(opened.trajectories()) == named
        assert opened.head() == head
        assert opened.cut(f"step:{step}") == rb.parse_cut(steps[step].planned.cut)
        result = replay_bundle(bundle, opened)
        assert list(opened.path.glob("checkpoints/*/*/*")) == [
            opened.path / f"checkpoints/demo/actor/v{base:08d}"
        ]
    assert result.exact
    assert (result.reran, result.differs_in) == (reran, None)
    assert _not_proven(result) == ({"schedule"} if step > 8 else {"selection", "schedule"})
    claims = {"selection", "schedule", "training", "metrics", "evidence"}
    assert set(result.stages) - {"backed"} == {*claims, *fabric.EVERY_STEPS_STAGES}
    assert not opened.path.exists()


@pytest.mark.more
@pytest.mark.parametrize(
    "changes", [{"lora": {"rank": 4}}, {"checkpoint": {"sharded": True}}], ids=["lora", "sharded"]
)
def test_other_checkpoints(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Low-rank factors with the weights that they are added to; weights and optimizer in shards."""
    log = fabric.record_store(tmp_path / "store", teachers=0)
    fabric.train(log, fabric.config(fabric.GRPO, steps=2, checkpoint_every=1, **changes))
    export_step(log, tmp_path / "one.rollbook", 1)
    shutil.rmtree(log.path)
    with opened_bundle(tmp_path / "one.rollbook") as (bundle, opened):
        result = replay_bundle(bundle, opened)
    assert (result.exact, result.whole, result.from_version) == (True, True, 1)


@pytest.mark.more
def test_a_fresh_process_opens_it(plain: Path, tmp_path: Path) -> None:
    """`rollbook replay open` alone needs nothing but the file; it gives the exit code, and JSON."""
    process = fabric.start_cli("replay", "open", plain, "--json", "--extract", tmp_path / "made")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    values = orjson.loads(out)
    assert values["bundle"]["step"] == 10
    verdicts = {name: stage["verdict"] for name, stage in values["replay"]["stages"].items()}
    assert (values["replay"]["equal"], verdicts.pop("schedule")) == (True, "not proven")
    assert set(verdicts.values()) == {"equal"}
    assert {"selection", "weights"} < verdicts.keys()
    assert rb.open(tmp_path / "made").head() == rb.parse_cut(values["bundle"]["head"])


def test_a_critic_a_reference_and_a_rollout_batch(of_critic: Store, tmp_path: Path) -> None:
    """A later step on a batch, with weights of a critic and of a reference, which needs no optimizer."""
    done = export_step(of_critic, tmp_path / "one.rollbook", 3)
    names = [member.name.removeprefix("checkpoints/demo/actor/") for member in done.bundle.members]
    assert done.bundle.steps == (2, 3)
    assert {n for n in names if n.endswith("safetensors")} == {
        *(f"v00000002/{name}.safetensors" for name in ("model", "optimizer", "critic", "critic_optimizer")),
        *(f"v00000000/{name}.safetensors" for name in ("model",)),
    }
    with opened_bundle(tmp_path / "one.rollbook") as (bundle, opened):
        result = replay_bundle(bundle, opened)
    assert result.exact
    assert {"reference_logprobs", "values", "critic_weights"} <= set(result.stages)


def test_no_start_in_the_middle_of_a_rollout_batch(of_critic: Store, tmp_path: Path) -> None:
    """A checkpoint between two steps on a batch is passed over: what the first made of it is gone."""
    log = rb.open(shutil.copytree(of_critic.path, tmp_path / "store"))
    before = next(c for c in fabric.steps_of(log).checkpoints if c.policy_version == 2)
    fabric.append(log, [replace(before, policy_version=3)])
    result = replay_step(log, 3)
    assert (result.reran, result.bit_for_bit) == ([2, 3], True)
    assert result.passed_over == ("version 3: it is in the middle of a rollout batch",)


def test_a_late_reward_is_shown(trained: Stores, tmp_path: Path) -> None:
    """What came after the step's cut about its trajectories is in the bundle; the step is as it was."""
    log = trained()
    trajectory = fabric.steps_of(log).steps[11].planned.samples[0]["trajectory_id"]
    fabric.append(log, [RewardAssigned(trajectory, None, 99.0), RewardAssigned("teach0", None, 98.0)])
    export_step(log, tmp_path / "one.rollbook", 11)
    with opened_bundle(tmp_path / "one.rollbook") as (bundle, opened):
        assert opened.trajectories()[trajectory].reward() == 99.0
        assert opened.trajectories(opened.cut("step:11"))[trajectory].reward() != 99.0
        assert replay_bundle(bundle, opened).exact


def test_what_was_changed_before_is_named(
    trained: Stores, tamper: Tamper, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """A reward that is another than was trained on: exit code 1, and the stage."""
    log = trained()
    tamper.event(log, "reward.assigned", lambda r: replace(r, reward=7.5), trajectory_id="g0.0")
    export_step(log, tmp_path / "one.rollbook", 10)
    code, out, _ = cli("replay", "open", tmp_path / "one.rollbook")
    assert (code, "differs, first at step 9 in stage rewards" in out) == (1, True)


# Left out -----------------------------------------------------------------------------------------


@pytest.mark.more
def test_without_the_optimizer(
    trained: Stores, tamper: Tamper, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """All up to the gradients is proven, in less than half of the bytes; a step behind others is refused."""
    log = trained()
    whole = export_step(log, tmp_path / "whole", 11)
    less = export_step(log, tmp_path / "less", 11, without="optimizer")
    weights = [sum(m.bytes for m in e.bundle.members if "safetensors" in m.name) for e in (whole, less)]
    assert weights[1] < 0.4 * weights[0]
    with opened_bundle(tmp_path / "less") as (bundle, opened):
        result = replay_bundle(bundle, opened)
    assert (result.differs_in, bundle.without) == (None, ("optimizer",))
    assert _not_proven(result) == {"input_optimizer", "optimizer", "weights", "schedule"}
    proven = [stage for stage in result.stages.values() if stage.verdict != Verdict.not_proven]
    assert {stage.verdict for stage in proven} == {Verdict.equal}
    assert {"selection", "gradients"} < {stage.stage for stage in proven}
    code, out, _ = cli("replay", "open", tmp_path / "less")
    assert (code, "from the weights-only checkpoint of version 11" in out) == (0, True)
    printed = " ".join(out.split())
    assert (
        "step 11: equal in part: bit for bit in training, input_weights, rng, selection, samples to gradients"
        in printed
    )
    assert "not compared: input_optimizer, schedule, optimizer, weights" in printed
    where = ("--store", log.path, "-o", tmp_path / "no")
    code, _, err = cli("replay", "export", "step", 7, *where, "--without", "optimizer")
    assert (code, "from that of version 4 on, 3 steps are run first" in err) == (2, True)
    trained_on = opened_samples(tmp_path / "less")
    tamper.event(log, "reward.assigned", lambda r: replace(r, reward=7.5), trajectory_id=trained_on[0])
    export_step(log, tmp_path / "changed", 11, without="optimizer")
    with opened_bundle(tmp_path / "changed") as (bundle, opened):
        assert replay_bundle(bundle, opened).differs_in == "rewards"


def opened_samples(path: Path) -> list[str]:
    """Ids of the trajectories in a bundle, in order."""
    with opened_bundle(path) as (_, opened):
        return sorted(opened.trajectories())


def test_without_weights(
    trained: Stores, tmp_path: Path, cli: Callable[..., tuple[int, str, str]], tamper: Tamper
) -> None:
    """By the log alone: to the losses where vectors were recorded, else to the advantages; selection too."""
    log = trained()
    fabric.append(log, fabric.rollout_records(2, 4, first=6, version=12))
    record = {"vectors": ["logprobs", "losses"]}
    fabric.train(log, fabric.config(fabric.GRPO, seed=5, steps=1, record=record))
    done = [export_step(log, tmp_path / str(step), step, without="weights") for step in (0, 11, 12)]
    tamper.event(log, "reward.assigned", lambda r: replace(r, reward=7.5), trajectory_id="g6.0")
    export_step(log, tmp_path / "changed", 12, without="weights")
    shutil.rmtree(log.path)
    stages = {"selection", "training", "samples", "old_logprobs", "rewards", "advantages", "evidence"}
    for export, more in zip(done, (set(), set(), {"logprobs", "losses"}), strict=True):
        assert export.bundle.up_to == ("losses" if more else "advantages")
        assert (export.bundle.from_version, export.bundle.without) == (None, ("weights",))
        [model] = [m.name for m in export.bundle.members if m.name.startswith("checkpoints/")]
        assert model.endswith("/config.json")
        with opened_bundle(Path(export.to)) as (bundle, opened):
            result = replay_bundle(bundle, opened)
        assert (set(result.stages), result.equal, result.from_version) == (stages | more, True, None)
        assert _not_proven(result) == ({"selection"} if bundle.step == 0 else set())
    code, out, _ = cli("replay", "open", tmp_path / "12")
    assert (code, "by the log alone, 8 trajectories, without the weights, up to the losses" in out) == (
        0,
        True,
    )
    code, out, _ = cli("replay", "open", tmp_path / "changed", "--json")
    assert (code, orjson.loads(out)["replay"]["differs_in"]) == (1, "rewards")
    code, _, err = cli("replay", "open", tmp_path / "12", "--no-replay", "--extract", tmp_path / "made")
    code, _, err = cli("replay", "step", 12, "--store", tmp_path / "made")
    assert (code, "cannot be replayed from any checkpoint" in err) == (2, True)


def test_a_critics_step_without_the_optimizer_or_weights(of_critic: Store, tmp_path: Path) -> None:
    """Weights of the critic stay, and what it gives is proven; without any the step is refused, with why."""
    export_step(of_critic, tmp_path / "one", 2, without="optimizer")
    with opened_bundle(tmp_path / "one") as (bundle, opened):
        result = replay_bundle(bundle, opened)
    updates = {"input_optimizer", "optimizer", "weights"}
    assert _not_proven(result) == {"schedule"} | updates | {f"critic_{stage}" for stage in updates}
    assert (result.equal, result.weights_only) == (True, True)
    assert result.stages["critic_gradients"].verdict == Verdict.equal
    with pytest.raises(ReplayError, match=r"one of several on a rollout batch.*Leave out --without"):
        export_step(of_critic, tmp_path / "two", 2, without="weights")
    assert not (tmp_path / "two").exists()


def test_samples_that_were_used_before(trained: Stores, tamper: Tamper, tmp_path: Path) -> None:
    """An earlier step that used the same samples is in the bundle, so that it is seen there too."""
    log = trained()
    again = fabric.steps_of(log).steps[11].planned.samples
    tamper.event(log, "step.planned", lambda plan: replace(plan, samples=again), step=9)
    export_step(log, tmp_path / "one", 11)
    with opened_bundle(tmp_path / "one") as (bundle, opened):
        assert set(fabric.steps_of(opened).steps) == {9, 10, 11}
        result = replay_bundle(bundle, opened)
    assert (bundle.steps, result.differs_in) == ((11,), "selection")
    assert replay_step(log, 11).differs_in == "selection"


def test_samples_of_an_attempt_that_was_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of the attempt before is in the bundle, for the step dropped its samples, by no recipe."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parts, "_loaded", {})
    (tmp_path / "picky_once.py").write_text(
        "import numpy as np\nCALLS = []\ndef correction(ratios, lengths, bounds):\n"
        "    CALLS.append(len(ratios))\n"
        "    return np.full(len(ratios), float(sum(n > 20 for n in CALLS) > 1))\n"
    )
    log = fabric.record_store(tmp_path / "store", teachers=0)
    keys = {"name": "policy_gradient", "groups": 2, "group_size": 4, "old": "trainer"}
    keys |= {"correction": "picky_once:correction", "correction_low": 0.0, "correction_high": 1e7}
    fabric.train(log, fabric.config(fabric.GRPO, steps=1, algorithm=keys | {"count_rejected": False}))
    export_step(log, tmp_path / "one", 0, trust_parts=True)
    with opened_bundle(tmp_path / "one") as (bundle, opened):
        plans = [e.record for e in opened.events_of([StepPlanned.KIND])]
        result = replay_bundle(bundle, opened, trust_parts=True)
    assert [plan.attempt for plan in plans if isinstance(plan, StepPlanned)] == [1, 2]
    assert (bundle.trajectories, bundle.attempt) == (16, 2)
    assert result.stages["selection"].verdict == Verdict.equal
    assert result.exact


def _plant(record: Any) -> Any:
    """The record with text of an agent in each place that has some."""
    match record:
        case TrajectoryOpened():
            labels, group = {MARK: MARK}, record.group and f"{MARK} {record.group}"
            return replace(record, name=f"{MARK} {record.name}", task=MARK, labels=labels, group=group)
        case TurnRequested():
            messages: list[Any] = [{"role": "user", "content": MARK}]
            return replace(
                *(record,),
                messages=messages,
                request={"tools": [MARK]},
                requested_model=MARK,
                wire={"key": MARK},
            )
        case TurnCompleted():
            return replace(record, reply={"role": "assistant", "content": MARK})
        case RewardAssigned():
            return replace(record, by=MARK)
    return None


def test_redacted_text_is_gone(trained: Stores, tamper: Tamper, tmp_path: Path) -> None:
    """No text that was planted is in the bundle, and the step replays as before; unredacted it is there."""
    log = trained()
    tamper.rewrite(log, "serve", lambda event: _plant(event.record))
    for redact in (False, True):
        export_step(log, tmp_path / f"{redact}", 10, redact=redact)
        with opened_bundle(tmp_path / f"{redact}") as (bundle, opened):
            rows = str(opened.table().to_pylist())
            units = "".join(p.read_text() for p in opened.path.rglob("UNIT.json"))
            groups = {t.opened.group for t in opened.trajectories().values()}
            assert replay_bundle(bundle, opened).exact
        assert ((MARK in rows), (MARK in units), bundle.redacted) == (not redact, False, redact)
        assert len(groups) == 4


# Refused ------------------------------------------------------------------------------------------


def _changed(path: Path, change: Callable[[dict[str, bytes]], None]) -> bytes:
    """A bundle of the same files but for a change, whose sizes and digests are those of what is in it."""
    with tarfile.open(path) as archive:
        held = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    change(held)
    manifest = orjson.loads(held.pop("BUNDLE.json"))
    del held["BUNDLE.sha256"]
    manifest["members"] = [
        {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in held.items()
    ]
    data = orjson.dumps(manifest, option=orjson.OPT_INDENT_2)
    check = f"{hashlib.sha256(data).hexdigest()}  BUNDLE.json\n".encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in ({"BUNDLE.json": data, "BUNDLE.sha256": check} | held).items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _tells(name: str, **changes: Any) -> Callable[[dict[str, bytes]], None]:
    """Changes keys of a JSON file."""

    def change(held: dict[str, bytes]) -> None:
        held[name] = orjson.dumps(orjson.loads(held[name]) | changes, option=orjson.OPT_INDENT_2)

    return change


def _lacks(part: str) -> Callable[[dict[str, bytes]], None]:
    """Takes out the files of a name."""

    def change(held: dict[str, bytes]) -> None:
        for name in [name for name in held if part in name]:
            del held[name]

    return change


TRAIN = "sealed/train/00000001-00000001.1/UNIT.json"


@pytest.mark.more_but(
    "*its manifest tells of0",
    *(f"*{reason}*" for reason in ("version 4 is not", "None up to", "said to be elsewhere0", "hold events")),
    *(f"*{reason}*" for reason in ("unit other", "update rollbook", "No such file", "version 9 is not in")),
)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_tells("BUNDLE.json", step=9, steps=[9]), "its manifest tells of"),
        (_tells("BUNDLE.json", step=3, steps=[3]), "no committed step 3"),
        (_tells("BUNDLE.json", run="other"), "no committed step 10"),
        (_tells("BUNDLE.json", cut="serve=1"), "its manifest tells of"),
        (_tells("BUNDLE.json", head="serve=1"), "its manifest tells of"),
        (_tells("BUNDLE.json", from_version=4), "the checkpoint of version 4 is not in it"),
        (_tells("BUNDLE.json", from_version=None), "goes from version None up to stage None, with weights"),
        (_tells("BUNDLE.json", up_to="losses"), "goes from version 9 up to stage losses, with weights"),
        (_tells("BUNDLE.json", without=["weights"]), "goes from version 9 up to stage None, without weights"),
        (_tells(TRAIN, remote=f"s3://bucket/{TRAIN.removesuffix('/UNIT.json')}"), "said to be elsewhere"),
        (_tells(TRAIN, dropped_us=1), "said to be elsewhere"),
        (_tells(TRAIN, left_out=3), "do not hold events"),
        (_tells(TRAIN, lane="other"), "its manifest is that of unit other"),
        (_tells(TRAIN, format=2), "update rollbook"),
        (_lacks("marks.parquet"), "No such file"),
        (_lacks("sealed/train"), "no committed step 10"),
        (_lacks("checkpoints/"), "the checkpoint of version 9 is not in it"),
    ],
)
def test_a_bundle_whose_content_is_not_as_told(plain: Path, tmp_path: Path, change: Any, reason: str) -> None:
    """Every digest holds, and what is told of the log, its units or the checkpoint does not: refused."""
    file = tmp_path / "hostile.rollbook"
    file.write_bytes(_changed(plain, change))
    with pytest.raises(InterchangeError, match=reason), opened_bundle(file, tmp_path / "made"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.rollbook"]


def test_what_is_changed_back_is_opened(plain: Path) -> None:
    """The way in which the bundles above are made changes nothing by itself."""
    assert _changed(plain, lambda held: None) == plain.read_bytes()


def test_weights_that_are_others(plain: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """A checkpoint whose files are not what its own manifest tells: exit code 2, and the tensor is named."""

    def change(held: dict[str, bytes]) -> None:
        [name] = [name for name in held if name.endswith("model.safetensors")]
        held[name] = held[name][:-1] + bytes([held[name][-1] ^ 1])

    file = tmp_path / "hostile.rollbook"
    file.write_bytes(_changed(plain, change))
    code, _, err = cli("replay", "open", file)
    assert (code, "weights damaged: " in err) == (2, True)


@pytest.fixture
def own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module in the current folder whose import makes a file, which is gone again afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "_loaded", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("evil_part.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\n"
        "def baseline(rollouts):\n    return rollouts.rewards\n"
    )
    yield tmp_path / "ran"
    sys.modules.pop("evil_part", None)


def test_parts_of_somebodys_own_are_not_run(
    trained: Stores,
    tamper: Tamper,
    plain: Path,
    own_part: Path,
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A manifest that names code makes no import, of the export nor of the opening, unless it is trusted."""
    log = trained()
    named = {"name": "policy_gradient", "groups": 2, "group_size": 4, "baseline": "evil_part:baseline"}
    tamper.event(log, "step.planned", lambda plan: replace(plan, algorithm=named), step=11)
    with pytest.raises(TrainError, match="--trust-parts"):
        export_step(log, Path("evil.rollbook"), 11)
    assert not own_part.exists()
    export_step(log, Path("evil.rollbook"), 11, trust_parts=True)
    assert own_part.exists()
    own_part.unlink()
    sys.modules.pop("evil_part")
    monkeypatch.setattr(parts, "_loaded", {})
    code, _, err = cli("replay", "open", "evil.rollbook", "--extract", "made")
    assert (code, "--trust-parts" in err, own_part.exists()) == (2, True, False)
    code, out, err = cli("replay", "open", "evil.rollbook", "--trust-parts")
    assert (code, "differs" in out, own_part.exists()) == (1, True, True), err


def test_what_cannot_be_exported(trained: Stores, cli: Callable[..., Any], tmp_path: Path) -> None:
    """No such step or run, a file that is there, and a checkpoint that is gone: exit code 2."""
    log, out = trained(), tmp_path / "out"

    def refused(step: int, *more: object) -> str:
        code, _, err = cli("replay", "export", "step", step, "--store", log.path, "-o", out, *more)
        assert code == 2
        return str(err)

    assert "no committed step 40" in refused(40)
    assert "no run 'none'" in refused(10, "--run", "none")
    out.write_text("mine")
    assert "exists" in refused(10)
    assert out.read_text() == "mine"
    out.unlink()
    shutil.rmtree(log.path / "checkpoints/demo/actor/v00000009")
    assert "cannot be replayed from any checkpoint: version 9: " in refused(9)
    assert list(tmp_path.iterdir()) == [log.path]
    with pytest.raises(ReplayError, match="no committed step 5 of policy 'critic'"):
        export_step(log, out, 5, policy="critic")


def test_it_is_extracted_into_a_store(plain: Path, cli: Callable[..., Any], tmp_path: Path) -> None:
    """Which other commands read, and which says that it is an excerpt; a folder in use is not taken, and no
    training goes on in one."""
    code, out, _ = cli("replay", "open", plain, "--extract", tmp_path / "made", "--no-replay")
    assert (code, "extracted to" in out) == (0, True)
    code, out, _ = cli("store", "verify", "--store", tmp_path / "made")
    assert (code, "an excerpt: " in out) == (0, True)
    code, out, _ = cli(
        "sql", "select step from steps order by 1", "--store", tmp_path / "made", "--format", "csv"
    )
    assert out.split() == ["step", "9", "10"]
    code, _, err = cli("replay", "open", plain, "--extract", tmp_path / "made")
    assert (code, "--extract" in err) == (2, True)
    head = rb.open(tmp_path / "made").head()
    with pytest.raises(TrainError, match="made is an excerpt: it was taken from another store"):
        fabric.train(rb.open(tmp_path / "made"), fabric.config(fabric.SFT, steps=20))
    assert rb.open(tmp_path / "made").head() == head
    assert all(unit.left_out for unit in current_units(tmp_path / "made", "serve"))


@pytest.mark.more
def test_the_pages_commands_run(
    trained: Stores, cli: Callable[..., Any], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of docs/bundles.md, in its order, in a folder that holds demo-store."""
    trained("demo-store")
    monkeypatch.chdir(tmp_path)
    page = (root / "docs" / "bundles.md").read_text()
    commands = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)).splitlines()
    assert len(commands) == 8
    for command in commands:
        name, *words = shlex.split(command)
        code, _, err = cli(*words)
        assert (name, code) == ("rollbook", 0), err
    assert {path.name for path in tmp_path.glob("*.rollbook")} == {
        *("step-10.rollbook", "step-9.rollbook", "log-of-9.rollbook", "to-share.rollbook")
    }
