"""Running a benchmark: names, JSON, and a folder left as it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

import rollbook.bench as benches
from rollbook.bench import Figure, Outcome, Spread, run_bench
from rollbook.bench.figure import spread
from rollbook.store.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """Three steps."""

    steps: int = 3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A benchmark that writes a file and says two figures; the folders it was given."""
    folders: list[Path] = []

    def measure(folder: Path, plan: Plan, on_round: object) -> int:
        folders.append(folder)
        (folder / "written").write_bytes(b"x" * plan.steps)
        return plan.steps

    def outcome(measured: int) -> Outcome:
        figures = (
            Figure("small.a", 1.5, "s", "b: 3 s", 2.0, measured),
            Figure("small.b", 1.0, "", None, None, 1),
        )
        spreads: tuple[Spread, ...] = (spread("a", "s", [1.0, 1.5, 9.0]),)
        return Outcome(figures, spreads)

    module = SimpleNamespace(Plan=Plan, measure=measure, outcome=outcome)
    monkeypatch.setattr(benches, "load", lambda name: module)
    return folders


def test_json_has_the_promised_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: list[Path]
) -> None:
    """`--json` prints a list of objects with exactly the promised keys; nothing is left on the disk."""
    run_bench("small", tmp_path, True)
    assert orjson.loads(capsys.readouterr().out) == [
        {"figure": "small.a", "value": 1.5, "unit": "s", "against": "b: 3 s", "ratio": 2.0, "runs": 3},
        {"figure": "small.b", "value": 1.0, "unit": "", "against": None, "ratio": None, "runs": 1},
    ]
    assert [folder.parent for folder in small] == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_large_stores_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: list[Path]) -> None:
    """A benchmark that keeps its stores works in the folder that was named, and else leaves nothing."""
    monkeypatch.setattr(benches.load("small"), "KEEPS_STORES", True, raising=False)
    monkeypatch.chdir(tmp_path)
    run_bench("small", None, True)
    assert (list(tmp_path.iterdir()), small[0].parent) == ([], tmp_path)
    run_bench("small", tmp_path, True)
    assert (small[1], (tmp_path / "written").read_bytes()) == (tmp_path, b"xxx")


def test_without_json_there_are_two_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: list[Path]
) -> None:
    """Without `--json`: a table of spreads and one of figures."""
    run_bench("small", tmp_path, False)
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines() if line.startswith(("a ", "small.a"))] == [
        ["a", "s", "1.00", "1.50", "9.00"],
        ["small.a", "1.50", "s", "2.00", "3", "b:", "3", "s"],
    ]


def test_what_cannot_be_run(tmp_path: Path) -> None:
    """An unknown name lists the names; a folder that is not there is named."""
    names = (
        "append, bits, cluster, device, hostile, learning, loop, materialize, proxy, recover, replay, "
        "rollouts, scale, seal, service, sql, sync, tail, train, view"
    )
    with pytest.raises(ConfigError, match=f"'nope': use one of {names}$"):
        run_bench("nope", tmp_path, True)
    with pytest.raises(ConfigError, match="is not a folder"):
        run_bench("append", tmp_path / "none", True)


@pytest.mark.parametrize("name", benches.BENCHES)
def test_each_has_its_parts(name: str) -> None:
    """Every benchmark has a plan with steps, and is bounded by it."""
    module = benches.load(name)
    assert module.Plan().steps > 0
    assert callable(module.measure)
    assert callable(module.outcome)
