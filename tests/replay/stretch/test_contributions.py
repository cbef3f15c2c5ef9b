"""`rollbook replay bisect --metric`: what a metric would be without a sample, against a batch without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollbook.replay.step.replayer import Replayer
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import find_start
from rollbook.replay.stretch.contributions import contributions
from rollbook.replay.stretch.stretch import history_of
from rollbook.store import Store
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import build_batch
from rollbook.train.step.step import PolicyLoss

STEP = 11


def test_the_norm_of_a_batch_without_a_sample(trained: Callable[..., Store]) -> None:
    """All samples but one in one pass, normalized as in the whole batch, give the same norm."""
    log = trained()
    history = history_of(log, None, "actor")
    result = contributions(log, history, STEP, "gradient_norm")
    by_sample = {part.sample: part.without for part in result.samples}
    recorded = history.steps[STEP].committed.metrics["gradient_norm"]
    assert result.value == pytest.approx(recorded, rel=1e-5)
    target = history.steps[STEP]
    run = RunLog(log, history)
    with Replayer(run, find_start(run, target)) as replayer:
        policy, batch = replayer.before(target)
        totals = Totals(batch.trained_tokens, batch.trained_samples)
        loss_of = PolicyLoss(recorded_algorithm(target.planned.algorithm), STEP, totals)
        for at in range(len(batch.samples)):
            left = [i for i in range(len(batch.samples)) if i != at]
            part = build_batch(batch.experience.part(left), [[list(range(len(left)))]], packed=False)
            policy.forward_backward(part.micro_batches, loss_of, part.shares)
            square = sum(float(g.double().square().sum()) for _, g in policy.stream_gradients())
            assert by_sample[at] == pytest.approx(square**0.5, rel=1e-5), at


def test_the_first_step_above(
    trained: Callable[..., Store], cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Is named with its samples; exit code 1; 0 where none is."""
    log = trained()
    code, out, _ = cli("replay", "bisect", "--metric", "gradient_norm", "--above", 1e9, "--store", log.path)
    assert (code, "none" in out) == (0, True)
    arguments = ("--metric", "gradient_norm", "--above", 0, "--from", 10, "--store", log.path)
    code, out, _ = cli("replay", "bisect", *arguments)
    assert code == 1
    assert "step 10 is the first: gradient_norm" in " ".join(out.split())
