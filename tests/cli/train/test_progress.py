"""What a training says in a batch job's file, and on a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook.cli.train.training import TrainingProgress, line_of
from rollbook.store import Store
from rollbook.store import events as kinds
from rollbook.train.loop.watcher import TrainingStart

METRICS = {"loss": 0.25, "gradient_norm": 1.5, "trained_tokens": 90, "samples": 6, "reward": None}
COMMITTED = kinds.StepCommitted(4, 1, "actor", 5, {}, METRICS)
FAILED = kinds.StepFailed(4, 2, "actor", "OutOfMemoryError()")
LOST = kinds.SyncFailed("actor", 5, "s", "http://e:1", "EngineLostError: gone")
HELD = kinds.SyncFinished("actor", 5, "s", "http://e:1", 3 * 2**20, 0.5)
KEPT = kinds.CheckpointWritten("actor", 5, "checkpoints/v5", "w", "o", "p", 2**20)
EVALUATED = kinds.EvalFinished(
    "actor", 5, "p", "", "", 64, 960, 12, 3, 4, {"loss": 0.5, "preference_margin": None, "reward": 0.25}
)
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (COMMITTED, "step 4: version 5  loss 0.2500  gradient norm 1.5  6 samples  90 trained tokens"),
        (FAILED, "step 4 failed (attempt 2): OutOfMemoryError()"),
        (LOST, "version 5: the sync to http://e:1 failed: EngineLostError: gone"),
        (HELD, "version 5: http://e:1 holds it, 3.0 MiB in 0.50 s"),
        (KEPT, "version 5: checkpoint checkpoints/v5 (1.0 MiB)"),
        (EVALUATED, "version 5: held out (64 samples, 12 trajectories)  loss 0.5000  reward 0.250"),
        (kinds.SampleDropped("t", "u", "staleness", "r", 0, {}), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_record_has_a_line_that_matters(record: Any, line: str | None) -> None:
    """Each with what one would look for; what goes by the thousand has none."""
    assert line_of(record) == line


def _shown(*, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with TrainingProgress() as progress:
        progress.begun(TrainingStart("r", "sft", None, 4, 4, 4, 9))
        progress.tell(COMMITTED, HELD, KEPT, EVALUATED)
        progress.committed(5, 4, METRICS)
        progress.tell(FAILED, LOST)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    start, text = shown.split("tail of the log, from version 4\n")
    assert start.splitlines() == ["going on after 4 of 9 steps", "training run r with sft from the "]
    return text


def test_a_training_that_became_another_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps count anew, which a bar at 0 does not explain."""
    with TrainingProgress() as progress:
        progress.begun(TrainingStart("r", "dpo", None, 12, 12, 0, 9, other=12))
    printed = " ".join(capsys.readouterr().err.split())
    assert "12 steps of this policy were committed by other configurations" in printed
    assert "count anew, 0 of 9 are done; it goes on from version 12" in printed


def test_an_evaluation_that_is_not_whole_says_so() -> None:
    """Before its numbers; one that is whole, or says nothing of it, has no word of that."""
    part = replace(EVALUATED, trajectories=22, expected=32, whole=False)
    line = line_of(part)
    assert line is not None
    assert "  NOT WHOLE: 22 of 32 trajectories  loss" in line
    assert "  NOT WHOLE: 22 trajectories  loss" in str(line_of(replace(part, expected=None)))
    for whole in (True, None):
        assert "WHOLE" not in str(line_of(replace(part, whole=whole)))


def test_a_file_has_a_line_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, syncs, checkpoints, evaluations and failures, each with its time, and no bar."""
    lines = _shown(terminal=False, capsys=capsys, monkeypatch=monkeypatch).splitlines()
    assert [re.sub(f"^{TIME} ", "", line) for line in lines] == [
        line_of(record) for record in (COMMITTED, HELD, KEPT, EVALUATED, FAILED, LOST)
    ]
    assert all(re.match(f"{TIME} ", line) for line in lines)


def test_a_terminal_has_a_bar_and_failures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes well is the bar's to say, but for evaluations."""
    shown = _shown(terminal=True, capsys=capsys, monkeypatch=monkeypatch)
    assert "step 4  loss 0.2500" in shown
    assert "5/9" in shown
    assert "step 4 failed (attempt 2)" in shown
    assert "the sync to http://e:1 failed" in shown
    assert "held out (64 samples, 12 trajectories)  loss 0.5000" in shown
    assert "holds it" not in shown
    assert "checkpoint" not in shown


def test_the_command_in_a_batch_job(
    recorded: Callable[..., Store], cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """`rollbook train` with its output in a file has a line a step."""
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT, steps=3)))
    code, _, err = cli("train", tmp_path / "train.toml", "--store", recorded().path)
    assert code == 0, err
    steps = re.findall(rf"^{TIME} step (\d+): version (\d+)  loss \d\.\d{{4}}  gradient norm", err, re.M)
    assert steps == [("0", "1"), ("1", "2"), ("2", "3")]
    assert len(re.findall(rf"^{TIME} version 3: checkpoint checkpoints/demo/actor/v00000003", err, re.M)) == 1
    assert "━" not in err
