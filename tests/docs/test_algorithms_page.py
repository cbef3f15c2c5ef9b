"""docs/algorithms.md: its table is that of the registry, and its command runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from rollbook.train.algorithms import parts
from rollbook.train.algorithms.advantages import BASELINES
from rollbook.train.algorithms.corrections import CORRECTIONS
from rollbook.train.algorithms.normalizers import NORMALIZERS
from rollbook.train.algorithms.orpo import Orpo
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.ppo import Ppo
from rollbook.train.algorithms.preferences import PREFERENCE_LOSSES, Dpo
from rollbook.train.algorithms.registry import ALGORITHMS
from rollbook.train.algorithms.reward_models import RewardModel
from rollbook.train.algorithms.rollouts import Rollouts
from rollbook.train.algorithms.simpo import Simpo
from rollbook.train.algorithms.surrogates import KL_ESTIMATORS, SURROGATES
from rollbook.train.algorithms.trial import try_out
from rollbook.train.config.config import parse_config


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "algorithms.md").read_text()


def _rows(page: str, head: str) -> list[list[str]]:
    lines = re.findall(r"^\|.*", page[page.index(head) :].split("\n\n")[0], re.MULTILINE)[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_row_has_the_defaults(page: str) -> None:
    """Every policy gradient, with its parts and clips; `grpo` has those of `policy_gradient`."""
    documented = {}
    for names, baseline, deviation, surrogate, clips, normalizer, source in _rows(page, "| name | baseline"):
        low, high = map(float, clips.split(","))
        parts = [text.strip("`") for text in (baseline, deviation, surrogate, normalizer)]
        documented |= dict.fromkeys(re.findall(r"`(\w+)`", names), (*parts, low, high))
        assert "arXiv:" in source
    assert set(documented) == set(ALGORITHMS) - {"sft", "dpo", "simpo", "orpo", "reward_model"}
    for name, kind in ALGORITHMS.items():
        if issubclass(kind, GroupPolicyGradient):
            a = kind.model_validate({"name": name})
            expected = a.baseline, a.deviation, a.surrogate, a.normalizer, a.clip_low, a.clip_high
            assert documented[name] == expected
    assert documented["grpo"] == documented["policy_gradient"]


def test_every_part_is_explained(page: str) -> None:
    """Each by the name that a CONFIG has for it; what peers they equal is `make test-parity`'s to hold."""
    rows = _rows(page, "| part | is")
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    families = (BASELINES, SURROGATES, CORRECTIONS, KL_ESTIMATORS, NORMALIZERS, PREFERENCE_LOSSES)
    ours = {*(name for family in families for name in family), "unbiased", "biased"}
    assert ours <= named
    others = {*Ppo.model_fields, *Dpo.model_fields, *RewardModel.model_fields, *ALGORITHMS}
    special = {"gae", "bradley_terry", "mean_deviation", "age_decay", "calibration_temperature"}
    assert named - ours <= others | special
    assert all(len(row) == 5 and all(row[:2]) for row in rows)


def test_every_key_that_changes_numbers_is_there(page: str) -> None:
    """By its own line, or in the words of a part's; others say how many samples there are, or name a part."""
    rows = _rows(page, "| part | is")
    assert all(row[2] not in ("", "–") for row in rows), "each has a source"
    assert all(row[4] not in ("", "–") for row in rows), "each equals something"
    named = {name for row in rows for name in re.findall(r"`(\w+)`", f"{row[0]} {row[1]} {row[4]}")}
    above = set(re.findall(r"`(\w+)", page[: page.index("| part | is")]))
    counts = {
        "name",
        "groups",
        "group_size",
        "epochs",
        "mini_batches",
        "reference_version",
        "ref_update_interval",
        "batch_size",
        "pairs",
    }
    kinds = {
        "baseline",
        "deviation",
        "surrogate",
        "correction",
        "kl_estimator",
        "normalizer",
        "preference_loss",
    }
    of_parts = {"clip_low": "l and h are the clips", "clip_high": "l and h are the clips"}
    of_parts |= {"overlong_factor": "`overlong_length`", "head": "`mean_deviation`"}
    written_by_trainer = {"reward_moments", "reward_moments_of"}
    for kind in (Ppo, Dpo, Simpo, Orpo, RewardModel):
        for key in {*kind.model_fields} - counts - kinds - written_by_trainer:
            assert key in named | above or of_parts[key] in page, key


def test_the_examples_work(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and the estimator, as they are written, by the names that the page has for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "_loaded", {})
    blocks = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    (tmp_path / "halved_loss.py").write_text(blocks[0])
    (tmp_path / "my_estimators.py").write_text(blocks[2])
    compile(blocks[1], "halved_row.py", "exec")
    keys = {"model": "m", "steps": 1}
    loss = {"name": "policy_gradient", "surrogate": "halved_loss:halved"}
    try_out(parse_config(keys | {"algorithm": loss}, "test").algorithm)
    estimator = {"name": "my_estimators:Halving", "baseline": "none", "deviation": "none", "discount": 0.5}
    algorithm = parse_config(keys | {"algorithm": estimator}, "test").algorithm
    try_out(algorithm)
    rollouts = Rollouts(np.array([4.0, 8.0]), np.arange(2), np.arange(2), np.array([2, 3]))
    assert algorithm.advantages(rollouts).values.tolist() == [2, 4, 2, 4, 8]


def test_the_command_runs(
    page: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
