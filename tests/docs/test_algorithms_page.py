"""docs/algorithms.md: its table is that of the registry, and its command runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rollbook.train.algorithms.baselines import BASELINES
from rollbook.train.algorithms.corrections import CORRECTIONS
from rollbook.train.algorithms.normalizers import NORMALIZERS
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.ppo import Ppo
from rollbook.train.algorithms.preferences import PREFERENCE_LOSSES, Dpo
from rollbook.train.algorithms.registry import ALGORITHMS
from rollbook.train.algorithms.regularizers import KL_ESTIMATORS
from rollbook.train.algorithms.reward_models import RewardModel
from rollbook.train.algorithms.surrogates import SURROGATES


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "algorithms.md").read_text()


def _rows(page: str, head: str) -> list[list[str]]:
    lines = re.findall(r"^\|.*", page[page.index(head) :].split("\n\n")[0], re.MULTILINE)[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_row_has_the_defaults(page: str) -> None:
    """Every policy gradient, with its parts and clips; `grpo` has those of `policy_gradient`."""
    found = {}
    for names, baseline, deviation, surrogate, clips, normalizer, source in _rows(page, "| name | baseline"):
        low, high = map(float, clips.split(","))
        parts = [text.strip("`") for text in (baseline, deviation, surrogate, normalizer)]
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), (*parts, low, high))
        assert "arXiv:" in source
    assert set(found) == set(ALGORITHMS) - {"sft", "dpo", "reward_model"}
    for name, kind in ALGORITHMS.items():
        if issubclass(kind, GroupPolicyGradient):
            a = kind.model_validate({"name": name})
            expected = a.baseline, a.deviation, a.surrogate, a.normalizer, a.clip_low, a.clip_high
            assert found[name] == expected
    assert found["grpo"] == found["policy_gradient"]


def test_every_part_is_explained(page: str) -> None:
    """Each by the name that a CONFIG has for it; what peers they equal is `make test-parity`'s to hold."""
    rows = _rows(page, "| part | is")
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    families = (BASELINES, SURROGATES, CORRECTIONS, KL_ESTIMATORS, NORMALIZERS, PREFERENCE_LOSSES)
    parts = {*(name for family in families for name in family), "unbiased", "biased"} - {"none"}
    assert parts <= named
    others = {*Ppo.model_fields, *Dpo.model_fields, *RewardModel.model_fields, *ALGORITHMS}
    assert named - parts <= others | {"gae", "bradley_terry", "mean_deviation"}
    assert all(len(row) == 5 and all(row[:2]) for row in rows)


def test_the_command_runs(page: str, root: Path, monkeypatch: Any, capsys: Any) -> None:
    """It prints the configuration with the keys that it sets."""
    [line] = re.findall(r"```bash\n(.*?)\n```", page, re.DOTALL)
    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.argv", shlex.split(line))
    from rollbook.cli.app import main

    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr().out
    assert not stop.value.code
    assert 'name = "dr_grpo"' in out
    assert "constant_length = 512" in out
