"""The sync's benchmark: its figures from laps, its witness, and its error where there is no SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollbook.bench import sync
from rollbook.bench.rounds import Lap, Limit
from rollbook.bench.sync_engine import Size, TimedControl, sglang_python
from rollbook.bench.sync_outcome import Measured, Parts
from rollbook.bench.sync_spans import Labelled, label_tokens
from rollbook.store.errors import ConfigError, EngineError
from rollbook.train.sync.control import EngineControl

LAPS = [
    ("/server_info", 1.0, 1.5),
    ("/weights_checker", 1.5, 2.0),
    ("/pause_generation", 2.0, 2.1),
    ("/update_weights_from_disk", 2.1, 4.0),
    ("/weights_checker", 4.5, 6.0),
    ("/update_weight_version", 6.5, 6.6),
    ("/continue_generation", 6.6, 7.0),
]


def test_a_sync_is_timed_in_parts() -> None:
    """Before the pause, until the weights are there, until they are verified; and the whole pause."""
    parts = Parts.of(0.5, LAPS)
    assert (parts.before, parts.transfer, parts.verify, parts.paused) == (1.5, 2.5, 2.0, 5.0)


def test_figures_are_medians_over_the_rounds() -> None:
    """Ratios are medians over the rounds, the difference is the worst, labels are counted."""
    laps = {
        name: [Lap(s, 0.0) for s in seconds]
        for name, seconds in {
            "bytes": (1.0, 2.0, 1.0),
            "disk": (2.0, 2.0, 6.0),
            "tensor": (1.0, 4.0, 3.0),
            "distributed": (8.0, 8.0, 6.0),
        }.items()
    }
    parts = {name: [Parts.of(0.5, LAPS)] for name in ("disk", "tensor", "distributed")}
    measured = Measured(laps, parts, 4_000_000, [1e-6, 3e-6, 2e-6], Labelled(100, 4, 3, 7))
    figures = {f.figure: f for f in sync.outcome(measured).figures}
    assert {name: (f.value, f.ratio, f.runs) for name, f in figures.items()} == {
        "sync.max_abs_logprob_diff": (3e-6, None, 3),
        "sync.disk_vs_bytes": (2.0, 2.0, 3),
        "sync.tensor_vs_disk": (3.0, 0.5, 3),
        "sync.distributed_vs_disk": (8.0, 4.0, 3),
        "sync.mislabelled_tokens": (4, None, 7),
    }
    spreads = {s.what + " " + s.unit: s.middle for s in sync.outcome(measured).spreads}
    assert spreads["disk, transfer MB/s"] == 4 / 2.5
    assert spreads["tensor, verify s"] == 2.0


def test_every_token_is_labelled_with_the_weights_that_made_it(tmp_path: Path) -> None:
    """Requests see several versions, and every token's recorded version is what the engine held."""
    steps: list[int] = []
    labelled = label_tokens(tmp_path, 25, 4, lambda: steps.append(1))
    assert (labelled.wrong, labelled.updates, len(steps)) == (0, 25, 25)
    assert labelled.tokens >= 4 * 120
    assert labelled.mixed >= 4


def test_the_witness_sees_wrong_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that lets the engine go on before an update is whole is found out."""
    real = EngineControl.end_update

    def early(self: Any) -> None:
        self.resume()
        real(self)

    monkeypatch.setattr(EngineControl, "end_update", early)
    assert label_tokens(tmp_path, 12, 4, lambda: None).wrong > 0


def test_without_an_environment_the_error_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the environment nothing is begun, and the error says how to make it."""
    monkeypatch.setenv("ROLLBOOK_SGLANG_PYTHON", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"no SGLang: .*python is not there; run `make \.venv-sglang"):
        sync.measure(tmp_path, sync.Plan(), lambda: None)
    assert list(tmp_path.iterdir()) == []


def test_a_variable_names_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names another python."""
    (tmp_path / "python").touch()
    monkeypatch.setenv("ROLLBOOK_SGLANG_PYTHON", str(tmp_path / "python"))
    assert sglang_python() == tmp_path / "python"


def test_requests_are_timed_by_route() -> None:
    """Requests are timed by their route, failed ones too."""
    control = TimedControl("http://127.0.0.1:9", 1.0)
    with pytest.raises(EngineError):
        control.info()
    ((route, begun, ended),) = control.laps
    assert route == "/server_info"
    assert begun < ended


def test_the_plan_is_bounded() -> None:
    """Rounds and updates; the model has 101 million parameters."""
    size = sync.Plan().size
    head = size.hidden // size.heads
    attention = 2 * size.hidden * head * (size.heads + size.kv_heads)
    whole = size.layers * (attention + 3 * size.hidden * size.intermediate) + size.vocab * size.hidden
    assert 100e6 < whole < 102e6
    assert sync.Plan(limit=Limit(3), updates=5).steps == 8
    assert Size() == size
