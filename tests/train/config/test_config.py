"""CONFIG files: everything that is not right is an error that names its key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook.demo.run import GRPO_CONFIG, SFT_CONFIG
from rollbook.store.errors import ConfigError, RollbookError
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.algorithms.sft import Sft
from rollbook.train.config.config import SyncConfig, parse_config
from rollbook.train.config.files import load_config

GOOD = 'model = "m"\nsteps = 3\n[algorithm]\nname = "sft"\n'


def _load(tmp_path: Path, text: str, *overrides: str) -> Any:
    file = tmp_path / "train.toml"
    file.write_text(text)
    return load_config(file, list(overrides))


def test_a_minimal_file_has_the_documented_defaults(tmp_path: Path) -> None:
    """A minimal file gives the documented defaults."""
    config = _load(tmp_path, GOOD)
    assert (config.run, config.policy, config.seed, config.threads) == ("default", "actor", 0, 1)
    assert config.algorithm == Sft(name="sft", batch_size=64)
    assert config.recipe.splits == ("train",)
    assert config.recipe.max_staleness is None
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-4, (0.9, 0.95))
    assert config.sync is None


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"stepz": 3}, "stepz: unknown key: did you mean steps?"),
        ({"optimiser": {"lr": 1.0}}, "optimiser: unknown key: did you mean optimizer?"),
        (
            {"algorithm": {"name": "sft", "groups": 2}},
            'algorithm.groups: unknown key: it goes with name = "grpo"',
        ),
        (
            {"optimizer": {"learn": 1.0}},
            "optimizer.learn: unknown key: [optimizer] has betas, clip_grad, ",
        ),
        (
            {"optimizer": {"seed": 1}},
            "optimizer.seed: unknown key: it belongs to the top of the file, before",
        ),
        ({"lr": 1.0}, "lr: unknown key: it belongs to [optimizer]"),
        ({"steps": "3"}, "steps: "),
        ({"steps": 1.5}, "steps: "),
        ({"steps": True}, "steps: "),
        ({"steps": 0}, "steps: "),
        ({"steps": 10**20}, "steps: "),
        ({"seed": -1}, "seed: "),
        ({"run": 7}, "run: "),
        ({"run": "../other"}, "run: "),
        ({"policy": ""}, "policy: "),
        ({"device": "tpu"}, "device: "),
        ({"algorithm": {"name": "trpo"}}, "algorithm.name: "),
        ({"algorithm": {}}, "algorithm.name: "),
        ({"algorithm": 3}, "algorithm: "),
        ({"algorithm": {"name": "grpo", "group_size": 0}}, "algorithm.group_size: "),
        ({"algorithm": {"name": "grpo", "clip_low": -0.1}}, "algorithm.clip_low: "),
        ({"recipe": {"max_staleness": -1}}, "recipe.max_staleness: "),
        ({"recipe": {"splits": ["train", "eval"]}}, "recipe.splits.1: "),
        ({"recipe": {"splits": "train"}}, "recipe.splits: "),
        ({"optimizer": {"lr": 0.0}}, "optimizer.lr: "),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: "),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: "),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas.1: is missing"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1: "),
        ({"optimizer": {"lr": 1e-4, "min_lr": 1e-3}}, "optimizer: min_lr"),
        ({"optimizer": {"decay": "WSD"}}, "optimizer: wsd_decay_steps"),
        ({"optimizer": {"wsd_decay_steps": 3}}, "optimizer: wsd_decay_steps"),
        ({"sync": {}}, "sync.engines: is missing"),
        ({"parallel": {"sequence": True}}, "parallel: sequence: it goes with tensor above 1"),
        ({"parallel": {"context": 2}}, "parallel: context 2: attention without"),
    ],
)
def test_a_wrong_key_is_named(values: dict[str, Any], key: str) -> None:
    """Unknown, ill-typed and out-of-range values are refused, the key first in its line."""
    good = {"model": "m", "steps": 3, "algorithm": {"name": "sft"}}
    with pytest.raises(ConfigError) as refused:
        parse_config(good | values, "file.toml")
    lines = str(refused.value).splitlines()
    assert lines[0] == "file.toml:"
    assert any(line.startswith(f"  {key}") for line in lines[1:]), lines


@pytest.mark.parametrize("key", ["model", "steps", "algorithm"])
def test_a_missing_key_is_named(key: str) -> None:
    """Each required key is asked for by name."""
    values = {"model": "m", "steps": 3, "algorithm": {"name": "sft"}}
    del values[key]
    with pytest.raises(ConfigError, match=f"  {key}: is missing"):
        parse_config(values, "x")


def test_all_errors_come_at_once() -> None:
    """One message names every key that is wrong."""
    with pytest.raises(ConfigError) as refused:
        parse_config({"steps": "x", "seeds": 1, "algorithm": {"name": "sft", "batch_size": 0}}, "x")
    named = {line.strip().partition(":")[0] for line in str(refused.value).splitlines()[1:]}
    assert named == {"model", "steps", "seeds", "algorithm.batch_size"}


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    """Bad TOML, bytes that are no text, a folder and a missing file each name the file."""
    broken, binary = tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("steps = = 3")
    binary.write_bytes(b"\xff\xfe\x00")
    for file, reason in (
        (broken, "not TOML"),
        (binary, "not TOML"),
        (tmp_path, "directory"),
        (tmp_path / "none.toml", "No such file"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            load_config(file, [])
        assert str(refused.value).startswith(f"{file}: ")


def test_set_overrides_dotted_keys(tmp_path: Path) -> None:
    """--set takes dotted keys with TOML values, and bare words as text; tables come into being."""
    config = _load(
        tmp_path,
        GOOD,
        "steps=7",
        "optimizer.lr = 1e-3",
        "run=night",
        'recipe.splits=["teacher"]',
        "algorithm.batch_size=2",
        'sync.engines=["http://x/engine"]',
    )
    assert (config.steps, config.optimizer.lr, config.run) == (7, 1e-3, "night")
    assert config.recipe.splits == ("teacher",)
    assert config.algorithm == Sft(name="sft", batch_size=2)
    assert config.sync is not None
    assert [str(engine) for engine in config.sync.engines] == ["http://x/engine"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "write key=value"),
        ("steps.more=1", "steps is not a table"),
        ("stepz=1", "stepz: unknown key"),
        ("steps=many", "steps: "),
        ("recipe.splits=['eval']", "recipe.splits.0: "),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, message: str) -> None:
    """An override that cannot be read, or gives a wrong value, is an error that names its key."""
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, GOOD, override)


def test_the_demos_configurations_load(tmp_path: Path) -> None:
    """What the demo writes is a valid CONFIG, with the algorithms it says."""
    values = {"run": "demo", "model": "m", "seed": 1, "offline_steps": 9, "online_steps": 3}
    values |= {"decay_steps": 3, "groups": 2, "group_size": 4, "engine": "http://127.0.0.1:1/engine"}
    sft = _load(tmp_path, SFT_CONFIG.format(**values))
    grpo = _load(tmp_path, GRPO_CONFIG.format(**values))
    assert isinstance(sft.algorithm, Sft)
    assert isinstance(grpo.algorithm, Grpo)
    assert (grpo.algorithm.groups, grpo.algorithm.group_size) == (2, 4)
    assert sft.recipe.splits == ("teacher",)


def test_the_shipped_configurations_load() -> None:
    """Every file in configs/ is a valid CONFIG."""
    for file in sorted((fabric.ROOT / "configs").glob("**/*.toml")):
        assert load_config(file, []).steps >= 1, file


def test_a_configuration_survives_its_text(tmp_path: Path) -> None:
    """Written as TOML and read again, a configuration is the same one."""
    for values in (fabric.SFT, fabric.GRPO):
        config = fabric.config(values)
        assert _load(tmp_path, fabric.toml(config)) == config


def test_the_command_says_what_is_wrong(cli: Callable[..., Any], tmp_path: Path) -> None:
    """`rollbook train` on a bad CONFIG exits with 2 and one line per key on stderr, no traceback."""
    (tmp_path / "bad.toml").write_text(GOOD.replace("steps", "stepz"))
    code, out, err = cli("train", tmp_path / "bad.toml", "--store", tmp_path)
    assert (code, out) == (2, "")
    assert "stepz: unknown key" in err
    assert "steps: is missing" in err
    assert "Traceback" not in err
    assert issubclass(ConfigError, RollbookError)


def _sync(**settings: Any) -> SyncConfig:
    return SyncConfig.model_validate({"engines": ("http://e:1",)} | settings)


def test_the_key_of_engines() -> None:
    """Out of the environment, by the variable that is named: the configuration is recorded."""
    usual, own = _sync(), _sync(key_env="PROXY_KEY")
    assert usual.key({}) is None
    assert usual.key({"ROLLBOOK_ENGINE_KEY": "k"}) == "k"
    assert own.key({"ROLLBOOK_ENGINE_KEY": "k", "PROXY_KEY": "p"}) == "p"
    with pytest.raises(ConfigError, match=r"sync.key_env names PROXY_KEY, which is not set"):
        own.key({})
    with pytest.raises(ConfigError, match=r"ROLLBOOK_ENGINE_KEY, which is set and empty"):
        usual.key({"ROLLBOOK_ENGINE_KEY": " "})
