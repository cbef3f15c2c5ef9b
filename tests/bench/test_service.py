"""The training service's benchmark: figures from seconds, sides that learn the same, and a run in small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollbook.bench import service, service_stage
from rollbook.bench.processes import BenchError
from rollbook.bench.service_outcome import (
    EVEN,
    PASS,
    STEP,
    TAILED,
    Crowd,
    Latencies,
    LogBytes,
    Measured,
    Publishing,
    Restart,
    Speed,
    Switching,
)
from rollbook.bench.service_stage import Size, client_python
from rollbook.store.errors import ConfigError

pytestmark = pytest.mark.torch
MEASURED = Measured(
    {EVEN: Speed([2.0, 4.0, 2.0], [1.0, 3.0, 1.9], 100), TAILED: Speed([1.0], [1.0], 100)},
    {
        PASS: Latencies([0.07, 0.08], [0.06, 0.07], [0.04, 0.05, 0.06]),
        STEP: Latencies([0.03, 0.03], [0.02, 0.025], [0.01]),
    },
    Switching([1.0, 2.0, 3.0], [2.0, 2.0, 4.0], 4, 0.97, 64),
    Publishing(
        [
            {"saved": 0.5, "opened": 0.1, "first": 0.4, "again": 0.2},
            {"saved": 0.2, "opened": 0.0, "first": 0.3, "again": 0.1},
        ],
        [0.4, 0.1],
        4_000_000,
    ),
    [Crowd([1.0, 1.0], [1.5, 2.0], 0.5, 64), Crowd([1.0], [1.1], 0.1, 8)],
    [Restart(5.0, 26.0, 21.0, 1.0, 1029, 40.0)],
    LogBytes(10_000, 2_000, 4_000, 8),
)
SMALL = service.Plan(
    rounds=1,
    size=Size(64, 32, 1, 2, 128),
    steps_each=1,
    lengths={EVEN: (6, 6), TAILED: (2, 10)},
    rank=2,
    small=4,
    operations=6,
    switched=4,
    models=2,
    published=3,
    waits=2,
    again_steps=2,
    again_passes=3,
    again=Size(64, 32, 1, 2, 128),
    restarts=1,
)


def test_figures() -> None:
    """Ratios are of rounds; of latencies the median alone is taken off, of a restart what ran again."""
    figures = {f.figure: f for f in service.outcome(MEASURED).figures}
    assert {name: (pytest.approx(f.value), f.ratio) for name, f in figures.items()} == {
        "service.vs_loop": (50.0, 0.75),
        "service.tailed_vs_loop": (100.0, 1.0),
        "service.added_p50_ms": (10.0, None),
        "service.added_p99_ms": (20.0, None),
        "service.call_p50_ms": (20.0, None),
        "service.call_p99_ms": (30.0, None),
        "service.switching": (32.0, 0.75),
        "service.publish_vs_bytes": (pytest.approx(0.6), pytest.approx((0.8 / 0.4 + 0.4 / 0.1) / 2)),
        "service.second_tenant_ops": (2.0, None),
        "service.restart_s": (6.0, None),
        "service.again_s": (20.0, 0.5),
        "service.op_bytes": (1000.0, None),
        "service.op_bytes_less_results": (500.0, None),
    }
    assert (
        figures["service.switching"].against
        == "one model: 32 tokens/s; 4 models, switched at 97% of operations"
    )
    assert len(service.outcome(MEASURED).spreads) == 23


def test_switches_are_counted() -> None:
    """Of operations behind another one of these models; those of others between them do not count."""
    assert service._switched(["a", "x", "a", "b", "a", "x", "b", "b"], ["a", "b"]) == 3 / 5


def test_sides_that_learn_something_else_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first losses are compared."""
    losses = iter((5.0, 5.01))

    def ask(*_: Any, **__: Any) -> Any:
        return {"seconds": 1.0, "losses": [next(losses)]}

    monkeypatch.setattr(service, "ask", ask)
    nobody: Any = None
    with pytest.raises(BenchError, match=r"loss of the service is 5.0, of the loop 5.01"):
        service._speeds(SMALL, nobody, nobody, lambda: None)


def test_without_an_environment_the_error_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is begun."""
    monkeypatch.setenv(service_stage.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"no client: .*python is not there; run `make \.venv-service"):
        service.measure(tmp_path, service.Plan(), lambda: None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "python").touch()
    assert client_python() == tmp_path / "python"


def test_steps_are_some_hundred_milliseconds() -> None:
    """The model has 15 million parameters, both batches as many tokens, and a kill comes before a state."""
    plan = service.Plan()
    size = plan.size
    head = size.width // size.heads
    layer = size.width * head * (2 * size.heads + 2 * (size.heads // 2)) + 12 * size.width**2
    assert 14e6 < size.layers * layer + size.vocab * size.width < 16e6
    assert sum(plan.lengths[EVEN]) == sum(plan.lengths[TAILED]) == 512
    assert plan.again_steps < 50
    assert plan.again_steps * (plan.again_passes + 1) >= 1000


@pytest.mark.service
def test_a_run_in_small(tmp_path: Path) -> None:
    """The real client and the loop do what is counted; every operation of several models is a switch."""
    steps: list[int] = []
    measured = service.measure(tmp_path, SMALL, lambda: steps.append(1))
    assert len(steps) == SMALL.steps
    assert {name: (len(s.service), len(s.loop), s.tokens) for name, s in measured.speeds.items()} == {
        EVEN: (1, 1, 12),
        TAILED: (1, 1, 12),
    }
    for latencies in measured.latencies.values():
        assert len(latencies.called) == len(latencies.accepted) == len(latencies.alone) == 3
        assert all(
            0 < since < called for since, called in zip(latencies.accepted, latencies.called, strict=True)
        )
    assert measured.switching.share > 0
    assert measured.log.operations == 2
    assert 0 < measured.log.sent + measured.log.results < measured.log.grown
    [restart] = measured.restarts
    assert restart.operations == 8
    assert 0 < restart.listens < restart.whole
    assert restart.listens + restart.first <= restart.whole + 0.1
    size, factors = SMALL.size, SMALL.published
    assert measured.publishing.bytes > 4 * factors * 2 * size.width
    assert [crowd.tokens for crowd in measured.crowds] == [12, 4]
    assert service.outcome(measured).figures
