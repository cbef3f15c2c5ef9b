"""CONFIG and recipe files: TOML, with overrides; a CONFIG may name a recipe file instead of having
a table `[recipe]`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from rollbook.store.config import is_whole, override, part_of, read_toml, toml_lines, written_key
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.sft import Sft
from rollbook.train.config.config import TABLES, TrainConfig, describe_errors, parse_config
from rollbook.train.config.recipe import RecipeConfig


def load_config(path: Path, overrides: list[str]) -> TrainConfig:
    """Read a CONFIG and apply `key=value` overrides (dotted keys, TOML values).

    `recipe = "best.toml"` stands for the keys of that file, which is looked for beside the CONFIG.

    Raises:
        ConfigError: it cannot be read, or a key is unknown, missing or ill-typed; all are named.
    """
    whole = read_toml(path)
    values = _with_recipe(part_of(whole, "train", str(path)), path)
    for text in overrides:
        override(values, text)
    return parse_config(values, str(path), partial(written_key, whole, "train"))


def read_training(values: Json, path: Path) -> TrainConfig:
    """The training in a whole run's configuration, whose CONFIG at this path has these values.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed; all are named.
    """
    own = _with_recipe(part_of(values, "train", str(path)), path)
    return parse_config(own, str(path), partial(written_key, values, "train"))


@dataclass(frozen=True, slots=True)
class NamedRecipe:
    """A recipe, and the algorithm whose needs it is checked against: a recipe alone needs nothing,
    like `sft`.

    `config` is the CONFIG that has both; None where the file is a recipe alone.
    """

    name: str
    recipe: RecipeConfig
    algorithm: Algorithm
    config: TrainConfig | None = None


def load_recipe(path: Path) -> NamedRecipe:
    """Read a recipe file, or the recipe of a CONFIG, which has an `[algorithm]`.

    Raises:
        ConfigError: it cannot be read, or a key is unknown or ill-typed; all are named.
    """
    whole = read_toml(path)
    values = part_of(whole, "train", str(path)) if is_whole(whole) else whole
    if "algorithm" in values:
        written = partial(written_key, whole, "train")
        config = parse_config(_with_recipe(values, path), str(path), written)
        return NamedRecipe(str(path), config.recipe, config.algorithm, config)
    return NamedRecipe(str(path), _recipe(values, path), Sft(name="sft"))


def _recipe(values: Json, path: Path) -> RecipeConfig:
    try:
        return RecipeConfig.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ConfigError(describe_errors(str(path), error, values)) from error


def _with_recipe(values: Json, path: Path) -> Json:
    """The values, with a recipe file's keys in place of its name.

    Raises:
        ConfigError: it cannot be read.
    """
    named = values.get("recipe")
    return values | {"recipe": read_toml(path.parent / named)} if isinstance(named, str) else values


LISTS = frozenset({"stop"})
"""Tables of which there may be several."""


def as_toml(config: TrainConfig) -> str:
    """A configuration as a CONFIG file; keys without a value are comments."""
    values = config.as_json()
    plain = {key: value for key, value in values.items() if key not in TABLES}
    tables = [
        f"\n{header(key)}\n{toml_lines(table)}"
        for key in TABLES
        if values.get(key) is not None
        for table in (values[key] if key in LISTS else [values[key]])
    ]
    return "\n".join([toml_lines(plain), *tables])


def header(table: str) -> str:
    """The line with which a table of a CONFIG begins."""
    return f"[[{table}]]" if table in LISTS else f"[{table}]"
